//! Streams of programs that are handed over to a process: what client and agent see of it, and what
//! is left.

use super::tests::{Served, called, running, running_as, served_with};
use crate::base::config::STREAMS_NAME;
use crate::base::time::unix_ms;
use crate::fixture;
use crate::model::exit::exit_now;
use crate::model::facts::Facts;
use crate::model::live::VmGroup;
use crate::vm::Vm;
use crate::vmm::agent_link::read_frame;
use dayfly_api::agent::{ExecSpec, Exit, Frame, FrameKind, Reply, encode};
use dayfly_api::client::{Client, ClientError, Exec, ExecEvent};
use dayfly_api::types::{ErrorCode, ExitKind, VmLimits};
use dayfly_host::process::{Process, ProcessId, scan_below};
use std::sync::Arc;
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{UnixListener, UnixStream};
use tokio::time::timeout;

/// Only a hang takes this long.
pub(super) const WITHIN: Duration = Duration::from_secs(120);
/// Bytes after which a stream is handed over.
pub(super) const ENOUGH: usize = 200 << 10;

/// A daemon with the process's program, and a VM whose VMM is this test.
pub(super) fn world() -> (Served, Arc<Vm>, UnixListener) {
    let served = served_with(|config| config.vmm = fixture::vmm());
    let (vm, listener) = running(&served, "web");
    vm.hold(Arc::new(Process::open(ProcessId::own().unwrap()).unwrap().unwrap()));
    (served, vm, listener)
}

pub(super) fn processes(served: &Served) -> Vec<ProcessId> {
    let found = scan_below(&served.daemon.config.vms(), STREAMS_NAME).unwrap();
    found.iter().map(|found| found.process).collect()
}

/// Waits for what comes, unless the code is broken.
pub(super) async fn bounded<T>(what: impl Future<Output = T>) -> T {
    timeout(WITHIN, what).await.expect("this does not come")
}

pub(super) async fn until(mut done: impl FnMut() -> bool) {
    let wait = async {
        while !done() {
            tokio::task::spawn_blocking(std::thread::yield_now).await.unwrap();
        }
    };
    timeout(WITHIN, wait).await.expect("this does not come");
}

pub(super) fn json(kind: FrameKind, body: &impl serde::Serialize) -> Vec<u8> {
    encode(kind, &serde_json::to_vec(body).unwrap())
}

/// Accepts a connection to the agent, and reads the request.
pub(super) async fn asked(listener: &UnixListener) -> UnixStream {
    let (mut stream, line) = called(listener).await;
    assert_eq!(line, "CONNECT 1024\n");
    stream.write_all(b"OK 7\n").await.unwrap();
    read_frame(&mut stream, "reading a request").await.unwrap();
    stream
}

const EXIT: Exit = Exit { code: Some(0), signal: None, timed_out: false };

/// A program that runs, and its agent's connection.
async fn program(
    served: &Served,
    listener: &UnixListener,
    liveness_ms: Option<u64>,
) -> (Exec, UnixStream) {
    let (client, argv) = (Client::new(&served.socket), vec!["p".to_owned()]);
    let spec = ExecSpec { argv, stdin: true, liveness_ms, ..ExecSpec::default() };
    let agent = async {
        let mut agent = asked(listener).await;
        let started = json(FrameKind::Reply, &Reply::Started { pid: 5, id: None });
        agent.write_all(&started).await.unwrap();
        agent
    };
    let (exec, agent) = bounded(async { tokio::join!(client.exec("web", &spec), agent) }).await;
    (exec.unwrap(), agent)
}

/// Output of the agent that is enough for a hand-over, until the process is there.
async fn handed(served: &Served, exec: &mut Exec, agent: &mut UnixStream) -> ProcessId {
    let output = encode(FrameKind::Stdout, &vec![b'x'; ENOUGH]);
    let (sent, got) =
        bounded(async { tokio::join!(agent.write_all(&output), exec.output.next()) }).await;
    sent.unwrap();
    assert_eq!(got.unwrap(), ExecEvent::Stdout(vec![b'x'; ENOUGH]));
    until(|| processes(served).len() == 1).await;
    let process = processes(served)[0];
    // Its control socket, and the three of the stream: from here on the daemon passes on nothing.
    until(|| sockets(process) >= 4).await;
    let passes = encode(FrameKind::Stdout, b"passes");
    let (sent, got) =
        bounded(async { tokio::join!(agent.write_all(&passes), exec.output.next()) }).await;
    sent.unwrap();
    assert_eq!(got.unwrap(), ExecEvent::Stdout(b"passes".to_vec()));
    process
}

/// The number of sockets that a process has.
pub(super) fn sockets(process: ProcessId) -> usize {
    let fds = std::fs::read_dir(format!("/proc/{}/fd", process.pid)).into_iter().flatten();
    let links = fds.flatten().filter_map(|fd| std::fs::read_link(fd.path()).ok());
    links.filter(|link| link.to_string_lossy().starts_with("socket:")).count()
}

/// Everything that the client still gets.
async fn rest(exec: &mut Exec) -> (Vec<u8>, Result<Exit, ClientError>) {
    let mut all = Vec::new();
    let reading = async {
        loop {
            match exec.output.next().await {
                Ok(ExecEvent::Stdout(bytes) | ExecEvent::Stderr(bytes)) => all.extend(bytes),
                Ok(ExecEvent::Exit(exit)) => return Ok(exit),
                Err(e) => return Err(e),
            }
        }
    };
    let end = timeout(WITHIN, reading).await.expect("the client waits for ever");
    (all, end)
}

fn refused(end: Result<Exit, ClientError>) -> dayfly_api::types::ApiError {
    let Err(ClientError::Refused(error)) = end else { panic!("{end:?}") };
    error
}

#[tokio::test]
async fn a_program_with_much_output_is_handed_over_and_ends_as_any_other() {
    let (served, _vm, listener) = world();
    let (mut exec, mut agent) = program(&served, &listener, None).await;
    assert!(processes(&served).is_empty(), "a short program costs a process");
    handed(&served, &mut exec, &mut agent).await;
    exec.input.write(b"typed").await.unwrap();
    let typed = bounded(read_frame(&mut agent, "input")).await.unwrap().unwrap();
    assert_eq!(typed, Frame { kind: FrameKind::Stdin, body: b"typed".to_vec() });
    agent.write_all(&encode(FrameKind::Stderr, b"last")).await.unwrap();
    agent.write_all(&json(FrameKind::Exit, &EXIT)).await.unwrap();
    let (bytes, end) = rest(&mut exec).await;
    assert_eq!((bytes.as_slice(), end.unwrap()), (&b"last"[..], EXIT));
    // One that fails gets the daemon's warning, which comes from another question to the agent.
    let (mut exec, mut agent) = program(&served, &listener, None).await;
    handed(&served, &mut exec, &mut agent).await;
    let stat = async {
        let mut full = asked(&listener).await;
        let stat = dayfly_api::agent::Stat {
            disk_total_bytes: 1 << 30,
            disk_available_bytes: 0,
            disk_available_files: 9,
            memory_total_bytes: 1,
            memory_available_bytes: 1,
        };
        full.write_all(&json(FrameKind::Reply, &Reply::Stat(stat))).await.unwrap();
    };
    let failed = Exit { code: Some(1), ..EXIT };
    agent.write_all(&json(FrameKind::Exit, &failed)).await.unwrap();
    let ((bytes, end), ()) = bounded(async { tokio::join!(rest(&mut exec), stat) }).await;
    assert_eq!(end.unwrap(), failed);
    let text = String::from_utf8(bytes).unwrap();
    assert!(text.starts_with("dayfly: web: ") && text.contains("disk"), "{text}");
}

#[tokio::test]
async fn a_program_that_runs_for_a_while_is_handed_over_without_output() {
    let (served, _vm, listener) = world();
    let (mut exec, mut agent) = program(&served, &listener, None).await;
    until(|| processes(&served).len() == 1).await;
    exec.input.end().await.unwrap();
    let end = bounded(read_frame(&mut agent, "input")).await.unwrap().unwrap();
    assert_eq!(end.kind, FrameKind::StdinEnd);
    agent.write_all(&json(FrameKind::Exit, &EXIT)).await.unwrap();
    assert_eq!(rest(&mut exec).await.1.unwrap(), EXIT);
}

#[tokio::test]
async fn bytes_that_a_client_sends_early_get_to_the_program_first() {
    let (served, _vm, listener) = world();
    let mut client = UnixStream::connect(&served.socket).await.unwrap();
    let spec = ExecSpec { argv: vec!["p".into()], stdin: true, ..ExecSpec::default() };
    // Far more than a hand-over takes, right behind the request: hyper and the session read it.
    let input: Vec<u8> = (0..3 << 20).map(|at: u32| u8::try_from(at * 7 % 251).unwrap()).collect();
    let frames: Vec<u8> =
        input.chunks(64 << 10).flat_map(|piece| encode(FrameKind::Stdin, piece)).collect();
    let head = "POST /v1/vms/web/exec HTTP/1.1\r\nHost: d\r\nConnection: upgrade\r\n\
                Upgrade: dayfly-exec\r\n\r\n";
    let all = [head.as_bytes(), &json(FrameKind::Request, &spec), &frames].concat();
    let (mut from, mut to) = client.split();
    let sent = to.write_all(&all);
    let served_by_agent = async {
        let mut agent = asked(&listener).await;
        let started = json(FrameKind::Reply, &Reply::Started { pid: 5, id: None });
        agent.write_all(&started).await.unwrap();
        let mut got = vec![0; frames.len()];
        agent.read_exact(&mut got).await.unwrap();
        assert!(got == frames, "bytes are lost, or in another order");
        agent.write_all(&json(FrameKind::Exit, &EXIT)).await.unwrap();
        agent
    };
    let received = async {
        let mut answer = Vec::new();
        let _ = from.read_to_end(&mut answer).await;
        answer
    };
    let (sent, _agent, answer) =
        bounded(async { tokio::join!(sent, served_by_agent, received) }).await;
    sent.unwrap();
    assert!(answer.starts_with(b"HTTP/1.1 101"));
    assert!(answer.ends_with(&json(FrameKind::Exit, &EXIT)));
    assert_eq!(processes(&served).len(), 1);
}

#[tokio::test]
async fn a_client_that_goes_ends_its_program() {
    let (served, _vm, listener) = world();
    let (mut exec, mut agent) = program(&served, &listener, None).await;
    handed(&served, &mut exec, &mut agent).await;
    drop(exec);
    assert_eq!(timeout(WITHIN, agent.read(&mut [0])).await.unwrap().unwrap(), 0);
    // The process has nothing to do any more.
    until(|| processes(&served).is_empty()).await;
}

#[tokio::test]
async fn the_end_of_a_vm_is_explained_to_clients_after_the_hand_over() {
    let (served, vm, listener) = world();
    let (mut exec, mut agent) = program(&served, &listener, None).await;
    handed(&served, &mut exec, &mut agent).await;
    drop(vm.ended(exit_now(ExitKind::Killed, "for this test")));
    drop(agent);
    let error = refused(rest(&mut exec).await.1);
    assert_eq!(error.code, ErrorCode::Guest);
    assert!(error.message.contains("VM web ended") && error.message.contains("for this test"));
}

#[tokio::test]
async fn the_end_of_a_vm_inside_a_frame_is_explained_and_is_no_output() {
    for (is_handed, is_removed) in [(true, false), (true, true), (false, false)] {
        let (served, vm, listener) = world();
        let (mut exec, mut agent) = program(&served, &listener, None).await;
        if is_handed {
            handed(&served, &mut exec, &mut agent).await;
        }
        // A frame whose end never comes.
        let cut = encode(FrameKind::Stdout, &[b'x'; 1000]);
        agent.write_all(&cut[..500]).await.unwrap();
        drop(vm.ended(exit_now(ExitKind::Killed, "for this test")));
        if is_removed {
            served.daemon.registry.forget(&vm);
        }
        drop(agent);
        let (bytes, end) = rest(&mut exec).await;
        assert_eq!(bytes, b"", "a part of a frame is no output");
        let error = refused(end);
        assert_eq!(error.code, ErrorCode::Guest);
        let words = if is_removed { "ended and was removed" } else { "for this test" };
        assert!(error.message.contains(words), "{error:?}");
    }
}

#[tokio::test]
async fn a_program_for_which_a_process_has_no_space_stays_with_the_daemon() {
    let served = served_with(|config| config.vmm = fixture::vmm());
    // Enough for one stream.
    let limits = VmLimits { memory_max_bytes: Some(2 << 20), ..VmLimits::default() };
    let facts = Facts { limits, ..fixture::facts() };
    let (vm, listener) = running_as(&served, "web", facts);
    vm.hold(Arc::new(Process::open(ProcessId::own().unwrap()).unwrap().unwrap()));
    let (mut one, mut first) = program(&served, &listener, None).await;
    let process = handed(&served, &mut one, &mut first).await;
    let (mut two, mut second) = program(&served, &listener, None).await;
    let output = encode(FrameKind::Stdout, &vec![b'x'; ENOUGH]);
    for _ in 0..5 {
        let both = async { tokio::join!(second.write_all(&output), two.output.next()) };
        let (sent, got) = bounded(both).await;
        sent.unwrap();
        assert_eq!(got.unwrap(), ExecEvent::Stdout(vec![b'x'; ENOUGH]));
    }
    assert_eq!((processes(&served), sockets(process)), (vec![process], 4), "it has one stream");
    for (exec, agent) in [(&mut two, &mut second), (&mut one, &mut first)] {
        agent.write_all(&json(FrameKind::Exit, &EXIT)).await.unwrap();
        assert_eq!(rest(exec).await.1.unwrap(), EXIT);
    }
}

#[tokio::test]
async fn no_process_is_started_for_a_vm_that_is_ending() {
    let (served, vm, _listener) = world();
    let config = &served.daemon.config;
    assert!(vm.streams_place(config).is_some());
    // Its group is taken from it first, and the process would be in the daemon's.
    let group = VmGroup { tree: "/dayfly".into(), number: 1 };
    vm.update(|live| live.group = Some(group));
    assert!(vm.streams_place(config).is_none());
    vm.update(|live| live.group = None);
    let mut child = std::process::Command::new("sleep").arg("1000").spawn().unwrap();
    let vmm = ProcessId::of(child.id()).unwrap().unwrap();
    vm.hold(Arc::new(Process::open(vmm).unwrap().unwrap()));
    assert!(vm.streams_place(config).is_some());
    child.kill().unwrap();
    child.wait().unwrap();
    assert!(vm.streams_place(config).is_none());
}

#[tokio::test]
async fn a_vm_that_is_removed_has_no_process_left_for_a_client_that_does_not_read() {
    let (served, vm, listener) = world();
    let (mut exec, mut agent) = program(&served, &listener, None).await;
    let process = handed(&served, &mut exec, &mut agent).await;
    // The VMM is this test, which does not end; so the end is that of the VM alone.
    drop(vm.ended(exit_now(ExitKind::Killed, "for this test")));
    served.daemon.registry.forget(&vm);
    assert!(vm.holds_slot(), "another VM could have the process's user");
    timeout(WITHIN, vm.streams.end(Duration::from_millis(1))).await.expect("it is not ended");
    assert!(processes(&served).iter().all(|other| *other != process));
    served.daemon.registry.release_slot(&vm);
    assert!(!vm.holds_slot());
    drop((exec, agent));
}

#[tokio::test]
async fn a_process_that_is_killed_breaks_its_streams_and_the_next_one_has_another() {
    let (served, _vm, listener) = world();
    let (mut exec, mut agent) = program(&served, &listener, None).await;
    let process = handed(&served, &mut exec, &mut agent).await;
    Process::open(process).unwrap().unwrap().kill().unwrap();
    let end = rest(&mut exec).await.1.unwrap_err();
    assert!(matches!(end, ClientError::Broken { .. }), "{end:?}");
    assert_eq!(timeout(WITHIN, agent.read(&mut [0])).await.unwrap().unwrap(), 0);
    until(|| processes(&served).is_empty()).await;
    let (mut exec, mut agent) = program(&served, &listener, None).await;
    handed(&served, &mut exec, &mut agent).await;
    agent.write_all(&json(FrameKind::Exit, &EXIT)).await.unwrap();
    assert_eq!(rest(&mut exec).await.1.unwrap(), EXIT);
}

#[tokio::test]
async fn an_agent_that_answers_no_more_is_not_waited_for_after_the_hand_over() {
    let served = served_with(|config| {
        config.vmm = fixture::vmm();
        config.deadlines.stat = Duration::from_millis(100);
        config.deadlines.agent = Duration::from_secs(1);
    });
    let (vm, listener) = running(&served, "web");
    vm.hold(Arc::new(Process::open(ProcessId::own().unwrap()).unwrap().unwrap()));
    let (mut exec, mut agent) = program(&served, &listener, Some(2000)).await;
    handed(&served, &mut exec, &mut agent).await;
    let questions = async {
        let mut unanswered = Vec::new();
        while unanswered.len() < 2 {
            unanswered.push(asked(&listener).await);
        }
        unanswered
    };
    let ((_, end), _unanswered) = bounded(async { tokio::join!(rest(&mut exec), questions) }).await;
    let error = refused(end);
    assert_eq!(error.code, ErrorCode::Timeout, "{error:?}");
    // The program ends with its stream.
    assert_eq!(timeout(WITHIN, agent.read(&mut [0])).await.unwrap().unwrap(), 0);
}

#[tokio::test]
async fn a_stream_that_nothing_takes_stays_with_the_daemon() {
    let served = served_with(|_| {});
    let (vm, listener) = running(&served, "web");
    vm.hold(Arc::new(Process::open(ProcessId::own().unwrap()).unwrap().unwrap()));
    let (mut exec, mut agent) = program(&served, &listener, None).await;
    let piece = encode(FrameKind::Stdout, &vec![b'x'; ENOUGH]);
    let begun = unix_ms();
    for _ in 0..20 {
        let (sent, got) =
            bounded(async { tokio::join!(agent.write_all(&piece), exec.output.next()) }).await;
        sent.unwrap();
        assert_eq!(got.unwrap(), ExecEvent::Stdout(vec![b'x'; ENOUGH]), "after {begun}");
    }
    exec.input.write(b"typed").await.unwrap();
    let typed = bounded(read_frame(&mut agent, "input")).await.unwrap().unwrap();
    assert_eq!(typed.body, b"typed");
    agent.write_all(&json(FrameKind::Exit, &EXIT)).await.unwrap();
    assert_eq!(rest(&mut exec).await.1.unwrap(), EXIT);
    assert!(processes(&served).is_empty());
}
