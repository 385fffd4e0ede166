//! The client against a server whose answers each test scripts.

use super::{Client, ClientError, ExecEvent, VmQuery, stream_body};
use crate::agent::{ExecSpec, Exit, FrameKind, WindowSize, encode};
use crate::types::{
    ApiError, ConnectRequest, CreateRequest, ErrorCode, ImageConfig, ImageUpload, Lifetime,
    NetworkRequest, Progress, RunReply, Source, Vm, VmState,
};
use bytes::Bytes;
use std::collections::BTreeMap;
use std::path::PathBuf;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{UnixListener, UnixStream};
use tokio::task::JoinHandle;

/// A separate socket path for each test.
fn socket() -> (tempdir::Dir, PathBuf) {
    let dir = tempdir::Dir::new();
    let path = dir.0.join("d.sock");
    (dir, path)
}

mod tempdir {
    use std::path::PathBuf;
    use std::sync::atomic::{AtomicU32, Ordering};

    pub struct Dir(pub PathBuf);
    static NEXT: AtomicU32 = AtomicU32::new(0);

    impl Dir {
        pub fn new() -> Self {
            let n = NEXT.fetch_add(1, Ordering::Relaxed);
            let path = std::env::temp_dir().join(format!("dayfly-api-{}-{n}", std::process::id()));
            std::fs::create_dir_all(&path).expect("a folder under the temporary one");
            Self(path)
        }
    }

    impl Drop for Dir {
        fn drop(&mut self) {
            let _ = std::fs::remove_dir_all(&self.0);
        }
    }
}

/// Reads a request's head.
async fn head(stream: &mut UnixStream) -> String {
    let mut bytes = Vec::new();
    while !bytes.ends_with(b"\r\n\r\n") {
        bytes.push(stream.read_u8().await.expect("a byte of the head"));
    }
    String::from_utf8(bytes).expect("an ASCII head")
}

/// Answers one request with `answer`, closes the connection, and returns the request's head.
fn answer_once(path: &PathBuf, answer: impl Into<Vec<u8>>) -> JoinHandle<String> {
    let listener = UnixListener::bind(path).expect("a socket in an empty folder");
    let answer = answer.into();
    tokio::spawn(async move {
        let (mut stream, _) = listener.accept().await.expect("a client");
        let head = head(&mut stream).await;
        stream.write_all(&answer).await.expect("a client that reads");
        head
    })
}

fn with_length(status: &str, body: &str) -> String {
    format!("HTTP/1.1 {status}\r\nContent-Length: {}\r\n\r\n{body}", body.len())
}

fn vm() -> Vm {
    Vm {
        id: "0123456789ab".parse().expect("an id"),
        name: "web".parse().expect("a name"),
        state: VmState::Running,
        exit: None,
        forked_from: None,
        snapshot: None,
        image: "debian".parse().expect("a name"),
        kernel: "6.12".parse().expect("a name"),
        vcpus: 1,
        cpus_online: None,
        memory_bytes: 1 << 28,
        created_unix_ms: 1,
        ready_us: Some(5),
        ephemeral: true,
        auto_remove: false,
        ends_unix_ms: None,
        program: None,
        network: None,
        volumes: Vec::new(),
        labels: BTreeMap::new(),
        paused_for: None,
        problem: None,
    }
}

#[tokio::test]
async fn a_listing_is_asked_for_and_read() {
    let (_dir, path) = socket();
    let body = serde_json::json!({ "items": [vm()] }).to_string();
    let server = answer_once(&path, with_length("200 OK", &body));
    assert_eq!(Client::new(path).vms(true).await.expect("an answer"), [vm()]);
    assert!(
        server.await.expect("no panic").starts_with("GET /v1/vms?all=true&limit=1000 HTTP/1.1\r\n")
    );
}

#[tokio::test]
async fn a_list_is_read_to_its_last_page() {
    let (_dir, path) = socket();
    let listener = UnixListener::bind(&path).expect("a socket in an empty folder");
    let server = tokio::spawn(async move {
        let (mut stream, _) = listener.accept().await.expect("a client");
        let mut asked = Vec::new();
        for next in [Some("a=b"), None] {
            asked.push(head(&mut stream).await.lines().next().map(str::to_owned));
            let body = serde_json::json!({ "items": [vm()], "next": next }).to_string();
            let answer = with_length("200 OK", &body);
            stream.write_all(answer.as_bytes()).await.expect("a client that reads");
        }
        asked
    });
    let query = VmQuery { labels: vec!["tier=web&x".into()], ..VmQuery::default() };
    let got = Client::new(path).vms_with(&query).await.expect("two pages");
    assert_eq!(got, [vm(), vm()]);
    let path = "GET /v1/vms?all=false&label=tier%3Dweb%26x&limit=1000";
    assert_eq!(
        server.await.expect("no panic"),
        [Some(format!("{path} HTTP/1.1")), Some(format!("{path}&cursor=a%3Db HTTP/1.1"))]
    );
}

#[tokio::test]
async fn an_empty_page_with_another_behind_it_ends_the_list() {
    let (_dir, path) = socket();
    let body = serde_json::json!({ "items": [], "next": "x" }).to_string();
    let _server = answer_once(&path, with_length("200 OK", &body));
    let error = Client::new(path).images().await.expect_err("no list");
    assert!(error.to_string().contains("an empty page"), "{error}");
}

#[tokio::test]
async fn a_refusal_keeps_its_kind_and_words() {
    let (_dir, path) = socket();
    let error = ApiError {
        code: ErrorCode::NotFound,
        message: "no VM named x; `dayfly ps` lists them".into(),
    };
    let server =
        answer_once(&path, with_length("404 Not Found", &serde_json::json!(error).to_string()));
    let got = Client::new(path).pause("x").await.expect_err("404");
    assert_eq!(got.code(), Some(ErrorCode::NotFound));
    assert_eq!(got.to_string(), error.message);
    assert!(server.await.expect("no panic").starts_with("POST /v1/vms/x/pause HTTP/1.1\r\n"));
}

#[tokio::test]
async fn answers_of_strangers_are_errors_that_show_them() {
    for answer in [
        with_length("502 Bad Gateway", "<html>proxy</html>"),
        with_length("200 OK", "{\"items\":3}"),
    ] {
        let (_dir, path) = socket();
        let server = answer_once(&path, answer);
        let got = Client::new(path).snapshots().await.expect_err("not ours");
        assert!(matches!(got, ClientError::Foreign { .. }), "{got:?}");
        server.await.expect("no panic");
    }
    let (_dir, path) = socket();
    let server = answer_once(&path, "HTTP/1.1 200 OK\r\nContent-Length: 50\r\n\r\n{\"items\"");
    let got = Client::new(path).snapshots().await.expect_err("cut short");
    assert!(matches!(got, ClientError::Broken { .. }), "{got:?}");
    server.await.expect("no panic");
    let (_dir, path) = socket();
    let got = Client::new(&path).info().await.expect_err("no process listens");
    assert!(matches!(&got, ClientError::Connect { socket, .. } if *socket == path), "{got:?}");
}

#[tokio::test]
async fn progress_arrives_line_by_line_however_it_is_cut() {
    let (_dir, path) = socket();
    let lines = [
        Progress::Phase { label: "boot".into() },
        Progress::Step { done: 1, total: 2 },
        Progress::Verified(Box::default()),
        Progress::Collected(Box::default()),
        Progress::Repaired(Box::default()),
        Progress::Failed(ApiError { code: ErrorCode::Guest, message: "no".into() }),
    ];
    let text: String = lines.iter().map(|l| format!("{}\n", serde_json::json!(l))).collect();
    let mut answer = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n".to_vec();
    for piece in text.as_bytes().chunks(7) {
        answer.extend_from_slice(format!("{:x}\r\n", piece.len()).as_bytes());
        answer.extend_from_slice(piece);
        answer.extend_from_slice(b"\r\n");
    }
    answer.extend_from_slice(b"0\r\n\r\n");
    let server = answer_once(&path, answer);
    let request = crate::types::SnapshotRequest { name: "s".parse().expect("a name") };
    let mut stream = Client::new(path).snapshot_vm("web", &request).await.expect("a stream");
    let mut got = Vec::new();
    while let Some(line) = stream.next().await.expect("lines of ours") {
        got.push(line);
    }
    assert_eq!(got, lines);
    server.await.expect("no panic");
}

#[tokio::test]
async fn an_upload_is_length_head_and_body() {
    let (_dir, path) = socket();
    let listener = UnixListener::bind(&path).expect("a socket");
    let server = tokio::spawn(async move {
        let (mut stream, _) = listener.accept().await.expect("a client");
        head(&mut stream).await;
        let mut chunked = Vec::new();
        while !chunked.ends_with(b"\r\n0\r\n\r\n") {
            chunked.push(stream.read_u8().await.expect("a byte of the body"));
        }
        stream.write_all(with_length("409 Conflict", "{}").as_bytes()).await.expect("a reader");
        let mut body = Vec::new();
        let mut rest = &chunked[..];
        while let Some(at) = rest.windows(2).position(|w| w == b"\r\n") {
            let length = std::str::from_utf8(&rest[..at]).expect("a chunk's length");
            let length = usize::from_str_radix(length, 16).expect("hexadecimal");
            body.extend_from_slice(&rest[at + 2..at + 2 + length]);
            rest = &rest[at + 4 + length..];
        }
        body
    });
    let upload = ImageUpload {
        size_bytes: 4096,
        digest: "00".into(),
        source: "a test".into(),
        config: ImageConfig::default(),
    };
    let pieces = [Ok(Bytes::from_static(b"zst")), Ok(Bytes::from_static(b"d!"))];
    let disk = stream_body(futures::stream::iter(pieces));
    let name = "i".parse().expect("a name");
    assert!(Client::new(path).upload_image(&name, &upload, disk).await.is_err());
    let body = server.await.expect("no panic");
    let length = u32::from_le_bytes(body[..4].try_into().expect("four bytes")) as usize;
    assert_eq!(
        serde_json::from_slice::<ImageUpload>(&body[4..4 + length]).expect("the head"),
        upload
    );
    assert_eq!(&body[4 + length..], b"zstd!");
}

/// Grants an upgrade, checks the first frame, and sends `frames`. Returns what the client sent
/// after the first frame.
fn exec_server(path: &PathBuf, frames: Vec<u8>, wait_for: usize) -> JoinHandle<(String, Vec<u8>)> {
    let listener = UnixListener::bind(path).expect("a socket");
    tokio::spawn(async move {
        let (mut stream, _) = listener.accept().await.expect("a client");
        let head = head(&mut stream).await;
        // Head and first frames in one write: the client must not lose the bytes after the head.
        let mut answer = format!(
            "HTTP/1.1 101 x\r\nConnection: upgrade\r\nUpgrade: {}\r\n\r\n",
            crate::types::UPGRADE
        )
        .into_bytes();
        answer.extend_from_slice(&frames);
        stream.write_all(&answer).await.expect("a reader");
        let mut got = vec![0; wait_for];
        stream.read_exact(&mut got).await.expect("what the client sends");
        (head, got)
    })
}

#[tokio::test]
async fn an_exec_carries_both_directions() {
    let (_dir, path) = socket();
    let exit = Exit { code: Some(3), signal: None, timed_out: false };
    let mut frames = Vec::new();
    let reply = RunReply::Started { vm: Box::new(vm()), pid: 77, id: None };
    frames.extend(encode(FrameKind::Reply, &serde_json::to_vec(&reply).expect("JSON")));
    frames.extend(encode(FrameKind::Stdout, b"out"));
    frames.extend(encode(FrameKind::Stderr, b"err"));
    frames.extend(encode(FrameKind::Exit, &serde_json::to_vec(&exit).expect("JSON")));
    let spec = ExecSpec { argv: vec!["cat".into()], stdin: true, ..ExecSpec::default() };
    let size = WindowSize { rows: 25, cols: 80 };
    let mut expected = encode(FrameKind::Request, &serde_json::to_vec(&spec).expect("JSON"));
    expected.extend(encode(FrameKind::Stdin, b"in"));
    expected.extend(encode(FrameKind::Resize, &serde_json::to_vec(&size).expect("JSON")));
    expected.extend(encode(FrameKind::Signal, &15_i32.to_le_bytes()));
    expected.extend(encode(FrameKind::StdinEnd, b""));
    let server = exec_server(&path, frames, expected.len());

    let mut exec = Client::new(path).exec("web", &spec).await.expect("a program");
    assert_eq!((exec.pid, &exec.vm), (77, &vm()));
    exec.input.write(b"in").await.expect("open");
    exec.input.resize(size).await.expect("open");
    exec.input.signal(15).await.expect("open");
    exec.input.end().await.expect("open");
    assert_eq!(exec.output.next().await.expect("an event"), ExecEvent::Stdout(b"out".into()));
    assert_eq!(exec.output.next().await.expect("an event"), ExecEvent::Stderr(b"err".into()));
    assert_eq!(exec.output.next().await.expect("an event"), ExecEvent::Exit(exit));
    let (head, got) = server.await.expect("no panic");
    assert!(head.starts_with("POST /v1/vms/web/exec HTTP/1.1\r\n"), "{head}");
    assert!(head.to_ascii_lowercase().contains("upgrade: dayfly-exec\r\n"), "{head}");
    assert_eq!(got, expected);
}

#[tokio::test]
async fn a_program_that_does_not_start_and_one_that_is_cut_off_are_errors() {
    let refuse = RunReply::Failed(ApiError {
        code: ErrorCode::ProgramNotFound,
        message: "no such program".into(),
    });
    let refuse = encode(FrameKind::Reply, &serde_json::to_vec(&refuse).expect("JSON"));
    let started = RunReply::Started { vm: Box::new(vm()), pid: 1, id: None };
    let started = encode(FrameKind::Reply, &serde_json::to_vec(&started).expect("JSON"));
    let too_long =
        [started.clone(), vec![0xff, 0xff, 0xff, 0xff, FrameKind::Stdout as u8]].concat();
    let half = [started.clone(), encode(FrameKind::Stdout, b"abc")[..6].to_vec()].concat();
    for (frames, code) in [
        (refuse, Some(ErrorCode::ProgramNotFound)),
        (started, None),
        (too_long, None),
        (half, None),
    ] {
        let (_dir, path) = socket();
        let server = exec_server(&path, frames, 1);
        let client = Client::new(path);
        let got = match client.exec("web", &ExecSpec::default()).await {
            Ok(exec) => exec.finish(1 << 20).await.expect_err("no exit came"),
            Err(e) => e,
        };
        assert_eq!(got.code(), code, "{got:?}");
        server.await.expect("no panic");
    }
}

#[tokio::test]
async fn a_program_that_is_cut_off_inside_a_frame_ends_with_the_reason_of_its_vm() {
    let started = RunReply::Started { vm: Box::new(vm()), pid: 1, id: None };
    let started = encode(FrameKind::Reply, &serde_json::to_vec(&started).expect("JSON"));
    let half = [started, encode(FrameKind::Stdout, b"abc")[..6].to_vec()].concat();
    let exit = r#"{"reason":"killed","message":"by a test","at_unix_ms":1}"#;
    let missing = ApiError { code: ErrorCode::NotFound, message: "no VM".into() };
    let missing = serde_json::json!(missing).to_string();
    for (answer, words) in [
        (with_length("200 OK", exit), "ended (Killed): by a test"),
        (with_length("404 Not Found", &missing), "was removed"),
    ] {
        let (_dir, path) = socket();
        let listener = UnixListener::bind(&path).expect("a socket");
        let frames = half.clone();
        let server = tokio::spawn(async move {
            let (mut stream, _) = listener.accept().await.expect("a client");
            head(&mut stream).await;
            let upgrade = crate::types::UPGRADE;
            let switched =
                format!("HTTP/1.1 101 x\r\nConnection: upgrade\r\nUpgrade: {upgrade}\r\n\r\n");
            let all = [switched.as_bytes(), &frames].concat();
            stream.write_all(&all).await.expect("a reader");
            stream.read_u8().await.expect("a request");
            drop(stream);
            let (mut stream, _) = listener.accept().await.expect("a question");
            let asked = head(&mut stream).await;
            stream.write_all(answer.as_bytes()).await.expect("a reader");
            asked
        });
        let exec = Client::new(path).exec("web", &ExecSpec::default()).await.expect("a program");
        let got = exec.finish(1 << 20).await.expect_err("no exit came");
        assert_eq!(got.code(), Some(ErrorCode::Guest), "{got:?}");
        assert!(got.to_string().contains(words), "{got}");
        let asked = server.await.expect("no panic");
        assert!(asked.starts_with("GET /v1/vms/0123456789ab/wait HTTP/1.1\r\n"), "{asked}");
    }
}

#[tokio::test]
async fn a_port_is_asked_for_and_its_bytes_are_whole() {
    let request = ConnectRequest {
        create: CreateRequest {
            source: Source::Snapshot("base".parse().expect("a name")),
            name: None,
            labels: BTreeMap::new(),
            forks: 0,
            lifetime: Lifetime::UNLIMITED,
            volumes: Vec::new(),
            limits: Default::default(),
            vcpus: None,
            network: NetworkRequest::default(),
        },
        port: 5000,
        keep: false,
    };
    let body = serde_json::to_vec(&request).expect("JSON");
    for (run, first_line, length) in [
        (false, "GET /v1/vms/a%2Fb/ports/5000 HTTP/1.1\r\n", 0),
        (true, "POST /v1/connect HTTP/1.1\r\n", body.len()),
    ] {
        let (_dir, path) = socket();
        let listener = UnixListener::bind(&path).expect("a socket");
        let server = tokio::spawn(async move {
            let (mut stream, _) = listener.accept().await.expect("a client");
            let head = head(&mut stream).await;
            let mut body = vec![0; length];
            stream.read_exact(&mut body).await.expect("a body");
            // Head and first bytes in one write: the client must not lose the bytes after the head.
            let answer = format!(
                "HTTP/1.1 101 x\r\nConnection: upgrade\r\nUpgrade: dayfly-port\r\nDayfly-Vm: \
                 {}\r\n\r\nfirst",
                serde_json::json!(vm())
            );
            stream.write_all(answer.as_bytes()).await.expect("a reader");
            let mut rest = String::new();
            stream.read_to_string(&mut rest).await.expect("an end");
            stream.write_all(b" last").await.expect("a reader");
            (head, body, rest)
        });
        let client = Client::new(path);
        let asked = if run {
            client.run_connected(&request).await
        } else {
            client.connect("a/b", 5000).await
        };
        let mut connection = asked.expect("a connection");
        assert_eq!(connection.vm, vm());
        connection.write_all(b"question").await.expect("open");
        connection.shutdown().await.expect("open");
        let mut got = String::new();
        connection.read_to_string(&mut got).await.expect("an end");
        assert_eq!(got, "first last");
        let (head, sent, rest) = server.await.expect("no panic");
        assert!(head.starts_with(first_line), "{head}");
        assert!(head.to_ascii_lowercase().contains("upgrade: dayfly-port\r\n"), "{head}");
        assert_eq!(rest, "question");
        assert_eq!(sent, if run { body.clone() } else { Vec::new() });
    }
}

#[tokio::test]
async fn a_port_without_a_vm_is_a_strangers() {
    let (_dir, path) = socket();
    let server =
        answer_once(&path, "HTTP/1.1 101 x\r\nConnection: upgrade\r\nUpgrade: dayfly-port\r\n\r\n");
    let got = Client::new(path).connect("web", 5000).await.expect_err("no VM");
    assert!(matches!(got, ClientError::Foreign { .. }), "{got:?}");
    server.await.expect("no panic");
}
