//! The program in its jail: it serves, holds no rights, and survives its daemon.

use crate::common::{EXIT, Handover, Line, OUT, asked, frame, hand_over, pair, plain};
use dayfly_relay::streams::MAX_STREAMS;
use dayfly_relay::streams::message::{Event, Order};
use rustix::io::{FdFlags, fcntl_setfd};
use std::io::{PipeWriter, Read, Write};
use std::os::fd::{AsRawFd, OwnedFd};
use std::process::{Child, Command, Stdio};

const USER: u32 = 0x7100_0001;

fn inherited(fd: &OwnedFd) -> String {
    fcntl_setfd(fd, FdFlags::empty()).unwrap();
    fd.as_raw_fd().to_string()
}

fn started(user: &str) -> (Child, OwnedFd, PipeWriter) {
    let (ended, vmm) = std::io::pipe().unwrap();
    let (control, of_process) = pair();
    let ended: OwnedFd = ended.into();
    let mut command = Command::new(env!("CARGO_BIN_EXE_dayfly-relay"));
    command.args(["--streams", &inherited(&of_process), "--vmm", &inherited(&ended)]);
    command.args(["--most", &MAX_STREAMS.to_string()]);
    let child = command.args(["--user", user]).stderr(Stdio::piped()).spawn().unwrap();
    (child, control, vmm)
}

fn status(child: &Child, name: &str) -> String {
    let text = std::fs::read_to_string(format!("/proc/{}/status", child.id())).unwrap();
    let line = text.lines().find_map(|line| line.strip_prefix(name)).unwrap();
    line.split_whitespace().collect::<Vec<_>>().join(" ")
}

fn ended(mut child: Child) {
    let status = child.wait().unwrap();
    let mut said = String::new();
    child.stderr.take().unwrap().read_to_string(&mut said).unwrap();
    assert!(status.success() && said.is_empty(), "{status}: {said}");
}

fn taken(control: &OwnedFd) -> Handover {
    let stream = hand_over(control, &plain());
    assert_eq!(stream.line.next(), Some(Event::Taken));
    stream.line.order(&Order::Go);
    stream
}

#[test]
fn it_serves_in_its_jail_and_ends_with_its_last_stream() {
    assert!(rustix::process::geteuid().is_root(), "this test needs root");
    let (child, control, _vmm) = started(&USER.to_string());
    // Each system call is made under the filter: bytes, ends, farewells, questions, refusals.
    let mut stream = taken(&control);
    stream.agent.write_all(&frame(OUT, &[1; 100_000])).unwrap();
    stream.client.read_exact(&mut [0; 100_005]).unwrap();
    stream.client.write_all(&[2; 100_000]).unwrap();
    stream.agent.read_exact(&mut [0; 100_000]).unwrap();
    assert_eq!(asked(&stream.line, 1).bytes, 100_005);
    let gone = taken(&control);
    drop(gone.client);
    assert_eq!(gone.line.next(), Some(Event::Gone));
    let Handover { mut client, mut agent, line } = taken(&control);
    agent.shutdown(std::net::Shutdown::Read).unwrap();
    client.write_all(&[3; 1000]).unwrap();
    agent.write_all(&frame(EXIT, b"{}")).unwrap();
    assert!(matches!(line.next(), Some(Event::Ended(_))));
    line.order(&Order::Finish(b"end".to_vec()));
    let mut said = Vec::new();
    client.read_to_end(&mut said).unwrap();
    assert_eq!(said, b"end");
    let kept = hand_over(&control, &plain());
    assert_eq!(kept.line.next(), Some(Event::Taken));
    kept.line.order(&Order::No);
    assert_eq!(kept.line.next(), None);
    let all: Vec<_> = (1..MAX_STREAMS).map(|_| taken(&control)).collect();
    assert_eq!(hand_over(&control, &plain()).line.next(), None);
    drop(all);

    assert_eq!(status(&child, "Uid:"), [&*USER.to_string(); 4].join(" "));
    for name in ["CapEff:", "CapPrm:", "CapInh:"] {
        assert_eq!(status(&child, name), "0000000000000000");
    }
    let jailed = (status(&child, "Seccomp:"), status(&child, "NoNewPrivs:"));
    assert_eq!(jailed, ("2".into(), "1".into()));
    let root = std::fs::read_link(format!("/proc/{}/root", child.id())).unwrap();
    assert!(root.ends_with("fdinfo"), "{root:?}");

    // Its daemon ends, and then the stream.
    let Handover { mut client, mut agent, line: Line(line) } = stream;
    drop((control, line));
    agent.write_all(&frame(EXIT, b"{}")).unwrap();
    let mut rest = Vec::new();
    client.read_to_end(&mut rest).unwrap();
    assert_eq!(rest, frame(EXIT, b"{}"));
    ended(child);
}

#[test]
fn a_process_that_is_killed_ends_its_streams_for_all() {
    let (mut child, control, _vmm) = started(&USER.to_string());
    let Handover { mut client, mut agent, line } = taken(&control);
    child.kill().unwrap();
    child.wait().unwrap();
    assert_eq!(line.next(), None);
    assert_eq!(client.read(&mut [0]).unwrap(), 0);
    assert_eq!(agent.read(&mut [0]).unwrap(), 0);
}

#[test]
fn it_does_not_serve_as_root() {
    let (mut child, _control, _vmm) = started("0");
    assert!(!child.wait().unwrap().success());
    let mut said = String::new();
    child.stderr.take().unwrap().read_to_string(&mut said).unwrap();
    assert!(said.contains("expected --user"), "{said}");
}
