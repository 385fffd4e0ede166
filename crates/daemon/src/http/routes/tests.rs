use super::*;
use crate::base::config::{Config, Deadlines};
use crate::fixture;
use crate::model::facts::Facts;
use crate::templates::cache::TemplateCache;
use crate::vmm::agent_link::read_frame;
use dayfly_api::agent::{Collector, ExecSpec, FrameKind};
use dayfly_api::client::Client;
use dayfly_api::types::ErrorCode;
use dayfly_api::types::MAX_JSON_BYTES;
use dayfly_units::{CpuModel, Name};
use std::path::{Path as FilePath, PathBuf};
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{UnixListener, UnixStream};

/// A daemon that serves from a temporary folder, without KVM.
pub(super) struct Served {
    _folder: tempfile::TempDir,
    pub(super) socket: PathBuf,
    pub(super) daemon: Arc<Daemon>,
}

pub(super) fn served() -> Served {
    served_within(Deadlines::default())
}

pub(super) fn served_within(deadlines: Deadlines) -> Served {
    served_with(|config| config.deadlines = deadlines)
}

pub(super) fn served_with(change: impl FnOnce(&mut Config)) -> Served {
    let folder = tempfile::tempdir().unwrap();
    let mut config = fixture::config(folder.path());
    change(&mut config);
    std::fs::create_dir_all(config.vms()).unwrap();
    std::fs::create_dir_all(&config.state).unwrap();
    let templates = TemplateCache::new(
        dayfly_store::Store::open(&config.state).unwrap(),
        crate::templates::pagers::Pagers::new(&config),
    );
    let daemon = fixture::daemon(config, templates, fixture::nodes());
    let socket = daemon.config.socket();
    let listener = UnixListener::bind(&socket).unwrap();
    let app = router(daemon.clone()).unwrap();
    tokio::spawn(async move { axum::serve(listener, app).await });
    Served { _folder: folder, socket, daemon }
}

/// Sends a raw request and returns the status line and the body of the answer.
pub(super) async fn raw(socket: &FilePath, request: &[u8]) -> (String, String) {
    let mut stream = UnixStream::connect(socket).await.unwrap();
    stream.write_all(request).await.unwrap();
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer).await.unwrap();
    let answer = String::from_utf8(answer).unwrap();
    let (head, body) = answer.split_once("\r\n\r\n").unwrap();
    (head.lines().next().unwrap().to_owned(), body.to_owned())
}

pub(super) fn request(method: &str, path: &str, body: &str) -> Vec<u8> {
    format!(
        "{method} {path} HTTP/1.1\r\nHost: d\r\nConnection: close\r\n\
         Content-Length: {}\r\n\r\n{body}",
        body.len()
    )
    .into_bytes()
}

#[tokio::test]
async fn what_is_counted_and_timed_is_reported_to_prometheus() {
    use crate::base::metrics::{CreatePhase, Start};
    let served = served();
    let metrics = &served.daemon.metrics;
    metrics.created(
        Start::Clone,
        &[
            (CreatePhase::Open, 100),
            (CreatePhase::Run, 400),
            (CreatePhase::Connect, 450),
            (CreatePhase::Identity, 900),
        ],
    );
    metrics.created(Start::Nothing, &[(CreatePhase::Open, 3_000_000)]);
    metrics.destroyed(Duration::from_millis(1), Duration::from_millis(15));
    let _memory = served.daemon.budget.reserve(64 << 20, None).unwrap();
    let (status, body) = raw(&served.socket, &request("GET", "/metrics", "")).await;
    assert_eq!(status, "HTTP/1.1 200 OK");
    for line in [
        r#"dayfly_create_seconds_bucket{le="0.0005",phase="run"} 1"#,
        r#"dayfly_create_seconds_bucket{le="0.0002",phase="run"} 0"#,
        r#"dayfly_create_seconds_count{phase="open"} 2"#,
        r#"dayfly_create_seconds_bucket{le="0.001",phase="total"} 1"#,
        r#"dayfly_created_total{from="clone"} 1"#,
        r#"dayfly_created_total{from="nothing"} 1"#,
        r#"dayfly_destroy_seconds_bucket{le="0.02",phase="gone"} 1"#,
        "dayfly_vms 0",
        "dayfly_waiting 0",
        "dayfly_waiting_clones 0",
        "dayfly_memory_reserved_bytes 67108864",
        "dayfly_memory_budget_bytes 1099511627776",
        "# EOF",
    ] {
        assert!(body.lines().any(|l| l == line), "{line} in\n{body}");
    }
}

#[test]
fn the_document_is_frozen() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/openapi.json");
    let now = document().unwrap();
    if std::env::var_os("DAYFLY_UPDATE").is_some() {
        std::fs::create_dir_all(FilePath::new(path).parent().unwrap()).unwrap();
        std::fs::write(path, &now).unwrap();
    }
    let frozen = std::fs::read_to_string(path).unwrap_or_default();
    assert!(
        frozen == now,
        "the API has changed: docs/openapi.json is not what the code says. If that is meant:\n\
         DAYFLY_UPDATE=1 cargo test --release -p dayfly-daemon the_document_is_frozen, \
         and review the difference"
    );
}

#[test]
fn each_operation_has_its_own_name() {
    let document: serde_json::Value = serde_json::from_str(&document().unwrap()).unwrap();
    let paths = document["paths"].as_object().unwrap();
    let operations = paths.values().flat_map(|path| path.as_object().unwrap().values());
    let names: Vec<_> = operations.map(|of| of["operationId"].as_str().unwrap()).collect();
    let unique: std::collections::BTreeSet<_> = names.iter().collect();
    assert!(names.len() > 40 && unique.len() == names.len(), "{names:?}");
}

#[tokio::test]
async fn errors_are_json_with_their_status() {
    let served = served();
    for (method, path, body, status, code) in [
        ("GET", "/v1/nothing", "", 404, ErrorCode::NotFound),
        ("PATCH", "/v1/vms", "", 405, ErrorCode::Invalid),
        ("GET", "/v1/vms/missing", "", 404, ErrorCode::NotFound),
        ("GET", "/v1/vms?all=perhaps", "", 400, ErrorCode::Invalid),
        ("POST", "/v1/vms/missing/pause", "", 404, ErrorCode::NotFound),
        ("DELETE", "/v1/images/none", "", 404, ErrorCode::NotFound),
        ("GET", "/v1/images/UPPER", "", 400, ErrorCode::Invalid),
        ("GET", "/v1/snapshots/..%2f..", "", 400, ErrorCode::Invalid),
        ("POST", "/v1/store/verify", "{", 400, ErrorCode::Invalid),
        ("POST", "/v1/store/verify", r#"{"snapshots":["../x"]}"#, 400, ErrorCode::Invalid),
        ("POST", "/v1/store/gc", "{", 400, ErrorCode::Invalid),
        ("POST", "/v1/store/gc", r#"{"without":["../x"]}"#, 400, ErrorCode::Invalid),
        ("GET", "/v1/store/repair", "", 405, ErrorCode::Invalid),
        ("DELETE", "/v1/store", "", 405, ErrorCode::Invalid),
        ("PUT", "/v1/images/x", "abc", 400, ErrorCode::Invalid),
        ("POST", "/v1/vms", "{", 400, ErrorCode::Invalid),
        ("POST", "/v1/vms", r#"{"source":{"snapshot":"none"}}"#, 404, ErrorCode::NotFound),
        ("POST", "/v1/run", "", 400, ErrorCode::Invalid),
        ("POST", "/v1/vms/missing/exec", "", 404, ErrorCode::NotFound),
        ("POST", "/v1/connect", "", 400, ErrorCode::Invalid),
        ("GET", "/v1/vms/missing/ports/5000", "", 400, ErrorCode::Invalid),
        ("GET", "/v1/vms/missing/ports/x", "", 400, ErrorCode::Invalid),
        ("POST", "/v1/vms/missing/ports/5000", "", 405, ErrorCode::Invalid),
    ] {
        let (line, body) = raw(&served.socket, &request(method, path, body)).await;
        let error: dayfly_api::types::ApiError = serde_json::from_str(&body)
            .unwrap_or_else(|e| panic!("{method} {path}: {e} in {body}"));
        assert_eq!(
            (line.split(' ').nth(1), error.code),
            (Some(status.to_string().as_str()), code),
            "{method} {path}: {error:?}"
        );
    }
    assert!(served.daemon.registry.is_empty());
}

#[tokio::test]
async fn a_body_over_the_cap_is_refused() {
    let served = served();
    let body = format!(r#"{{"source":{{"snapshot":"{}"}}}}"#, "a".repeat(MAX_JSON_BYTES));
    let (line, _) = raw(&served.socket, &request("POST", "/v1/vms", &body)).await;
    assert!(line.contains("400"), "{line}");
}

#[tokio::test]
async fn a_fresh_daemon_has_nothing_and_no_leaks() {
    let served = served();
    let client = Client::new(&served.socket);
    assert_eq!(client.info().await.unwrap().vms, 0);
    assert!(client.vms(true).await.unwrap().is_empty());
    assert!(client.images().await.unwrap().is_empty());
    assert!(client.kernels().await.unwrap().is_empty());
    assert!(client.snapshots().await.unwrap().is_empty());
    assert!(client.leaks().await.unwrap().is_empty());
}

#[tokio::test]
async fn an_unknown_entry_of_the_run_folder_is_a_leak_and_swept() {
    let served = served();
    let id = dayfly_units::VmId::random();
    let dir = served.daemon.config.vm(id);
    std::fs::create_dir_all(dir.root()).unwrap();
    std::fs::write(&dir.console()[0], "x").unwrap();
    let client = Client::new(&served.socket);
    let before = client.leaks().await.unwrap();
    assert_eq!(before.iter().map(|leak| leak.kind.as_str()).collect::<Vec<_>>(), ["file"]);
    assert!(dir.path().exists(), "looking changes nothing");
    assert_eq!(client.sweep().await.unwrap(), before);
    assert!(!dir.path().exists());
    assert!(client.leaks().await.unwrap().is_empty());
}

/// A VM in phase `Running` without a VMM, and the socket on which its VMM would listen.
pub(super) fn running(served: &Served, name: &str) -> (Arc<crate::vm::Vm>, UnixListener) {
    let labels = [("schön".to_owned(), "\u{7f}".to_owned())].into();
    running_as(served, name, Facts { labels, ..fixture::facts() })
}

/// The same with other facts.
pub(super) fn running_as(
    served: &Served,
    name: &str,
    facts: Facts,
) -> (Arc<crate::vm::Vm>, UnixListener) {
    let name = Some(name.parse().unwrap());
    let vm = served
        .daemon
        .registry
        .reserve(&served.daemon.config, name, facts, fixture::memory(), None)
        .unwrap();
    std::fs::create_dir_all(vm.dir.root()).unwrap();
    let listener = UnixListener::bind(vm.dir.vsock()).unwrap();
    vm.step(crate::model::state::Event::Ready).unwrap();
    (vm, listener)
}

/// Accepts one connection and reads its first line.
pub(super) async fn called(listener: &UnixListener) -> (UnixStream, String) {
    let (mut stream, _) = listener.accept().await.unwrap();
    let mut line = Vec::new();
    while line.last() != Some(&b'\n') {
        line.push(stream.read_u8().await.unwrap());
    }
    (stream, String::from_utf8(line).unwrap())
}

/// Accepts a connection to the agent, and reads the program of its request, with the strings that
/// follow.
pub(super) async fn asked_program(listener: &UnixListener) -> (UnixStream, ExecSpec) {
    let (mut stream, line) = called(listener).await;
    assert_eq!(line, "CONNECT 1024\n");
    stream.write_all(b"OK 7\n").await.unwrap();
    let request = read_frame(&mut stream, "reading a request").await.unwrap().unwrap();
    let mut spec: ExecSpec = serde_json::from_slice(&request.body).unwrap();
    if let Some(mut strings) = Collector::of(&mut spec).unwrap() {
        while !strings.is_complete() {
            let frame = read_frame(&mut stream, "reading strings").await.unwrap().unwrap();
            assert_eq!(frame.kind, FrameKind::Strings);
            strings.add(&frame.body).unwrap();
        }
        strings.finish(&mut spec).unwrap();
    }
    (stream, spec)
}

#[tokio::test]
async fn a_connection_to_a_port_carries_bytes_both_ways() {
    let served = served();
    let (vm, listener) = running(&served, "web");
    let guest = tokio::spawn(async move {
        let (mut stream, line) = called(&listener).await;
        assert_eq!(line, "CONNECT 5000\n");
        // Bytes right after the greeting belong to the client.
        stream.write_all(b"OK 7\nhello\n").await.unwrap();
        let mut heard = String::new();
        stream.read_to_string(&mut heard).await.unwrap();
        stream.write_all(heard.to_uppercase().as_bytes()).await.unwrap();
    });
    let mut connection = Client::new(&served.socket).connect("web", 5000).await.unwrap();
    assert_eq!(connection.vm, vm.shown());
    connection.write_all(b"question").await.unwrap();
    connection.shutdown().await.unwrap();
    let mut said = String::new();
    connection.read_to_string(&mut said).await.unwrap();
    assert_eq!(said, "hello\nQUESTION");
    guest.await.unwrap();
}

#[tokio::test]
async fn a_port_is_refused_before_the_upgrade_and_says_why() {
    let served = served();
    let (vm, listener) = running(&served, "web");
    let client = Client::new(&served.socket);
    let refused = async |port| client.connect("web", port).await.unwrap_err();
    for (port, word) in [(1024, "agent"), (1025, "agent"), (0, "expected a number")] {
        let e = refused(port).await;
        assert_eq!(e.code(), Some(ErrorCode::Invalid), "{e}");
        assert!(e.to_string().contains(word) && e.to_string().contains(&port.to_string()), "{e}");
    }
    let closing = async {
        drop(called(&listener).await);
    };
    let (e, ()) = tokio::join!(refused(5001), closing);
    assert_eq!(e.code(), Some(ErrorCode::Guest), "{e}");
    assert!(
        ["VM web", "port 5001", "listen"].iter().all(|word| e.to_string().contains(word)),
        "{e}"
    );
    let stranger = async {
        called(&listener).await.0.write_all(b"what?\n").await.unwrap();
    };
    let (e, ()) = tokio::join!(refused(5001), stranger);
    assert_eq!(e.code(), Some(ErrorCode::Guest), "{e}");
    assert!(e.to_string().contains("what?"), "{e}");

    vm.step(crate::model::state::Event::Pause).unwrap();
    let e = refused(5000).await;
    assert_eq!((e.code(), e.to_string().contains("paused")), (Some(ErrorCode::State), true), "{e}");
    vm.step(crate::model::state::Event::Die).unwrap();
    let e = refused(5000).await;
    assert_eq!((e.code(), e.to_string().contains("exited")), (Some(ErrorCode::State), true), "{e}");
    let e = client.connect("missing", 5000).await.unwrap_err();
    assert_eq!(e.code(), Some(ErrorCode::NotFound), "{e}");
}

#[tokio::test]
async fn a_guest_that_does_not_answer_is_given_up() {
    let served =
        served_within(Deadlines { port: Duration::from_millis(50), ..Deadlines::default() });
    let (_vm, _listener) = running(&served, "web");
    let e = Client::new(&served.socket).connect("web", 5000).await.unwrap_err();
    assert_eq!(e.code(), Some(ErrorCode::Timeout), "{e}");
}

#[tokio::test]
async fn the_end_of_the_vm_or_the_daemon_ends_a_connection() {
    for daemon_ends in [false, true] {
        let served = served();
        let (vm, listener) = running(&served, "web");
        let greet = async {
            let mut guest = called(&listener).await.0;
            guest.write_all(b"OK 7\n").await.unwrap();
            guest
        };
        let client = Client::new(&served.socket);
        let (connection, guest) = tokio::join!(client.connect("web", 5000), greet);
        let mut connection = connection.unwrap();
        // A VMM that ends closes its sockets.
        let _guest = if daemon_ends {
            served.daemon.stop.cancel();
            Some(guest)
        } else {
            drop(vm.ended(crate::model::exit::exit_now(
                dayfly_api::types::ExitKind::Killed,
                "killed",
            )));
            drop(guest);
            None
        };
        assert_eq!(connection.read(&mut [0; 1]).await.unwrap(), 0);
    }
}

#[tokio::test]
async fn a_connected_run_that_cannot_be_leaves_nothing() {
    let served = served();
    let client = Client::new(&served.socket);
    let request = |port| dayfly_api::types::ConnectRequest {
        create: dayfly_api::types::CreateRequest {
            source: dayfly_api::types::Source::Snapshot("none".parse().unwrap()),
            name: None,
            labels: Default::default(),
            forks: 0,
            lifetime: Default::default(),
            network: dayfly_api::types::NetworkRequest::default(),
            volumes: Vec::new(),
            limits: Default::default(),
            vcpus: None,
        },
        port,
        keep: false,
    };
    let e = client.run_connected(&request(5000)).await.unwrap_err();
    assert_eq!(e.code(), Some(ErrorCode::NotFound), "{e}");
    let e = client.run_connected(&request(1024)).await.unwrap_err();
    assert_eq!(e.code(), Some(ErrorCode::Invalid), "{e}");
    assert!(served.daemon.registry.is_empty());
}

#[tokio::test]
async fn a_creation_that_fails_leaves_nothing() {
    let served = served();
    let client = Client::new(&served.socket);
    // Without a process: the image exists, the VMM program does not.
    let disk = vec![7; 1 << 16];
    let file = served.daemon.config.run.join("disk");
    std::fs::write(&file, &disk).unwrap();
    let digest = dayfly_store::sparse::digest(&std::fs::File::open(&file).unwrap()).unwrap().digest;
    let name: Name = "i".parse().unwrap();
    let packed = |bytes: &[u8]| {
        let packed = zstd::encode_all(bytes, 1).unwrap();
        dayfly_api::client::stream_body(futures::stream::iter([Ok(packed.into())]))
    };
    let head = dayfly_api::types::ImageUpload {
        size_bytes: disk.len() as u64,
        digest: digest.to_string(),
        source: "a test".into(),
        config: Default::default(),
    };
    let wrong = dayfly_api::types::ImageUpload { digest: "0".repeat(64), ..head.clone() };
    let refused = client.upload_image(&name, &wrong, packed(&disk)).await.unwrap_err();
    assert_eq!(refused.code(), Some(ErrorCode::Damaged), "{refused}");
    client.upload_image(&name, &head, packed(&disk)).await.unwrap();
    let kernel = [b"vmlinux".as_slice(), b"initrd"].concat();
    let head = dayfly_api::types::KernelUpload {
        release: "6.12".into(),
        vmlinux_bytes: 7,
        initrd_bytes: 6,
        modules: None,
        digest: dayfly_store::Digest::of(&kernel).to_string(),
    };
    client.upload_kernel(&"k".parse().unwrap(), &head, packed(&kernel)).await.unwrap();
    let boot = |memory_bytes, vcpus| dayfly_api::types::CreateRequest {
        source: dayfly_api::types::Source::Boot(dayfly_api::types::BootSource {
            image: name.clone(),
            kernel: None,
            memory_bytes,
            vcpus,
            cpu_model: CpuModel::Host,
            init: None,
        }),
        name: Some("v".parse().unwrap()),
        labels: Default::default(),
        forks: 0,
        lifetime: Default::default(),
        network: dayfly_api::types::NetworkRequest::default(),
        volumes: Vec::new(),
        limits: Default::default(),
        vcpus: None,
    };
    for (memory, vcpus) in [(0, 1), (64 << 20, 0), (64 << 20, 17), ((64 << 20) + 4096, 1)] {
        assert_eq!(
            client.create(&boot(memory, vcpus)).await.unwrap_err().code(),
            Some(ErrorCode::Invalid)
        );
    }
    for _ in 0..2 {
        let failed = client.create(&boot(64 << 20, 1)).await.unwrap_err();
        assert_eq!(failed.code(), Some(ErrorCode::Internal), "{failed}");
        served.daemon.undo.close();
        served.daemon.undo.wait().await;
        served.daemon.undo.reopen();
        assert!(served.daemon.registry.is_empty());
        assert_eq!(std::fs::read_dir(served.daemon.config.vms()).unwrap().count(), 0);
        assert_eq!(std::fs::read_dir(served.daemon.templates.vms_folder()).unwrap().count(), 0);
    }
    client.remove_image(&name).await.unwrap();
}

#[tokio::test]
async fn a_vm_is_not_named_as_a_host_of_the_internet_or_as_an_address() {
    let served = served();
    let create = |name: &str| format!(r#"{{"source":{{"snapshot":"s"}},"name":"{name}"}}"#);
    let fork = |name: &str| format!(r#"{{"name":"{name}"}}"#);
    for bad in ["pypi.org", "www.example.com", "10.88.0.6", "localhost", "a..b"] {
        for (path, body) in [("/v1/vms", create(bad)), ("/v1/vms/v/fork", fork(bad))] {
            let (line, body) = raw(&served.socket, &request("POST", path, &body)).await;
            assert!(line.contains("400"), "{path}: {line}: {body}");
            assert!(body.contains("VM name") && body.contains(bad), "{path}: {body}");
        }
    }
    // This name is accepted; the request fails because the snapshot is missing.
    let (line, body) = raw(&served.socket, &request("POST", "/v1/vms", &create("web"))).await;
    assert!(line.contains("404") && body.contains("snapshot"), "{line}: {body}");
}
