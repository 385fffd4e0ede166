use super::*;
use crate::spawn::{Program, Spawn};
use proptest::prelude::*;

/// Only six VMs, so that known and found ones often coincide.
fn vm_of(n: u8) -> VmId {
    format!("00000000000{:x}", n % 6).parse().unwrap()
}

fn process_of(n: u8) -> ProcessId {
    ProcessId { pid: u32::from(n % 4), start_ticks: u64::from(n % 2) }
}

fn group_of(n: u8) -> GroupName {
    let number = u32::from(n % 3);
    if n < 128 { GroupName::Vm(number) } else { GroupName::Template(number) }
}

fn found() -> impl Strategy<Value = Found> {
    let bytes = || prop::collection::vec(any::<u8>(), 0..8);
    (prop::collection::vec(any::<(u8, u8)>(), 0..8), bytes(), bytes(), bytes(), bytes()).prop_map(
        |(processes, mounts, groups, entries, temporary)| Found {
            processes: processes
                .iter()
                .map(|&(p, v)| VmProcess { process: process_of(p), vm: vm_of(v) })
                .collect(),
            mounts: mounts
                .iter()
                .map(|&n| PathBuf::from(format!("/run/dayfly/vms/{}/root", vm_of(n))))
                .collect(),
            groups: groups.iter().copied().map(group_of).collect(),
            entries: entries
                .iter()
                .map(|&n| PathBuf::from(format!("/run/dayfly/vms/{}", vm_of(n))))
                .collect(),
            temporary: temporary
                .iter()
                .map(|&n| PathBuf::from(format!("/var/lib/dayfly/staging/{n}")))
                .collect(),
        },
    )
}

fn known() -> impl Strategy<Value = Known> {
    let vms = prop::collection::vec((any::<u8>(), prop::option::of(any::<u8>())), 0..6);
    let bytes = || prop::collection::vec(any::<u8>(), 0..6);
    (vms, bytes(), bytes()).prop_map(|(vms, temporary, groups)| Known {
        vms: vms.iter().map(|&(v, p)| (vm_of(v), p.map(process_of))).collect(),
        mounts: BTreeSet::new(),
        temporary: temporary
            .iter()
            .map(|&n| PathBuf::from(format!("/var/lib/dayfly/staging/{n}")))
            .collect(),
        groups: groups.iter().copied().map(group_of).collect(),
    })
}

proptest! {
    #[test]
    fn everything_found_is_known_or_a_leak_and_never_both(found in found(), known in known()) {
        let leaks = decide(&found, &known);
        for p in &found.processes {
            let ours = known.vms.get(&p.vm).is_some_and(|process| *process == Some(p.process));
            prop_assert_eq!(leaks.contains(&Leak::Process(p.process, p.vm)), !ours);
        }
        for group in &found.groups {
            prop_assert_eq!(leaks.contains(&Leak::Group(*group)), !known.groups.contains(group));
        }
        for path in &found.entries {
            let vm: VmId = path.file_name().unwrap().to_str().unwrap().parse().unwrap();
            let leaked = leaks.contains(&Leak::File(path.clone()));
            prop_assert_eq!(leaked, !known.vms.contains_key(&vm));
        }
        for path in &found.temporary {
            let leaked = leaks.contains(&Leak::File(path.clone()));
            prop_assert_eq!(leaked, !known.temporary.contains(path));
        }
        for path in &found.mounts {
            let mine = known.vms.keys().any(|vm| path.starts_with(format!("/run/dayfly/vms/{vm}")));
            prop_assert_eq!(leaks.contains(&Leak::Mount(path.clone())), !mine);
        }
        let kernel = found.processes.len() + found.mounts.len() + found.groups.len();
        let all = kernel + found.entries.len() + found.temporary.len();
        prop_assert!(leaks.len() <= all, "a leak that was not found");
    }

    #[test]
    fn processes_go_before_mounts_and_these_before_files(found in found()) {
        let rank = |leak: &Leak| match leak {
            Leak::Process(..) => 0,
            Leak::Mount(_) => 1,
            Leak::Group(_) => 2,
            Leak::Socket(_) | Leak::File(_) => 3,
        };
        prop_assert!(decide(&found, &Known::default()).is_sorted_by_key(rank));
    }

    #[test]
    fn with_nothing_found_nothing_leaks(known in known()) {
        prop_assert_eq!(decide(&Found::default(), &known), []);
    }
}

#[test]
fn what_names_no_vm_is_a_leak() {
    let entries = vec!["/run/dayfly/vms/garbage".into(), "/run/dayfly/vms/00000000000A".into()];
    let found = Found { entries, ..Found::default() };
    assert_eq!(decide(&found, &Known::default()).len(), 2);
}

#[test]
fn what_a_crash_leaves_is_found_swept_and_then_gone() {
    let state = tempfile::tempdir().unwrap();
    let run = state.path().join("run");
    let staging = state.path().join("staging");
    let (alive, dead) = (VmId::random(), VmId::random());
    let program = format!("dayfly-leak-{dead}");
    for folder in [
        run.join(alive.to_string()),
        run.join(dead.to_string()).join("root"),
        staging.join("upload"),
    ] {
        std::fs::create_dir_all(folder).unwrap();
    }
    let _socket = std::os::unix::net::UnixListener::bind(run.join("stray.sock")).unwrap();
    let start = |vm: VmId| {
        let mut spawn = Spawn::new(Program::Path("/bin/sh".into()), program.as_str());
        spawn.argv =
            [&program, "-c", "read x <&3; true", "--id", &vm.to_string()].map(Into::into).into();
        let (read, write) = std::io::pipe().unwrap();
        spawn.fds = vec![(read.into(), 3)];
        (Process::from_child(spawn.run().unwrap()).unwrap(), write)
    };
    let (kept, _kept_pipe) = start(alive);
    let (left, _left_pipe) = start(dead);
    let places = Places {
        program,
        vm_folders: vec![run.clone(), state.path().join("not-there")],
        temporary: vec![staging.clone()],
        mount_roots: vec![run.clone()],
    };
    let known = Known { vms: [(alive, Some(kept.id()))].into(), ..Known::default() };
    let leaks = find(&places, None, &known).unwrap();
    let mut expected = vec![
        Leak::Process(left.id(), dead),
        Leak::File(run.join(dead.to_string())),
        Leak::Socket(run.join("stray.sock")),
        Leak::File(staging.join("upload")),
    ];
    expected.sort();
    let mut sorted = leaks.clone();
    sorted.sort();
    assert_eq!(sorted, expected);
    for leak in &leaks {
        sweep(leak, None).unwrap();
        sweep(leak, None).unwrap();
    }
    assert_eq!(find(&places, None, &known).unwrap(), []);
    assert!(kept.is_alive().unwrap() && run.join(alive.to_string()).is_dir());
    assert!(!left.is_alive().unwrap());
    kept.kill().unwrap();
    kept.wait(None).unwrap();
    left.wait(None).unwrap();
}

#[test]
fn a_sweep_follows_no_link() {
    let folder = tempfile::tempdir().unwrap();
    let (outside, inside) = (folder.path().join("precious"), folder.path().join("vms"));
    std::fs::create_dir_all(&outside).unwrap();
    std::fs::write(outside.join("file"), "x").unwrap();
    std::fs::create_dir_all(inside.join("vm")).unwrap();
    std::os::unix::fs::symlink(&outside, inside.join("link")).unwrap();
    std::os::unix::fs::symlink(&outside, inside.join("vm/link")).unwrap();
    for name in ["link", "vm"] {
        sweep(&Leak::File(inside.join(name)), None).unwrap();
    }
    assert_eq!(std::fs::read_dir(&inside).unwrap().count(), 0);
    assert!(outside.join("file").is_file());
}
