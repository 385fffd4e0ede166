//! Self-forks: a guest connects to vsock port [`HOST_PORT`] of the host, and asks for clones of
//! its VM.
//!
//! Only root in the guest gets here, because the VMM connects only privileged source ports to this
//! socket ([`crate::base::config::VmDir::guest_socket`]).
//!
//! | resource that a guest could use up | bound |
//! |---|---|
//! | bytes and time of a request | one request at a time, one frame, [`TIMEOUT`] |
//! | clones | the owner's limit of *existing* clones that it asked for, ended ones included |
//! | clones made in a time | a [`Bucket`] |
//! | refusals | each refusal delays its answer longer ([`Refusals`]) |

use crate::base::error::{ApiError, Outcome};
use crate::base::time::Asked;
use crate::daemon::Daemon;
use crate::ops::fork;
use crate::vm::Vm;
use crate::vm::registry::Children;
use crate::vmm::agent_link::{read_frame, write_frame};
use dayfly_api::agent::{FrameKind, HOST_PORT, HostReply, HostRequest};
use dayfly_api::types::{ErrorCode, ForkRequest, Lifetime};
use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::mpsc::UnboundedReceiver;
use tokio::time::timeout;

/// Time limit for a guest to send its request, and to take the answer.
const TIMEOUT: Duration = Duration::from_secs(5);

/// Delay of the first refusal. Each further one takes twice as long, up to [`LONGEST`], so that
/// repeated requests cost other VMs and the host little.
const SHORTEST: Duration = Duration::from_millis(50);
/// The longest delay of a refusal.
const LONGEST: Duration = Duration::from_millis(1600);
/// Time without a refusal after which the next one is delayed by [`SHORTEST`] again.
const QUIET: Duration = Duration::from_secs(16);

/// Serves the guest request sockets of all VMs, until the daemon stops.
pub async fn keep(daemon: Arc<Daemon>, mut opened: UnboundedReceiver<(Arc<Vm>, UnixListener)>) {
    loop {
        let next = tokio::select! {
            next = opened.recv() => next,
            () = daemon.stop.cancelled() => return,
        };
        let Some((vm, listener)) = next else { return };
        tokio::spawn(accept(daemon.clone(), vm, listener));
    }
}

/// Serves the socket of one VM, until the VM or the daemon ends.
async fn accept(daemon: Arc<Daemon>, vm: Arc<Vm>, listener: UnixListener) {
    let mut refusals = Refusals::default();
    let mut bucket = Bucket::full(vm.facts.fork.max_clones, Instant::now());
    loop {
        let stream = tokio::select! {
            accepted = listener.accept() => accepted,
            () = vm.wait_gone() => return,
            () = daemon.stop.cancelled() => return,
        };
        match stream {
            Ok((stream, _)) => serve(&daemon, &vm, stream, &mut refusals, &mut bucket).await,
            // Perhaps too few descriptors, which become free again.
            Err(e) => {
                tracing::warn!(vm = %vm.id, "port {HOST_PORT} of its host: {e}");
                tokio::time::sleep(TIMEOUT).await;
            }
        }
    }
}

/// The recent refusals of one guest.
#[derive(Debug, Default)]
struct Refusals {
    next: Duration,
    last: Option<Instant>,
}

impl Refusals {
    /// The delay of the next refusal.
    fn wait(&mut self, now: Instant) -> Duration {
        let quiet = self.last.is_none_or(|last| now.duration_since(last) > QUIET);
        let wait = if quiet { SHORTEST } else { self.next };
        (self.next, self.last) = ((wait * 2).min(LONGEST), Some(now));
        wait
    }
}

/// A token bucket of clones: a burst, and then a rate.
#[derive(Debug)]
struct Bucket {
    most: f64,
    per_s: f64,
    left: f64,
    since: Instant,
}

impl Bucket {
    /// Clones that a burst may have beyond the limit of existing ones, because some may be removed
    /// before the next request.
    const EXTRA: u32 = 8;

    /// A full bucket for a VM that may have `max_clones` clones.
    fn full(max_clones: u32, now: Instant) -> Self {
        let most = f64::from(max_clones.saturating_add(Self::EXTRA));
        Self { most, per_s: (f64::from(max_clones) / 60.0).max(1.0), left: most, since: now }
    }

    /// Takes `count` tokens.
    ///
    /// # Errors
    /// The time until there are enough tokens.
    fn take(&mut self, count: u32, now: Instant) -> Result<(), Duration> {
        let count = f64::from(count);
        let grown = now.saturating_duration_since(self.since).as_secs_f64() * self.per_s;
        (self.left, self.since) = ((self.left + grown).min(self.most), now);
        if count > self.left {
            return Err(Duration::from_secs_f64((count - self.left) / self.per_s));
        }
        self.left -= count;
        Ok(())
    }

    /// Returns the tokens of a fork that failed.
    fn put_back(&mut self, count: u32) {
        self.left = (self.left + f64::from(count)).min(self.most);
    }
}

async fn serve(
    daemon: &Arc<Daemon>,
    vm: &Arc<Vm>,
    mut stream: UnixStream,
    refusals: &mut Refusals,
    bucket: &mut Bucket,
) {
    let reply = match asked(&mut stream).await {
        Ok(HostRequest::Fork { count }) => forked(daemon, vm, count, bucket)
            .await
            .unwrap_or_else(|error| HostReply::Err { message: error.0.message }),
        Err(message) => HostReply::Err { message },
    };
    if matches!(reply, HostReply::Err { .. }) {
        tokio::time::sleep(refusals.wait(Instant::now())).await;
    }
    let answer = async {
        let json = serde_json::to_vec(&reply).map_err(io::Error::from)?;
        write_frame(&mut stream, FrameKind::Reply, &json).await
    };
    // An error means that the guest does not read the answer.
    let _ = timeout(TIMEOUT, answer).await;
}

async fn asked(stream: &mut UnixStream) -> Result<HostRequest, String> {
    let frame = timeout(TIMEOUT, read_frame(stream, "asking its host")).await;
    match frame {
        Ok(Ok(Some(frame))) if frame.kind == FrameKind::Request => {
            serde_json::from_slice(&frame.body).map_err(|e| format!("request: {e}"))
        }
        Ok(Ok(got)) => Err(format!("expected a request, got {:?}", got.map(|frame| frame.kind))),
        Ok(Err(e)) => Err(e.to_string()),
        Err(_) => Err(format!("expected a request within {} s", TIMEOUT.as_secs())),
    }
}

/// Forks the VM for its guest, within the limits.
async fn forked(
    daemon: &Arc<Daemon>,
    vm: &Arc<Vm>,
    count: u32,
    bucket: &mut Bucket,
) -> Outcome<HostReply> {
    let refused = |why: &dyn std::fmt::Display| {
        ApiError::new(ErrorCode::Exhausted, format_args!("fork: {why}"))
    };
    let Children { alive, ended } = daemon.registry.children(vm.id);
    let max_clones = vm.facts.fork.max_clones;
    let left = max_clones.saturating_sub(alive).saturating_sub(ended);
    if count == 0 || count > left {
        let those = match ended {
            0 => String::new(),
            _ => {
                format!(", {ended} ended and were not removed: `dayfly rm` on the host makes room")
            }
        };
        return Err(refused(&format_args!(
            "expected 1 to {left} clones, got {count}: \
             this machine may have {max_clones} at one time, {alive} live{those}"
        )));
    }
    if let Err(wait) = bucket.take(count, Instant::now()) {
        let ms = wait.as_millis();
        return Err(refused(&format_args!(
            "{count} more clones so soon: expected a pause of {ms} ms"
        )));
    }
    // The clone has the deadline of `vm` too: else a guest could extend its time by a clone.
    let lifetime = Lifetime { ttl_ms: None, auto_remove: vm.facts.auto_remove };
    let (labels, name, egress, template) = (BTreeMap::new(), None, None, None);
    let (publish, publish_exposed) = (Vec::new(), false);
    let request = ForkRequest {
        count,
        name,
        labels,
        forks: 0,
        egress,
        publish,
        publish_exposed,
        lifetime,
        limits: None,
        template,
    };
    let forked = fork::fork_for_guest(daemon, vm, request, Asked::now()).await;
    let forked = forked.inspect_err(|_| bucket.put_back(count))?;
    Ok(HostReply::Forked { ids: forked.items.iter().map(|vm| vm.id).collect() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_guest_that_is_refused_again_and_again_waits_longer_until_it_is_quiet() {
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

    #[test]
    fn clones_come_as_many_as_may_exist_at_once_and_then_at_a_rate() {
        let begun = Instant::now();
        for (may, per_minute) in [(1, 60), (60, 60), (600, 600)] {
            let mut bucket = Bucket::full(may, begun);
            bucket.take(may, begun).unwrap();
            bucket.take(Bucket::EXTRA, begun).unwrap();
            let wait = bucket.take(1, begun).unwrap_err();
            assert!(bucket.take(1, begun + wait.mul_f64(0.9)).is_err());
            bucket.take(1, begun + wait.mul_f64(1.1)).unwrap();
            let later = begun + wait.mul_f64(1.1);
            let made = |bucket: &mut Bucket, from: Instant, s: u64| {
                let steps = (0..s * 100).map(|n| from + Duration::from_millis(n * 10));
                steps.filter(|now| bucket.take(1, *now).is_ok()).count()
            };
            let in_a_minute = made(&mut bucket, later, 60);
            assert!(in_a_minute.abs_diff(per_minute) <= 1, "{may}: {in_a_minute}");
            // A long pause does not save up more tokens than a full bucket.
            let quiet = later + Duration::from_secs(86_400);
            let at_once = (0..10_000).take_while(|_| bucket.take(1, quiet).is_ok()).count();
            assert_eq!(at_once, usize::try_from(may + Bucket::EXTRA).unwrap());
        }
        let mut bucket = Bucket::full(2, begun);
        bucket.take(10, begun).unwrap();
        bucket.put_back(10);
        bucket.put_back(10);
        assert!(bucket.take(11, begun).is_err() && bucket.take(10, begun).is_ok());
    }
}
