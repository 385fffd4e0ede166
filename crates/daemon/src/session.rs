//! A client's connection on which a program runs: first frame, reply, relay, end.

use crate::daemon::Daemon;
use crate::error::{Fault, Outcome};
use crate::ndjson::Teller;
use crate::relay::{self, Ended, RelayError};
use crate::time::Asked;
use crate::vm::agent_link::{self, AgentLink, LinkError, read_frame, write_frame};
use crate::vm::birth::{self, Newborn, Next, Order};
use crate::vm::pool::Lasting;
use crate::vm::{Vm, inspect};
use bytes::BytesMut;
use dayfly_api::agent::{ExecSpec, Exit, Frame, FrameKind, Reply, Request};
use dayfly_api::types::{ErrorCode, Progress, RunReply, RunRequest};
use dayfly_units::Name;
use hyper::upgrade::Upgraded;
use hyper_util::rt::TokioIo;
use serde::de::DeserializeOwned;
use std::future::Future;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt, ReadHalf, WriteHalf};
use tokio::net::UnixStream;
use tokio::time::timeout;

/// A connection that has left HTTP.
pub type Client = TokioIo<Upgraded>;

/// Bytes that a client may send before it was answered.
const EARLY_MAX_BYTES: usize = 256 << 10;
/// After the guest's connection ended without `Exit`: how long to wait for the end of the VM, which explains it.
const EXPLANATION: Duration = Duration::from_millis(1500);

/// A program that has said nothing for so long is asked after.
const SILENCE: Duration = Duration::from_secs(30);

/// The client's side of a session.
struct Caller {
    read: ReadHalf<Client>,
    write: WriteHalf<Client>,
    /// What it sent before it was answered.
    early: BytesMut,
}

/// The client is gone: there is nobody to tell.
struct Gone;

impl Caller {
    fn new(client: Client) -> Self {
        let (read, write) = tokio::io::split(client);
        Self { read, write, early: BytesMut::new() }
    }

    async fn request<T: DeserializeOwned>(&mut self, within: Duration) -> Outcome<T> {
        let doing = "reading the client's first frame";
        let frame = match timeout(within, read_frame(&mut self.read, doing)).await {
            Ok(Ok(Some(frame))) => frame,
            Ok(Ok(None)) => return Err(Fault::invalid("first frame: the connection ended before it")),
            // The error speaks of an agent; here the client is the other side.
            Ok(Err(LinkError::Frame { source, .. })) => {
                return Err(Fault::invalid(format_args!("first frame: {source}")));
            }
            Ok(Err(e)) => return Err(Fault::invalid(format_args!("first frame: {e}"))),
            Err(_) => {
                return Err(Fault::new(
                    ErrorCode::Timeout,
                    format_args!("first frame: nothing for {} s", within.as_secs()),
                ));
            }
        };
        if frame.kind != FrameKind::Request {
            return Err(Fault::invalid(format_args!(
                "first frame: expected a request, got {:?}",
                frame.kind
            )));
        }
        serde_json::from_slice(&frame.body).map_err(|e| Fault::invalid(format_args!("first frame: {e}")))
    }

    /// Does `work` as long as the client is there.
    async fn while_there<T>(&mut self, work: impl Future<Output = T>) -> Result<T, Gone> {
        let mut work = std::pin::pin!(work);
        loop {
            tokio::select! {
                biased;
                done = &mut work => return Ok(done),
                got = self.read.read_buf(&mut self.early), if self.early.len() < EARLY_MAX_BYTES => {
                    if !matches!(got, Ok(1..)) {
                        return Err(Gone);
                    }
                }
            }
        }
    }

    async fn reply(&mut self, reply: &RunReply) -> Result<(), Gone> {
        let json = serde_json::to_vec(reply).map_err(|_| Gone)?;
        write_frame(&mut self.write, FrameKind::Reply, &json).await.map_err(|_| Gone)
    }

    async fn fail(&mut self, fault: Fault) {
        // A client that is gone cannot be told.
        let _ = self.reply(&RunReply::Failed(fault.0)).await;
        let _ = self.write.shutdown().await;
    }
}

/// Serves `POST /v1/vms/{vm}/exec`.
pub async fn exec(daemon: Arc<Daemon>, vm: Arc<Vm>, client: Client) {
    let mut caller = Caller::new(client);
    let stop = daemon.stop.clone();
    tokio::select! {
        () = async {
            match caller.request::<ExecSpec>(daemon.config.deadlines.first_frame).await {
                Ok(spec) => serve(&daemon, &vm, Program::New(spec), None, false, &mut caller).await,
                Err(fault) => caller.fail(fault).await,
            }
        } => {}
        () = stop.cancelled() => {}
    }
}

/// Serves `POST /v1/run`.
pub async fn run(daemon: Arc<Daemon>, client: Client) {
    let asked = Asked::now();
    let mut caller = Caller::new(client);
    let stop = daemon.stop.clone();
    // Dropped where this ends, whatever the reason: an ephemeral VM goes with it.
    let mut newborn: Option<Newborn> = None;
    tokio::select! {
        () = async {
            let request: RunRequest = match caller.request(daemon.config.deadlines.first_frame).await {
                Ok(request) => request,
                Err(fault) => return caller.fail(fault).await,
            };
            // Without arguments there is no program: that is told once there is a VM.
            let next = (!request.exec.argv.is_empty()).then(|| Request::Exec(Box::new(request.exec.clone())));
            let order = Order { ephemeral: !request.keep, next, ..Order::create(request.create) };
            let mut born = match caller.while_there(birth::birth(&daemon, asked, order)).await {
                Ok(Ok(born)) => born,
                Ok(Err(fault)) => return caller.fail(fault).await,
                Err(Gone) => return,
            };
            let vm = born.vm();
            let (program, lasting) = match born.take_next() {
                Some(Next { link, lasting }) => (Program::Asked(link), Some(lasting)),
                None => (Program::New(request.exec), None),
            };
            if request.keep {
                let _lives_on = born.keep();
            } else {
                newborn = Some(born);
            }
            serve(&daemon, &vm, program, lasting, !request.keep, &mut caller).await;
        } => {}
        () = stop.cancelled() => {}
    }
    drop(newborn);
}

/// Runs one program and tells the client of it. A birth is `lasting` until the program's first output or its end. With `last` the VM goes
/// when it ends.
async fn serve(
    daemon: &Daemon,
    vm: &Vm,
    program: Program,
    lasting: Option<Lasting>,
    last: bool,
    caller: &mut Caller,
) {
    let started = match caller.while_there(start(daemon, vm, program)).await {
        Ok(started) => started,
        Err(Gone) => return,
    };
    let (agent, pid) = match started {
        Ok(started) => started,
        Err(fault) => return caller.fail(fault).await,
    };
    let reply = RunReply::Started { vm: Box::new(vm.shown()), pid };
    if caller.reply(&reply).await.is_err() {
        return;
    }
    let (mut from_agent, mut to_agent) = agent.into_split();
    let early = caller.early.split();
    let ended = tokio::select! {
        ended = async {
            // What comes then is read, and an error met, by the relay.
            let _ = from_agent.readable().await;
            drop(lasting);
            relay::outwards(&mut from_agent, &mut caller.write).await
        } => ended,
        () = async {
            let _ = to_agent.write_all(&early).await;
            relay::inwards(&mut caller.read, &mut to_agent).await;
        } => return,
    };
    match ended {
        Ok(Ended::Exit(exit, frame)) => {
            warn_if_full(daemon, vm, &exit, caller).await;
            if last {
                // Nobody who knows of the exit shall find the VM listed.
                vm.update(|live| live.kill_asked = true);
            }
            let _ = caller.write.write_all(&frame).await;
            let _ = caller.write.shutdown().await;
        }
        Ok(Ended::Closed) => caller.fail(explain(vm).await).await,
        Err(RelayError::Client(_)) => {}
        Err(e) => caller.fail(Fault::new(ErrorCode::Guest, e)).await,
    }
}

/// A program in a guest.
#[derive(Debug)]
pub enum Program {
    /// To be asked for.
    New(ExecSpec),
    /// Asked for with the guest's identity; this is where the answer comes from.
    Asked(AgentLink),
}

/// Starts a program: its connection and its process id in the guest.
///
/// # Errors
/// The agent's, or [`explain`]'s where the VM ended.
pub async fn start(daemon: &Daemon, vm: &Vm, program: Program) -> Outcome<(UnixStream, u32)> {
    let doing = "starting a program";
    if matches!(&program, Program::New(spec) if spec.argv.is_empty()) {
        return Err(Fault::invalid("exec: argv: expected a program, got nothing"));
    }
    vm.phase().serves("run a program in")?;
    let work = async {
        let mut link = match program {
            Program::Asked(link) => link,
            Program::New(spec) => {
                let mut link = AgentLink::connect(&vm.dir.vsock(), daemon.config.deadlines.agent).await?;
                link.send(&Request::Exec(Box::new(spec)), doing).await?;
                link
            }
        };
        match link.reply(doing).await? {
            Reply::Started { pid } => Ok((link.into_stream(), pid)),
            reply => Err(LinkError::Unexpected { doing, expected: "Started", got: format!("{reply:?}") }),
        }
    };
    let result = tokio::select! {
        biased;
        result = work => result,
        () = vm.wait_gone() => return Err(explain(vm).await),
    };
    match result {
        Ok(started) => Ok(started),
        Err(LinkError::Refused(failure)) => Err(Fault::from_exec(&failure)),
        // The guest's end is seen here before the VMM has told its reason.
        Err(e @ (LinkError::Io { .. } | LinkError::Unexpected { .. })) => {
            match timeout(EXPLANATION, vm.wait_gone()).await {
                Ok(()) => Err(explain(vm).await),
                Err(_) => Err(e.into()),
            }
        }
        Err(e) => Err(e.into()),
    }
}

/// Tells of a full disk after a program that failed: its own message rarely says which disk.
async fn warn_if_full(daemon: &Daemon, vm: &Vm, exit: &Exit, caller: &mut Caller) {
    if exit.code != Some(0)
        && let Ok(stat) = agent_link::stat(&vm.dir.vsock(), daemon.config.deadlines.stat).await
        && let Some(warning) = inspect::disk_warning(&stat)
    {
        let text = format!("dayfly: {}: {warning}\n", vm.name);
        let _ = write_frame(&mut caller.write, FrameKind::Stderr, text.as_bytes()).await;
    }
}

/// Why a guest's connection ended before its program did.
pub async fn explain(vm: &Vm) -> Fault {
    let _ = timeout(EXPLANATION, vm.wait_gone()).await;
    match vm.live().exit {
        Some(exit) => Fault::new(
            ErrorCode::Guest,
            format_args!("VM {} ended ({:?}): {}", vm.name, exit.reason, exit.message),
        ),
        None => Fault::new(
            ErrorCode::Guest,
            format_args!("VM {}: its agent closed the connection before the program ended", vm.name),
        ),
    }
}

/// Where an agent is asked whether it is still there, and when.
struct Pulse<'a> {
    vm: &'a Name,
    socket: &'a Path,
    silence: Duration,
    within: Duration,
}

impl Pulse<'_> {
    /// Waits for what the agent says `next`. A program may be silent for as long as it likes; an agent that does not answer on the side either, twice in a
    /// row, has gone with its kernel, and nothing else would end the wait.
    async fn wait<T>(&self, next: impl Future<Output = T>) -> Outcome<T> {
        let mut next = std::pin::pin!(next);
        let mut mute = false;
        loop {
            if let Ok(got) = timeout(self.silence, &mut next).await {
                return Ok(got);
            }
            match agent_link::stat(self.socket, self.within).await {
                Ok(_) => mute = false,
                Err(_) if !mute => mute = true,
                Err(e) => {
                    let text =
                        format_args!("VM {}: its agent answers no more, as a program runs: {e}", self.vm);
                    return Err(Fault::new(ErrorCode::Timeout, text));
                }
            }
        }
    }
}

/// Runs a program to its end and tells its output; gives how it ended and the last of its standard error.
///
/// # Errors
/// As [`start`]; or the connection ended before the program.
pub async fn to_its_end(daemon: &Daemon, vm: &Vm, spec: ExecSpec, tell: &Teller) -> Outcome<(Exit, Vec<u8>)> {
    const TAIL_BYTES: usize = 4 << 10;
    let doing = "running a program";
    let (mut agent, _) = start(daemon, vm, Program::New(spec)).await?;
    let (socket, within) = (vm.dir.vsock(), daemon.config.deadlines.agent);
    let pulse = Pulse { vm: &vm.name, socket: &socket, silence: SILENCE, within };
    let mut tail = Vec::new();
    let say =
        |bytes: &[u8]| tell.tell(Progress::Output { text: String::from_utf8_lossy(bytes).into_owned() });
    loop {
        match pulse.wait(read_frame(&mut agent, doing)).await? {
            Ok(Some(Frame { kind: FrameKind::Stdout, body })) => say(&body).await,
            Ok(Some(Frame { kind: FrameKind::Stderr, body })) => {
                tail.extend_from_slice(&body);
                tail.drain(..tail.len().saturating_sub(TAIL_BYTES));
                say(&body).await;
            }
            Ok(Some(Frame { kind: FrameKind::Exit, body })) => {
                let exit = serde_json::from_slice(&body).map_err(|e| {
                    Fault::new(ErrorCode::Guest, format_args!("the Exit frame of the guest's agent: {e}"))
                })?;
                return Ok((exit, tail));
            }
            Ok(Some(Frame { kind, .. })) => {
                return Err(Fault::new(
                    ErrorCode::Guest,
                    format_args!("the guest's agent, while {doing}: got {kind:?}"),
                ));
            }
            Ok(None) | Err(LinkError::Io { .. }) => return Err(explain(vm).await),
            Err(e) => return Err(e.into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::net::UnixListener;
    use tokio::sync::oneshot;

    #[tokio::test]
    async fn an_agent_that_answers_no_more_is_not_waited_for() {
        let folder = tempfile::tempdir().unwrap();
        let socket = folder.path().join("agent");
        let listener = UnixListener::bind(&socket).unwrap();
        let vm = "quiet".parse().unwrap();
        let (silence, within) = (Duration::from_millis(5), Duration::from_millis(50));
        let pulse = Pulse { vm: &vm, socket: &socket, silence, within };
        assert_eq!(pulse.wait(std::future::ready(7)).await.unwrap(), 7);

        // One answer that is missing is no end.
        let (say, said) = oneshot::channel();
        let agent = async {
            drop(listener.accept().await.unwrap());
            say.send(8).unwrap();
        };
        let (got, ()) = tokio::join!(pulse.wait(said), agent);
        assert_eq!(got.unwrap(), Ok(8));

        // It takes connections, and that is all.
        let fault = pulse.wait(std::future::pending::<()>()).await.unwrap_err();
        assert_eq!(fault.0.code, ErrorCode::Timeout);
        assert!(fault.to_string().contains("quiet"), "{fault}");
    }
}
