//! The two clocks: wall time for timestamps, monotonic time for durations.

use std::time::{SystemTime, UNIX_EPOCH};

/// Milliseconds since 1970; 0 if the host's clock is earlier.
#[must_use]
pub fn unix_ms() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}

/// Nanoseconds since 1970; 0 if the host's clock is earlier.
#[must_use]
pub fn unix_ns() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_nanos()).unwrap_or(u64::MAX)
}

/// Microseconds of `CLOCK_MONOTONIC`, the clock in which VMMs report their phases.
#[must_use]
pub fn monotonic_us() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    let unsigned = |n: i64| u64::try_from(n).unwrap_or(0);
    unsigned(now.tv_sec) * 1_000_000 + unsigned(now.tv_nsec) / 1_000
}

/// Microseconds of `CLOCK_BOOTTIME`, which counts while the host is suspended.
#[must_use]
pub fn boottime_us() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
    let unsigned = |n: i64| u64::try_from(n).unwrap_or(0);
    unsigned(now.tv_sec) * 1_000_000 + unsigned(now.tv_nsec) / 1_000
}

/// The instant of a request, from which its timeline counts.
#[derive(Debug, Clone, Copy)]
pub struct Asked(u64);

impl Asked {
    /// The current instant.
    #[must_use]
    pub fn now() -> Self {
        Self(monotonic_us())
    }

    /// Microseconds since then.
    #[must_use]
    pub fn elapsed_us(self) -> u64 {
        monotonic_us().saturating_sub(self.0)
    }

    /// The instant, in [`monotonic_us`].
    #[must_use]
    pub fn at_us(self) -> u64 {
        self.0
    }
}
