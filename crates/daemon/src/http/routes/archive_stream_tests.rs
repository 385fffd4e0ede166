//! Archives in frames: what a client gets, also if the agent, the VM or the client breaks off, and
//! what an earlier daemon gets.

use super::stream_tests::{ENOUGH, asked, bounded, json, processes, sockets, until, world};
use crate::model::exit::exit_now;
use crate::vmm::agent_link::read_frame;
use dayfly_api::agent::{Failure, FailureCode, Frame, FrameKind, Reply, encode};
use dayfly_api::client::{ByteStream, Client, ClientError, stream_body};
use dayfly_api::types::{ErrorCode, ExitKind};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{UnixListener, UnixStream};

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

fn failure(code: FailureCode, message: &str) -> Vec<u8> {
    json(FrameKind::Reply, &Reply::Err(Failure { code, message: message.to_owned() }))
}

#[tokio::test]
async fn archives_come_whole_or_with_the_reason() {
    let (served, _vm, listener) = world();
    let data = |length: usize| encode(FrameKind::Data, &vec![7; length]);
    let end = encode(FrameKind::End, &[]);
    for length in [3, ENOUGH] {
        for (last, code, words) in [
            (end.clone(), None, ""),
            (failure(FailureCode::NoSpace, "\x1bfull"), Some(ErrorCode::Exhausted), r"\x1bfull"),
            (encode(FrameKind::Exit, b""), Some(ErrorCode::Guest), "Exit"),
            (json(FrameKind::Reply, &Reply::Ok), Some(ErrorCode::Guest), "got the reply Ok"),
            (encode(FrameKind::Reply, b"{"), Some(ErrorCode::Guest), "does not parse"),
            (vec![0xff; 5], Some(ErrorCode::Guest), "frame length at byte 0"),
            (vec![1, 0], Some(ErrorCode::Guest), "before it had sent everything"),
        ] {
            let agent = async {
                let mut agent = asked(&listener).await;
                let ok = json(FrameKind::Reply, &Reply::Ok);
                let piece = data(length);
                agent.write_all(&[ok, piece.clone(), piece, last.clone()].concat()).await.unwrap();
                agent.shutdown().await.unwrap();
                agent
            };
            let client = Client::new(&served.socket);
            let reading = async { read(client.read_archive("web", "/x").await.unwrap()).await };
            let ((bytes, got), _agent) = bounded(async { tokio::join!(reading, agent) }).await;
            assert_eq!(bytes, vec![7; 2 * length], "{words}");
            match code {
                None => got.unwrap(),
                Some(code) => {
                    let Err(ClientError::Refused(error)) = got else { panic!("{words}: {got:?}") };
                    assert!(error.code == code && error.message.contains(words), "{error:?}");
                    assert!(!error.message.contains(char::is_control), "{error:?}");
                }
            }
        }
    }
}

#[tokio::test]
async fn archives_are_sent_whole_or_the_client_gets_the_reason() {
    let (served, _vm, listener) = world();
    for pieces in [1, 40] {
        for refusing in [false, true] {
            let agent = async {
                let mut agent = asked(&listener).await;
                agent.write_all(&json(FrameKind::Reply, &Reply::Ok)).await.unwrap();
                if refusing {
                    let full = failure(FailureCode::NoSpace, "full");
                    agent.write_all(&full).await.unwrap();
                    return (0, agent);
                }
                let mut count = 0;
                while let Some(Frame { kind: FrameKind::Data, body }) =
                    read_frame(&mut agent, "data").await.unwrap()
                {
                    count += body.len();
                }
                agent.write_all(&json(FrameKind::Reply, &Reply::Ok)).await.unwrap();
                (count, agent)
            };
            let body = (0..pieces).map(|_| Ok(bytes::Bytes::from(vec![3; 64 << 10])));
            let client = Client::new(&served.socket);
            let sending =
                client.write_archive("web", "/x", stream_body(futures::stream::iter(body)));
            let (sent, (count, _agent)) = bounded(async { tokio::join!(sending, agent) }).await;
            if refusing {
                let error = sent.unwrap_err();
                assert_eq!(error.code(), Some(ErrorCode::Exhausted), "{error}");
            } else {
                sent.unwrap();
                assert_eq!(count, pieces * (64 << 10));
            }
        }
    }
    // An agent that is content before it has all.
    let agent = async {
        let mut agent = asked(&listener).await;
        let content = json(FrameKind::Reply, &Reply::Ok);
        agent.write_all(&[content.clone(), content].concat()).await.unwrap();
        agent
    };
    let client = Client::new(&served.socket);
    let endless = futures::stream::repeat_with(|| Ok(bytes::Bytes::from(vec![3; 64 << 10])));
    let sending = client.write_archive("web", "/x", stream_body(endless));
    let (sent, _agent) = bounded(async { tokio::join!(sending, agent) }).await;
    assert!(sent.is_err(), "an archive without its end was taken");
    // A body that breaks off ends the connection, so that the guest keeps nothing.
    let agent = async {
        let mut agent = asked(&listener).await;
        agent.write_all(&json(FrameKind::Reply, &Reply::Ok)).await.unwrap();
        let mut all = Vec::new();
        let _ = agent.read_to_end(&mut all).await;
        all
    };
    let body = [Ok(bytes::Bytes::from_static(b"half")), Err(std::io::Error::other("mine"))];
    let client = Client::new(&served.socket);
    let sending = client.write_archive("web", "/x", stream_body(futures::stream::iter(body)));
    let (sent, all) = bounded(async { tokio::join!(sending, agent) }).await;
    assert!(matches!(sent, Err(ClientError::Broken { .. })), "{sent:?}");
    assert_eq!(all, encode(FrameKind::Data, b"half"));
}

#[tokio::test]
async fn other_protocols_in_the_header_are_ignored_and_a_half_request_is_refused() {
    let (served, _vm, listener) = world();
    let raw = async |headers: &str| {
        let mut client = UnixStream::connect(&served.socket).await.unwrap();
        let request =
            format!("GET /v1/vms/web/archive?path=/x HTTP/1.1\r\nHost: d\r\n{headers}\r\n");
        client.write_all(request.as_bytes()).await.unwrap();
        let mut answer = vec![0; 12];
        client.read_exact(&mut answer).await.unwrap();
        String::from_utf8(answer).unwrap()
    };
    for (headers, status) in [
        ("Connection: upgrade\r\nUpgrade: h2c\r\n", "HTTP/1.1 200"),
        ("Connection: upgrade\r\nUpgrade: websocket\r\n", "HTTP/1.1 200"),
        ("Connection: upgrade\r\nUpgrade: h2c, dayfly-stream\r\n", "HTTP/1.1 101"),
        ("Upgrade: dayfly-stream\r\n", "HTTP/1.1 400"),
    ] {
        let agent = async {
            if status.ends_with("400") {
                return;
            }
            let mut agent = asked(&listener).await;
            let ok = json(FrameKind::Reply, &Reply::Ok);
            agent.write_all(&[ok, encode(FrameKind::End, &[])].concat()).await.unwrap();
        };
        let (got, ()) = bounded(async { tokio::join!(raw(headers), agent) }).await;
        assert_eq!(got, status, "{headers}");
    }
}

#[tokio::test]
async fn an_earlier_daemon_gets_archives_as_bodies_and_no_empty_ones() {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("d.sock");
    let listener = UnixListener::bind(&socket).unwrap();
    let daemon = async {
        let mut asked = Vec::new();
        let info =
            r#"{"version":"1","pid":1,"host_kernel":"6","kvm":"svm","vms":0,"state_dir":"/"}"#;
        let answers = [
            format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n{info}", info.len()),
            "HTTP/1.1 204 No Content\r\n\r\n".to_owned(),
            "HTTP/1.1 204 No Content\r\n\r\n".to_owned(),
        ];
        let (mut stream, _) = listener.accept().await.unwrap();
        for answer in answers {
            let mut bytes = Vec::new();
            let is_put = |bytes: &[u8]| bytes.starts_with(b"PUT");
            // The end of the head, or of a body in chunks.
            let end = |bytes: &[u8]| match is_put(bytes) {
                true => bytes.ends_with(b"\r\n0\r\n\r\n"),
                false => bytes.ends_with(b"\r\n\r\n"),
            };
            while !end(&bytes) {
                bytes.push(stream.read_u8().await.unwrap());
            }
            asked.push(String::from_utf8(bytes).unwrap());
            stream.write_all(answer.as_bytes()).await.unwrap();
        }
        asked
    };
    let client = Client::new(&socket);
    let body = || {
        let pieces = [Ok(bytes::Bytes::from_static(b"archive"))];
        stream_body(futures::stream::iter(pieces))
    };
    let sending = async {
        client.write_archive("web", "/x", body()).await.unwrap();
        client.write_archive("web", "/x", body()).await.unwrap();
    };
    let ((), asked) = bounded(async { tokio::join!(sending, daemon) }).await;
    assert!(asked[0].starts_with("GET /v1/info "), "{asked:?}");
    for put in &asked[1..] {
        assert!(put.contains("archive\r\n0") && !put.contains("dayfly-stream"), "{put}");
    }
}

#[tokio::test]
async fn an_archive_that_breaks_off_inside_a_frame_gets_no_other_bytes() {
    for length in [3, ENOUGH] {
        let (served, vm, listener) = world();
        let agent = async {
            let mut agent = asked(&listener).await;
            let piece = encode(FrameKind::Data, &vec![7; length]);
            let cut = &encode(FrameKind::Data, &[8; 1000])[..500];
            let ok = json(FrameKind::Reply, &Reply::Ok);
            agent.write_all(&[ok.as_slice(), &piece, cut].concat()).await.unwrap();
            if length == ENOUGH {
                until(|| processes(&served).iter().any(|process| sockets(*process) >= 4)).await;
            }
            drop(vm.ended(exit_now(ExitKind::Killed, "for this test")));
        };
        let client = Client::new(&served.socket);
        let reading = async { read(client.read_archive("web", "/x").await.unwrap()).await };
        let ((bytes, got), ()) = bounded(async { tokio::join!(reading, agent) }).await;
        assert_eq!(bytes, vec![7; length]);
        let Err(ClientError::Refused(error)) = got else { panic!("{length}: {got:?}") };
        assert!(error.message.contains("for this test"), "{error:?}");
    }
}
