//! The metrics of the daemon.

use crate::daemon::Daemon;
use prometheus_client::encoding::text::encode;
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::registry::{Registry, Unit};

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
    let mut text = String::new();
    // Writing to a String does not fail.
    let _ = encode(&mut text, &registry);
    text
}
