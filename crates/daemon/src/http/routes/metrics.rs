//! The metrics of the daemon.

use crate::daemon::Daemon;
use crate::vm::bill::Bill;
use dayfly_api::types::DiskTraffic;
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

/// Which VM a figure belongs to, and what it counts: `read` or `written`, `received` or `sent`.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Moved {
    vm: String,
    name: String,
    what: &'static str,
}

/// Seconds of CPU time.
type Seconds = Counter<f64, AtomicU64>;

/// Registers what each VM that lives has taken from the host (Closer, section IV-B: all work for a
/// VM is charged to it).
fn bills(daemon: &Daemon, registry: &mut Registry) {
    let (cpu, memory) = (Family::<OfVm, Seconds>::default(), Family::<OfVm, Gauge>::default());
    let traffic = Traffic::default();
    for vm in daemon.registry.all().iter().filter(|vm| vm.phase().alive()) {
        let bill = vm.bill();
        let of = OfVm { vm: vm.id.to_string(), name: vm.name.to_string() };
        if let Some(usage) = bill.usage {
            cpu.get_or_create(&of).inc_by(Duration::from_micros(usage.cpu_us).as_secs_f64());
        }
        // A v1 without cpuacct counts memory and no CPU time.
        let bytes = match bill.usage {
            Some(usage) => usage.memory_bytes,
            None => vm.usage().and_then(|usage| usage.memory_bytes),
        };
        if let Some(bytes) = bytes {
            memory.get_or_create(&of).set(i64::try_from(bytes).unwrap_or(i64::MAX));
        }
        traffic.add(&of, &bill);
    }
    let (seconds, bytes) = (Unit::Seconds, || Unit::Bytes);
    registry.register_with_unit("vm_cpu", "CPU time that VMs have taken", seconds, cpu);
    registry.register_with_unit("vm_memory", "Memory that is charged to VMs", bytes(), memory);
    let Traffic { disk_bytes, disk_requests, net_bytes, net_packets } = traffic;
    registry.register_with_unit("vm_disk", "Bytes that disks have moved", bytes(), disk_bytes);
    registry.register("vm_disk_requests", "Requests that disks have served", disk_requests);
    registry.register_with_unit("vm_network", "Bytes of packets", bytes(), net_bytes);
    registry.register("vm_network_packets", "Packets that guests had", net_packets);
}

/// What guests have moved through their devices.
#[derive(Default)]
struct Traffic {
    disk_bytes: Family<Moved, Counter>,
    disk_requests: Family<Moved, Counter>,
    net_bytes: Family<Moved, Counter>,
    net_packets: Family<Moved, Counter>,
}

impl Traffic {
    fn add(&self, of: &OfVm, bill: &Bill) {
        let add = |to: &Family<Moved, Counter>, what, n| {
            let OfVm { vm, name } = of.clone();
            to.get_or_create(&Moved { vm, name, what }).inc_by(n);
        };
        let sum =
            |of: fn(&DiskTraffic) -> u64| bill.disks.iter().map(of).fold(0, u64::saturating_add);
        if !bill.disks.is_empty() {
            add(&self.disk_bytes, "read", sum(|disk| disk.read_bytes));
            add(&self.disk_bytes, "written", sum(|disk| disk.written_bytes));
            add(&self.disk_requests, "read", sum(|disk| disk.reads));
            add(&self.disk_requests, "written", sum(|disk| disk.writes));
        }
        if let Some(net) = bill.net {
            add(&self.net_bytes, "received", net.received_bytes);
            add(&self.net_bytes, "sent", net.sent_bytes);
            add(&self.net_packets, "received", net.received_packets);
            add(&self.net_packets, "sent", net.sent_packets);
        }
    }
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
