//! Programs that outlive their client, over a unix socket.

mod common;

use common::{Guest, eventually, sh, started};
use dayfly_api::agent::{ExecSpec, FrameKind, Reply, Request};

fn log_of(pid: u32, follow: bool) -> Request {
    Request::Log { pid, follow, program: None, tail: None, since_unix_ms: None }
}

#[test]
fn what_a_detached_program_writes_is_kept_by_program() {
    let guest = Guest::start();
    let detached = |text: &str| {
        let mut client = guest.connect();
        started(&mut client, ExecSpec { detach: true, ..sh(text) })
    };
    let log = |pid: u32| {
        let mut client = guest.connect();
        client.request(&log_of(pid, true));
        assert_eq!(client.reply(), Reply::Ok);
        let mut text = Vec::new();
        loop {
            match client.frame() {
                Some((FrameKind::Data, body)) => text.extend(body),
                Some((FrameKind::End, _)) => return String::from_utf8(text).unwrap(),
                other => panic!("{other:?}"),
            }
        }
    };
    let (one, two) = (detached("echo one; echo two >&2; exec sleep 0.2"), detached("echo 2"));
    let many = detached("yes 0123456789abcde | head -c 5242880; echo; echo the newest line");
    assert_eq!((log(one).as_str(), log(two).as_str()), ("one\ntwo\n", "2\n"));
    let newest = log(many);
    assert!(
        newest.ends_with("\nthe newest line\n") && newest.len() < 300 << 10,
        "{} bytes",
        newest.len()
    );
    let unknown = guest.ask(&log_of(1, false));
    assert!(matches!(&unknown, Reply::Err(f) if f.message.contains(" (/bin/sh)")), "{unknown:?}");
}

#[test]
fn a_detached_program_is_listed_signalled_and_waited_for() {
    let guest = Guest::start();
    let spec = ExecSpec {
        detach: true,
        ..sh("trap 'exit 7' TERM; echo begun; while :; do sleep 0.1; done")
    };
    let Reply::Started { pid, id: Some(id) } = guest.ask(&Request::Exec(Box::new(spec))) else {
        panic!("a detached program has an id")
    };
    let listed = || match guest.ask(&Request::Programs) {
        Reply::Programs { programs } => programs,
        other => panic!("{other:?}"),
    };
    let found = listed();
    assert_eq!((found.len(), found[0].pid, &found[0].id, found[0].exit), (1, pid, &id, None));
    assert_eq!(found[0].command[..2], ["/bin/sh", "-c"]);
    let mut waiting = guest.connect();
    waiting.request(&Request::WaitForProgram { program: id.clone() });
    // The trap is set once it has said so.
    eventually("it has begun", || {
        let mut client = guest.connect();
        client.request(&log_of(pid, false));
        assert_eq!(client.reply(), Reply::Ok);
        client.frame().is_some_and(|(_, body)| body == b"begun\n")
    });
    let signal = Request::SignalProgram { program: id.clone(), signal: libc::SIGTERM };
    assert_eq!(guest.ask(&signal), Reply::Ok);
    let Reply::Program(ended) = waiting.reply() else { panic!("it has ended") };
    assert_eq!((ended.exit.unwrap().code, &ended.id), (Some(7), &id));
    assert_eq!(listed(), [ended.clone()]);
    let again = guest.ask(&Request::WaitForProgram { program: pid.to_string() });
    assert_eq!(again, Reply::Program(ended));
    assert!(matches!(guest.ask(&signal), Reply::Err(_)), "it has ended");
    assert_eq!(guest.ask(&Request::ForgetProgram { program: id }), Reply::Ok);
    assert!(listed().is_empty());
}

#[test]
fn a_program_left_in_the_background_lives_on() {
    let guest = Guest::start();
    let (gate, done) = (guest.root().join("gate"), guest.root().join("done"));
    let script = format!(
        "mkfifo {0}; (read x <{0}; echo out; echo err >&2; echo out; touch {1}) & exit 3",
        gate.display(),
        done.display()
    );
    assert_eq!(guest.sh(&script).exit.code, Some(3));
    std::fs::write(&gate, "go\n").unwrap();
    eventually("it wrote twice without a reader", || done.exists());
}
