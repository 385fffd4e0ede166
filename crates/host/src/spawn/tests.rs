use super::*;
use crate::process::{Ended, Process};
use std::fs::File;
use std::io::{Read, Seek, Write};
use std::os::fd::OwnedFd;
use std::path::Path;
use std::time::Duration;

fn sh(script: &str) -> Spawn {
    let mut spawn = Spawn::new(Program::Path("/bin/sh".into()), "sh");
    spawn.argv.extend(["-c".into(), script.into()]);
    spawn.env.push("PATH=/usr/bin:/bin".into());
    spawn
}

/// Runs the process to its end and returns its stdout.
fn output(mut spawn: Spawn) -> (String, Ended) {
    let (mut read, write) = std::io::pipe().unwrap();
    spawn.stdout = Stdio::Fd(OwnedFd::from(write));
    let child = Process::from_child(spawn.run().unwrap()).unwrap();
    let mut text = String::new();
    read.read_to_string(&mut text).unwrap();
    (text, child.wait(None).unwrap().unwrap())
}

fn file_with(text: &str) -> File {
    let mut file = tempfile::tempfile().unwrap();
    file.write_all(text.as_bytes()).unwrap();
    file.rewind().unwrap();
    file
}

#[test]
fn a_program_runs_with_its_arguments_environment_and_folder() {
    let mut spawn = sh("echo \"$0 $1 $A $(pwd)\"; env | wc -l; exit 7");
    spawn.argv.extend(["zero".into(), "one two".into()]);
    spawn.env.push("A=b c".into());
    spawn.cwd = "/proc".into();
    let (text, ended) = output(spawn);
    // The environment has PATH and A, PWD (added by `sh`) and perhaps `_`.
    assert!(text.starts_with("zero one two b c /proc\n"), "{text}");
    assert!(text.lines().nth(1).unwrap().trim().parse::<u32>().unwrap() <= 4, "{text}");
    assert_eq!(ended, Ended::Code(7));
}

#[test]
fn exactly_the_given_descriptors_are_open() {
    // A descriptor of this process without close-on-exec, which must not leak into the child.
    let stray = rustix::io::dup(file_with("stray")).unwrap();
    let mut spawn = Spawn::new(Program::Path("/bin/ls".into()), "ls");
    spawn.argv.extend(["/proc/self/fd".into()]);
    spawn.fds = vec![(file_with("a").into(), 3), (file_with("b").into(), 9)];
    let (text, ended) = output(spawn);
    drop(stray);
    // ls itself opens the folder, at the lowest free number.
    assert_eq!(text.split_whitespace().collect::<Vec<_>>(), ["0", "1", "2", "3", "4", "9"]);
    assert_eq!(ended, Ended::Code(0));
}

#[test]
fn descriptors_that_change_places_are_not_mixed_up() {
    // The sources are each other's targets, which a naive sequence of dup2 would overwrite.
    let (a, b) = (OwnedFd::from(file_with("from a")), OwnedFd::from(file_with("from b")));
    let (at_a, at_b) = (a.as_raw_fd(), b.as_raw_fd());
    let mut spawn = sh(&format!("cat /proc/self/fd/{at_b}; echo; cat /proc/self/fd/{at_a}"));
    spawn.fds = vec![(a, at_b), (b, at_a)];
    assert_eq!(output(spawn).0, "from a\nfrom b");
}

#[test]
fn a_program_is_executed_by_descriptor() {
    let program = File::open("/bin/echo").unwrap();
    let mut spawn = Spawn::new(Program::Fd(program.into()), "anything");
    spawn.argv.push("hello".into());
    assert_eq!(output(spawn), ("hello\n".to_owned(), Ended::Code(0)));
}

#[test]
fn what_fails_in_the_child_is_reported_with_step_and_errno() {
    let failure = |spawn: Spawn| match spawn.run().unwrap_err() {
        SpawnError::Child { step, source, .. } => (step, source.raw_os_error().unwrap()),
        other => panic!("{other}"),
    };
    let missing = Spawn::new(Program::Path("/nonexistent/program".into()), "x");
    assert_eq!(failure(missing), (Step::Execute.text(), libc::ENOENT));
    let not_a_program = Spawn::new(Program::Path("/etc/passwd".into()), "x");
    assert_eq!(failure(not_a_program), (Step::Execute.text(), libc::EACCES));
    let mut nowhere = sh("true");
    nowhere.cwd = "/nonexistent".into();
    assert_eq!(failure(nowhere), (Step::Folder.text(), libc::ENOENT));
}

#[test]
fn a_failed_start_leaves_no_zombie_and_no_descriptor() {
    let open = || std::fs::read_dir("/proc/self/fd").unwrap().count();
    let zombies = || {
        let own = format!(
            "/proc/{}/task/{}/children",
            std::process::id(),
            rustix::thread::gettid().as_raw_nonzero()
        );
        std::fs::read_to_string(own).unwrap().split_whitespace().count()
    };
    let before = zombies();
    let mut least = usize::MAX;
    // Other tests of this process open files too, some of them hundreds for a while. Fifty leaked
    // descriptors would show in the minimum, and each further round adds fifty.
    for _ in 0..100 {
        least = usize::MAX;
        for _ in 0..50 {
            Spawn::new(Program::Path("/nonexistent".into()), "x").run().unwrap_err();
            least = least.min(open());
        }
        if least < 45 {
            break;
        }
    }
    assert_eq!(zombies(), before);
    assert!(least < 45, "{least} descriptors");
}

#[test]
fn bad_numbers_and_nul_bytes_are_refused() {
    for numbers in [vec![0], vec![2], vec![-1], vec![END_FD], vec![5, 5]] {
        let mut spawn = sh("true");
        spawn.fds = numbers.iter().map(|&n| (OwnedFd::from(file_with("")), n)).collect();
        assert!(matches!(spawn.run(), Err(SpawnError::FdNumber { .. })), "{numbers:?}");
    }
    let mut spawn = sh("true");
    spawn.argv.push("a\0b".into());
    assert!(matches!(spawn.run(), Err(SpawnError::Nul { what: "an argument", .. })));
}

#[test]
fn a_child_leads_its_session_and_has_default_signals() {
    // SAFETY: changes only the disposition of SIGHUP of this test process; no test sends SIGHUP.
    unsafe { libc::signal(libc::SIGHUP, libc::SIG_IGN) };
    let mut spawn = Spawn::new(Program::Path("/bin/cat".into()), "cat");
    spawn.argv.push("/proc/self/status".into());
    let (status, _) = output(spawn);
    let mask = |key: &str| {
        let line = status.lines().find(|l| l.starts_with(key)).unwrap();
        u64::from_str_radix(line.split_whitespace().nth(1).unwrap(), 16).unwrap()
    };
    // Rust programs ignore SIGPIPE: a child that inherited the disposition would have bit 12 set.
    assert_eq!((mask("SigBlk:"), mask("SigIgn:"), mask("SigCgt:")), (0, 0, 0));
    let mut spawn = Spawn::new(Program::Path("/bin/cat".into()), "cat");
    spawn.argv.push("/proc/self/stat".into());
    let (stat, _) = output(spawn);
    let words: Vec<&str> = stat.split_whitespace().collect();
    assert_eq!(words[0], words[5], "session is not its own pid: {stat}");
}

#[test]
fn the_callers_signal_mask_is_kept() {
    let mask = || {
        let status = std::fs::read_to_string("/proc/thread-self/status").unwrap();
        status.lines().find(|l| l.starts_with("SigBlk:")).unwrap().to_owned()
    };
    let before = mask();
    output(sh("true"));
    assert_eq!(mask(), before);
}

#[test]
fn namespaces_are_its_own() {
    if !dayfly_units::needs::root() {
        return;
    }
    let here = |kind: &str| std::fs::read_link(Path::new("/proc/self/ns").join(kind)).unwrap();
    let (mut read, write) = std::io::pipe().unwrap();
    let mut spawn = sh("echo $$; exec sleep 1000");
    spawn.namespaces = Namespaces::ALL;
    spawn.stdout = Stdio::Fd(OwnedFd::from(write));
    let child = spawn.run().unwrap();
    let pid = child.pid;
    let process = Process::from_child(child).unwrap();
    let mut first = [0; 2];
    read.read_exact(&mut first).unwrap();
    assert_eq!(&first, b"1\n", "it is process 1 of its namespace");
    for kind in ["pid", "mnt", "net", "ipc", "uts"] {
        let there = std::fs::read_link(format!("/proc/{pid}/ns/{kind}")).unwrap();
        assert_ne!(there, here(kind), "{kind}");
    }
    process.kill().unwrap();
    assert_eq!(
        process.wait(Some(Duration::from_secs(240))).unwrap(),
        Some(Ended::Signal(libc::SIGKILL))
    );
}

#[test]
fn many_threads_start_programs_at_once() {
    std::thread::scope(|scope| {
        for t in 0..8 {
            scope.spawn(move || {
                for i in 0..25 {
                    let text = format!("{t}-{i}");
                    let (a, b) = (file_with(&text), file_with("other"));
                    let mut spawn = sh("cat <&5");
                    spawn.fds = vec![(a.into(), 5), (b.into(), 6)];
                    assert_eq!(output(spawn), (text, Ended::Code(0)));
                }
            });
        }
    });
}

/// The part of [`a_child_outlives_its_parent`] that runs in a separate process.
#[test]
fn start_a_child_and_die() {
    let Ok(file) = std::env::var("DAYFLY_HOST_TEST_PID_FILE") else { return };
    let child = sh("exec sleep 1000").run().unwrap();
    std::fs::write(file, child.pid.to_string()).unwrap();
    rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::KILL)
        .unwrap();
}

#[test]
fn a_child_outlives_its_parent() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("pid");
    let mut parent = Spawn::new(Program::Path(std::env::current_exe().unwrap()), "test");
    parent.argv.extend(["--exact".into(), "spawn::tests::start_a_child_and_die".into()]);
    parent.env.push(format!("DAYFLY_HOST_TEST_PID_FILE={}", file.display()).into());
    let parent = Process::from_child(parent.run().unwrap()).unwrap();
    assert_eq!(
        parent.wait(Some(Duration::from_secs(240))).unwrap(),
        Some(Ended::Signal(libc::SIGKILL))
    );
    let pid: u32 = std::fs::read_to_string(&file).unwrap().parse().unwrap();
    let id = crate::process::ProcessId::of(pid).unwrap().unwrap();
    let child = Process::open(id).unwrap().expect("the child died with its parent");
    assert_eq!(child.wait(Some(Duration::from_millis(100))).unwrap(), None);
    assert!(child.is_alive().unwrap());
    child.kill().unwrap();
    assert_eq!(
        child.wait(Some(Duration::from_secs(240))).unwrap(),
        Some(Ended::Unknown),
        "it is not our child"
    );
}
