//! Counters and histograms, in Prometheus' text format at `/metrics`.
//!
//! - `dayfly_create_seconds`, by `phase`: from one phase of a creation to the next; `total`: from
//!   the request to the identity
//! - `dayfly_created_total`, by `from`: created VMs by what they started with: `clone`,
//!   `warm_vmm`, `nothing` (neither was ready), `boot`
//! - `dayfly_destroy_seconds`, by `phase`: from the request until the memory is `free`, until the
//!   process is `gone`
//! - `dayfly_copied_layers_total`: frozen layers that were copied because a process could still
//!   write to them
//! - `dayfly_vms`: VMs, those that have ended included
//! - `dayfly_waiting`: warm VMMs and warm clones that wait for a VM
//! - `dayfly_waiting_clones`: of these, warm clones
//! - `dayfly_memory_reserved_bytes`: memory reserved for VMs
//! - `dayfly_memory_budget_bytes`: the most memory that may be reserved
//! - `dayfly_vm_cpu_seconds_total`, by `vm` and `name`: CPU time of each VM that lives, since its
//!   last start, from its control group
//! - `dayfly_vm_memory_bytes`, by `vm` and `name`: memory that is charged to it
//! - `dayfly_vm_disk_bytes_total`, `dayfly_vm_disk_requests_total`, by `what` (`read`, `written`):
//!   what the guest of each VM that lives has moved to and from its disks, since its last start
//! - `dayfly_vm_network_bytes_total`, `dayfly_vm_network_packets_total`, by `what` (`received`,
//!   `sent`): the same of its network device

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::{Registry, Unit};
use std::time::Duration;

/// Upper bounds of the histograms' buckets, in seconds: 50 us to 100 s, three a decade.
const BOUNDS: [f64; 20] = [
    0.000_05, 0.000_1, 0.000_2, 0.000_5, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0,
    2.0, 5.0, 10.0, 20.0, 50.0, 100.0,
];

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Phase {
    phase: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct From {
    from: &'static str,
}

/// What a VM was started with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Start {
    /// A warm clone.
    Clone,
    /// A warm VMM.
    WarmVmm,
    /// A VMM made for this request, because none was ready.
    Nothing,
    /// A kernel, which the guest boots.
    Boot,
}

/// A phase of the creation of a VM; each ends where the next begins.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CreatePhase {
    /// Until the source is verified and open.
    Open,
    /// Until the VMM runs the guest.
    Run,
    /// Until the agent accepts a connection.
    Connect,
    /// Until the agent has its identity.
    Identity,
}

impl CreatePhase {
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

/// The daemon's counters and histograms.
#[derive(Debug)]
pub struct Metrics {
    create: Timed,
    created: Family<From, Counter>,
    destroy: Timed,
    copied_layers: Counter,
}

impl Default for Metrics {
    fn default() -> Self {
        Self {
            create: Family::new_with_constructor(histogram),
            created: Family::default(),
            destroy: Family::new_with_constructor(histogram),
            copied_layers: Counter::default(),
        }
    }
}

impl Metrics {
    /// Registers all metrics of this struct.
    pub fn register(&self, registry: &mut Registry) {
        let seconds = || Unit::Seconds;
        registry.register_with_unit(
            "create",
            "Phases of the creation of a VM",
            seconds(),
            self.create.clone(),
        );
        registry.register(
            "created",
            "Created VMs by what they were made from",
            self.created.clone(),
        );
        registry.register_with_unit(
            "destroy",
            "Phases of the end of a VM",
            seconds(),
            self.destroy.clone(),
        );
        registry.register(
            "copied_layers",
            "Frozen layers that were copied because a process could still write to them",
            self.copied_layers.clone(),
        );
    }

    /// Counts a frozen layer that was copied because a process could still write to it.
    pub fn copied_layer(&self) {
        self.copied_layers.inc();
    }

    /// Counts a created VM. `phases` have the microseconds from the request at which each ended.
    pub fn created(&self, start: Start, phases: &[(CreatePhase, u64)]) {
        let mut before = 0;
        for (phase, us) in phases {
            self.observe(
                &self.create,
                phase.name(),
                Duration::from_micros(us.saturating_sub(before)),
            );
            before = *us;
        }
        self.observe(&self.create, "total", Duration::from_micros(before));
        let from = match start {
            Start::Clone => "clone",
            Start::WarmVmm => "warm_vmm",
            Start::Nothing => "nothing",
            Start::Boot => "boot",
        };
        self.created.get_or_create(&From { from }).inc();
    }

    /// Counts a VM that was destroyed on request: the time until its memory was free, and until its
    /// process was gone.
    pub fn destroyed(&self, free: Duration, gone: Duration) {
        self.observe(&self.destroy, "free", free);
        self.observe(&self.destroy, "gone", gone);
    }

    #[expect(clippy::unused_self, reason = "reads as what it is")]
    fn observe(&self, timed: &Timed, phase: &'static str, took: Duration) {
        timed.get_or_create(&Phase { phase }).observe(took.as_secs_f64());
    }
}
