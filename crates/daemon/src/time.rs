//! The two clocks: wall time for people, monotonic time for measuring.

use std::time::{SystemTime, UNIX_EPOCH};

/// Milliseconds since 1970; 0 on a host whose clock is before that.
#[must_use]
pub fn unix_ms() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}

/// Nanoseconds since 1970.
#[must_use]
pub fn unix_ns() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_nanos()).unwrap_or(u64::MAX)
}

/// Microseconds of `CLOCK_MONOTONIC`, the clock in which VMMs report their phases.
#[must_use]
pub fn monotonic_us() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    let part = |n: i64| u64::try_from(n).unwrap_or(0);
    part(now.tv_sec) * 1_000_000 + part(now.tv_nsec) / 1_000
}

/// The instant of a request, to which its timeline refers.
#[derive(Debug, Clone, Copy)]
pub struct Asked(u64);

impl Asked {
    /// Now.
    #[must_use]
    pub fn now() -> Self {
        Self(monotonic_us())
    }

    /// Microseconds since then.
    #[must_use]
    pub fn elapsed_us(self) -> u64 {
        monotonic_us().saturating_sub(self.0)
    }

    /// That instant in [`monotonic_us`].
    #[must_use]
    pub fn at_us(self) -> u64 {
        self.0
    }
}
