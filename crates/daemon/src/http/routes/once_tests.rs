//! Requests with a key, whose handlers count.

use super::tests::{Served, raw, running, served};
use crate::base::error::ApiError;
use crate::http::{ndjson, once};
use axum::Router;
use axum::http::StatusCode;
use axum::routing::post;
use dayfly_api::types::{ErrorCode, List, Progress, Vm};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use tokio::io::AsyncWriteExt;
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::{Notify, Semaphore};

/// What the handlers do.
#[derive(Default)]
struct Script {
    /// How often a handler began.
    begun: AtomicU32,
    /// How often one was dropped before its end.
    dropped: AtomicU32,
    began: Notify,
    was_dropped: Notify,
    /// The status of the answer; 0: 201.
    status: AtomicU32,
}

struct Dropped<'a>(&'a Script, bool);

impl Drop for Dropped<'_> {
    fn drop(&mut self) {
        if !self.1 {
            self.0.dropped.fetch_add(1, Ordering::Relaxed);
            self.0.was_dropped.notify_one();
        }
    }
}

struct Bed {
    served: Served,
    socket: PathBuf,
    script: Arc<Script>,
    /// A handler takes one permit before it answers.
    go: Arc<Semaphore>,
}

async fn answer(script: &Script, go: &Semaphore) -> (StatusCode, String) {
    let number = script.begun.fetch_add(1, Ordering::Relaxed);
    script.began.notify_one();
    let mut dropped = Dropped(script, false);
    go.acquire().await.unwrap().forget();
    dropped.1 = true;
    let status = u16::try_from(script.status.load(Ordering::Relaxed)).unwrap();
    let status = StatusCode::from_u16(status).unwrap_or(StatusCode::CREATED);
    (status, format!("{{\"number\":{number}}}"))
}

impl Bed {
    fn new() -> Self {
        let served = served();
        let (script, go) = (Arc::new(Script::default()), Arc::new(Semaphore::new(0)));
        let handler = {
            let (script, go) = (script.clone(), go.clone());
            move || {
                let (script, go) = (script.clone(), go.clone());
                async move { answer(&script, &go).await }
            }
        };
        let stop = served.daemon.stop.clone();
        let lines = {
            let (script, go) = (script.clone(), go.clone());
            move || {
                let (stop, script, go) = (stop.clone(), script.clone(), go.clone());
                let answers = ndjson::stream(stop, move |progress| async move {
                    progress.phase("one").await;
                    let (status, body) = answer(&script, &go).await;
                    Err::<dayfly_api::types::Snapshot, _>(if status.is_success() {
                        ApiError::internal(body)
                    } else {
                        ApiError::conflict(body)
                    })
                });
                async move { answers }
            }
        };
        let app = Router::new()
            .route("/v1/vms", post(handler.clone()))
            .route("/v1/vms/{vm}/exec", post(handler.clone()))
            .route("/v1/vms/{vm}/pause", post(handler))
            .route("/v1/bake", post(lines))
            .layer(axum::middleware::from_fn_with_state(served.daemon.clone(), once::once));
        let socket = served.socket.with_extension("once");
        let listener = UnixListener::bind(&socket).unwrap();
        tokio::spawn(async move { axum::serve(listener, app).await });
        Self { served, socket, script, go }
    }

    fn text(path: &str, headers: &str, body: &str) -> Vec<u8> {
        let length = body.len();
        format!(
            "POST {path} HTTP/1.1\r\nHost: d\r\nConnection: close\r\n{headers}\
             Content-Length: {length}\r\n\r\n{body}"
        )
        .into_bytes()
    }

    async fn post(&self, path: &str, headers: &str, body: &str) -> (String, String) {
        let (line, body) = raw(&self.socket, &Self::text(path, headers, body)).await;
        (line.split(' ').nth(1).unwrap().to_owned(), body)
    }

    fn begun(&self) -> u32 {
        self.script.begun.load(Ordering::Relaxed)
    }
}

const A: &str = "Idempotency-Key: \"a\"\r\n";

#[tokio::test]
async fn a_request_is_carried_out_once_however_often_it_is_sent() {
    let bed = Bed::new();
    let (first, second) = tokio::join!(bed.post("/v1/vms", A, "{}"), async {
        bed.script.began.notified().await;
        let again = bed.post("/v1/vms", "idempotency-key: a\r\n", "{}");
        tokio::join!(again, async { bed.go.add_permits(1) }).0
    });
    assert_eq!(first, ("201".into(), "{\"number\":0}".into()));
    assert_eq!(second, first);
    assert_eq!(bed.post("/v1/vms", A, "{}").await, first);
    assert_eq!(bed.begun(), 1);
    for (path, body) in [("/v1/vms", "{ }"), ("/v1/vms?x=1", "{}"), ("/v1/vms/a/exec", "{}")] {
        let (status, body) = bed.post(path, A, body).await;
        assert_eq!(status, "422", "{path}: {body}");
        let error: dayfly_api::types::ApiError = serde_json::from_str(&body).unwrap();
        assert_eq!(error.code, ErrorCode::KeyReused);
    }
    // Another key, no key, and an operation that takes none.
    bed.go.add_permits(4);
    assert_eq!(bed.post("/v1/vms", "Idempotency-Key: b\r\n", "{}").await.1, "{\"number\":1}");
    assert_eq!(bed.post("/v1/vms", "", "{}").await.1, "{\"number\":2}");
    assert_eq!(bed.post("/v1/vms/a/pause", A, "{}").await.1, "{\"number\":3}");
    assert_eq!(bed.post("/v1/vms/a/pause", A, "{}").await.1, "{\"number\":4}");
}

#[tokio::test]
async fn a_failure_is_repeated_only_if_something_may_have_run() {
    let bed = Bed::new();
    bed.go.add_permits(100);
    for (path, status, kept) in [
        ("/v1/vms", "507", false),
        ("/v1/vms", "504", false),
        ("/v1/vms/a/exec", "404", false),
        ("/v1/vms/a/exec", "502", true),
        ("/v1/vms/a/exec", "504", true),
        ("/v1/vms/a/exec", "200", true),
    ] {
        bed.script.status.store(status.parse().unwrap(), Ordering::Relaxed);
        let header = format!("Idempotency-Key: {status}{}\r\n", path.len());
        let first = bed.post(path, &header, "{}").await;
        assert_eq!(first.0, status);
        let again = bed.post(path, &header, "{}").await;
        assert_eq!(again == first, kept, "{path}: {status}");
    }
}

#[tokio::test]
async fn the_work_ends_with_its_last_client() {
    let bed = Bed::new();
    let send = async || {
        let mut stream = UnixStream::connect(&bed.socket).await.unwrap();
        stream.write_all(&Bed::text("/v1/vms", A, "{}")).await.unwrap();
        stream
    };
    let first = send().await;
    bed.script.began.notified().await;
    drop(first);
    bed.script.was_dropped.notified().await;
    // Nothing is left of it: a repetition begins anew.
    let (again, ()) = tokio::join!(bed.post("/v1/vms", A, "{}"), async {
        bed.script.began.notified().await;
        bed.go.add_permits(1);
    });
    assert_eq!(again.1, "{\"number\":1}");
    assert_eq!((bed.begun(), bed.script.dropped.load(Ordering::Relaxed)), (2, 1));
}

#[tokio::test]
async fn a_failed_progress_is_not_repeated() {
    let bed = Bed::new();
    bed.go.add_permits(2);
    for number in 0..2 {
        let (status, body) = bed.post("/v1/bake", A, "{}").await;
        assert_eq!(status, "200");
        let lines: Vec<Progress> = body
            .lines()
            .filter(|line| line.starts_with('{'))
            .map(|line| serde_json::from_str(line).unwrap())
            .collect();
        assert_eq!(lines[0], Progress::Phase { label: "one".into() });
        let Some(Progress::Failed(error)) = lines.last() else { panic!("{lines:?}") };
        assert!(error.message.contains(&format!("{number}")), "{}", error.message);
    }
}

#[tokio::test]
async fn a_stored_snapshot_is_answered_again_by_its_last_line() {
    let served = served();
    let key = crate::model::request_key::RequestKey {
        key: "a".into(),
        request: dayfly_units::Digest::of(b"POST /v1/bake\n{}"),
    };
    let Ok(crate::vm::requests::Entered::First(ticket, ..)) = served.daemon.requests.enter(&key)
    else {
        panic!()
    };
    let answer = crate::vm::requests::Answer {
        status: StatusCode::OK,
        kind: "application/x-ndjson",
        body: "{\"event\":\"snapshot\"}\n".into(),
    };
    ticket.finish(answer, true);
    let (line, body) = raw(&served.socket, &Bed::text("/v1/bake", A, "{}")).await;
    assert!(line.contains("200"), "{line}");
    assert_eq!(body, "{\"event\":\"snapshot\"}\n");
}

#[tokio::test]
async fn vms_of_an_earlier_daemon_are_the_answer_while_they_are_there() {
    let bed = Bed::new();
    let (vm, _listener) = running(&bed.served, "web");
    let digest = dayfly_units::Digest::of(b"POST /v1/vms\n{}");
    let key = crate::model::request_key::RequestKey { key: "a".into(), request: digest };
    bed.served.daemon.requests.adopt(&key, vm.id);
    let (status, body) = bed.post("/v1/vms", A, "{}").await;
    assert_eq!((status.as_str(), bed.begun()), ("201", 0));
    assert_eq!(serde_json::from_str::<Vm>(&body).unwrap(), vm.shown());
    assert_eq!(bed.post("/v1/vms", A, "{ }").await.0, "422");
    bed.served.daemon.registry.forget(&vm);
    bed.go.add_permits(1);
    assert_eq!(bed.post("/v1/vms", A, "{}").await.1, "{\"number\":0}");
    // Of many VMs, those that are left.
    let (other, _listener) = running(&bed.served, "other");
    let digest = dayfly_units::Digest::of(b"POST /v1/batch/create\n{}");
    let key = crate::model::request_key::RequestKey { key: "b".into(), request: digest };
    for id in [vm.id, other.id] {
        bed.served.daemon.requests.adopt(&key, id);
    }
    let request = Bed::text("/v1/batch/create", "Idempotency-Key: b\r\n", "{}");
    let (line, body) = raw(&bed.served.socket, &request).await;
    assert!(line.contains("201"), "{line}: {body}");
    assert_eq!(serde_json::from_str::<List<Vm>>(&body).unwrap(), List::whole(vec![other.shown()]));
}

#[tokio::test]
async fn what_is_no_key_is_refused() {
    let bed = Bed::new();
    for headers in [
        "Idempotency-Key: \r\n",
        "Idempotency-Key: a b\r\n",
        "Idempotency-Key: a\r\nIdempotency-Key: a\r\n",
        "Idempotency-Key: a\r\nUpgrade: dayfly-exec\r\n",
    ] {
        let (status, body) = bed.post("/v1/vms", headers, "{}").await;
        assert_eq!(status, "400", "{headers}: {body}");
        assert!(body.contains("Idempotency-Key"), "{body}");
    }
    assert_eq!(bed.begun(), 0);
}
