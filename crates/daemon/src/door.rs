//! The door of a VM that may fork itself: its guest connects to vsock port [`HOST_PORT`] of the host, and asks for clones of the machine that it is.
//!
//! What comes through it was written by the guest: one request at a time, of bounded length, within a bounded time; and never more clones at one time than
//! the VM's owner has allowed.

use crate::daemon::Daemon;
use crate::error::{Fault, Outcome};
use crate::fork;
use crate::time::Asked;
use crate::vm::Vm;
use crate::vm::agent_link::{read_frame, write_frame};
use crate::vm::registry::FIRST_UID;
use dayfly_api::agent::{FrameKind, HOST_PORT, HostReply, HostRequest};
use dayfly_api::types::{ErrorCode, ForkRequest};
use std::collections::BTreeMap;
use std::io;
use std::os::unix::fs::chown;
use std::os::unix::net::UnixListener as StdListener;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::net::{UnixListener, UnixStream};
use tokio::time::timeout;

/// How long a guest may take to say what it wants, and to take the answer.
const PATIENCE: Duration = Duration::from_secs(5);

/// After so long a guest is told that it may not, and twice as long each further time, up to [`LONGEST`]: who asks again and again takes no time from others,
/// and little from the machine that it is in.
const SHORTEST: Duration = Duration::from_millis(50);
/// See [`SHORTEST`].
const LONGEST: Duration = Duration::from_millis(1600);
/// Who has not asked for so long is answered as at first.
const QUIET: Duration = Duration::from_secs(16);

/// Opens it, until the VM or the daemon ends. Within a runtime.
///
/// # Errors
/// The socket cannot be made.
pub fn open(daemon: &Arc<Daemon>, vm: &Arc<Vm>) -> Outcome<()> {
    let path = vm.dir.door();
    let listen = || -> io::Result<UnixListener> {
        // One of a daemon before, perhaps.
        match std::fs::remove_file(&path) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(e),
            _ => {}
        }
        let listener = StdListener::bind(&path)?;
        // Its VMM connects to it as its own user.
        let user = FIRST_UID + vm.slot;
        chown(&path, Some(user), Some(user))?;
        listener.set_nonblocking(true)?;
        UnixListener::from_std(listener)
    };
    let listener =
        listen().map_err(|e| Fault::internal(format_args!("listening on {}: {e}", path.display())))?;
    let (daemon, vm) = (daemon.clone(), vm.clone());
    tokio::spawn(async move {
        let mut refusals = Refusals::default();
        loop {
            let stream = tokio::select! {
                accepted = listener.accept() => accepted,
                () = vm.wait_gone() => return,
                () = daemon.stop.cancelled() => return,
            };
            match stream {
                Ok((stream, _)) => serve(&daemon, &vm, stream, &mut refusals).await,
                // Of descriptors, perhaps, which come back.
                Err(e) => {
                    tracing::warn!(vm = %vm.id, "port {HOST_PORT} of its host: {e}");
                    tokio::time::sleep(PATIENCE).await;
                }
            }
        }
    });
    Ok(())
}

/// How often a guest was refused of late.
#[derive(Debug, Default)]
struct Refusals {
    next: Duration,
    last: Option<Instant>,
}

impl Refusals {
    /// How long the next one is to wait for its answer.
    fn wait(&mut self, now: Instant) -> Duration {
        let quiet = self.last.is_none_or(|last| now.duration_since(last) > QUIET);
        let wait = if quiet { SHORTEST } else { self.next };
        (self.next, self.last) = ((wait * 2).min(LONGEST), Some(now));
        wait
    }
}

async fn serve(daemon: &Arc<Daemon>, vm: &Arc<Vm>, mut stream: UnixStream, refusals: &mut Refusals) {
    let reply = match asked(&mut stream).await {
        Ok(HostRequest::Fork { count }) => forked(daemon, vm, count)
            .await
            .unwrap_or_else(|fault| HostReply::Err { message: fault.0.message }),
        Err(message) => HostReply::Err { message },
    };
    if matches!(reply, HostReply::Err { .. }) {
        tokio::time::sleep(refusals.wait(Instant::now())).await;
    }
    let told = async {
        let json = serde_json::to_vec(&reply).map_err(io::Error::from)?;
        write_frame(&mut stream, FrameKind::Reply, &json).await
    };
    // A guest that does not want to know.
    let _ = timeout(PATIENCE, told).await;
}

async fn asked(stream: &mut UnixStream) -> Result<HostRequest, String> {
    let frame = timeout(PATIENCE, read_frame(stream, "asking its host")).await;
    match frame {
        Ok(Ok(Some(frame))) if frame.kind == FrameKind::Request => {
            serde_json::from_slice(&frame.body).map_err(|e| format!("request: {e}"))
        }
        Ok(Ok(got)) => Err(format!("expected a request, got {:?}", got.map(|frame| frame.kind))),
        Ok(Err(e)) => Err(e.to_string()),
        Err(_) => Err(format!("expected a request within {} s", PATIENCE.as_secs())),
    }
}

/// Clones for a guest that asks for them.
async fn forked(daemon: &Arc<Daemon>, vm: &Arc<Vm>, count: u32) -> Outcome<HostReply> {
    let all = daemon.registry.all();
    let alive =
        all.iter().filter(|other| other.facts.fork.from == Some(vm.id) && other.phase().alive()).count();
    let left = vm.facts.fork.may.saturating_sub(u32::try_from(alive).unwrap_or(u32::MAX));
    if count == 0 || count > left {
        let may = vm.facts.fork.may;
        return Err(Fault::new(
            ErrorCode::Exhausted,
            format_args!(
                "fork: expected 1 to {left} clones, got {count}: this machine may have {may} at one time, {alive} live"
            ),
        ));
    }
    let request = ForkRequest { count, name: None, labels: BTreeMap::new(), forks: 0, template: None };
    let forked = fork::fork(daemon, vm, request, Asked::now()).await?;
    Ok(HostReply::Forked { ids: forked.items.iter().map(|vm| vm.id).collect() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_is_refused_again_and_again_waits_longer_until_it_is_quiet() {
        let (begun, mut refusals) = (Instant::now(), Refusals::default());
        let mut at = begun;
        let waits: Vec<u128> = (0..8)
            .map(|_| {
                let wait = refusals.wait(at);
                at += wait;
                wait.as_millis()
            })
            .collect();
        assert_eq!(waits, [50, 100, 200, 400, 800, 1600, 1600, 1600]);
        assert_eq!(refusals.wait(at + QUIET / 2), LONGEST);
        assert_eq!(refusals.wait(at + 2 * QUIET), SHORTEST);
    }
}
