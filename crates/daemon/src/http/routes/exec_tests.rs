//! The clock stands still while anything else can happen.

use super::super::tests::{called, running, served_within};
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
    let started = json(FrameKind::Reply, &Reply::Started { pid: 5 });
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
