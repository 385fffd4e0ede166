//! Programs in a guest: starting one, and running one to its end.

use crate::base::error::{ApiError, Outcome};
use crate::base::long_requests::Permit;
use crate::base::progress::ProgressSender;
use crate::daemon::Daemon;
use crate::model::program::for_exec;
use crate::ops::liveness::Liveness;
use crate::vm::Vm;
use crate::vmm::agent_link::{AgentLink, LinkError, read_frame};
use dayfly_api::agent::{
    ExecSpec, Exit, Frame, FrameKind, Reply, Request, protocol_of, request_frames,
};
use dayfly_api::types::{ErrorCode, ExecResult, Progress};
use dayfly_units::text::escaped;
use std::time::Duration;
use tokio::net::UnixStream;
use tokio::time::timeout;

/// Time to wait for the end of the VM after its agent's connection ended without `Exit`, because
/// the VM's exit reason explains it.
const EXPLANATION: Duration = Duration::from_millis(1500);

/// A program in a guest.
#[derive(Debug)]
pub enum Program {
    /// A program to be requested, in the image's environment. The permit of a long one is held
    /// until the agent has the request.
    New(ExecSpec, Option<Permit>),
    /// A program requested together with the guest's identity, with the link for the reply.
    Asked(AgentLink),
}

impl Program {
    /// [`ExecSpec::liveness_ms`] of a program that was not requested yet.
    #[must_use]
    pub const fn liveness_ms(&self) -> Option<u64> {
        match self {
            Self::New(spec, _) => spec.liveness_ms,
            Self::Asked(_) => None,
        }
    }
}

/// A program that has started.
#[derive(Debug)]
pub struct Started {
    /// The connection to the guest's agent.
    pub agent: UnixStream,
    /// The process id in the guest.
    pub pid: u32,
    /// The id, if the program is detached and the agent gives ids.
    pub id: Option<String>,
}

/// The longest id of a program that is taken from an agent, in characters.
const ID: usize = 64;

/// Starts a program.
///
/// # Errors
/// The agent's error, or that of [`explain`] if the VM ended.
pub async fn start(daemon: &Daemon, vm: &Vm, program: Program) -> Outcome<Started> {
    let doing = "starting a program";
    if matches!(&program, Program::New(spec, _) if spec.argv.is_empty()) {
        return Err(ApiError::invalid("exec: argv: expected a program, got nothing"));
    }
    vm.serves("run a program in")?;
    let work = async {
        let mut link = match program {
            Program::Asked(link) => link,
            Program::New(mut spec, _permit) => {
                for_exec(&mut spec, &vm.facts.config);
                let protocol = vm.update(|live| protocol_of(&live.agent_version));
                let frames = request_frames(&mut Request::Exec(Box::new(spec)), protocol)?;
                let mut link =
                    AgentLink::connect(&vm.dir.vsock(), daemon.config.deadlines.agent).await?;
                link.send_frames(&frames, doing).await?;
                link
            }
        };
        match link.reply(doing).await? {
            Reply::Started { pid, id } => {
                let id = id.map(|id| escaped(&id, ID).to_string());
                Ok(Started { agent: link.into_stream(), pid, id })
            }
            reply => {
                Err(LinkError::Unexpected { doing, expected: "Started", got: format!("{reply:?}") })
            }
        }
    };
    let result = tokio::select! {
        biased;
        result = work => result,
        () = vm.wait_gone() => return Err(explain(vm, PROGRAM).await),
    };
    match result {
        Ok(started) => Ok(started),
        Err(LinkError::Refused(failure)) => Err(ApiError::from_exec(&failure)),
        // The daemon sees the guest's end before the VMM has written its exit record.
        Err(e @ (LinkError::Io { .. } | LinkError::Unexpected { .. })) => {
            match timeout(EXPLANATION, vm.wait_gone()).await {
                Ok(()) => Err(explain(vm, PROGRAM).await),
                Err(_) => Err(e.into()),
            }
        }
        Err(e) => Err(e.into()),
    }
}

/// What an agent owes when it runs a program, for [`explain`].
pub const PROGRAM: &str = "the program ended";

/// The error for a connection of a guest that ended before what was `due`.
pub async fn explain(vm: &Vm, due: &'static str) -> ApiError {
    let _ = timeout(EXPLANATION, vm.wait_gone()).await;
    match vm.live().exit {
        Some(exit) => ApiError::new(
            ErrorCode::Guest,
            format_args!("VM {} ended ({:?}): {}", vm.name, exit.reason, exit.message),
        ),
        None => ApiError::new(
            ErrorCode::Guest,
            format_args!("VM {}: its agent closed the connection before {due}", vm.name),
        ),
    }
}

/// The beginning of a stream.
#[derive(Debug, Default)]
struct Beginning {
    bytes: Vec<u8>,
    truncated: bool,
}

impl Beginning {
    fn add(&mut self, more: &[u8], most: usize) {
        let room = most.saturating_sub(self.bytes.len()).min(more.len());
        self.bytes.extend_from_slice(&more[..room]);
        self.truncated |= room < more.len();
    }

    fn text(&self) -> String {
        String::from_utf8_lossy(&self.bytes).into_owned()
    }
}

/// Runs a program to its end. Returns how it ended, and the first `most` bytes of each of its two
/// streams. A detached program is only started.
///
/// # Errors
/// As [`start`]; or the connection ended before the program.
pub async fn collected(
    daemon: &Daemon,
    vm: &Vm,
    spec: ExecSpec,
    permit: Option<Permit>,
    most: usize,
) -> Outcome<ExecResult> {
    if spec.stdin {
        return Err(ApiError::invalid(
            "stdin: expected false: only an exec with Upgrade: dayfly-exec has input",
        ));
    }
    let doing = "running a program";
    let detach = spec.detach;
    let liveness = Liveness::new(vm, spec.liveness_ms, daemon.config.deadlines.agent);
    let program = Program::New(spec, permit);
    let Started { mut agent, pid, id } = start(daemon, vm, program).await?;
    if detach {
        let program = Some(id.unwrap_or_else(|| pid.to_string()));
        return Ok(ExecResult { program, ..ExecResult::default() });
    }
    let (mut out, mut err) = (Beginning::default(), Beginning::default());
    loop {
        match liveness.wait(read_frame(&mut agent, doing)).await? {
            Ok(Some(Frame { kind: FrameKind::Stdout, body })) => out.add(&body, most),
            Ok(Some(Frame { kind: FrameKind::Stderr, body })) => err.add(&body, most),
            Ok(Some(Frame { kind: FrameKind::Exit, body })) => {
                let exit: Exit = exit_of(&body)?;
                return Ok(ExecResult {
                    stdout: out.text(),
                    stderr: err.text(),
                    stdout_truncated: out.truncated,
                    stderr_truncated: err.truncated,
                    exit_code: exit.code,
                    signal: exit.signal,
                    timed_out: exit.timed_out,
                    program: None,
                });
            }
            other => return Err(no_exit(vm, other, doing).await),
        }
    }
}

fn exit_of(body: &[u8]) -> Outcome<Exit> {
    serde_json::from_slice(body).map_err(|e| {
        let message = format_args!("the Exit frame of the guest's agent: {e}");
        ApiError::new(ErrorCode::Guest, message)
    })
}

/// The error for what came instead of output or `Exit`.
async fn no_exit(vm: &Vm, got: Result<Option<Frame>, LinkError>, doing: &'static str) -> ApiError {
    match got {
        Ok(Some(Frame { kind, .. })) => ApiError::new(
            ErrorCode::Guest,
            format_args!("the guest's agent, while {doing}: got {kind:?}"),
        ),
        Ok(None) | Err(LinkError::Io { .. }) => explain(vm, PROGRAM).await,
        Err(e) => e.into(),
    }
}

/// Runs a program to its end and sends its output as progress. Returns how it ended and the end of
/// its standard error.
///
/// # Errors
/// As [`start`]; or the connection ended before the program.
pub async fn to_its_end(
    daemon: &Daemon,
    vm: &Vm,
    spec: ExecSpec,
    progress: &ProgressSender,
) -> Outcome<(Exit, Vec<u8>)> {
    const TAIL_BYTES: usize = 4 << 10;
    let doing = "running a program";
    let liveness = Liveness::new(vm, spec.liveness_ms, daemon.config.deadlines.agent);
    let Started { mut agent, .. } = start(daemon, vm, Program::New(spec, None)).await?;
    let mut tail = Vec::new();
    let say = |bytes: &[u8]| {
        progress.send(Progress::Output { text: String::from_utf8_lossy(bytes).into_owned() })
    };
    loop {
        match liveness.wait(read_frame(&mut agent, doing)).await? {
            Ok(Some(Frame { kind: FrameKind::Stdout, body })) => say(&body).await,
            Ok(Some(Frame { kind: FrameKind::Stderr, body })) => {
                tail.extend_from_slice(&body);
                tail.drain(..tail.len().saturating_sub(TAIL_BYTES));
                say(&body).await;
            }
            Ok(Some(Frame { kind: FrameKind::Exit, body })) => {
                return Ok((exit_of(&body)?, tail));
            }
            other => return Err(no_exit(vm, other, doing).await),
        }
    }
}
