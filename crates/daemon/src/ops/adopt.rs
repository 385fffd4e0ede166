//! Adoption at the start of a daemon: it decides for each VM that an earlier daemon left.
//!
//! ```text
//!  record, process ──decide──▶ Ask | Keep | MarkExited | Discard       before the API is served
//!  everything without a record ─▶ swept
//!
//!  Ask: the VM is listed as recorded ─ Status ─decide▶ Adopt | Resume | MarkExited  meanwhile
//! ```
//!
//! No VMM delays the API or another VM: a VMM may have been taken over by its guest, and then does
//! not answer, or byte by byte. The first half asks no VMM. The second asks all of them at the same
//! time, each with a deadline for the whole answer.

use crate::base::error::{ApiError, blocking};
use crate::daemon::Daemon;
use crate::model::disk::Disk;
use crate::model::exit::exit_now;
use crate::model::state::Phase;
use crate::net::Attachment;
use crate::ops::{interrupted, remove, save, sweep};
use crate::templates::pagers::{PAGER_NAME, end_with, pager_lives};
use crate::vm::Vm;
use crate::vm::batch;
use crate::vm::record::{self, Record, read_json};
use crate::vmm::{control_link, guest_socket};
use dayfly_api::types::ExitKind;
use dayfly_host::process::Process;
use dayfly_units::{VmId, error::chain};
use dayfly_vmm::control::{Answer, Command};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::Semaphore;
use tokio::task::JoinSet;

/// The most VMMs that are asked at the same time. A connection takes a descriptor.
const ASKED_AT_ONCE: usize = 1024;

/// What the daemon finds of a recorded VM.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Seen {
    /// Its process is gone.
    Gone,
    /// Its process lives; its VMM has not been asked yet.
    Lives,
    /// Its process lives, but its VMM does not answer.
    Unresponsive,
    /// Its VMM answers.
    Answers {
        /// Whether its vCPUs are stopped.
        paused: bool,
    },
}

/// What the daemon does with a recorded VM.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// List it as recorded, and ask its VMM.
    Ask,
    /// Adopt it in this phase.
    Adopt(Phase),
    /// A snapshot or a fork of it was interrupted: resume it and give it its identity again.
    Resume,
    /// List it as exited; kill its process if it has one.
    MarkExited,
    /// It was listed as exited, and stays so.
    Keep,
    /// Its client ended with the earlier daemon, or its start was never finished: remove
    /// everything.
    Discard,
}

/// Decides about a recorded VM, without I/O.
#[must_use]
pub fn decide(phase: Phase, ephemeral: bool, seen: Seen) -> Verdict {
    match (phase, seen) {
        _ if ephemeral => Verdict::Discard,
        (Phase::Starting, _) => Verdict::Discard,
        (Phase::Exited, _) => Verdict::Keep,
        (_, Seen::Gone | Seen::Unresponsive) => Verdict::MarkExited,
        (_, Seen::Lives) => Verdict::Ask,
        (Phase::Freezing | Phase::Forking, Seen::Answers { .. }) => Verdict::Resume,
        // The VMM's answer counts, because the daemon may have died between a command and its
        // record.
        (Phase::Running | Phase::Paused, Seen::Answers { paused: true }) => {
            Verdict::Adopt(Phase::Paused)
        }
        (Phase::Running | Phase::Paused, Seen::Answers { paused: false }) => {
            Verdict::Adopt(Phase::Running)
        }
    }
}

/// Adopts the VMs that live, and sweeps the rest. Must end before the daemon serves clients.
/// Returns the tasks that ask the VMMs, each with its VM's id; they need not end before.
pub async fn adopt(daemon: &Arc<Daemon>) -> JoinSet<VmId> {
    let mut ids: Vec<VmId> = match std::fs::read_dir(daemon.config.vms()) {
        Ok(entries) => entries.filter_map(|e| e.ok()?.file_name().to_str()?.parse().ok()).collect(),
        Err(e) => {
            tracing::error!("{}: {e}", daemon.config.vms().display());
            Vec::new()
        }
    };
    ids.sort_unstable();
    let unanswered = batch::unanswered(&daemon.config);
    let (mut asking, turns) = (JoinSet::new(), Arc::new(Semaphore::new(ASKED_AT_ONCE)));
    for id in ids {
        if unanswered.contains(&id) {
            tracing::info!(vm = %id, "one of several that no client learned of, to be swept");
            continue;
        }
        match Record::read(&daemon.config.vm(id), id) {
            Ok(record) => {
                if let Some(left) = one(daemon, record).await {
                    let (daemon, turns) = (daemon.clone(), turns.clone());
                    asking.spawn(async move {
                        let _turn = turns.acquire().await;
                        ask(&daemon, left).await;
                        id
                    });
                }
            }
            // Its start was not finished, or its removal was interrupted.
            Err(e) => tracing::info!(vm = %id, "no record, to be swept: {e}"),
        }
    }
    daemon.networks.adopted_all();
    let same = daemon.clone();
    // Only after every live VM has pinned its image and layers.
    let _ = blocking(move || {
        release_layers(&same);
        same.templates.collect();
        same.templates.collect_pages();
        Ok(())
    })
    .await;
    match sweep::sweep(daemon).await {
        Ok(swept) => {
            let (vms, swept) = (daemon.registry.len(), swept.len());
            tracing::info!(vms, swept, "adopted what a daemon before left");
            let swept = unanswered.iter().all(|id| !daemon.config.vm(*id).path().exists());
            if swept && let Err(e) = batch::forget(&daemon.config) {
                tracing::error!("forgetting unanswered requests: {e}");
            }
        }
        Err(error) => tracing::error!("sweeping what a daemon before left: {error}"),
    }
    asking
}

/// Releases the frozen layers that an earlier daemon's VMs had released. They are deleted now, or
/// with the last clone that uses them.
fn release_layers(daemon: &Daemon) {
    let (store, vms) = (daemon.templates.store(), daemon.registry.all());
    let of_the_living = vms.iter().filter_map(|vm| {
        let live = vm.live();
        // The layers of a VM with an interrupted snapshot are not known.
        let known = live.phase.alive() && live.no_snapshot.is_none();
        known.then(|| {
            store.keep_vm_layers(vm.id, &live.disks.iter().flat_map(Disk::own).collect::<Vec<_>>())
        })
    });
    let gone = |vm: &VmId| !daemon.registry.has(*vm);
    let of_the_gone =
        store.shared_layer_owners().into_iter().filter(gone).map(|vm| store.remove_vm(vm));
    for failed in of_the_living.chain(of_the_gone).filter_map(Result::err) {
        tracing::warn!("leaving layers of a VM: {}", chain(&failed));
    }
}

/// An adopted VM whose VMM has not been asked yet.
struct Left {
    vm: Arc<Vm>,
    process: Arc<Process>,
    /// The phase that was recorded.
    phase: Phase,
}

impl Left {
    /// Whether a snapshot or a fork of it was interrupted.
    const fn interrupted(&self) -> bool {
        matches!(self.phase, Phase::Freezing | Phase::Forking)
    }
}

/// Takes over a recorded VM as far as that is possible without its VMM. Returns the VM if its VMM
/// has to be asked.
async fn one(daemon: &Arc<Daemon>, record: Record) -> Option<Left> {
    let id = record.id;
    let dir = daemon.config.vm(id);
    let (phase, ephemeral) = (record.live.phase, record.facts.ephemeral);
    let process = living(&record);
    let seen = if process.is_some() { Seen::Lives } else { Seen::Gone };
    let verdict = decide(phase, ephemeral, seen);
    tracing::info!(vm = %id, name = %record.name, ?seen, ?verdict, "found");
    if verdict == Verdict::Discard {
        // The sweep kills its process and removes its files, because it is not in the registry.
        return None;
    }
    let exit = (verdict == Verdict::MarkExited)
        .then(|| remove::classify_exit(read_json(&dir.exit()), record.live.kill_asked));
    let vm: Vm = record.into_vm(dir);
    if let Some(exit) = exit {
        // It was just read from its record, so it has nothing whose drop takes time.
        drop(vm.ended(exit));
        vm.drop_slot();
    }
    if matches!(phase, Phase::Freezing | Phase::Forking) {
        // Whether its layers were frozen is unknown.
        vm.update(|live| live.no_snapshot = Some(INTERRUPTED.to_owned()));
    }
    if vm.phase().alive() {
        give_resources(daemon, &vm);
    }
    let vm = match daemon.registry.adopt(vm) {
        Ok(vm) => vm,
        // The sweep removes it.
        Err(e) => {
            tracing::error!(vm = %id, "cannot be adopted: {e}");
            return None;
        }
    };
    let process = process.filter(|_| verdict == Verdict::Ask);
    if let Some(process) = &process {
        follow(daemon, &vm, process.clone());
    }
    record::note(&daemon.registry, &vm).await;
    process.map(|process| Left { vm, process, phase })
}

/// The process of a recorded VM, if it lives.
fn living(record: &Record) -> Option<Arc<Process>> {
    match Process::open(record.live.process?) {
        Ok(process) => process.filter(|p| p.is_alive().unwrap_or(false)).map(Arc::new),
        Err(e) => {
            tracing::error!(vm = %record.id, "its process: {e}");
            None
        }
    }
}

/// Asks the VMM of an adopted VM for its status, and does what follows from the answer. Requests to
/// stop or to save the VM wait until then.
async fn ask(daemon: &Arc<Daemon>, left: Left) {
    let interrupted = left.interrupted();
    let Left { vm, process, phase } = left;
    // A snapshot or a fork that a client asks for meanwhile waits, because it would keep the VMM
    // from answering.
    let snapshots = vm.snapshots.lock().await;
    let deadlines = daemon.config.deadlines;
    // No operation has it before the VM's VMM was asked.
    let Ok(turn) = vm.take_turn(deadlines.save).await else { return };
    // A VMM that is saving answers only after the save.
    let within = if interrupted { deadlines.save } else { deadlines.control };
    let control = vm.dir.control();
    let answer = tokio::select! {
        answer = control_link::command(&control, Command::Status, within) => answer,
        () = vm.wait_gone() => return,
        () = daemon.stop.cancelled() => return,
    };
    let (seen, status) = match answer {
        Ok(Answer::Status(status)) => (Seen::Answers { paused: status.paused }, Some(status)),
        _ => (Seen::Unresponsive, None),
    };
    let whole = status.as_ref().is_none_or(|status| status.whole);
    let verdict = decide(phase, false, seen);
    tracing::info!(vm = %vm.id, name = %vm.name, ?seen, ?verdict, "asked");
    match verdict {
        Verdict::Adopt(phase) => vm.update(|live| {
            // It may have ended meanwhile.
            if live.phase.alive() {
                live.phase = phase;
            }
        }),
        Verdict::Resume => {
            if let Some(status) = &status {
                interrupted::settle(daemon, &vm, status).await;
            }
            // A failure is logged, and the VM is ended.
            let _ = save::thaw(daemon, &vm).await;
        }
        _ => end_unresponsive(&vm, &process),
    }
    record::note(&daemon.registry, &vm).await;
    drop((turn, snapshots));
    if !whole {
        tokio::spawn(watch_left(daemon.clone(), vm, process));
    }
}

/// Kills a VMM that does not answer. The task that watches the process marks the VM as exited.
fn end_unresponsive(vm: &Vm, process: &Process) {
    let why = "its VMM did not answer a new daemon, which ended it";
    vm.update(|live| {
        live.exit.get_or_insert_with(|| exit_now(ExitKind::Failed, why));
    });
    if let Err(e) = process.kill() {
        tracing::error!(vm = %vm.id, "ending a VMM that does not answer: {e}");
    }
}

/// Gives a live VM its network attachment, its memory and its pin again.
fn give_resources(daemon: &Daemon, vm: &Vm) {
    vm.attach(Attachment::adopt(&daemon.networks, vm.live().network, &vm.facts.network));
    vm.keep_memory(daemon.budget.adopt(vm.node, vm.facts.memory_bytes));
    match daemon.templates.pin(&vm.name, &vm.live().disks) {
        Ok(pin) => vm.keep_pinned(pin),
        // Its VMM has all files open; only snapshots need the pin.
        Err(error) => vm.update(|live| live.no_snapshot = Some(error.0.message)),
    }
}

/// Watches an adopted VM's process, and serves its guest's requests.
fn follow(daemon: &Arc<Daemon>, vm: &Arc<Vm>, process: Arc<Process>) {
    vm.hold(process.clone());
    remove::watch(daemon, vm.clone(), process);
    if vm.facts.fork.max_clones > 0 {
        match guest_socket::listen(vm) {
            Ok(listener) => daemon.serve_self_forks(vm.clone(), listener),
            Err(error) => {
                tracing::error!(vm = %vm.id, "it cannot fork itself any more: {error}");
            }
        }
    }
}

/// Why no snapshot can be taken of a VM any more.
const INTERRUPTED: &str = "the daemon ended in the middle of a snapshot or a fork of it";

/// Period at which [`watch_left`] asks a VMM whether its memory is complete.
const LOOK: Duration = Duration::from_secs(1);

/// Ends an adopted VM whose memory is incomplete if its pager does not live any more.
async fn watch_left(daemon: Arc<Daemon>, vm: Arc<Vm>, vmm: Arc<Process>) {
    let control = vm.dir.control();
    let mut answered = Instant::now();
    while !daemon.stop.is_cancelled() && !vm.is_gone() {
        let (pager, name) = (vm.live().pager, daemon.config.run.join(PAGER_NAME));
        let lives = blocking(move || {
            pager_lives(pager, &name)
                .map_err(|e| ApiError::internal(format_args!("looking for pagers: {e}")))
        });
        // The VMM is asked after this, because a pager may complete the memory and end in between.
        let lives = lives.await.unwrap_or(true);
        let deadlines = daemon.config.deadlines;
        let status = control_link::command(&control, Command::Status, deadlines.control).await;
        let (whole, silent) = match status {
            Ok(Answer::Status(status)) => {
                answered = Instant::now();
                (status.whole, false)
            }
            // The VMM is busy, or waits for a page.
            _ => (false, true),
        };
        match () {
            () if whole => return,
            () if !lives && (!silent || answered.elapsed() > deadlines.save) => {
                let cause = "the pager of its memory died while pages were missing, \
                             and no daemon was there";
                if let Err(e) = end_with(&vmm, &vm.dir.exit(), cause) {
                    tracing::error!(vm = %vm.id, "ending a VM without a pager: {e}");
                }
                return;
            }
            _ => tokio::time::sleep(LOOK).await,
        }
    }
}

#[cfg(test)]
#[path = "adopt_tests.rs"]
mod tests;
