//! The metrics of the daemon.

use crate::daemon::Daemon;
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::encoding::text::encode;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::{ConstGauge, Gauge};
use prometheus_client::registry::{Registry, Unit};
use std::sync::atomic::AtomicU64;
use std::time::Duration;

/// Which VM a figure belongs to.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct OfVm {
    vm: String,
    name: String,
}

/// Seconds of CPU time.
type Seconds = Counter<f64, AtomicU64>;

/// Registers what each VM that lives has taken from the host (Closer, section IV-B: all work for a
/// VM is charged to it).
fn bills(daemon: &Daemon, registry: &mut Registry) {
    let (cpu, memory) = (Family::<OfVm, Seconds>::default(), Family::<OfVm, Gauge>::default());
    for vm in daemon.registry.all() {
        let Some(usage) = vm.usage() else { continue };
        let of = OfVm { vm: vm.id.to_string(), name: vm.name.to_string() };
        if let Some(time) = usage.cpu {
            cpu.get_or_create(&of).inc_by(Duration::from_micros(time.all_us).as_secs_f64());
        }
        if let Some(bytes) = usage.memory_bytes {
            memory.get_or_create(&of).set(i64::try_from(bytes).unwrap_or(i64::MAX));
        }
    }
    let (seconds, bytes) = (Unit::Seconds, Unit::Bytes);
    registry.register_with_unit("vm_cpu", "CPU time that VMs have taken", seconds, cpu);
    registry.register_with_unit("vm_memory", "Memory that is charged to VMs", bytes, memory);
}

/// All metrics in the text format of OpenMetrics 1.0.
#[must_use]
pub fn text(daemon: &Daemon) -> String {
    let mut registry = Registry::with_prefix("dayfly");
    daemon.metrics.register(&mut registry);
    let bytes = |n: u64| ConstGauge::new(i64::try_from(n).unwrap_or(i64::MAX));
    let (reserved, budget) =
        daemon.budget.shares().into_iter().fold((0, 0), |sum: (u64, u64), (reserved, budget)| {
            (sum.0.saturating_add(reserved), sum.1.saturating_add(budget))
        });
    let count = |n: usize| ConstGauge::new(i64::try_from(n).unwrap_or(i64::MAX));
    registry.register("vms", "VMs there are", count(daemon.registry.len()));
    let (waiting, warm_clones) = daemon.pool.waiting();
    registry.register("waiting", "VMMs that wait for a VM", count(waiting));
    registry.register(
        "waiting_clones",
        "Of these, clones that only have to be resumed",
        count(warm_clones),
    );
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
    bills(daemon, &mut registry);
    let mut text = String::new();
    // Writing to a String does not fail.
    let _ = encode(&mut text, &registry);
    text
}
