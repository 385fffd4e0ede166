use super::*;
use crate::spawn::{Program, Spawn};
use proptest::prelude::*;

fn sleeper() -> Process {
    let mut spawn = Spawn::new(Program::Path("/bin/sleep".into()), "sleep");
    spawn.argv.push("1000".into());
    Process::from_child(spawn.run().unwrap()).unwrap()
}

#[test]
fn a_process_is_found_again_by_its_identity_and_only_by_it() {
    let process = sleeper();
    let id = process.id();
    assert_eq!(ProcessId::of(id.pid).unwrap(), Some(id));
    let again = Process::open(id).unwrap().unwrap();
    assert!(again.is_alive().unwrap());
    let other = ProcessId { start_ticks: id.start_ticks + 1, ..id };
    assert!(Process::open(other).unwrap().is_none(), "another process that has the pid now");
    assert_eq!(again.wait(Some(Duration::from_millis(20))).unwrap(), None);
    again.kill().unwrap();
    assert_eq!(process.wait(None).unwrap(), Some(Ended::Signal(libc::SIGKILL)));
    assert!(!again.is_alive().unwrap());
    assert_eq!(again.wait(None).unwrap(), Some(Ended::Unknown), "reaped above");
    assert!(Process::open(id).unwrap().is_none());
    again.kill().unwrap();
    assert_eq!(ProcessId::of(id.pid).unwrap().filter(|&now| now == id), None);
}

#[test]
fn the_signal_that_killed_a_process_is_known_before_and_after_it_is_reaped() {
    for signal in [Signal::KILL, Signal::SYS] {
        let process = sleeper();
        let again = Process::open(process.id()).unwrap().unwrap();
        assert_eq!(again.killed_by(Duration::ZERO).unwrap(), None, "it lives");
        process.signal(signal).unwrap();
        assert!(process.poll(None).unwrap());
        let killed = Some(signal.as_raw());
        assert_eq!(again.killed_by(Duration::ZERO).unwrap(), killed, "a zombie");
        process.wait(None).unwrap();
        // Before Linux 6.15 the kernel forgets it.
        let kept = again.exit_status().unwrap().is_some();
        assert_eq!(again.killed_by(Duration::ZERO).unwrap(), killed.filter(|_| kept));
    }
    let mut spawn = Spawn::new(Program::Path("/bin/true".into()), "true");
    spawn.argv.clear();
    let ended = Process::from_child(spawn.run().unwrap()).unwrap();
    assert!(ended.poll(None).unwrap());
    assert_eq!(ended.killed_by(Duration::ZERO).unwrap(), None, "it exited");
    ended.wait(None).unwrap();
    assert_eq!(ended.killed_by(Duration::ZERO).unwrap(), None, "it exited");
}

#[test]
fn the_signal_is_known_although_the_process_is_reaped_meanwhile() {
    for _ in 0..3000 {
        let process = sleeper();
        let again = Process::open(process.id()).unwrap().unwrap();
        process.kill().unwrap();
        std::thread::scope(|scope| {
            scope.spawn(|| process.wait(None).unwrap());
            assert!(again.poll(None).unwrap());
            let killed = again.killed_by(Duration::from_secs(240)).unwrap();
            // Before Linux 6.15 the kernel forgets it.
            if again.exit_status().unwrap().is_some() {
                assert_eq!(killed, Some(libc::SIGKILL));
            }
        });
    }
}

#[test]
fn a_zombie_has_ended_but_is_there_until_it_is_reaped() {
    let process = sleeper();
    process.kill().unwrap();
    assert!(process.poll(None).unwrap());
    assert_eq!(ProcessId::of(process.id().pid).unwrap(), Some(process.id()));
    assert!(!process.is_alive().unwrap());
    assert_eq!(process.wait(None).unwrap(), Some(Ended::Signal(libc::SIGKILL)));
}

#[test]
fn pids_that_cannot_be_are_no_process() {
    for pid in [0, 0x7fff_ffff, u32::MAX] {
        assert_eq!(ProcessId::of(pid).unwrap(), None, "{pid}");
        assert!(Process::open(ProcessId { pid, start_ticks: 0 }).unwrap().is_none(), "{pid}");
    }
}

#[test]
fn a_scan_finds_processes_by_argv() {
    let vm = VmId::random();
    let program = format!("dayfly-test-{vm}");
    let mut spawn = Spawn::new(Program::Path("/bin/sh".into()), format!("/some/where/{program}"));
    spawn.argv.extend([
        "-c".into(),
        "read x <&3; true".into(),
        "--id".into(),
        vm.to_string().into(),
    ]);
    let (read, _write) = std::io::pipe().unwrap();
    spawn.fds = vec![(read.into(), 3)];
    let process = Process::from_child(spawn.run().unwrap()).unwrap();
    assert_eq!(scan(&program).unwrap(), [VmProcess { process: process.id(), vm }]);
    process.kill().unwrap();
    process.wait(None).unwrap();
    assert_eq!(scan(&program).unwrap(), []);
}

#[test]
fn command_lines() {
    let vm: VmId = "0123456789ab".parse().unwrap();
    let of = |line: &str| vm_of("dayfly-vmm", line.replace(' ', "\0").as_bytes());
    assert_eq!(of("dayfly-vmm --id 0123456789ab "), Some(vm));
    assert_eq!(of("/x/dayfly-vmm --config-fd 3 --id=0123456789ab "), Some(vm));
    for not in [
        "",
        "dayfly-vmm",
        "dayfly-vmm --id",
        "dayfly-vmm --id x",
        "vim --id 0123456789ab",
        "sh dayfly-vmm --id 0123456789ab",
    ] {
        assert_eq!(of(not), None, "{not}");
    }
}

#[test]
fn the_start_time_is_found_behind_any_program_name() {
    let rest: Vec<String> = (4..=52).map(|n| n.to_string()).collect();
    for name in ["x", "a b", "a) R (b", ")))", "( ("] {
        let line = format!("12 ({name}) S {}", rest.join(" "));
        assert_eq!(start_ticks(line.as_bytes()), Some(22), "{name}");
    }
}

proptest! {
    #[test]
    fn any_bytes_are_read_without_panic(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
        let _ticks = start_ticks(&bytes);
        let _vm = vm_of("dayfly-vmm", &bytes);
    }
}
