//! Output of a guest's console, and of detached programs in a guest.

use crate::base::error::{ApiError, Outcome, blocking};
use crate::daemon::Daemon;
use crate::http::routes::agent_body::AgentBody;
use crate::http::routes::agent_stream::AgentStream;
use crate::http::routes::extract::{Params, Shared, Word};
use crate::http::routes::upgrade::{Stream, Upgrade, wanted};
use crate::ops::programs;
use crate::vm::Vm;
use crate::vmm::agent_link::AgentLink;
use crate::vmm::console::Console;
use axum::body::Body;
use axum::extract::State;
use axum::http::{HeaderMap, header};
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use dayfly_api::agent::{Reply, Request};
use dayfly_api::types::{ApiError as ErrorBody, ErrorCode, StreamReply};
use serde::Deserialize;
use std::io;
use std::sync::Arc;
use std::time::Duration;

/// Period at which a followed console is read again.
const LOOK: Duration = Duration::from_millis(100);
const TEXT: &str = "text/plain; charset=utf-8";

/// Which output, and whether to follow it.
#[derive(Debug, Deserialize, utoipa::IntoParams)]
#[into_params(parameter_in = Query)]
pub struct LogParams {
    /// Follow the output until the VM ends, or until no process can write to it any more.
    #[serde(default)]
    follow: bool,
    /// The output of the detached program with this id or process id. The guest's agent
    /// keeps the newest 256 KiB of each of 32 programs. Without it: the program of the `run` that
    /// created the VM, if that is detached and the VM has not ended, or else the console.
    program: Option<String>,
    /// Only the last lines of the output so far.
    tail: Option<u64>,
    /// Only output since this time, to a second. Only of a program: a console has no times.
    since_unix_ms: Option<u64>,
    /// The console, also of a VM with such a program.
    #[serde(default)]
    console: bool,
}

/// Reads a guest's console: the newest output, at least 2 MiB if there was as much. Or reads the
/// output of a detached program.
///
/// The output of a program comes in frames, as an archive does, with `Upgrade: dayfly-stream`. A
/// console comes as without.
#[utoipa::path(
    get,
    operation_id = "read_logs",
    path = "/v1/vms/{vm}/logs",
    params(("vm" = String, Path), LogParams),
    responses(
        (status = 101, body = StreamReply),
        (status = 200, body = String, content_type = "text/plain"),
        (status = 404, body = ErrorBody), (status = 409, body = ErrorBody)
    )
)]
pub async fn logs(
    State(daemon): Shared,
    Word(word): Word,
    Params(params): Params<LogParams>,
    upgrade: Result<Upgrade<Stream>, ApiError>,
    headers: HeaderMap,
) -> Outcome<Response> {
    let upgrade = wanted(upgrade, &headers)?;
    let LogParams { follow, program, tail, since_unix_ms, console: of_console } = params;
    let vm = daemon.registry.find(&word)?;
    if of_console && program.is_some() {
        return Err(ApiError::invalid("console, program: expected at most one of them"));
    }
    // What a VM that has ended still has is its console.
    let own = || vm.live().program.filter(|_| !of_console && vm.phase().alive());
    match program.or_else(own) {
        None if since_unix_ms.is_some() => Err(ApiError::invalid(
            "since_unix_ms: expected a program: the lines of a console have no times; use tail",
        )),
        None => {
            let body = console(vm, follow, tail).await?;
            Ok(([(header::CONTENT_TYPE, TEXT)], body).into_response())
        }
        Some(program) => {
            let excerpt = Excerpt { follow, tail, since_unix_ms };
            of_program(&daemon, vm, program, excerpt, (upgrade, &headers)).await
        }
    }
}

async fn console(vm: Arc<Vm>, follow: bool, lines: Option<u64>) -> Outcome<Body> {
    let dir = vm.dir.clone();
    let console = blocking(move || {
        let path = dir.path().display().to_string();
        let read = || {
            let mut console = Console::open(&dir)?;
            let first = lines.map(|lines| console.last_lines(lines)).transpose()?;
            Ok((console, first.unwrap_or_default()))
        };
        read()
            .map_err(|e: io::Error| ApiError::internal(format_args!("the console in {path}: {e}")))
    });
    let (console, first) = console.await?;
    let vm = follow.then_some(vm);
    let tail = Tail { console, first, vm, last_look: false, ended: lines.is_some() && !follow };
    let pieces = futures::stream::try_unfold(tail, async |tail| tail.next().await);
    Ok(Body::from_stream(pieces))
}

struct Tail {
    console: Console,
    /// Bytes that were read already.
    first: Vec<u8>,
    /// Nothing follows `first`.
    ended: bool,
    /// The VM to whose end the console is followed; `None`: not followed.
    vm: Option<Arc<Vm>>,
    last_look: bool,
}

impl Tail {
    async fn next(mut self) -> io::Result<Option<(Bytes, Self)>> {
        if !self.first.is_empty() {
            return Ok(Some((std::mem::take(&mut self.first).into(), self)));
        }
        if self.ended {
            return Ok(None);
        }
        loop {
            let read = tokio::task::spawn_blocking(move || {
                let piece = self.console.more();
                (piece, self)
            });
            let piece;
            (piece, self) = read.await.map_err(io::Error::other)?;
            let piece = piece?;
            if !piece.is_empty() {
                return Ok(Some((piece.into(), self)));
            }
            let Some(vm) = self.vm.as_ref().filter(|_| !self.last_look) else { return Ok(None) };
            // Output between the last read and the end of the VM is read after the end was noticed.
            self.last_look = tokio::time::timeout(LOOK, vm.wait_gone()).await.is_ok();
        }
    }
}

/// Which excerpt of a program's output.
struct Excerpt {
    follow: bool,
    tail: Option<u64>,
    since_unix_ms: Option<u64>,
}

/// The request to the agent. Agents of the version before know only process ids.
///
/// # Errors
/// The agent is too old for what is asked.
fn request(vm: &Vm, word: String, excerpt: &Excerpt) -> Outcome<Request> {
    let Excerpt { follow, tail, since_unix_ms } = *excerpt;
    match word.parse() {
        Ok(pid) if tail.is_none() && since_unix_ms.is_none() => {
            let old = programs::needs(vm, programs::IDS, DOING).is_err();
            // An id may consist of decimal digits.
            let program = (!old).then_some(word);
            Ok(Request::Log { pid, follow, program, tail, since_unix_ms })
        }
        _ => {
            programs::needs(vm, programs::IDS, DOING)?;
            Ok(Request::Log { pid: 0, follow, program: Some(word), tail, since_unix_ms })
        }
    }
}

const DOING: &str = "reading a program's output";

async fn of_program(
    daemon: &Arc<Daemon>,
    vm: Arc<Vm>,
    word: String,
    excerpt: Excerpt,
    (upgrade, headers): (Option<Upgrade<Stream>>, &HeaderMap),
) -> Outcome<Response> {
    vm.serves("read what a program wrote in")?;
    let follows = vm.followers.clone().read_owned().await;
    let mut link = AgentLink::connect(&vm.dir.vsock(), daemon.config.deadlines.agent).await?;
    link.send(&request(&vm, word, &excerpt)?, DOING).await?;
    match link.reply(DOING).await? {
        Reply::Ok => {}
        reply => {
            let text = format!("the guest's agent, while {DOING}: expected Ok, got {reply:?}");
            return Err(ApiError::new(ErrorCode::Guest, text));
        }
    }
    // A program that is followed may be silent for as long as it likes.
    let silence = (!excerpt.follow).then_some(daemon.config.deadlines.agent);
    let agent = link.into_stream();
    if let Some(upgrade) = upgrade {
        let stream = AgentStream { vm, agent, doing: DOING, silence, follows: Some(follows) };
        let daemon = daemon.clone();
        return Ok(upgrade.then(move |client| stream.read(daemon, client)));
    }
    let body = AgentBody::new(agent, vm, DOING, silence).following(follows);
    Ok(body.answer(TEXT, headers))
}
