//! Programs in a guest: starting one, and running one to its end.

use crate::base::error::{ApiError, Outcome};
use crate::base::progress::ProgressSender;
use crate::daemon::Daemon;
use crate::model::program::for_exec;
use crate::ops::liveness::Liveness;
use crate::vm::Vm;
use crate::vmm::agent_link::{AgentLink, LinkError, read_frame};
use dayfly_api::agent::{ExecSpec, Exit, Frame, FrameKind, Reply, Request};
use dayfly_api::types::{ErrorCode, Progress};
use std::time::Duration;
use tokio::net::UnixStream;
use tokio::time::timeout;

/// Time to wait for the end of the VM after its agent's connection ended without `Exit`, because
/// the VM's exit reason explains it.
const EXPLANATION: Duration = Duration::from_millis(1500);

/// A program in a guest.
#[derive(Debug)]
pub enum Program {
    /// A program to be requested, in the image's environment.
    New(ExecSpec),
    /// A program requested together with the guest's identity, with the link for the reply.
    Asked(AgentLink),
}

/// Starts a program. Returns its connection and its process id in the guest.
///
/// # Errors
/// The agent's error, or that of [`explain`] if the VM ended.
pub async fn start(daemon: &Daemon, vm: &Vm, program: Program) -> Outcome<(UnixStream, u32)> {
    let doing = "starting a program";
    if matches!(&program, Program::New(spec) if spec.argv.is_empty()) {
        return Err(ApiError::invalid("exec: argv: expected a program, got nothing"));
    }
    vm.serves("run a program in")?;
    let work = async {
        let mut link = match program {
            Program::Asked(link) => link,
            Program::New(mut spec) => {
                for_exec(&mut spec, &vm.facts.config);
                let mut link =
                    AgentLink::connect(&vm.dir.vsock(), daemon.config.deadlines.agent).await?;
                link.send(&Request::Exec(Box::new(spec)), doing).await?;
                link
            }
        };
        match link.reply(doing).await? {
            Reply::Started { pid } => Ok((link.into_stream(), pid)),
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
    let (mut agent, _) = start(daemon, vm, Program::New(spec)).await?;
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
                let exit = serde_json::from_slice(&body).map_err(|e| {
                    ApiError::new(
                        ErrorCode::Guest,
                        format_args!("the Exit frame of the guest's agent: {e}"),
                    )
                })?;
                return Ok((exit, tail));
            }
            Ok(Some(Frame { kind, .. })) => {
                return Err(ApiError::new(
                    ErrorCode::Guest,
                    format_args!("the guest's agent, while {doing}: got {kind:?}"),
                ));
            }
            Ok(None) | Err(LinkError::Io { .. }) => return Err(explain(vm, PROGRAM).await),
            Err(e) => return Err(e.into()),
        }
    }
}
