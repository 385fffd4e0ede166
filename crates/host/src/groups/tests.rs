use super::files::keyed;
use super::find::{mounts, v1 as places_v1, v2 as place_v2};
use super::place::{Hierarchy, V2Place};
use super::*;
use crate::process::{Ended, Process};
use crate::spawn::{Program, Spawn};
use dayfly_units::needs;

const V1_MOUNTS: &str = "\
30 22 0:26 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory
31 22 0:27 / /sys/fs/cgroup/cpu,cpuacct rw shared:9 - cgroup cgroup rw,cpu,cpuacct
32 22 0:28 / /sys/fs/cgroup/freezer rw - cgroup cgroup rw,freezer
33 22 0:29 /a /sys/fs/cgroup/pids rw - cgroup cgroup rw,pids
34 22 0:30 / /sys/fs/cgroup/unified rw,nosuid - cgroup2 cgroup2 rw
35 22 0:31 / /proc rw - proc proc rw
";
const V1_OWN: &str = "4:pids:/a/b\n3:memory:/m\n2:cpu,cpuacct:/\n1:freezer:/f\n0::/own\n";

#[test]
fn the_bases_of_v1_are_the_daemon_s_own_groups_or_the_given_one() {
    let found = mounts(V1_MOUNTS);
    assert_eq!(found.len(), 5);
    let shown = |root: &Root| {
        let found = places_v1(&found, V1_OWN, root);
        let text = |of: &Hierarchy| {
            format!("{} {} {}", of.controllers.join("+"), of.base.display(), of.own.display())
        };
        found.iter().map(text).collect::<Vec<_>>()
    };
    let own = [
        "memory /sys/fs/cgroup/memory/m /sys/fs/cgroup/memory/m",
        "cpu+cpuacct /sys/fs/cgroup/cpu,cpuacct/ /sys/fs/cgroup/cpu,cpuacct/",
        "pids /sys/fs/cgroup/pids/b /sys/fs/cgroup/pids/b",
    ];
    assert_eq!(shown(&Root::Own), own);
    // The mount of pids shows only /a and what is below.
    let given = [
        "memory /sys/fs/cgroup/memory/x /sys/fs/cgroup/memory/m",
        "cpu+cpuacct /sys/fs/cgroup/cpu,cpuacct/x /sys/fs/cgroup/cpu,cpuacct/",
    ];
    assert_eq!(shown(&Root::At("/x".into())), given);
}

#[test]
fn a_group_of_v2_is_used_only_if_it_is_the_root_delegated_or_given() {
    let mounts = mounts("34 22 0:30 / /cg rw,nosuid - cgroup2 cgroup2 rw\n");
    let chosen = |own: &str, root: Root, delegated: bool| {
        let found = place_v2(&mounts[0], &format!("0::{own}\n"), &root, |_| delegated);
        found.map(|place| (place.base, place.above.len(), place.joins)).map_err(|e| e.to_string())
    };
    let base = |path: &str, above, joins| Ok((PathBuf::from(path), above, joins));
    assert_eq!(chosen("/", Root::Own, false), base("/cg/", 1, true));
    assert_eq!(
        chosen("/s.slice/d.service/main", Root::Own, true),
        base("/cg/s.slice/d.service", 1, false)
    );
    for (own, delegated) in [("/s.slice/d.service", true), ("/s.slice/d.service/main", false)] {
        let refused = chosen(own, Root::Own, delegated).unwrap_err();
        assert!(refused.contains(own) && refused.contains("--group-root"), "{refused}");
    }
    assert_eq!(chosen("/s/d.service", Root::At("/x/y".into()), false), base("/cg/x/y", 3, false));
}

#[test]
fn the_lines_of_a_file_are_found_by_their_keys() {
    let text = "oom 3\noom_kill 12\noom_group_kill 0\n";
    assert_eq!(keyed(text, "oom"), Some(3));
    assert_eq!(keyed(text, "oom_kill"), Some(12));
    assert_eq!(keyed(text, "kill"), None);
    assert_eq!([1, 50, 100, 10_000].map(v1::shares), [10, 512, 1024, 102_400]);
}

/// A process in the group, which spins for a moment and then waits for the end of its input.
fn process_in(
    groups: &Groups,
    group: GroupName,
) -> (Process, std::io::PipeWriter, std::io::PipeReader) {
    let mut spawn = Spawn::new(Program::Path("/bin/sh".into()), "sh");
    let script = "i=0; while [ $i -lt 20000 ]; do i=$((i+1)); done; echo x; read x <&3";
    spawn.argv.extend(["-c".into(), script.into()]);
    let (read, write) = std::io::pipe().unwrap();
    let (answer, out) = std::io::pipe().unwrap();
    spawn.fds = vec![(read.into(), 3)];
    spawn.stdout = crate::spawn::Stdio::Fd(out.into());
    spawn.group = Some(groups.entry(group).unwrap());
    (Process::from_child(spawn.run().unwrap()).unwrap(), write, answer)
}

/// What holds in both versions.
fn a_group_lives(groups: &Groups) {
    let vm = GroupName::Vm(7);
    groups.make(vm).unwrap();
    assert_eq!(groups.make(vm).unwrap_err().kind(), io::ErrorKind::AlreadyExists);
    groups.make(GroupName::Template(1)).unwrap();
    assert_eq!(groups.list().unwrap(), [GroupName::Template(1), vm]);
    assert_eq!(groups.usage(vm).unwrap().cpu_us, 0);
    assert!(!groups.is_used(vm).unwrap());
    let (process, input, mut output) = process_in(groups, vm);
    std::io::Read::read_exact(&mut output, &mut [0]).unwrap();
    for folder in groups.folders() {
        let inside = std::fs::read_to_string(folder.join("vms/7/cgroup.procs")).unwrap();
        assert_eq!(inside.trim(), process.id().pid.to_string(), "{}", folder.display());
    }
    assert!(groups.is_used(vm).unwrap() && !groups.reset(vm).unwrap());
    assert!(!groups.remove(vm).unwrap(), "a process is in it");
    assert!(process.is_alive().unwrap(), "a removal that is refused ends nothing");
    let used = groups.usage(vm).unwrap();
    assert!(used.cpu_us > 0, "{used:?}");
    drop(input);
    assert_eq!(process.wait(None).unwrap(), Some(Ended::Code(1)));
    let after = groups.usage(vm).unwrap();
    assert!(after.cpu_us >= used.cpu_us, "what has ended counts: {used:?}, {after:?}");
    assert_eq!(after.oom_kills, 0);
}

fn removed(groups: Groups) {
    let folders = groups.folders().to_vec();
    for group in groups.list().unwrap() {
        assert!(groups.remove(group).unwrap());
        assert!(groups.remove(group).unwrap(), "it is gone already");
        assert!(groups.usage(group).is_err());
    }
    groups.close().unwrap();
    assert!(folders.iter().all(|folder| !folder.exists()), "{folders:?}");
}

#[test]
fn a_group_of_v1_is_entered_by_a_new_process_limited_and_used_again() {
    let run = tempfile::tempdir().unwrap();
    if !needs::root() {
        return;
    }
    let text = std::fs::read_to_string("/proc/self/mountinfo").unwrap();
    let cgroups = std::fs::read_to_string("/proc/self/cgroup").unwrap();
    let found = places_v1(&mounts(&text), &cgroups, &Root::Own);
    if found.is_empty() {
        return; // a host with v2 alone
    }
    let groups = Groups::in_place(Place::V1(found), run.path(), false).unwrap();
    a_group_lives(&groups);
    let vm = GroupName::Vm(7);
    let limits = Limits {
        cpu_max_millicpus: Some(1500),
        cpu_weight: Some(50),
        memory_max_bytes: Some(64 << 20),
        pids_max: Some(9),
    };
    let file = |name: &str| {
        let at = |folder: &PathBuf| std::fs::read_to_string(folder.join("vms/7").join(name)).ok();
        groups.folders().iter().find_map(at).unwrap().trim().to_owned()
    };
    let files = ["cpu.cfs_quota_us", "cpu.shares", "memory.limit_in_bytes", "pids.max"];
    let before = files.map(file);
    groups.set(vm, &limits).unwrap();
    assert_eq!(files.map(file), ["150000", "512", "67108864", "9"]);
    groups.lift_cpu_max(vm).unwrap();
    assert_eq!(file("cpu.cfs_quota_us"), "-1");
    assert!(groups.reset(vm).unwrap());
    assert_eq!(files.map(file), before);
    let again = groups.usage(vm).unwrap();
    assert_eq!((again.cpu_us, again.cpu_user_us, again.cpu_system_us), (0, 0, 0));
    removed(groups);
}

#[test]
fn a_process_that_takes_too_much_memory_is_counted_and_its_group_is_not_used_again() {
    let run = tempfile::tempdir().unwrap();
    if !needs::root() {
        return;
    }
    let Ok(groups) = Groups::open(&Root::Own, run.path(), false) else { return };
    let vm = GroupName::Vm(0);
    groups.make(vm).unwrap();
    let memory_max_bytes = Some(4 << 20);
    if groups.set(vm, &Limits { memory_max_bytes, ..Limits::default() }).is_ok() {
        let mut spawn = Spawn::new(Program::Path("/bin/sh".into()), "sh");
        spawn.argv.extend(["-c".into(), "x=x; while :; do x=$x$x; done".into()]);
        spawn.group = Some(groups.entry(vm).unwrap());
        let process = Process::from_child(spawn.run().unwrap()).unwrap();
        assert_eq!(process.wait(None).unwrap(), Some(Ended::Signal(libc::SIGKILL)));
        let used = groups.usage(vm).unwrap();
        assert!(used.oom_kills > 0, "{used:?}");
        assert!(used.memory_peak_bytes.is_some_and(|peak| peak >= 3 << 20), "{used:?}");
        assert!(!groups.reset(vm).unwrap());
    }
    removed(groups);
}

#[test]
fn a_group_of_v2_is_entered_by_a_new_process() {
    let run = tempfile::tempdir().unwrap();
    if !needs::root() {
        return;
    }
    let text = std::fs::read_to_string("/proc/self/mountinfo").unwrap();
    let cgroups = std::fs::read_to_string("/proc/self/cgroup").unwrap();
    let mounts = mounts(&text);
    let unified = mounts.iter().find(|mount| mount.is_v2());
    let chosen = unified.map(|mount| place_v2(mount, &cgroups, &Root::Own, |_| true));
    let Some(Ok(place)) = chosen else {
        return; // a host with v1 alone, or a group of another program
    };
    let place = Place::V2(V2Place { joins: false, ..place });
    let groups = Groups::in_place(place, run.path(), false).unwrap();
    a_group_lives(&groups);
    let limits = Limits { pids_max: Some(9), ..Limits::default() };
    let set = groups.set(GroupName::Vm(7), &limits);
    assert_eq!(set.is_ok(), groups.controllers().pids, "{set:?}");
    if let Err(e) = set {
        assert_eq!(
            e.to_string(),
            "pids_max: the control groups of this host have no controller \"pids\""
        );
    }
    assert!(!groups.reset(GroupName::Vm(7)).unwrap(), "each VM has a new group");
    removed(groups);
}

#[test]
fn a_tree_is_locked_and_is_swept_once_its_run_folder_is_gone() {
    let outer = tempfile::tempdir().unwrap();
    if !needs::root() {
        return;
    }
    let (own, other) = (outer.path().join("own"), outer.path().join("other"));
    for run in [&own, &other] {
        std::fs::create_dir(run).unwrap();
    }
    let Ok(groups) = Groups::open(&Root::Own, &own, false) else { return };
    let again = Groups::open(&Root::Own, &own, false).unwrap_err();
    assert!(matches!(again, NoGroups::Taken(_)), "{again}");
    let left = groups.folders().to_vec();
    groups.make(GroupName::Vm(1)).unwrap();
    let (process, input, _output) = process_in(&groups, GroupName::Vm(1));
    std::fs::remove_dir(&own).unwrap();
    // Its daemon lives; then it is gone and a VM lives; then nothing of it.
    removed(Groups::open(&Root::Own, &other, false).unwrap());
    assert!(left.iter().all(|folder| folder.join("main").is_dir()));
    drop(groups);
    removed(Groups::open(&Root::Own, &other, false).unwrap());
    assert!(left.iter().all(|folder| folder.join("vms/1").is_dir()));
    assert!(process.is_alive().unwrap());
    drop(input);
    process.wait(None).unwrap();
    removed(Groups::open(&Root::Own, &other, false).unwrap());
    assert!(left.iter().all(|folder| !folder.exists()), "{left:?}");
}
