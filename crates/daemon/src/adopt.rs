//! A daemon starts: which VMs of the one before live on, and which are buried.
//!
//! ```text
//!  record, process, control socket ──decide──▶ Adopt | Bury | Discard
//!  everything that no record tells of ───────▶ swept
//! ```

use crate::daemon::Daemon;
use crate::door;
use crate::error::chain;
use crate::net::Wires;
use crate::vm::record::{Record, read_json};
use crate::vm::state::Phase;
use crate::vm::{Disk, Vm, control_link, death, exit_now, identity};
use crate::{pagers, sweep, vm};
use dayfly_api::types::{ExitKind, VmExit};
use dayfly_host::process::Process;
use dayfly_units::VmId;
use dayfly_vmm::control::{Answer, Command};
use std::sync::Arc;
use std::time::Duration;

/// What is found of a recorded VM.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Seen {
    /// Its process is gone.
    Gone,
    /// Its process lives; the control socket does not answer.
    Mute,
    /// It answers.
    Answers {
        /// Its vCPUs are stopped.
        paused: bool,
    },
}

/// What becomes of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// It lives on, in this phase.
    Adopt(Phase),
    /// A snapshot or a fork of it was cut off: let it go on and give it its identity again.
    Thaw,
    /// It is listed as exited; its process is ended where there is one.
    Bury,
    /// It was listed as exited, and stays so.
    Keep,
    /// Its client is gone with the daemon, or its start was never finished: nothing of it stays.
    Discard,
}

/// Decides; no I/O.
#[must_use]
pub fn decide(phase: Phase, ephemeral: bool, seen: Seen) -> Verdict {
    match (phase, seen) {
        _ if ephemeral => Verdict::Discard,
        (Phase::Starting, _) => Verdict::Discard,
        (Phase::Exited, _) => Verdict::Keep,
        (_, Seen::Gone | Seen::Mute) => Verdict::Bury,
        (Phase::Freezing | Phase::Forking, Seen::Answers { .. }) => Verdict::Thaw,
        // The VMM knows better: the daemon may have died between a command and its record.
        (Phase::Running | Phase::Paused, Seen::Answers { paused: true }) => Verdict::Adopt(Phase::Paused),
        (Phase::Running | Phase::Paused, Seen::Answers { paused: false }) => Verdict::Adopt(Phase::Running),
    }
}

/// Adopts what lives, sweeps the rest. Done before the daemon serves anybody.
pub async fn adopt(daemon: &Arc<Daemon>) {
    let mut ids: Vec<VmId> = match std::fs::read_dir(daemon.config.vms()) {
        Ok(entries) => entries.filter_map(|e| e.ok()?.file_name().to_str()?.parse().ok()).collect(),
        Err(e) => {
            tracing::error!("{}: {e}", daemon.config.vms().display());
            Vec::new()
        }
    };
    ids.sort_unstable();
    for id in ids {
        match Record::read(&daemon.config.vm(id), id) {
            Ok(record) => one(daemon, record).await,
            // Its start was not finished, or it was being removed.
            Err(e) => tracing::info!(vm = %id, "no record, to be swept: {e}"),
        }
    }
    let same = daemon.clone();
    // After everything that lives has pinned what it stands on.
    let _ = crate::error::blocking(move || {
        let_layers_go(&same);
        same.depot.collect();
        same.depot.collect_pages();
        Ok(())
    })
    .await;
    match sweep::sweep(daemon).await {
        Ok(swept) => tracing::info!(
            vms = daemon.registry.len(),
            swept = swept.len(),
            "adopted what a daemon before left"
        ),
        Err(fault) => tracing::error!("sweeping what a daemon before left: {fault}"),
    }
}

/// Layers that VMs had frozen for their forks, and had let go when the daemon ended: they go now, or with the last clone that stands on them.
fn let_layers_go(daemon: &Daemon) {
    let (store, vms) = (daemon.depot.store(), daemon.registry.all());
    let of_the_living = vms.iter().filter_map(|vm| {
        let live = vm.live();
        // Of one that was cut off it is not known what it has.
        let known = live.phase.alive() && live.no_snapshot.is_none();
        known.then(|| store.keep_vm_layers(vm.id, &live.disks.iter().flat_map(Disk::own).collect::<Vec<_>>()))
    });
    let gone = |vm: &VmId| !daemon.registry.has(*vm);
    let of_the_gone = store.held_vms().into_iter().filter(gone).map(|vm| store.remove_vm(vm));
    for failed in of_the_living.chain(of_the_gone).filter_map(Result::err) {
        tracing::warn!("leaving layers of a VM: {}", chain(&failed));
    }
}

async fn one(daemon: &Arc<Daemon>, record: Record) {
    let id = record.id;
    let dir = daemon.config.vm(id);
    let (phase, ephemeral) = (record.live.phase, record.facts.ephemeral);
    let process = match record.live.process.map(Process::open) {
        Some(Ok(process)) => process.map(Arc::new),
        Some(Err(e)) => {
            tracing::error!(vm = %id, "its process: {e}");
            None
        }
        None => None,
    };
    let alive = process.as_ref().is_some_and(|p| p.is_alive().unwrap_or(false));
    let mut whole = true;
    let seen = if alive {
        // A VMM that is saving answers when it has saved.
        let deadlines = daemon.config.deadlines;
        let within = if matches!(phase, Phase::Freezing | Phase::Forking) {
            deadlines.save
        } else {
            deadlines.control
        };
        match control_link::command(&dir.control(), Command::Status, within).await {
            Ok(Answer::Status(status)) => {
                whole = status.whole;
                Seen::Answers { paused: status.paused }
            }
            _ => Seen::Mute,
        }
    } else {
        Seen::Gone
    };
    let verdict = decide(phase, ephemeral, seen);
    tracing::info!(vm = %id, name = %record.name, ?seen, ?verdict, "found");
    if verdict == Verdict::Discard {
        // The sweep ends its process and removes its files: nobody knows it.
        return;
    }
    let exit: Option<VmExit> = (verdict == Verdict::Bury).then(|| match seen {
        Seen::Mute => exit_now(ExitKind::Failed, "its VMM did not answer a new daemon, which ended it"),
        _ => death::judge(read_json(&dir.exit()), record.live.kill_asked),
    });
    let vm: Vm = record.into_vm(dir);
    if let Some(exit) = exit {
        if let Some(process) = &process
            && alive
        {
            let ended = process.kill().and_then(|()| process.wait(Some(Duration::from_secs(10))));
            tracing::info!(vm = %id, ?ended, "ended a VMM that does not answer");
        }
        vm.ended(exit);
        vm.drop_slot();
    }
    if let Verdict::Adopt(phase) = verdict {
        vm.update(|live| live.phase = phase);
    }
    if vm.phase().alive() {
        vm.wire(Wires::adopt(daemon, vm.live().network));
        vm.keep_memory(daemon.budget.adopt(vm.node, vm.facts.memory_bytes));
        match daemon.depot.pin(&vm.name, &vm.live().disks) {
            Ok(pin) => vm.keep_pinned(pin),
            // It has everything open; only its next snapshot would have nothing to stand on.
            Err(fault) => vm.update(|live| live.no_snapshot = Some(fault.0.message)),
        }
    }
    let vm = match daemon.registry.adopt(vm) {
        Ok(vm) => vm,
        // Left to the sweep.
        Err(e) => return tracing::error!(vm = %id, "cannot be adopted: {e}"),
    };
    if let (Verdict::Adopt(_) | Verdict::Thaw, Some(process)) = (verdict, process) {
        vm.hold(process.clone());
        death::watch(daemon, vm.clone(), process.clone());
        if vm.facts.fork.may > 0
            && let Err(fault) = door::open(daemon, &vm)
        {
            tracing::error!(vm = %id, "it cannot fork itself any more: {fault}");
        }
        if !whole {
            tokio::spawn(pagers::watch_left(daemon.clone(), vm.clone(), process));
        }
    }
    if verdict == Verdict::Thaw {
        thaw(daemon, &vm).await;
    }
    death::note(daemon, &vm).await;
}

/// A snapshot or a fork was cut off. Whether its layer was frozen is not known, so the VM lives on without further snapshots.
async fn thaw(daemon: &Arc<Daemon>, vm: &Arc<vm::Vm>) {
    let why = "the daemon ended in the middle of a snapshot or a fork of it";
    vm.update(|live| live.no_snapshot = Some(why.to_owned()));
    let deadlines = daemon.config.deadlines;
    let result = async {
        control_link::done(&vm.dir.control(), Command::Resume, deadlines.control)
            .await
            .map_err(|e| e.to_string())?;
        identity::give(daemon, vm, None, || ()).await.map_err(|e| e.to_string())?;
        vm.step(vm::state::Event::Thaw).map_err(|e| e.to_string())
    };
    if let Err(e) = result.await {
        tracing::error!(vm = %vm.id, "{why}, and it cannot go on: {e}");
        if let Err(e) = death::kill(daemon, vm).await {
            tracing::error!(vm = %vm.id, "{e}");
        }
    }
}

#[cfg(test)]
#[path = "adopt_tests.rs"]
mod tests;
