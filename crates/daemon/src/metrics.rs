//! What is counted and timed, in Prometheus' text format at `/metrics`.
//!
//! | name | labels | what |
//! |---|---|---|
//! | `dayfly_birth_seconds` | `phase` | from one phase of a birth to the next; `total`: from the request to the identity |
//! | `dayfly_births_total` | `from` | births by what they began with: `clone` and `shell` were ready, `nothing` was, `boot` |
//! | `dayfly_death_seconds` | `phase` | from the request until the memory is `free`, until the process is `gone` |
//! | `dayfly_vms` | | VMs there are, those that have ended included |
//! | `dayfly_waiting` | | VMMs that wait for births |
//! | `dayfly_waiting_clones` | | of these, clones that only have to be let go |
//! | `dayfly_memory_reserved_bytes` | | memory that VMs may come to use |
//! | `dayfly_memory_budget_bytes` | | the most of it that they may have |

use crate::daemon::Daemon;
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::encoding::text::encode;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::{Registry, Unit};
use std::time::Duration;

/// The upper bounds of histograms, in seconds: 50 us to 100 s, three a decade.
const BOUNDS: [f64; 20] = [
    0.000_05, 0.000_1, 0.000_2, 0.000_5, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0,
    10.0, 20.0, 50.0, 100.0,
];

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Phase {
    phase: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct From {
    from: &'static str,
}

/// What a birth began with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Start {
    /// A primed clone.
    Clone,
    /// A shell.
    Shell,
    /// Nothing was ready.
    Nothing,
    /// A kernel.
    Boot,
}

/// A phase of a birth; each ends where the next begins.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Birth {
    /// The source is verified and open.
    Open,
    /// The VMM runs the guest.
    Run,
    /// The agent listens.
    Connect,
    /// It has its identity.
    Identity,
}

impl Birth {
    const fn name(self) -> &'static str {
        match self {
            Self::Open => "open",
            Self::Run => "run",
            Self::Connect => "connect",
            Self::Identity => "identity",
        }
    }
}

fn histogram() -> Histogram {
    Histogram::new(BOUNDS)
}

type Timed = Family<Phase, Histogram, fn() -> Histogram>;

/// All of it.
#[derive(Debug)]
pub struct Metrics {
    birth: Timed,
    births: Family<From, Counter>,
    death: Timed,
}

impl Default for Metrics {
    fn default() -> Self {
        Self {
            birth: Family::new_with_constructor(histogram),
            births: Family::default(),
            death: Family::new_with_constructor(histogram),
        }
    }
}

impl Metrics {
    /// A birth is done: its phases with the microseconds from the request at which each ended.
    pub fn birth(&self, start: Start, phases: &[(Birth, u64)]) {
        let mut before = 0;
        for (phase, us) in phases {
            self.observe(&self.birth, phase.name(), Duration::from_micros(us.saturating_sub(before)));
            before = *us;
        }
        self.observe(&self.birth, "total", Duration::from_micros(before));
        let from = match start {
            Start::Clone => "clone",
            Start::Shell => "shell",
            Start::Nothing => "nothing",
            Start::Boot => "boot",
        };
        self.births.get_or_create(&From { from }).inc();
    }

    /// A VM was ended on request: how long until its memory was free, and until its process was gone.
    pub fn death(&self, free: Duration, gone: Duration) {
        self.observe(&self.death, "free", free);
        self.observe(&self.death, "gone", gone);
    }

    #[expect(clippy::unused_self, reason = "reads as what it is")]
    fn observe(&self, timed: &Timed, phase: &'static str, took: Duration) {
        timed.get_or_create(&Phase { phase }).observe(took.as_secs_f64());
    }
}

/// Everything, as Prometheus reads it (OpenMetrics 1.0).
#[must_use]
pub fn text(daemon: &Daemon) -> String {
    let mut registry = Registry::with_prefix("dayfly");
    let metrics = &daemon.metrics;
    let seconds = || Unit::Seconds;
    registry.register_with_unit("birth", "Phases of births", seconds(), metrics.birth.clone());
    registry.register("births", "Births by what they began with", metrics.births.clone());
    registry.register_with_unit("death", "Phases of deaths", seconds(), metrics.death.clone());
    let bytes = |n: u64| ConstGauge::new(i64::try_from(n).unwrap_or(i64::MAX));
    let (reserved, budget) =
        daemon.budget.shares().into_iter().fold((0, 0), |sum: (u64, u64), (reserved, budget)| {
            (sum.0.saturating_add(reserved), sum.1.saturating_add(budget))
        });
    let count = |n: usize| ConstGauge::new(i64::try_from(n).unwrap_or(i64::MAX));
    registry.register("vms", "VMs there are", count(daemon.registry.len()));
    let (waiting, primed) = daemon.pool.waiting();
    registry.register("waiting", "VMMs that wait for births", count(waiting));
    registry.register("waiting_clones", "Of these, clones that only have to be let go", count(primed));
    registry.register_with_unit(
        "memory_reserved",
        "Memory that VMs may come to use",
        Unit::Bytes,
        bytes(reserved),
    );
    registry.register_with_unit(
        "memory_budget",
        "The most of it that they may have",
        Unit::Bytes,
        bytes(budget),
    );
    let mut text = String::new();
    // Writing to a String does not fail.
    let _ = encode(&mut text, &registry);
    text
}
