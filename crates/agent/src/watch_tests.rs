use super::*;
use std::io::{BufRead, BufReader};
use std::os::unix::process::CommandExt;
use std::process::Command;

/// A watching program; the reader gets the agent's lines.
fn watch(watchers: &Watchers, words: &str) -> Result<BufReader<UnixStream>, String> {
    let (ours, theirs) = UnixStream::pair().unwrap();
    watchers.add(theirs, words.split_ascii_whitespace())?;
    let mut program = BufReader::new(ours);
    assert_eq!(line(&mut program), "ok");
    Ok(program)
}

fn line(program: &mut BufReader<UnixStream>) -> String {
    let mut line = String::new();
    program.get_ref().set_read_timeout(Some(Duration::from_secs(20))).unwrap();
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
    let watchers = Watchers::default();
    let (mut plain, mut held) =
        (watch(&watchers, "").unwrap(), watch(&watchers, "barrier").unwrap());
    std::thread::scope(|scope| {
        let holding = scope.spawn(|| watchers.hold());
        assert_eq!(line(&mut held), "fork");
        std::thread::sleep(Duration::from_millis(30));
        assert!(!holding.is_finished(), "no program said go");
        held.get_ref().write_all(b"go\n").unwrap();
        holding.join().unwrap().unwrap();
    });
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
    second.get_ref().write_all(b"go").unwrap();
    first.get_ref().write_all(b"go\n").unwrap();
    let began = Instant::now();
    assert_eq!(watchers.hold().unwrap_err(), format!("process {pid}: no `go` within 10 s"));
    assert!(began.elapsed() >= TIMEOUT);
    // The wait ends early for a program that ends meanwhile.
    first.get_ref().write_all(b"go\n").unwrap();
    drop(second);
    watchers.hold().unwrap();
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
    watchers.release(Is::Parent);
    std::thread::sleep(Duration::from_millis(20));
    assert!(child.try_wait().unwrap().is_none());
    watchers.release(Is::Clone { number: 0, id: "" });
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
