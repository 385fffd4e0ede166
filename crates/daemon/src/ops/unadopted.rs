//! VMs of an earlier daemon that this daemon cannot adopt: it keeps and lists them, and no more.
//!
//! Nothing of such a VM is given to others or deleted until a client removes the VM: its process,
//! run folder, user, address and layers. A daemon that can read the record adopts the VM later.

use crate::daemon::Daemon;
use crate::model::exit::exit_now;
use crate::model::facts::{Facts, ForkFacts};
use crate::model::live::Live;
use crate::model::state::Phase;
use crate::model::vm_slot::VmSlot;
use crate::net::Attachment;
use crate::net::relay::Left;
use crate::ops::{classify, expiry, remove};
use crate::vm::Vm;
use crate::vm::record::read_exit;
use crate::vm::registry::id_as_name;
use crate::vm::survey::{Traces, Unreadable};
use dayfly_api::types::{ExitKind, NetworkRequest, VmExit, VmNetwork};
use dayfly_host::cpus::CpuList;
use dayfly_host::memory;
use dayfly_host::process::{Process, uid_of};
use dayfly_store::{Digest, KernelRef};
use dayfly_units::text::{LONG, escaped};
use dayfly_units::{CpuModel, Name, VmId};
use std::sync::Arc;
use std::time::UNIX_EPOCH;

/// Keeps a VM that cannot be adopted. If the VM's process is gone, or has never existed, the VM is
/// listed as exited. `relays` are those that the daemon before has left.
pub(super) fn keep(daemon: &Arc<Daemon>, mut left: Unreadable, relays: &mut Left) {
    let id = left.id;
    let (process, lives) = match left.vmm(&daemon.config) {
        Ok(process) => (process.map(Arc::new), None),
        Err(e) => {
            left.why += &format!("; the host does not say whether its process lives: {e}");
            (None, Some(true))
        }
    };
    let lives = lives.unwrap_or(process.is_some());
    let network = left.network(&daemon.config, process.as_deref()).filter(|_| lives);
    let Unreadable { why, traces, .. } = left;
    let problem = escaped(&why, LONG).to_string();
    let exit = (!lives).then(|| ended(daemon, id, &problem));
    let (network, asked) = network.unzip();
    let images = traces.disks.iter().map(|disk| disk.image.name.clone()).collect();
    let vm = vm(daemon, id, traces, problem, process.as_deref(), network.clone(), exit);
    let vm = match daemon.registry.keep(vm) {
        Ok(vm) => vm,
        Err(e) => {
            tracing::error!(vm = %id, "cannot be kept: {e}");
            return;
        }
    };
    tracing::error!(vm = %id, name = %vm.name, lives, "not adopted: {why}");
    // Also if it has ended, because a daemon that can read its record may start it again.
    vm.keep_pinned(daemon.templates.store().pin_every_layer(&format!("VM {}", vm.name), images));
    if !lives {
        return;
    }
    let (asked, relay) = (asked.unwrap_or_default(), relays.take(vm.id, vm.uid));
    vm.attach(Attachment::adopt(&daemon.networks, network, &asked, relay));
    let resident = process.as_ref().and_then(|process| memory::of(process.id().pid).ok());
    let resident_bytes = resident.map_or(0, |memory| memory.rss_kib << 10);
    vm.keep_memory(daemon.budget.adopt(vm.node, vm.facts.memory_bytes.max(resident_bytes)));
    expiry::watch(daemon, &vm);
    if let Some(process) = process {
        vm.hold(process.clone());
        vm.connect_ports(&daemon.config);
        remove::watch(daemon, vm, process);
    }
}

/// Why such a VM ended: the exit record says so, if it can be read.
fn ended(daemon: &Daemon, id: VmId, problem: &str) -> VmExit {
    let exit = classify::classify_exit(read_exit(&daemon.config.vm(id).exit()).1, false);
    if exit.reason == ExitKind::Lost { exit_now(ExitKind::Lost, problem) } else { exit }
}

fn vm(
    daemon: &Daemon,
    id: VmId,
    traces: Traces,
    problem: String,
    process: Option<&Process>,
    network: Option<VmNetwork>,
    exit: Option<VmExit>,
) -> Vm {
    let dir = daemon.config.vm(id);
    let uid = process.and_then(|process| uid_of(process.id().pid).ok());
    let slot = uid.and_then(|uid| daemon.registry.slot_of(uid));
    let created = std::fs::metadata(dir.record()).and_then(|meta| meta.modified());
    let created = created.ok().and_then(|time| time.duration_since(UNIX_EPOCH).ok());
    let created_unix_ms =
        created.and_then(|since| u64::try_from(since.as_millis()).ok()).unwrap_or_default();
    let live = Live {
        phase: if exit.is_some() { Phase::Exited } else { Phase::Unknown },
        exit,
        kill_asked: false,
        ready_us: None,
        creation_us: 0,
        relays_us: 0,
        memory_time: None,
        timeline: Vec::new(),
        asked_us: None,
        process: None,
        cpus: CpuList::default(),
        starts_vcpus: false,
        cpus_online: None,
        pager: None,
        identity: None,
        network,
        volumes: Vec::new(),
        agent_version: String::new(),
        disks: traces.disks,
        read_only_layers: false,
        zeroes_written: false,
        deadline: traces.deadline,
        expired: false,
        group: None,
        program: None,
        no_snapshot: Some(problem.clone()),
    };
    // A bake's VM or a `run` without `--keep` has no record.
    let facts = Facts {
        ephemeral: false,
        ..traces.facts.unwrap_or_else(|| unknown_facts(created_unix_ms))
    };
    let name = traces.name.unwrap_or_else(|| id_as_name(id));
    let vm_slot =
        VmSlot { id, slot: slot.unwrap_or_default(), uid: uid.unwrap_or_default(), node: 0 };
    let mut vm = Vm::with(vm_slot, name, dir, facts, live);
    if slot.is_none() {
        vm.drop_slot();
    }
    vm.unadopted = Some(problem);
    vm
}

fn unknown_facts(created_unix_ms: u64) -> Facts {
    Facts {
        snapshot: None,
        ancestors: Vec::new(),
        fork: ForkFacts::default(),
        image: unknown(),
        kernel: KernelRef { name: unknown(), release: String::new(), digest: Digest([0; 32]) },
        vcpus: 0,
        max_vcpus: 0,
        cpu_model: CpuModel::Host,
        memory_bytes: 0,
        nets: 0,
        created_unix_ms,
        network: NetworkRequest::default(),
        config: Default::default(),
        init: None,
        ephemeral: false,
        auto_remove: false,
        labels: Default::default(),
        volumes: Vec::new(),
        limits: Default::default(),
        request: None,
    }
}

/// Shown for names that a record does not give.
#[expect(clippy::expect_used, reason = "locally proven: letters are a name")]
fn unknown() -> Name {
    "unknown".parse().expect("letters are a name")
}

#[cfg(test)]
#[path = "unadopted_tests.rs"]
mod tests;
