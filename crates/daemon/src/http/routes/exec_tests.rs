//! The clock stands still while anything else can happen.

use super::super::tests::{asked_program, called, running, served_within};
use crate::base::config::Deadlines;
use crate::vmm::agent_link::read_frame;
use dayfly_api::agent::{ExecSpec, Exit, FrameKind, Reply, encode};
use dayfly_api::client::{Client, ClientError, ExecEvent};
use dayfly_api::types::ErrorCode;
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{UnixListener, UnixStream};

/// Accepts a connection to the agent, and reads the request.
async fn asked(listener: &UnixListener) -> UnixStream {
    let (mut stream, line) = called(listener).await;
    assert_eq!(line, "CONNECT 1024\n");
    stream.write_all(b"OK 7\n").await.unwrap();
    read_frame(&mut stream, "reading a request").await.unwrap();
    stream
}

fn json(kind: FrameKind, body: &impl serde::Serialize) -> Vec<u8> {
    encode(kind, &serde_json::to_vec(body).unwrap())
}

/// An agent that starts a program, writes a line of it, and then answers nothing, as in a guest
/// whose kernel has hung. It goes on once it was asked `questions` times.
async fn silent(listener: UnixListener, questions: usize) {
    let mut program = asked(&listener).await;
    let started = json(FrameKind::Reply, &Reply::Started { pid: 5, id: None });
    let line = encode(FrameKind::Stdout, b"one\n");
    program.write_all(&[started, line].concat()).await.unwrap();
    let mut unanswered = Vec::new();
    while unanswered.len() < questions {
        unanswered.push(asked(&listener).await);
    }
    let exit = Exit { code: Some(3), signal: None, timed_out: false };
    program.write_all(&json(FrameKind::Exit, &exit)).await.unwrap();
    let _ = program.read_to_end(&mut Vec::new()).await;
}

/// The end of a program in a guest with a [`silent`] agent.
async fn end_with(questions: usize) -> Result<Option<i32>, ClientError> {
    let agent = Duration::from_millis(100);
    let served = served_within(Deadlines { agent, ..Deadlines::default() });
    let (_vm, listener) = running(&served, "web");
    tokio::spawn(silent(listener, questions));
    let spec = ExecSpec { argv: vec!["p".into()], liveness_ms: Some(10), ..ExecSpec::default() };
    let mut exec = Client::new(&served.socket).exec("web", &spec).await.unwrap();
    let ended = async {
        loop {
            match exec.output.next().await? {
                ExecEvent::Stdout(bytes) => assert_eq!(&bytes[..], b"one\n"),
                ExecEvent::Exit(exit) => return Ok(exit.code),
                ExecEvent::Stderr(bytes) => panic!("{bytes:?}"),
            }
        }
    };
    tokio::time::timeout(Duration::from_secs(60), ended).await.expect("the client waits for ever")
}

#[tokio::test(start_paused = true)]
async fn exec_in_a_guest_that_answers_no_more_ends_with_an_error() {
    let Err(ClientError::Refused(error)) = end_with(usize::MAX).await else {
        panic!("expected an error")
    };
    assert_eq!(error.code, ErrorCode::Timeout, "{error:?}");
    for words in ["VM web", "twice in a row", "--liveness 0"] {
        assert!(error.message.contains(words), "{error:?}");
    }
    // After one missing answer the program may still end.
    assert_eq!(end_with(1).await.unwrap(), Some(3));
}

#[tokio::test]
async fn a_program_s_output_and_end_come_in_one_answer() {
    let served = served_within(Deadlines::default());
    let (_vm, listener) = running(&served, "web");
    let (has_begun, begun) = tokio::sync::oneshot::channel();
    let agent = tokio::spawn(async move {
        let mut program = asked(&listener).await;
        let started = json(FrameKind::Reply, &Reply::Started { pid: 5, id: None });
        let out = encode(FrameKind::Stdout, b"12345\xff");
        let err = encode(FrameKind::Stderr, b"e");
        let exit = Exit { code: Some(3), signal: None, timed_out: false };
        let exit = json(FrameKind::Exit, &exit);
        program.write_all(&[started, out.clone(), err, out, exit].concat()).await.unwrap();
        let mut detached = asked(&listener).await;
        let started = Reply::Started { pid: 6, id: Some("0123456789ab".into()) };
        detached.write_all(&json(FrameKind::Reply, &started)).await.unwrap();
        // The client that goes away ends its program.
        let mut program = asked(&listener).await;
        let started = Reply::Started { pid: 7, id: None };
        program.write_all(&json(FrameKind::Reply, &started)).await.unwrap();
        has_begun.send(()).unwrap();
        assert_eq!(program.read(&mut [0]).await.unwrap(), 0);
    });
    let client = Client::new(&served.socket);
    let spec = ExecSpec { argv: vec!["p".into()], ..ExecSpec::default() };
    let result = client.exec_to_end("web", &spec, 8).await.unwrap();
    assert_eq!((result.stdout.as_str(), result.stderr.as_str()), ("12345\u{fffd}12", "e"));
    assert_eq!((result.stdout_truncated, result.stderr_truncated), (true, false));
    assert_eq!((result.exit_code, result.signal, result.timed_out), (Some(3), None, false));
    let detached = ExecSpec { detach: true, ..spec.clone() };
    let result = client.exec_to_end("web", &detached, 8).await.unwrap();
    assert_eq!(result.program.as_deref(), Some("0123456789ab"));
    let with_input = ExecSpec { stdin: true, ..spec.clone() };
    for (spec, most) in [(&with_input, 8), (&ExecSpec::default(), 8), (&spec, 5 << 20)] {
        let refused = client.exec_to_end("web", spec, most).await.unwrap_err();
        assert_eq!(refused.code(), Some(ErrorCode::Invalid), "{refused}");
    }
    let going = tokio::spawn(async move { client.exec_to_end("web", &spec, 8).await.map(drop) });
    begun.await.unwrap();
    going.abort();
    let ended = tokio::time::timeout(Duration::from_secs(60), agent).await;
    ended.expect("the program runs on without its client").unwrap();
}

#[tokio::test]
async fn arguments_of_almost_2_mib_pass_and_an_earlier_agent_is_named() {
    let served = served_within(Deadlines::default());
    let (vm, listener) = running(&served, "web");
    let client = Client::new(&served.socket);
    let argv = (0..16).map(|n| format!("{n}{}", "x".repeat(117_000))).collect();
    let spec = ExecSpec { argv, env: [("A".into(), "=".into())].into(), ..ExecSpec::default() };
    // Agents of earlier versions get nothing.
    let mut errors = Vec::new();
    for version in ["0.1.0", "0.1.0+1", "0.1.0+2"] {
        vm.update(|live| live.agent_version = version.into());
        errors.push(client.exec("web", &spec).await.unwrap_err());
        errors.push(client.exec_to_end("web", &spec, 8).await.unwrap_err());
    }
    for error in errors {
        let text = error.to_string();
        assert_eq!(error.code(), Some(ErrorCode::ProgramNotExecutable), "{text}");
        assert!(
            text.contains("E2BIG") && text.contains("bake the image's snapshot again"),
            "{text}"
        );
    }
    let long = ExecSpec { argv: vec!["x".repeat(120_000); 18], ..ExecSpec::default() };
    let error = client.exec("web", &long).await.unwrap_err();
    assert_eq!(error.code(), Some(ErrorCode::ProgramNotExecutable), "{error}");
    vm.update(|live| live.agent_version = "0.1.0+3".into());
    let error = client.exec_to_end("web", &long, 8).await.unwrap_err();
    assert_eq!(error.code(), Some(ErrorCode::ProgramNotExecutable), "{error}");
    assert!(error.to_string().contains("E2BIG"), "{error}");
    let wanted = spec.clone();
    let agent = tokio::spawn(async move {
        // The refused programs made no connection.
        let mut asked = Vec::new();
        while asked.len() < 3 {
            let (mut stream, spec) = asked_program(&listener).await;
            let started = json(FrameKind::Reply, &Reply::Started { pid: 5, id: None });
            let exit = Exit { code: Some(0), signal: None, timed_out: false };
            let frames = [started, json(FrameKind::Exit, &exit)].concat();
            stream.write_all(&frames).await.unwrap();
            asked.push(spec);
        }
        asked
    });
    let mut exec = client.exec("web", &spec).await.unwrap();
    assert!(matches!(exec.output.next().await.unwrap(), ExecEvent::Exit(_)));
    let result = client.exec_to_end("web", &spec, 8).await.unwrap();
    assert_eq!(result.exit_code, Some(0));
    let detached = ExecSpec { detach: true, ..spec };
    let result = client.exec_to_end("web", &detached, 8).await.unwrap();
    assert_eq!(result.program.as_deref(), Some("5"));
    let wait = tokio::time::timeout(Duration::from_secs(60), agent).await;
    for got in wait.expect("three programs").unwrap() {
        assert_eq!((&got.argv, &got.env), (&wanted.argv, &wanted.env));
    }
}
