//! Looks at the memory of all VMs now and then, for their bills
//! ([`MemoryTime`](crate::model::memory_time::MemoryTime)).

use crate::base::error::blocking;
use crate::base::time::monotonic_us;
use crate::daemon::Daemon;
use crate::model::memory_time::MemoryTime;
use crate::vm::{Vm, record};
use std::sync::Arc;
use std::time::Duration;

/// How often. For 2,000 VMs a look reads 4,000 files of the kernel and writes 2,000 records.
const PERIOD: Duration = Duration::from_secs(60);

/// Looks until the daemon ends.
pub async fn keep(daemon: Arc<Daemon>) {
    loop {
        tokio::select! {
            () = tokio::time::sleep(PERIOD) => {}
            () = daemon.stop.cancelled() => return,
        }
        for vm in daemon.registry.all() {
            look(&daemon, &vm).await;
        }
    }
}

/// Looks at the memory of one VM, if it lives and has a control group. What is shown changes after
/// the record, so that the next daemon never knows less.
pub(super) async fn look(daemon: &Daemon, vm: &Arc<Vm>) {
    if !vm.phase().alive() {
        return;
    }
    let same = vm.clone();
    let usage = blocking(move || Ok(same.usage())).await.ok().flatten();
    let Some(bytes) = usage.and_then(|usage| usage.memory_bytes) else { return };
    let now_us = monotonic_us();
    let next = vm.update(|live| match live.memory_time {
        Some(before) => Some(before.then(now_us, bytes)),
        None => live.asked_us.map(|since_us| MemoryTime::first(since_us, now_us, bytes)),
    });
    // Not now, if another task writes the record or removes the VM: one VM delays no other.
    record::change(&daemon.registry, vm, move |live| live.memory_time = next).await;
}
