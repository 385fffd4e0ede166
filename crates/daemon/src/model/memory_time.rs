//! Memory over time: the integral of what is charged to a VM, in byte-seconds.
//!
//! The kernel has no such counter, so the daemon looks now and then. Between two looks a VM counts
//! with what it had at the first of them, so that the figure at any time follows from what the
//! record has: the next daemon goes on where the last one was killed, and the figure never goes
//! down.

use serde::{Deserialize, Serialize};

/// The last look at a VM's memory.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemoryTime {
    /// The integral until the look.
    byte_seconds: u64,
    /// When that was, in microseconds of `CLOCK_MONOTONIC`.
    at_us: u64,
    /// What was charged then, in bytes.
    bytes: u64,
}

/// Bytes for this long, in byte-seconds.
#[must_use]
pub fn product(bytes: u64, us: u64) -> u64 {
    u64::try_from(u128::from(bytes) * u128::from(us) / 1_000_000).unwrap_or(u64::MAX)
}

impl MemoryTime {
    /// The first look, at `now_us`, of a VM that was requested at `since_us`: it counts as if it
    /// had had `bytes` from then on.
    #[must_use]
    pub fn first(since_us: u64, now_us: u64, bytes: u64) -> Self {
        let byte_seconds = product(bytes, now_us.saturating_sub(since_us));
        Self { byte_seconds, at_us: now_us, bytes }
    }

    /// A later look.
    #[must_use]
    pub fn then(self, now_us: u64, bytes: u64) -> Self {
        Self { byte_seconds: self.until(now_us), at_us: now_us.max(self.at_us), bytes }
    }

    /// The integral until a time after the look.
    #[must_use]
    pub fn until(self, now_us: u64) -> u64 {
        let more = product(self.bytes, now_us.saturating_sub(self.at_us));
        self.byte_seconds.saturating_add(more)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_vm_counts_with_what_it_had_at_the_look_before() {
        let first = MemoryTime::first(1_000_000, 3_000_000, 10);
        assert_eq!((first.until(3_000_000), first.until(4_500_000)), (20, 35));
        // A clock that goes back, as after a start of the host.
        assert_eq!(first.until(0), 20);
        let next = first.then(5_000_000, 1000);
        assert_eq!((next.until(5_000_000), next.until(6_000_000)), (40, 1040));
        assert_eq!(next.then(0, u64::MAX).until(u64::MAX), u64::MAX);
        assert_eq!(MemoryTime::first(5, 0, 7).until(0), 0);
    }

    proptest! {
        /// Whichever looks the killed daemon had not recorded: what was shown goes up.
        #[test]
        fn the_figure_never_goes_down(
            looks in prop::collection::vec((0_u64..1 << 40, 0_u64..1 << 50), 1..20),
        ) {
            let mut time = 0;
            let mut of = MemoryTime::first(0, 0, 1 << 20);
            let mut shown = 0;
            for (us, bytes) in looks {
                time += us;
                prop_assert!(of.until(time) >= shown);
                shown = of.until(time);
                of = of.then(time, bytes);
                prop_assert_eq!(of.until(time), shown);
            }
        }
    }
}
