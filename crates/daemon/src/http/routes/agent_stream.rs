//! Archives and outputs in frames, over an upgraded connection: the frames of the guest's agent, so
//! that a process of the VM can pass them on ([`crate::http::stream`]).
//!
//! ```text
//!  read   agent ── Data … ──▶ client, then End, or Reply with `failed`
//!  write  client ── Data … End ──▶ agent; then Reply with `done` or `failed` to the client
//! ```
//! The daemon answers 101 when the agent has accepted the request, so its refusals have a status.

use crate::base::error::ApiError;
use crate::daemon::Daemon;
use crate::http::relay::{Over, rules};
use crate::http::session::{Client, without_daemon};
use crate::http::stream::{self, AgentCheck, Between};
use crate::ops::exec;
use crate::vm::Vm;
use bytes::BytesMut;
use dayfly_api::agent::{FrameKind, Reply, encode};
use dayfly_api::types::{ErrorCode, StreamReply};
use std::sync::Arc;
use std::time::Duration;
use tokio::net::UnixStream;
use tokio::sync::OwnedRwLockReadGuard;

/// The longest reply of an agent, in bytes.
const REPLY_MAX_BYTES: u32 = 16 << 10;

/// A stream whose request the agent has accepted.
#[derive(Debug)]
pub struct AgentStream {
    /// The VM.
    pub vm: Arc<Vm>,
    /// The connection to its agent.
    pub agent: UnixStream,
    /// For errors: `reading an archive`.
    pub doing: &'static str,
    /// How long the agent of a running guest may take for a byte; `None`: without limit.
    pub silence: Option<Duration>,
    /// Delays the removal of the VM with its program ([`Vm::followers`]).
    pub follows: Option<OwnedRwLockReadGuard<()>>,
}

impl AgentStream {
    /// Serves a client that reads.
    pub async fn read(self, daemon: Arc<Daemon>, client: Client) {
        let ending = [FrameKind::End, FrameKind::Reply];
        self.serve(&daemon, client, &[FrameKind::Data], &ending).await;
    }

    /// Serves a client that writes.
    pub async fn write(self, daemon: Arc<Daemon>, client: Client) {
        self.serve(&daemon, client, &[], &[FrameKind::Reply]).await;
    }

    async fn serve(
        self,
        daemon: &Daemon,
        client: Client,
        passed: &[FrameKind],
        ending: &[FrameKind],
    ) {
        let Self { vm, agent, doing, silence, follows } = self;
        let between = Between {
            daemon,
            vm: &vm,
            rules: rules(passed, ending, REPLY_MAX_BYTES),
            farewell: failed(without_daemon(&vm)),
            check: AgentCheck::Silence(silence, doing),
        };
        let (read, write) = tokio::io::split(client);
        let all = async {
            let halves = (read, write, BytesMut::new());
            let (over, rest) = stream::pass(&between, halves, agent, None).await;
            if let Some(last) = last(&vm, doing, over).await {
                rest.finish(last).await;
            }
        };
        // What was handed over goes on.
        let _ = daemon.stop.run_until_cancelled(all).await;
        drop(follows);
    }
}

/// The client's last frame; `None` if it is gone.
async fn last(vm: &Vm, doing: &'static str, over: Result<Over, ApiError>) -> Option<Vec<u8>> {
    let got = match over {
        Err(silent) => return Some(failed(silent)),
        Ok(Over::Gone) => return None,
        Ok(Over::Closed) => {
            return Some(failed(exec::explain(vm, "it had sent everything").await));
        }
        Ok(Over::Wrong(wrong)) => wrong.to_string(),
        Ok(Over::Frame(FrameKind::End, _)) => return Some(encode(FrameKind::End, &[])),
        Ok(Over::Frame(_, body)) => match serde_json::from_slice(&body) {
            Ok(Reply::Ok) if doing == WRITING => return Some(reply(&StreamReply::Done {})),
            Ok(Reply::Err(failure)) => return Some(failed(ApiError::from_agent(&failure))),
            Ok(other) => format!("got the reply {other:?}"),
            Err(e) => format!("got a reply in JSON that does not parse: {e}"),
        },
    };
    let text = format_args!("VM {}: the guest's agent, while {doing}: {got}", vm.name);
    Some(failed(ApiError::new(ErrorCode::Guest, text)))
}

/// What an agent does that unpacks an archive.
pub const WRITING: &str = "writing an archive";

fn reply(reply: &StreamReply) -> Vec<u8> {
    // Serialising it cannot fail, as in `websocket::notice`.
    encode(FrameKind::Reply, &serde_json::to_vec(reply).unwrap_or_default())
}

fn failed(error: ApiError) -> Vec<u8> {
    reply(&StreamReply::Failed(error.0))
}
