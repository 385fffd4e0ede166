//! Options of `closer`.

use crate::prelude::*;

/// How long VMs run before anything is measured.
pub const SETTLE: Duration = Duration::from_secs(1);

/// Options of `closer`.
#[derive(Debug, clap::Args)]
pub struct Options {
    /// Seconds of each measurement
    #[arg(long, default_value_t = 60, value_name = "S", value_parser = at_least(1))]
    pub seconds: usize,
    /// Idle VMs beside which the daemon is measured
    #[arg(long, default_value_t = 2000, value_name = "N")]
    pub idle: usize,
    /// Milliseconds between an answer and the next request of `fairness`
    #[arg(long, default_value_t = 10, value_name = "MS")]
    pause: u64,
    /// Only these parts, separated by commas
    #[arg(long, value_name = "PARTS", value_delimiter = ',')]
    only: Vec<Measured>,
}

/// A part of the scenario.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Measured {
    /// A tracer against the control groups
    Traced,
    /// I/O on the bills of VMs that are asked at 1:3:6
    Fairness,
    /// A VM that floods all that serves it
    Attack,
    /// A VM that wants more memory than its limit permits
    Greedy,
}

impl Options {
    /// Whether the part is wanted.
    pub fn has(&self, part: Measured) -> bool {
        self.only.is_empty() || self.only.contains(&part)
    }

    /// The time between an answer and the next request.
    pub const fn pause(&self) -> Duration {
        Duration::from_millis(self.pause)
    }

    /// The length of each measurement.
    pub const fn time(&self) -> Duration {
        Duration::from_secs(self.seconds as u64)
    }
}
