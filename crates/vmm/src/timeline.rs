//! When each phase of a VM's start ended, in microseconds of CLOCK_MONOTONIC. Benchmarks compare
//! starts by it.

/// Phases in the order in which they ended.
#[derive(Debug, Clone, Default)]
pub struct Timeline(Vec<(String, u64)>);

/// CLOCK_MONOTONIC in microseconds.
#[must_use]
pub fn now_us() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    u64::try_from(now.tv_sec).unwrap_or(0) * 1_000_000
        + u64::try_from(now.tv_nsec).unwrap_or(0) / 1000
}

impl Timeline {
    /// A timeline whose first phase, `started`, is now.
    #[must_use]
    pub fn start() -> Self {
        let mut timeline = Self::default();
        timeline.done("started");
        timeline
    }

    /// A timeline whose first phase, `started`, was at `us`.
    #[must_use]
    pub fn since(us: u64) -> Self {
        Self(vec![("started".to_owned(), us)])
    }

    /// Notes that `phase` ended now.
    pub fn done(&mut self, phase: &str) {
        self.0.push((phase.to_owned(), now_us()));
    }

    /// Name and time of each phase so far.
    #[must_use]
    pub fn phases(&self) -> Vec<(String, u64)> {
        self.0.clone()
    }
}
