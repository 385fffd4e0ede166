//! The end of a VM's time to live.

use serde::{Deserialize, Serialize};

/// An instant at which the daemon ends a VM, by two clocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Deadline {
    /// In microseconds of the host's `CLOCK_BOOTTIME`, which decides: it counts while the host is
    /// suspended, and no process can set it. A VM does not outlive its host's boot.
    pub boot_us: u64,
    /// In milliseconds since 1970, for clients, by the clock at the time of the request.
    pub unix_ms: u64,
    /// The time to live that was asked for, in milliseconds: a VM that is started again gets it
    /// anew. `None` in records of earlier daemons.
    #[serde(default)]
    pub ttl_ms: Option<u64>,
}

impl Deadline {
    /// The deadline `ttl_ms` milliseconds after an instant, which the two clocks show as
    /// `boot_us` and `unix_ms`.
    #[must_use]
    pub const fn after(ttl_ms: u64, boot_us: u64, unix_ms: u64) -> Self {
        Self {
            boot_us: boot_us.saturating_add(ttl_ms.saturating_mul(1000)),
            unix_ms: unix_ms.saturating_add(ttl_ms),
            ttl_ms: Some(ttl_ms),
        }
    }

    /// Microseconds from `boot_us` until this instant; 0 if it has passed.
    #[must_use]
    pub const fn left_us(self, boot_us: u64) -> u64 {
        self.boot_us.saturating_sub(boot_us)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_clock_of_the_boot_decides() {
        let deadline = Deadline::after(1500, 7, 1_000_000);
        assert_eq!(
            deadline,
            Deadline { boot_us: 1_500_007, unix_ms: 1_001_500, ttl_ms: Some(1500) }
        );
        assert_eq!(deadline.left_us(7), 1_500_000);
        assert_eq!(deadline.left_us(1_500_006), 1);
        assert_eq!((deadline.left_us(1_500_007), deadline.left_us(u64::MAX)), (0, 0));
        assert_eq!(Deadline::after(u64::MAX, 7, 7).boot_us, u64::MAX);
    }
}
