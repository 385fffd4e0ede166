use super::super::tests::{Served, called, running, served, served_within};
use super::*;
use crate::base::config::Deadlines;
use crate::http::stream::AgentCheck;
use crate::model::state::Event;
use crate::ops::liveness::Hears;
use dayfly_api::agent::{Failure, FailureCode, encode};
use dayfly_api::client::{ByteStream, Client, ClientError, LogOptions};
use dayfly_relay::streams::message::Heard;
use std::cell::Cell;
use std::future::poll_fn;
use std::task::Poll;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixListener;

fn reply(reply: &Reply) -> Vec<u8> {
    encode(FrameKind::Reply, &serde_json::to_vec(reply).unwrap())
}

/// An agent that says `frames` to the next client after the reply, and stays until that has gone.
fn agent(listener: UnixListener, frames: Vec<u8>, stays: bool) {
    tokio::spawn(async move {
        let (mut stream, line) = called(&listener).await;
        assert_eq!(line, "CONNECT 1024\n");
        stream.write_all(b"OK 7\n").await.unwrap();
        read_frame(&mut stream, "reading a request").await.unwrap();
        stream.write_all(&[reply(&Reply::Ok), frames].concat()).await.unwrap();
        if stays {
            let _ = stream.read_to_end(&mut Vec::new()).await;
        }
    });
}

/// Everything in a stream, and how it ended.
async fn read(mut stream: ByteStream) -> (Vec<u8>, Result<(), ClientError>) {
    let mut all = Vec::new();
    loop {
        match stream.next().await {
            Ok(Some(piece)) => all.extend_from_slice(&piece),
            Ok(None) => return (all, Ok(())),
            Err(e) => return (all, Err(e)),
        }
    }
}

async fn archive(served: &Served) -> (Vec<u8>, Result<(), ClientError>) {
    read(Client::new(&served.socket).read_archive_as_body("web", "/x").await.unwrap()).await
}

#[tokio::test]
async fn whole_archives_and_logs_arrive_as_they_are() {
    let served = served();
    for log in [false, true] {
        let (vm, listener) = running(&served, "web");
        let pieces = [&b"one "[..], b"two"].map(|piece| encode(FrameKind::Data, piece));
        let frames = [pieces.concat(), encode(FrameKind::End, &[])].concat();
        agent(listener, frames, true);
        let (bytes, end) = if log {
            let followed = LogOptions { follow: true, ..LogOptions::default() };
            let client = Client::new(&served.socket);
            read(client.program_log("web", "3", followed).await.unwrap()).await
        } else {
            archive(&served).await
        };
        assert!(bytes == b"one two" && end.is_ok(), "{end:?}");
        forget(&served, &vm);
    }
}

/// Makes room for another VM of the same name.
fn forget(served: &Served, vm: &Arc<crate::vm::Vm>) {
    std::fs::remove_file(vm.dir.vsock()).unwrap();
    drop(vm.ended(crate::model::exit::exit_now(dayfly_api::types::ExitKind::Killed, "killed")));
    served.daemon.registry.forget(vm);
}

#[tokio::test]
async fn a_client_learns_why_an_archive_is_not_complete() {
    let served = served();
    let failure =
        |message: String| reply(&Reply::Err(Failure { code: FailureCode::NoSpace, message }));
    let stays = true;
    for (frames, stays, code, words) in [
        (
            failure("\x1b]0;x\x07".into()),
            stays,
            ErrorCode::Exhausted,
            r"in the guest: \x1b]0;x\x07",
        ),
        (
            failure("\u{29e3d}\\\"".repeat(30_000)),
            stays,
            ErrorCode::Exhausted,
            "in the guest: \u{29e3d}",
        ),
        (encode(FrameKind::Exit, b"{}"), stays, ErrorCode::Guest, "got a frame of kind Exit"),
        (encode(FrameKind::Data, b""), stays, ErrorCode::Guest, "got an empty frame"),
        (reply(&Reply::Ok), stays, ErrorCode::Guest, "got the reply Ok"),
        (encode(FrameKind::Reply, b"{"), stays, ErrorCode::Guest, "JSON that does not parse"),
        (vec![0xff; 20], stays, ErrorCode::Guest, "frame length at byte 0"),
        (
            vec![1, 0],
            !stays,
            ErrorCode::Guest,
            "closed the connection before it had sent everything",
        ),
        (
            Vec::new(),
            !stays,
            ErrorCode::Guest,
            "closed the connection before it had sent everything",
        ),
    ] {
        let (vm, listener) = running(&served, "web");
        agent(listener, [encode(FrameKind::Data, b"half"), frames].concat(), stays);
        let (bytes, end) = archive(&served).await;
        let Err(ClientError::Refused(error)) = end else { panic!("{words}: {end:?}") };
        assert_eq!(bytes, b"half", "{words}");
        assert!(error.code == code && error.message.contains(words), "{words}: {error:?}");
        assert!(!error.message.contains(char::is_control), "{error:?}");
        forget(&served, &vm);
    }
}

#[tokio::test]
async fn a_client_that_reads_no_trailers_sees_the_connection_break() {
    let served = served();
    for (te, broken) in [("", true), ("TE: gzip, Trailers\r\n", false)] {
        let (vm, listener) = running(&served, "web");
        let frames = [encode(FrameKind::Data, b"half"), encode(FrameKind::Exit, b"")].concat();
        agent(listener, frames, true);
        let mut stream = UnixStream::connect(&served.socket).await.unwrap();
        let path = "/v1/vms/web/archive?path=/x";
        let request = format!("GET {path} HTTP/1.1\r\nHost: d\r\nConnection: close\r\n{te}\r\n");
        stream.write_all(request.as_bytes()).await.unwrap();
        let mut answer = Vec::new();
        let _ = stream.read_to_end(&mut answer).await;
        let answer = String::from_utf8(answer).unwrap();
        assert_eq!(!answer.contains("\r\n0\r\n"), broken, "{answer}");
        assert_eq!(!answer.contains("\r\ndayfly-error: {"), broken, "{answer}");
        forget(&served, &vm);
    }
}

#[tokio::test(start_paused = true)]
async fn an_agent_that_owes_a_frame_is_not_waited_for_without_end() {
    let agent_time = Duration::from_millis(50);
    let served = served_within(Deadlines { agent: agent_time, ..Deadlines::default() });
    // Half a frame is no frame.
    for half in [&b""[..], &[9, 0, 0, 0, FrameKind::Data as u8, 1]] {
        let (vm, listener) = running(&served, "web");
        agent(listener, half.to_vec(), true);
        let (_, end) = archive(&served).await;
        let Err(ClientError::Refused(error)) = end else { panic!("{end:?}") };
        assert_eq!(error.code, ErrorCode::Timeout, "{error:?}");
        assert!(
            error.message.contains("VM web") && error.message.contains("within 0.05 s"),
            "{error:?}"
        );
        forget(&served, &vm);
    }
}

/// An agent that sends nothing, whatever its client reads.
struct Silent;

impl Hears for Silent {
    async fn heard(&self) -> Heard {
        Heard { bytes: 0, waits: true }
    }
}

#[tokio::test(start_paused = true)]
async fn time_in_which_a_guest_is_paused_does_not_count() {
    let served = served();
    let (vm, _listener) = running(&served, "web");
    let silence = Duration::from_millis(2);
    // A tick is the whole silence here: each asks once more for what never comes, up to a bound.
    let asked = Cell::new(0);
    let comes_after = |polls| {
        let asked = &asked;
        asked.set(0);
        poll_fn(move |_| {
            asked.set(asked.get() + 1);
            if asked.get() > polls { Poll::Ready(()) } else { Poll::Pending }
        })
    };
    let check = AgentCheck::Silence(Some(silence), "waiting");
    let error = in_time(&vm, silence, "waiting", comes_after(100)).await.unwrap_err();
    assert!(error.0.code == ErrorCode::Timeout && asked.get() < 10, "{error}: {}", asked.get());
    let error = check.wait(&vm, comes_after(100), &Silent).await.unwrap_err();
    assert!(error.0.code == ErrorCode::Timeout && asked.get() < 10, "{error}: {}", asked.get());
    vm.step(Event::Pause).unwrap();
    in_time(&vm, silence, "waiting", comes_after(100)).await.unwrap();
    assert_eq!(asked.get(), 101);
    check.wait(&vm, comes_after(100), &Silent).await.unwrap();
    assert_eq!(asked.get(), 101);
}
