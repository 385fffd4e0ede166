//! How long the service's tasks occupy an async worker. Each poll is measured in CPU time of its
//! thread, so that a busy host does not count.

use rustix::time::{ClockId, clock_gettime};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::task::{Context, Poll};
use std::time::Duration;

/// The limit above which a poll counts as long, because it delays other tasks.
pub const LONG: Duration = Duration::from_millis(1);

/// Counters of the service.
#[derive(Debug, Default)]
pub struct Stats {
    /// Number of polls of the service's tasks.
    pub polls: AtomicU64,
    /// Number of polls that took longer than [`LONG`].
    pub long_polls: AtomicU64,
    /// The longest poll, in nanoseconds of CPU time.
    pub longest_poll_ns: AtomicU64,
    /// Questions that were parsed.
    pub questions: AtomicU64,
    /// Questions that were dropped unread, because a guest exceeded its rate.
    pub over_limit: AtomicU64,
    /// Questions that were forwarded to the host's servers.
    pub forwarded: AtomicU64,
    /// Connections that were closed at once, because a guest had its maximum.
    pub closed_connections: AtomicU64,
    /// Number of restarts of the service's tasks.
    pub restarts: AtomicU64,
}

pub(super) fn count(counter: &AtomicU64) {
    counter.fetch_add(1, Relaxed);
}

/// A future whose polls are timed.
pub(super) struct Timed<F> {
    inner: Pin<Box<F>>,
    stats: Arc<Stats>,
}

impl<F> Timed<F> {
    pub fn new(stats: &Arc<Stats>, inner: F) -> Self {
        Self { inner: Box::pin(inner), stats: stats.clone() }
    }
}

/// The CPU time of the calling thread.
fn used_ns() -> u64 {
    let used = clock_gettime(ClockId::ThreadCPUTime);
    let ns = used.tv_sec.saturating_mul(1_000_000_000).saturating_add(used.tv_nsec);
    u64::try_from(ns).unwrap_or(0)
}

impl<F: Future> Future for Timed<F> {
    type Output = F::Output;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<F::Output> {
        let before = used_ns();
        let polled = self.inner.as_mut().poll(context);
        let took = used_ns().saturating_sub(before);
        count(&self.stats.polls);
        self.stats.longest_poll_ns.fetch_max(took, Relaxed);
        if u128::from(took) > LONG.as_nanos() {
            count(&self.stats.long_polls);
        }
        polled
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_poll_that_computes_is_counted_and_one_that_waits_is_not() {
        let stats = Arc::new(Stats::default());
        let read = |counter: &AtomicU64| counter.load(Relaxed);
        // The time of an interrupt counts for the poll that it hits, so not every wait has to
        // count for nothing.
        let mut waits = 0;
        while read(&stats.polls) == 0 || read(&stats.long_polls) >= waits {
            waits += 1;
            assert!(waits <= 20, "each wait is counted: {stats:?}");
            Timed::new(&stats, tokio::time::sleep(Duration::from_millis(5))).await;
        }
        let [polls, long] = [&stats.polls, &stats.long_polls].map(read);
        assert!(polls >= 2 * waits, "{stats:?}");
        let computes = Timed::new(&stats, async {
            let begun = used_ns();
            while used_ns() - begun < 2_000_000 {}
            7
        });
        assert_eq!(computes.await, 7);
        assert_eq!(
            (read(&stats.long_polls), read(&stats.polls)),
            (long + 1, polls + 1),
            "{stats:?}"
        );
        assert!(read(&stats.longest_poll_ns) >= 2_000_000, "{stats:?}");
    }
}
