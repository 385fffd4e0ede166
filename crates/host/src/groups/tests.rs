use super::files::keyed;
use super::find::{mounts, v1 as places_v1, v2 as place_v2};
use super::place::{Hierarchy, V2Place};
use super::*;
use crate::process::{Ended, Process};
use crate::spawn::{Program, Spawn};
use dayfly_units::needs;
use std::os::unix::fs::PermissionsExt;
use std::time::{Duration, Instant};

/// Only a hang takes this long.
const WITHIN: Duration = Duration::from_secs(120);

/// Whether this process can have groups with all limits.
fn has_groups() -> bool {
    let can = Groups::check(&Root::Own);
    needs::met(needs::Need::Groups, can.is_ok_and(Controllers::are_all))
}

fn untested(what: &str) {
    let thread = std::thread::current();
    eprintln!("{}: {what}: nothing was tested", thread.name().unwrap_or("a test"));
}

fn cpu_us(usage: &Usage) -> u64 {
    usage.cpu.unwrap().all_us
}

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

#[test]
fn the_page_cache_of_files_can_be_reclaimed() {
    let stat = "anon 5\nactive_file 30\ninactive_file 2\ntotal_active_file 7\n";
    assert_eq!(files::without_cache(100, stat, ["active_file", "inactive_file"]), 68);
    assert_eq!(files::without_cache(100, stat, ["total_active_file", "total_inactive_file"]), 93);
    assert_eq!(files::without_cache(10, stat, ["active_file", "inactive_file"]), 0);
}

#[test]
fn the_group_of_a_process_is_found_by_the_name_of_the_tree() {
    let of = |text: &str| name::vm_of(text, "dayfly-1".as_ref());
    assert_eq!(of("3:cpu:/\n2:memory:/a/dayfly-1/vms/7\n0::/\n"), Some(GroupName::Vm(7)));
    assert_eq!(of("0::/dayfly-1/vms/0\n"), Some(GroupName::Vm(0)));
    assert_eq!(of("0::/dayfly-1/booked/3\n"), Some(GroupName::Booked(3)));
    for other in ["/dayfly-2/vms/7", "/dayfly-1/vms/x", "/dayfly-1/main", "/vms/7", "/"] {
        assert_eq!(of(&format!("0::{other}\n")), None, "{other}");
    }
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
    assert_eq!(cpu_us(&groups.usage(vm).unwrap()), 0);
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
    assert!(cpu_us(&used) > 0, "{used:?}");
    assert_eq!(groups.unreclaimable_bytes(vm).unwrap().is_some(), used.memory_bytes.is_some());
    groups.lift_rates_of(std::process::id()).unwrap();
    drop(input);
    assert_eq!(process.wait(Some(WITHIN)).unwrap(), Some(Ended::Code(1)));
    let after = groups.usage(vm).unwrap();
    assert!(cpu_us(&after) >= cpu_us(&used), "what has ended counts: {used:?}, {after:?}");
    assert_eq!(after.oom_kills, 0);
}

/// Opens a tree that was dropped. A process that another test is starting may have its lock.
fn open_again(run: &Path) -> Groups {
    let begun = Instant::now();
    loop {
        match Groups::open(&Root::Own, run, false) {
            Err(NoGroups::Taken(_)) if begun.elapsed() < WITHIN => std::thread::yield_now(),
            opened => return opened.unwrap(),
        }
    }
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
        return untested("a host with v2 alone");
    }
    let groups = Groups::in_place(Place::V1(found, None), run.path(), false).unwrap();
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
    let (process, input, _output) = process_in(&groups, vm);
    groups.lift_rates_of(process.id().pid).unwrap();
    assert_eq!(file("cpu.cfs_quota_us"), "-1");
    drop(input);
    process.wait(Some(WITHIN)).unwrap();
    groups.set(vm, &limits).unwrap();
    groups.lift_rates(vm).unwrap();
    assert_eq!(file("cpu.cfs_quota_us"), "-1");
    assert!(groups.reset(vm).unwrap());
    assert_eq!(files.map(file), before);
    assert_eq!(groups.usage(vm).unwrap().cpu, Some(CpuTime::default()));
    removed(groups);
}

#[test]
fn a_process_that_takes_too_much_memory_is_counted_and_its_group_is_not_used_again() {
    let run = tempfile::tempdir().unwrap();
    if !has_groups() {
        return;
    }
    let groups = Groups::open(&Root::Own, run.path(), false).unwrap();
    let vm = GroupName::Vm(0);
    groups.make(vm).unwrap();
    let has = |file: &str| groups.folders().iter().any(|folder| folder.join(file).exists());
    let (v1, swap) = ("vms/0/memory.limit_in_bytes", "vms/0/memory.memsw.limit_in_bytes");
    let swaps = std::fs::read_to_string("/proc/swaps").unwrap_or_default();
    if has(v1) && !has(swap) && swaps.lines().count() > 1 {
        removed(groups);
        return untested("a host that swaps, and a v1 kernel that does not account swap");
    }
    let memory_max_bytes = Some(4 << 20);
    groups.set(vm, &Limits { memory_max_bytes, ..Limits::default() }).unwrap();
    let mut spawn = Spawn::new(Program::Path("/bin/sh".into()), "sh");
    spawn.argv.extend(["-c".into(), "x=x; while :; do x=$x$x; done".into()]);
    spawn.group = Some(groups.entry(vm).unwrap());
    let process = Process::from_child(spawn.run().unwrap()).unwrap();
    assert_eq!(process.wait(Some(WITHIN)).unwrap(), Some(Ended::Signal(libc::SIGKILL)));
    let used = groups.usage(vm).unwrap();
    assert!(used.oom_kills > 0, "{used:?}");
    // Not in v2 before Linux 5.19.
    assert!(used.memory_peak_bytes.is_none_or(|peak| peak >= 3 << 20), "{used:?}");
    assert!(!groups.reset(vm).unwrap());
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
        return untested("a host with v1 alone, or a group of another program");
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
    if !has_groups() {
        return;
    }
    let (own, other) = (outer.path().join("own"), outer.path().join("other"));
    for run in [&own, &other] {
        std::fs::create_dir(run).unwrap();
    }
    let groups = Groups::open(&Root::Own, &own, false).unwrap();
    let mode = |folder: &PathBuf| folder.metadata().unwrap().permissions().mode() & 0o777;
    // Another user could lock a folder that it can open.
    assert!(groups.folders().iter().all(|folder| mode(folder) == 0o700));
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
    process.wait(Some(WITHIN)).unwrap();
    let begun = Instant::now();
    // Another test that sweeps may have the tree's lock for a moment.
    while left.iter().any(|folder| folder.exists()) {
        assert!(begun.elapsed() < WITHIN, "{left:?}");
        removed(Groups::open(&Root::Own, &other, false).unwrap());
    }
}

#[test]
fn a_tree_is_closed_to_others_and_its_missing_folders_are_made_again() {
    let run = tempfile::tempdir().unwrap();
    if !has_groups() {
        return;
    }
    let groups = Groups::open(&Root::Own, run.path(), false).unwrap();
    let folders = groups.folders().to_vec();
    for folder in &folders {
        std::fs::set_permissions(folder, std::fs::Permissions::from_mode(0o755)).unwrap();
        std::fs::remove_dir(folder.join("vms")).unwrap();
    }
    drop(groups);
    let groups = open_again(run.path());
    for folder in &folders {
        assert_eq!(folder.metadata().unwrap().permissions().mode() & 0o777, 0o700);
        std::fs::remove_dir(folder.join("vms")).unwrap();
    }
    assert_eq!(groups.list().unwrap(), []);
    groups.make(GroupName::Vm(3)).unwrap();
    assert_eq!(groups.list().unwrap(), [GroupName::Vm(3)]);
    let pids_max = Some(9);
    groups.set(GroupName::Vm(3), &Limits { pids_max, ..Limits::default() }).unwrap();
    removed(groups);
}

#[test]
fn nothing_is_left_of_a_tree_that_cannot_be_used() {
    let run = tempfile::tempdir().unwrap();
    if !has_groups() {
        return;
    }
    let groups = Groups::open(&Root::Own, run.path(), false).unwrap();
    let [first, ..] = groups.folders() else { panic!("a tree without a folder") };
    let base = first.parent().unwrap().to_owned();
    removed(groups);
    // The second hierarchy is no cgroup file system, so that nothing can enter its groups.
    let elsewhere = run.path().join("elsewhere");
    std::fs::create_dir(&elsewhere).unwrap();
    let hierarchy = |base: &Path, controller: &str| Hierarchy {
        base: base.to_owned(),
        own: base.to_owned(),
        controllers: vec![controller.to_owned()],
        joins: false,
    };
    let place = Place::V1(vec![hierarchy(&base, "x"), hierarchy(&elsewhere, "y")], None);
    let why = Groups::in_place(place, run.path(), false).unwrap_err();
    assert!(matches!(why, NoGroups::Making(_)), "{why}");
    assert!(!base.join(tree::name(run.path())).exists());
    assert_eq!(std::fs::read_dir(&elsewhere).unwrap().count(), 0);
}

#[test]
fn a_base_that_was_made_is_known_and_others_are_not() {
    let run = tempfile::tempdir().unwrap();
    if !has_groups() {
        return;
    }
    let groups = Groups::open(&Root::Own, run.path(), false).unwrap();
    let base = groups.folders()[0].join("vms/a/b");
    tree::make_base(&base).unwrap();
    tree::make_base(&base).unwrap();
    let above: Vec<bool> = base.ancestors().take(3).map(tree::was_made).collect();
    assert_eq!(above, [true, true, false]);
    for made in base.ancestors().take(2) {
        std::fs::remove_dir(made).unwrap();
    }
    removed(groups);
}
