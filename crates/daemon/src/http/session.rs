//! A client's connection on which a program runs: first frame, reply, relay, end.

use crate::base::caller::Caller;
use crate::base::error::{ApiError, Outcome};
use crate::base::long_requests::Permit;
use crate::base::time::Asked;
use crate::daemon::Daemon;
use crate::http::json;
use crate::http::relay::{Over, rules};
use crate::http::stream::{self, AgentCheck, Between, Rest, Socket};
use crate::ops::create::{self, Next, Order, VmGuard};
use crate::ops::exec::{PROGRAM, Program, Started, explain, start};
use crate::ops::liveness::Liveness;
use crate::ops::{inspect, own_program, programs, volumes};
use crate::vm::batch::Batch;
use crate::vm::{Vm, record};
use crate::vmm::agent_link::{self, LinkError, read_frame, write_frame};
use crate::vmm::pool::Lasting;
use bytes::BytesMut;
use dayfly_api::agent::{
    Collector, ExecSpec, Exit, Frame, FrameKind, Request, StringsError, encode,
};
use dayfly_api::types::{ErrorCode, RunReply, RunRequest};
use hyper::upgrade::Upgraded;
use hyper_util::rt::TokioIo;
use serde::de::DeserializeOwned;
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt, ReadHalf, WriteHalf};
use tokio::time::timeout;

/// A client's connection after the upgrade from HTTP.
pub type Client = TokioIo<Upgraded>;

/// The most bytes that a client may send before the reply.
const EARLY_MAX_BYTES: usize = 256 << 10;
/// Bytes of the longest body of an `Exit` frame.
const EXIT_MAX_BYTES: u32 = 1 << 10;

/// The client's side of a session.
struct ClientSide<S> {
    read: ReadHalf<S>,
    write: WriteHalf<S>,
    /// Bytes that the client sent before the reply.
    early: BytesMut,
}

/// The client is gone, so no error can be sent.
struct Gone;

impl<S: Socket> ClientSide<S> {
    fn new(client: S) -> Self {
        let (read, write) = tokio::io::split(client);
        Self { read, write, early: BytesMut::new() }
    }

    async fn request<T: DeserializeOwned>(&mut self, within: Duration) -> Outcome<T> {
        let doing = "reading the client's first frame";
        let frame = match timeout(within, read_frame(&mut self.read, doing)).await {
            Ok(Ok(Some(frame))) => frame,
            Ok(Ok(None)) => {
                return Err(ApiError::invalid("first frame: the connection ended before it"));
            }
            // The error's text names the agent, but here the client sent the frame.
            Ok(Err(LinkError::Frame { source, .. })) => {
                return Err(ApiError::invalid(format_args!("first frame: {source}")));
            }
            Ok(Err(e)) => return Err(ApiError::invalid(format_args!("first frame: {e}"))),
            Err(_) => {
                return Err(ApiError::new(
                    ErrorCode::Timeout,
                    format_args!("first frame: nothing for {} s", within.as_secs()),
                ));
            }
        };
        if frame.kind != FrameKind::Request {
            return Err(ApiError::invalid(format_args!(
                "first frame: expected a request, got {:?}",
                frame.kind
            )));
        }
        json::decoded(&frame.body).map_err(|e| ApiError::invalid(format_args!("first frame: {e}")))
    }

    /// Reads the `Strings` frames that a request announces. Waits for a permit before.
    async fn strings(
        &mut self,
        spec: &mut ExecSpec,
        daemon: &Daemon,
        user: Option<&Caller>,
    ) -> Outcome<Option<Permit>> {
        let wrong = |e: StringsError| ApiError::from_strings(&e);
        let Some(mut collector) = Collector::of(spec).map_err(wrong)? else { return Ok(None) };
        let within = daemon.config.deadlines.first_frame;
        let permit = daemon.long_requests.permit(user).await;
        let all = async {
            while !collector.is_complete() {
                match read_frame(&mut self.read, "reading arguments").await {
                    Ok(Some(Frame { kind: FrameKind::Strings, body })) => {
                        collector.add(&body).map_err(wrong)?;
                    }
                    Ok(Some(Frame { kind, .. })) => {
                        return Err(ApiError::invalid(format_args!(
                            "expected arguments and environment in Strings frames, got {kind:?}"
                        )));
                    }
                    Ok(None) => return Err(ApiError::invalid("arguments: the connection ended")),
                    Err(e) => return Err(ApiError::invalid(format_args!("arguments: {e}"))),
                }
            }
            Ok(())
        };
        timeout(within, all).await.unwrap_or_else(|_| {
            let waited = within.as_secs();
            let text = format_args!("arguments: not complete after {waited} s");
            Err(ApiError::new(ErrorCode::Timeout, text))
        })?;
        collector.finish(spec).map_err(wrong)?;
        Ok(permit)
    }

    /// The program that a client asks for.
    async fn program(&mut self, daemon: &Daemon, user: Option<&Caller>) -> Outcome<Program> {
        let mut spec: ExecSpec = self.request(daemon.config.deadlines.first_frame).await?;
        let permit = self.strings(&mut spec, daemon, user).await?;
        Ok(Program::New(spec, permit))
    }

    /// The VM and the program that a client asks for.
    async fn run_request(
        &mut self,
        daemon: &Daemon,
        user: Option<&Caller>,
    ) -> Outcome<(RunRequest, Option<Permit>)> {
        let mut request: RunRequest = self.request(daemon.config.deadlines.first_frame).await?;
        let permit = self.strings(&mut request.exec, daemon, user).await?;
        Ok((request, permit))
    }

    /// Runs `work` while the client stays; reads the client's early bytes meanwhile.
    async fn while_there<T>(&mut self, work: impl Future<Output = T>) -> Result<T, Gone> {
        let mut work = std::pin::pin!(work);
        loop {
            tokio::select! {
                biased;
                done = &mut work => return Ok(done),
                got = self.read.read_buf(&mut self.early),
                    if self.early.len() < EARLY_MAX_BYTES =>
                {
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

    async fn fail(&mut self, error: ApiError) {
        // An error means that the client is gone.
        let _ = self.reply(&RunReply::Failed(error.0)).await;
        let _ = self.write.shutdown().await;
    }
}

/// Serves `POST /v1/vms/{vm}/exec`, and the frames of a WebSocket, for `user`.
pub async fn exec<S: Socket>(
    daemon: Arc<Daemon>,
    vm: Arc<Vm>,
    user: Option<Arc<Caller>>,
    client: S,
) {
    let mut caller = ClientSide::new(client);
    let stop = daemon.stop.clone();
    tokio::select! {
        () = async {
            match caller.program(&daemon, user.as_deref()).await {
                Ok(program) => {
                    let within = daemon.config.deadlines.agent;
                    let liveness = Liveness::new(&vm, program.liveness_ms(), within);
                    let run = Run { program, liveness, last: false, kept: None };
                    serve(&daemon, &vm, run, None, caller).await
                }
                Err(error) => caller.fail(error).await,
            }
        } => {}
        () = stop.cancelled() => {}
    }
}

/// Serves `POST /v1/run` for `user`.
pub async fn run(daemon: Arc<Daemon>, user: Option<Arc<Caller>>, client: Client) {
    let asked = Asked::now();
    let mut caller = ClientSide::new(client);
    let stop = daemon.stop.clone();
    // Dropped at the end for any reason, which removes an ephemeral VM.
    let mut guard: Option<VmGuard> = None;
    tokio::select! {
        () = async {
            let (request, permit) = match caller.run_request(&daemon, user.as_deref()).await {
                Ok(asked_for) => asked_for,
                Err(error) => return caller.fail(error).await,
            };
            let volumes = volumes::asked(&daemon, &request.create.volumes, user.as_deref());
            let volumes = match volumes {
                Ok(volumes) => volumes,
                Err(error) => return caller.fail(error).await,
            };
            let detached = request.exec.detach;
            let next = Some(Request::Exec(Box::new(request.exec.clone())));
            // The VM has a record before the record names its program.
            let batch = (detached && request.keep).then(|| Batch::of_one(&daemon.config));
            let batch = match batch.transpose() {
                Ok(batch) => batch,
                Err(error) => return caller.fail(ApiError::internal(error)).await,
            };
            let order = Order {
                ephemeral: !request.keep,
                batch,
                next,
                entrypoint: request.entrypoint,
                ..Order::create(request.create, volumes)
            };
            let mut born = match caller.while_there(create::create(&daemon, asked, order)).await {
                Ok(Ok(born)) => born,
                Ok(Err(error)) => return caller.fail(error).await,
                Err(Gone) => return,
            };
            let vm = born.vm();
            if detached
                && vm.facts.auto_remove
                && let Err(old) = programs::needs(&vm, programs::IDS, "ending it with its program")
            {
                return caller.fail(old).await;
            }
            let within = daemon.config.deadlines.agent;
            let liveness = Liveness::new(&vm, request.exec.liveness_ms, within);
            let (program, lasting) = match born.take_next() {
                Some(Next { link, lasting }) => {
                    // The agent has them.
                    drop((request.exec, permit));
                    (Program::Asked(link), Some(lasting))
                }
                None => (Program::New(request.exec, permit), None),
            };
            let last = !request.keep;
            if request.keep && !detached {
                let _lives_on = born.keep();
            } else {
                guard = Some(born);
            }
            // A detached program may be what ends the VM: kept once the VM's record names it.
            let kept = if request.keep && detached { Some(&mut guard) } else { None };
            let run = Run { program, liveness, last, kept };
            serve(&daemon, &vm, run, lasting, caller).await;
        } => {}
        () = stop.cancelled() => {}
    }
    drop(guard);
}

/// A program for a client.
struct Run<'a> {
    program: Program,
    liveness: Liveness<'a>,
    /// Whether the VM is removed after the program.
    last: bool,
    /// The guard of a VM that is kept once its record names the program, which outlives the
    /// client.
    kept: Option<&'a mut Option<VmGuard>>,
}

/// Runs one program for the client. `lasting` is dropped with the program's first output or its
/// end.
async fn serve<S: Socket>(
    daemon: &Arc<Daemon>,
    vm: &Arc<Vm>,
    run: Run<'_>,
    lasting: Option<Lasting>,
    mut caller: ClientSide<S>,
) {
    let Run { program, liveness, last, kept } = run;
    let started = match caller.while_there(start(daemon, vm, program)).await {
        Ok(started) => started,
        Err(Gone) => return,
    };
    let Started { agent, pid, id } = match started {
        Ok(started) => started,
        Err(error) => return caller.fail(error).await,
    };
    if let Some(guard) = kept {
        let program = id.clone().unwrap_or_else(|| pid.to_string());
        vm.update(|live| live.program = Some(program));
        record::note(&daemon.registry, vm).await;
        if let Some(Err(error)) = guard.as_ref().map(VmGuard::commit) {
            return caller.fail(error).await;
        }
        let _lives_on = guard.take().map(VmGuard::keep);
        own_program::watch(daemon, vm);
    }
    let reply = RunReply::Started { vm: Box::new(vm.shown()), pid, id };
    if caller.reply(&reply).await.is_err() {
        return;
    }
    let output = [FrameKind::Stdout, FrameKind::Stderr];
    let between = Between {
        daemon,
        vm,
        rules: rules(&output, &[FrameKind::Exit], EXIT_MAX_BYTES),
        farewell: failed(without_daemon(vm)),
        check: AgentCheck::Liveness(liveness),
    };
    let ClientSide { read, write, early } = caller;
    let (over, rest) = stream::pass(&between, (read, write, early), agent, lasting).await;
    end(daemon, vm, last, over, rest).await;
}

/// Sends the client how its program ended.
async fn end(daemon: &Daemon, vm: &Vm, last: bool, over: Outcome<Over>, rest: Rest) {
    let error = match over {
        Ok(Over::Gone) => return,
        Ok(Over::Frame(kind, body)) => match serde_json::from_slice(&body) {
            Ok(exit) => {
                let warning = full_disk(daemon, vm, &exit).await.unwrap_or_default();
                if last {
                    // Before the client gets the exit, so that no later request finds the VM
                    // listed.
                    vm.update(|live| live.kill_asked = true);
                }
                return rest.finish([warning, encode(kind, &body)].concat()).await;
            }
            Err(e) => {
                let text = format_args!("the Exit frame of the guest's agent: {e}");
                ApiError::new(ErrorCode::Guest, text)
            }
        },
        Ok(Over::Closed) => explain(vm, PROGRAM).await,
        Ok(Over::Wrong(wrong)) => ApiError::new(ErrorCode::Guest, wrong),
        Err(silent) => silent,
    };
    rest.finish(failed(error)).await;
}

/// The last frame of a client whose program has no exit.
fn failed(error: ApiError) -> Vec<u8> {
    // Serialising it cannot fail, as in `websocket::notice`.
    let json = serde_json::to_vec(&RunReply::Failed(error.0)).unwrap_or_default();
    encode(FrameKind::Reply, &json)
}

/// What a client gets whose VM ends while no daemon is there.
pub fn without_daemon(vm: &Vm) -> ApiError {
    let text = format_args!(
        "VM {}: the guest's agent closed the connection, and no daemon says why, because it ended \
         before; `dayfly ps -a` may show it when the next one runs",
        vm.name
    );
    ApiError::new(ErrorCode::Guest, text)
}

/// A frame that warns of a full root disk after a failed program, because the program's own message
/// rarely names the disk.
async fn full_disk(daemon: &Daemon, vm: &Vm, exit: &Exit) -> Option<Vec<u8>> {
    if exit.code == Some(0) {
        return None;
    }
    let stat = agent_link::stat(&vm.dir.vsock(), daemon.config.deadlines.stat).await.ok()?;
    let text = format!("dayfly: {}: {}\n", vm.name, inspect::disk_warning(&stat)?);
    Some(encode(FrameKind::Stderr, text.as_bytes()))
}
