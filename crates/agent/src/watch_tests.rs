use super::*;
use rustix::process::{WaitOptions, kill_process, waitpid};
use std::io::{BufRead, BufReader};
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};

/// A watching program; the reader gets the agent's lines.
fn watch(watchers: &Watchers, words: &str) -> Result<BufReader<UnixStream>, String> {
    watch_and_agent(watchers, words).map(|(program, _)| program)
}

/// As [`watch`], with a second descriptor of the agent's end.
fn watch_and_agent(
    watchers: &Watchers,
    words: &str,
) -> Result<(BufReader<UnixStream>, UnixStream), String> {
    let (ours, theirs) = UnixStream::pair().unwrap();
    let agent = theirs.try_clone().unwrap();
    watchers.add(theirs, words.split_ascii_whitespace())?;
    let mut program = BufReader::new(ours);
    assert_eq!(line(&mut program), "ok");
    Ok((program, agent))
}

fn line(program: &mut BufReader<UnixStream>) -> String {
    let mut line = String::new();
    program.get_ref().set_read_timeout(Some(Duration::from_secs(240))).unwrap();
    program.read_line(&mut line).unwrap();
    line.trim_end().to_owned()
}

/// Whether nothing can be read.
fn quiet(program: &BufReader<UnixStream>) -> bool {
    let mut fds = [PollFd::new(program.get_ref(), PollFlags::IN)];
    poll(&mut fds, Some(&rustix::time::Timespec::default())).unwrap() == 0
}

#[test]
fn those_with_a_barrier_are_waited_for_and_all_learn_what_the_machine_is() {
    // A thread of a busy host may stand still for seconds.
    let watchers =
        Watchers { timeout: Mutex::new(Duration::from_secs(240)), ..Watchers::default() };
    let mut plain = watch(&watchers, "").unwrap();
    let (mut held, agent) = watch_and_agent(&watchers, "barrier").unwrap();
    let said = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let holding = scope.spawn(|| (watchers.hold(), said.load(Ordering::SeqCst)));
        assert_eq!(line(&mut held), "fork");
        // Once the agent has read the first bytes, it waits for the last one.
        held.get_ref().write_all(b"go").unwrap();
        while rustix::io::ioctl_fionread(&agent).unwrap() > 0 {
            assert!(!holding.is_finished(), "no program said go");
            std::thread::yield_now();
        }
        said.store(true, Ordering::SeqCst);
        held.get_ref().write_all(b"\n").unwrap();
        assert_eq!(holding.join().unwrap(), (Ok(()), true), "it waits until a program says go");
    });
    drop(agent);
    assert!(quiet(&plain) && quiet(&held));
    watchers.release(Is::Parent);
    assert_eq!(line(&mut held), "parent");
    watchers.release(Is::Parent);
    assert!(quiet(&plain) && quiet(&held), "nothing was about to happen");
    watchers.release(Is::Clone { number: 3, id: "abc" });
    assert_eq!((line(&mut plain), line(&mut held)), ("clone 3 abc".into(), "clone 3 abc".into()));
    drop((plain, held));
    watchers.hold().unwrap();
    assert!(watchers.all().is_empty(), "a program that is gone is forgotten");
}

#[test]
fn a_program_that_does_not_say_go_prevents_the_fork() {
    let watchers = Watchers::default();
    let (mut first, mut second) =
        (watch(&watchers, "barrier").unwrap(), watch(&watchers, "barrier").unwrap());
    first.get_ref().write_all(b"go\n").unwrap();
    second.get_ref().write_all(b"no\n").unwrap();
    let error = watchers.hold().unwrap_err();
    let pid = std::process::id();
    assert_eq!(error, format!("process {pid}: expected `go`, got \"no\""));
    for program in [&mut first, &mut second] {
        assert_eq!((line(program), line(program)), ("fork".into(), "parent".into()));
    }
    // The wait ends early for a program that ends meanwhile.
    first.get_ref().write_all(b"go\n").unwrap();
    drop(second);
    watchers.hold().unwrap();

    let watchers =
        Watchers { timeout: Mutex::new(Duration::from_millis(20)), ..Watchers::default() };
    let late = watch(&watchers, "barrier").unwrap();
    late.get_ref().write_all(b"go").unwrap();
    assert_eq!(watchers.hold().unwrap_err(), format!("process {pid}: no `go` within 0.02 s"));
    let watchers = Watchers::default();
    assert_eq!(*watchers.timeout.lock().unwrap(), Duration::from_secs(10));
    for (answer_ms, seconds) in [(Some(120_000), 40), (None, 10), (Some(u64::MAX), 1_200)] {
        let identity = Identity {
            hostname: "fly".into(),
            machine_id: "a".repeat(32),
            wall_clock_ns: 1,
            entropy: String::new(),
            number: 0,
            network: None,
            answer_ms,
            cpus: None,
        };
        watchers.wait_for(&identity);
        assert_eq!(*watchers.timeout.lock().unwrap(), Duration::from_secs(seconds));
    }
}

#[test]
fn a_clone_signals_who_named_a_signal() {
    let watchers = Watchers::default();
    // The signal goes to the program at the other end.
    let mut program = Command::new("sleep");
    let mut child = program.arg("100").process_group(0).spawn().unwrap();
    let pid = Pid::from_child(&child);
    let (ours, theirs) = UnixStream::pair().unwrap();
    drop(ours);
    let signal = Some(SIGNALS).map(|signals| {
        // SAFETY: a signal of Linux, which libc does not reserve.
        unsafe { Signal::from_raw_unchecked(*signals.start() + 3) }
    });
    let pidfd = pidfd_open(pid, PidfdFlags::empty()).unwrap();
    let own = Pid::as_raw(Some(pid));
    watchers.all().push(Watcher {
        stream: theirs,
        pid: own,
        program: pidfd,
        signal,
        barrier: false,
        waits: false,
    });
    // Signals of a stopped process wait, and `/proc` shows them.
    kill_process(pid, Signal::STOP).unwrap();
    waitpid(Some(pid), WaitOptions::UNTRACED).unwrap().unwrap();
    let waiting = || {
        let status = std::fs::read_to_string(format!("/proc/{own}/status")).unwrap();
        let masks = status.lines().filter_map(|line| {
            line.strip_prefix("SigPnd:").or_else(|| line.strip_prefix("ShdPnd:"))
        });
        masks.fold(0, |all, mask| all | u64::from_str_radix(mask.trim(), 16).unwrap())
    };
    watchers.release(Is::Parent);
    assert_eq!(waiting(), 0, "the original machine got a signal");
    watchers.release(Is::Clone { number: 0, id: "" });
    assert_eq!(waiting(), 1 << 36);
    kill_process(pid, Signal::CONT).unwrap();
    use std::os::unix::process::ExitStatusExt;
    assert_eq!(child.wait().unwrap().signal(), Some(37));
}

#[test]
fn what_is_no_wish_is_refused_and_so_is_one_too_many() {
    let watchers = Watchers::default();
    for words in ["spoon", "9", "33", "65", "34 35", "-1", "barrier 34 x"] {
        let error = watch(&watchers, words).unwrap_err();
        assert!(error.starts_with("expected `watch [barrier] [SIGNAL]`"), "{words}: {error}");
    }
    let mut all: Vec<_> = (0..MOST).map(|_| watch(&watchers, "barrier 34").unwrap()).collect();
    assert_eq!(watch(&watchers, "").unwrap_err(), "64 programs watch: expected fewer");
    all.pop();
    watch(&watchers, "").unwrap();
}
