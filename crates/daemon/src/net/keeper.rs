//! The task that keeps the network of VMs ready.

use crate::net::names;
use crate::net::networks::Networks;
use dayfly_host::net::VmNetns;
use dayfly_units::error::chain;
use std::io;
use std::os::fd::OwnedFd;
use std::time::Duration;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio_util::sync::CancellationToken;

/// Interval of the check for enough waiting taps.
const TICK: Duration = Duration::from_secs(5);
/// Shortest time between two looks at the host's rules because they changed.
const PAUSE: Duration = Duration::from_millis(100);

/// A socket that becomes readable when the host's rules change. Call it within a tokio runtime.
fn rule_changes() -> io::Result<AsyncFd<OwnedFd>> {
    let fd = VmNetns::changes_of_rules().map_err(|e| io::Error::other(chain(&e)))?;
    // SAFETY: `OwnedFd` returns the same open descriptor as long as it lives, and the `AsyncFd`
    // owns it.
    Ok(unsafe { AsyncFd::register_with_interest(fd, Interest::READABLE) }?)
}

/// Resolves when the host's rules have changed; never if there is no socket.
async fn changed(rules: Option<&AsyncFd<OwnedFd>>) {
    let Some(rules) = rules else { return std::future::pending().await };
    let Ok(mut ready) = rules.readable().await else { return std::future::pending().await };
    while rustix::io::read(rules, &mut [0; 4096]).is_ok() {}
    ready.clear_ready();
}

/// Waits between two looks at rules that change all the time, as those of kube-proxy do.
async fn pause(stop: &CancellationToken) {
    tokio::select! {
        () = tokio::time::sleep(PAUSE) => {}
        () = stop.cancelled() => {}
    }
}

/// Whether a step that is repeated failed last time. Each series of failures is reported once.
#[derive(Debug, Default)]
struct Failing(bool);

impl Failing {
    /// Whether `failed` begins a series of failures.
    const fn begins(&mut self, failed: bool) -> bool {
        let begins = failed && !self.0;
        self.0 = failed;
        begins
    }
}

/// Keeps the host's rules in place and taps waiting, and runs the name service, until the daemon
/// stops.
pub async fn keep(networks: Networks, stop: CancellationToken) {
    keep_at_least(networks, stop, TICK).await;
}

/// [`keep`], with a check every `tick` even if nothing has happened.
pub(super) async fn keep_at_least(networks: Networks, stop: CancellationToken, tick: Duration) {
    let Ok(network) = networks.get().cloned() else { return };
    let (mut answering, mut failing) = (None, Failing::default());
    let rules = rule_changes().inspect_err(|e| {
        tracing::error!("the host's packet filter is looked at every {tick:?} only: {e}");
    });
    while !stop.is_cancelled() {
        if answering.is_none() {
            answering = names::start(&network)
                .inspect_err(|e| tracing::error!("names of VMs: {e}; trying again in {tick:?}"))
                .ok();
        }
        let filling = network.clone();
        let filled = tokio::task::spawn_blocking(move || {
            match filling.vm_netns.restore_rules() {
                Ok(true) => {
                    tracing::warn!(
                        "the host's packet filter had lost the rules for VMs: they are back"
                    )
                }
                Ok(false) => {}
                Err(e) => {
                    tracing::error!(
                        "the host's packet filter may lack the rules for VMs: {}",
                        chain(&e)
                    )
                }
            }
            filling.clean();
            filling.fill()
        });
        let failed = match filled.await {
            Ok(filled) => filled.err().map(|e| chain(&e)),
            Err(e) => Some(e.to_string()),
        };
        if failing.begins(failed.is_some()) {
            let why = failed.unwrap_or_default();
            tracing::error!("making taps ahead of demand: {why}; trying again in {tick:?}");
        }
        tokio::select! {
            () = network.wanted.notified() => {}
            () = changed(rules.as_ref().ok()) => pause(&stop).await,
            () = tokio::time::sleep(tick) => {}
            () = stop.cancelled() => {}
        }
    }
    drop(answering);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_series_of_failures_is_reported_once() {
        let mut failing = Failing::default();
        let results = [false, true, true, false, true, true, false, false];
        let begins = results.map(|failed| failing.begins(failed));
        assert_eq!(begins, [false, true, false, false, true, false, false, false]);
    }
}
