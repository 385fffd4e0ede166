//! Adoption at the start of a daemon: it decides for each VM that an earlier daemon left.
//!
//! ```text
//!  record, process ──decide──▶ Ask | Keep | MarkExited | Discard       before the API is served
//!  record unreadable ─▶ kept and listed, not adopted ([`unadopted`])
//!  everything without a record ─▶ swept
//!
//!  Ask: the VM is listed as recorded ─ Status ─decide▶ Adopt | Resume | Wait     meanwhile
//!                                        ▲                             │
//!                                        └── asked again after a pause ┘
//! ```
//!
//! No VMM delays the API or another VM: a VMM may be stopped, swapped out or busy, or its guest may
//! have taken it over. The first half asks no VMM. The second asks all of them at the same time,
//! each with a time limit for the whole answer. No VMM is killed because it does not answer.

use crate::base::error::{ApiError, blocking};
use crate::base::groups::GroupLease;
use crate::base::time::monotonic_us;
use crate::daemon::Daemon;
use crate::model::disk::Disk;
use crate::model::facts::Facts;
use crate::model::state::Phase;
use crate::net::relay::Left;
use crate::ops::resources::{give_resources, keep_disks};
use crate::ops::{
    adopt_streams, classify, expiry, interrupted, own_program, packer, remove, save, space, sweep,
    unadopted, volumes,
};
use crate::templates::pagers::{PAGER_NAME, end_with, pager_lives};
use crate::vm::Vm;
use crate::vm::batch;
use crate::vm::bill::{Account, Bill, Vcpus};
use crate::vm::record::{self, Record, read_exit};
use crate::vm::survey::{self, Found, Unreadable};
use crate::vmm::{control_link, guest_socket};
use dayfly_api::types::EventKind;
use dayfly_host::process::Process;
use dayfly_units::text::{SHORT, escaped};
use dayfly_units::{VmId, error::chain};
use dayfly_vmm::control::{Answer, Command, Status};
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::Semaphore;
use tokio::task::JoinSet;

/// The most VMMs that are asked at the same time. A connection takes a descriptor.
const ASKED_AT_ONCE: usize = 1024;
/// The pauses before a VMM that did not answer is asked again: the first, then twice the one
/// before, up to the last.
const PAUSES: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(60));

/// What the daemon finds of a recorded VM.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Seen {
    /// Its process is gone.
    Gone,
    /// Its process lives; its VMM has not been asked yet.
    Lives,
    /// Its process lives, but its VMM has not answered, or with something else than a status.
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
    /// Leave it as recorded, and ask its VMM again later.
    Wait,
    /// List it as exited.
    MarkExited,
    /// It was listed as exited, and stays so.
    Keep,
    /// Its client ended with the earlier daemon, or its start was never finished, or it is not to
    /// stay when it has ended: remove everything.
    Discard,
}

/// How long a VM stays.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stays {
    /// As long as the connection or the bake that created it.
    WithItsClient,
    /// Until it has ended.
    UntilItsEnd,
    /// Until it is removed.
    UntilRemoved,
}

impl Stays {
    /// How long a VM with these facts stays.
    #[must_use]
    pub const fn of(facts: &Facts) -> Self {
        match (facts.ephemeral, facts.auto_remove) {
            (true, _) => Self::WithItsClient,
            (false, true) => Self::UntilItsEnd,
            (false, false) => Self::UntilRemoved,
        }
    }
}

/// Decides about a recorded VM, without I/O.
#[must_use]
pub fn decide(phase: Phase, stays: Stays, seen: Seen) -> Verdict {
    let ended = phase == Phase::Exited || seen == Seen::Gone;
    match (phase, seen) {
        _ if stays == Stays::WithItsClient => Verdict::Discard,
        _ if stays == Stays::UntilItsEnd && ended => Verdict::Discard,
        (Phase::Starting, _) => Verdict::Discard,
        (Phase::Exited | Phase::Unknown, _) => Verdict::Keep,
        (_, Seen::Gone) => Verdict::MarkExited,
        (_, Seen::Lives) => Verdict::Ask,
        (_, Seen::Unresponsive) => Verdict::Wait,
        (Phase::Freezing | Phase::Forking, Seen::Answers { .. }) => Verdict::Resume,
        // The VMM's answer counts, because the daemon may have died between a command and its
        // record.
        (Phase::Running | Phase::Paused, Seen::Answers { paused }) => {
            Verdict::Adopt(if paused { Phase::Paused } else { Phase::Running })
        }
    }
}

/// Adopts the VMs that live, and sweeps the rest. Must end before the daemon serves clients.
/// Returns the tasks that ask the VMMs, each with its VM's id. Each ends when its VMM has answered.
///
/// # Errors
/// The run folder cannot be listed; nothing was changed.
pub async fn adopt(daemon: &Arc<Daemon>) -> io::Result<JoinSet<VmId>> {
    let vms = daemon.config.vms();
    // First, because they take memory of VMs that live.
    blocking(move || Ok(packer::end_left(&vms))).await.map_err(io::Error::other)?;
    let same = daemon.clone();
    let found = blocking(move || Ok(survey::survey(&same.config))).await;
    let found = found.map_err(io::Error::other)??;
    let unanswered = batch::unanswered(&daemon.config);
    let vms = daemon.config.vms();
    let (mut relays, of_streams) = match found.is_empty() {
        true => (Left::default(), Vec::new()),
        false => blocking(move || Ok((Left::find(&vms), adopt_streams::left(&vms))))
            .await
            .unwrap_or_default(),
    };
    let (mut asking, turns) = (JoinSet::new(), Arc::new(Semaphore::new(ASKED_AT_ONCE)));
    let mut kept = Vec::new();
    for (id, found) in found {
        if unanswered.contains(&id) {
            tracing::info!(vm = %id, "one of several that no client learned of, to be swept");
            continue;
        }
        let left = match found {
            Found::Record(record) => one(daemon, *record, &mut relays).await,
            Found::Unreadable(left) => Err(left),
            Found::Nothing => {
                tracing::info!(vm = %id, "no record: its start was not finished, or its removal");
                continue;
            }
        };
        match left {
            Ok(Some(left)) => {
                asking.spawn(ask(daemon.clone(), left, turns.clone()));
            }
            Ok(None) => {}
            Err(left) => kept.push(left),
        }
    }
    // Last, because VMs with a readable record get their names, slots and addresses first.
    let same = daemon.clone();
    let keep = move || {
        kept.into_iter().for_each(|left| unadopted::keep(&same, *left, &mut relays));
        Ok(())
    };
    blocking(keep).await.map_err(io::Error::other)?;
    adopt_streams::adopt(daemon, of_streams);
    daemon.networks.adopted_all();
    daemon.groups.take_the_rest();
    let same = daemon.clone();
    // Only after every VM has pinned its image and layers.
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
    Ok(asking)
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
struct Unasked {
    vm: Arc<Vm>,
    process: Arc<Process>,
    /// The phase that was recorded.
    phase: Phase,
}

/// Takes over a recorded VM as far as that is possible without its VMM. Returns the VM if its VMM
/// has to be asked.
///
/// # Errors
/// The VM, if it cannot be adopted.
async fn one(
    daemon: &Arc<Daemon>,
    record: Record,
    relays: &mut Left,
) -> Result<Option<Unasked>, Box<Unreadable>> {
    let id = record.id;
    let dir = daemon.config.vm(id);
    let (phase, stays) = (record.live.phase, Stays::of(&record.facts));
    let process = match living(&record) {
        Ok(process) => process,
        Err(e) if stays != Stays::WithItsClient && phase.alive() => {
            return Err(Box::new(Unreadable::of(record, format!("its process: {e}"))));
        }
        Err(_) => None,
    };
    let seen = if process.is_some() { Seen::Lives } else { Seen::Gone };
    let verdict = decide(phase, stays, seen);
    tracing::info!(vm = %id, name = %record.name, ?seen, ?verdict, "found");
    if verdict == Verdict::Discard {
        // The sweep kills its process and removes its files, because it is not in the registry.
        return Ok(None);
    }
    let exit = (verdict == Verdict::MarkExited).then(|| {
        let (metered, ended) = read_exit(&dir.exit());
        let exit = classify::classify_exit(ended, record.live.kill_asked);
        (classify::classify_expired(exit, record.live.expired), metered)
    });
    let ended_us = written_us(&dir.exit());
    let of_this_boot = record.is_of_this_boot();
    let vmm = record.live.process.filter(|_| record.is_of_this_boot());
    let pid = process.as_ref().map(|process| process.id().pid);
    let group = record.group_in(&daemon.groups, pid);
    let limited = record.facts.limits.memory_max_bytes.is_some();
    let exit = exit.map(|(exit, metered)| {
        let usage = group.as_ref().and_then(GroupLease::usage);
        let exit = match record.uid {
            Some(uid) => classify::classify_memory(exit, vmm, uid, usage, limited),
            None => exit,
        };
        let account = Account::of(&record.live, Some(ended_us));
        Bill::new(usage.as_ref(), metered.as_ref(), Vcpus::AtLeast(0), account).close(exit)
    });
    let same = record.clone();
    let vm: Vm = record.into_vm(dir);
    vm.adopt_group(group);
    if let Some(exit) = exit {
        // It was just read from its record, so it has nothing whose drop takes time.
        drop(vm.ended(exit));
        vm.drop_slot();
    }
    if matches!(phase, Phase::Freezing | Phase::Forking) {
        // Whether its layers were frozen is unknown.
        vm.update(|live| live.no_snapshot = Some(INTERRUPTED.to_owned()));
    }
    if !of_this_boot {
        vm.update(|live| {
            live.no_snapshot.get_or_insert_with(|| REBOOTED.to_owned());
        });
    }
    let vm = daemon
        .registry
        .adopt(vm)
        .map_err(|e| Box::new(Unreadable::of(same, format!("it cannot be adopted: {e}"))))?;
    vm.adopt_cpus(pid.map(|_| &daemon.groups));
    if vm.phase().alive() {
        give_resources(daemon, &vm, relays.take(vm.id, vm.uid));
    } else {
        keep_disks(daemon, &vm);
    }
    if verdict == Verdict::MarkExited {
        vm.announce_end(|| daemon.happened(&vm, EventKind::Exited));
    }
    let process = process.filter(|_| verdict == Verdict::Ask);
    if let Some(process) = &process {
        follow(daemon, &vm, process.clone());
    }
    record::note(&daemon.registry, &vm).await;
    Ok(process.map(|process| Unasked { vm, process, phase }))
}

/// When the exit file was written last, in microseconds of `CLOCK_MONOTONIC`: the end of a VMM that
/// has left an exit record. Without one, it is the VMM's start, as what a VMM counts does not
/// change the time. 0 if it is not known.
fn written_us(exit: &Path) -> u64 {
    let written = std::fs::metadata(exit).and_then(|file| file.modified());
    // A time to come, after a change of the host's clock, is now.
    let age = written.map(|at| at.elapsed().unwrap_or_default());
    let age_us = age.map_or(u64::MAX, |age| u64::try_from(age.as_micros()).unwrap_or(u64::MAX));
    monotonic_us().saturating_sub(age_us)
}

/// The process of a recorded VM, if it lives.
fn living(record: &Record) -> io::Result<Option<Arc<Process>>> {
    let recorded = record.live.process.filter(|_| record.is_of_this_boot());
    Ok(recorded.map(survey::alive).transpose()?.flatten().map(Arc::new))
}

/// Asks the VMM of an adopted VM for its status until it answers, and does what follows. Returns
/// the VM's id.
///
/// Requests to stop or to save the VM wait while its VMM is asked for the first time. After that
/// they are refused until it has answered ([`Vm::answers`]).
async fn ask(daemon: Arc<Daemon>, left: Unasked, turns: Arc<Semaphore>) -> VmId {
    let Unasked { vm, process, phase } = left;
    let mut first = Some((vm.snapshots.clone().lock_owned().await, vm.turn().await));
    let (mut pause, longest) = PAUSES;
    loop {
        let answer = tokio::select! {
            answer = status(&daemon, &vm, &turns) => answer,
            () = vm.wait_gone() => break,
            () = daemon.stop.cancelled() => break,
        };
        match answer.and_then(|status| settled(phase, status)) {
            Ok(status) => {
                let locks = match first.take() {
                    Some(locks) => locks,
                    None => (vm.snapshots.clone().lock_owned().await, vm.turn().await),
                };
                settle(&daemon, &vm, phase, &status).await;
                drop(locks);
                if !status.whole {
                    tokio::spawn(watch_left(daemon, vm.clone(), process));
                }
                break;
            }
            Err(why) => {
                let verdict = decide(phase, Stays::UntilRemoved, Seen::Unresponsive);
                tracing::warn!(vm = %vm.id, name = %vm.name, ?verdict, "its VMM: {why}");
                vm.wait_for_vmm(Some(why));
            }
        }
        drop(first.take());
        tokio::select! {
            () = tokio::time::sleep(pause) => {}
            () = vm.wait_gone() => break,
            () = daemon.stop.cancelled() => break,
        }
        pause = pause.saturating_mul(2).min(longest);
    }
    vm.id
}

/// The status that the VMM reports.
///
/// # Errors
/// It reports none within the time limit, or something else.
async fn status(daemon: &Daemon, vm: &Vm, turns: &Semaphore) -> Result<Status, String> {
    let _turn = turns.acquire().await;
    let within = daemon.config.deadlines.control;
    match control_link::command(&vm.dir.control(), Command::Status, within).await {
        Ok(Answer::Status(status)) => Ok(status),
        Ok(other) => {
            Err(format!("expected its status, got {}", escaped(&format!("{other:?}"), SHORT)))
        }
        Err(e) => Err(e.to_string()),
    }
}

/// The status, if the VMM has carried out all commands of the daemon before.
fn settled(phase: Phase, status: Status) -> Result<Status, String> {
    match status.busy.filter(|_| matches!(phase, Phase::Freezing | Phase::Forking)) {
        Some(busy) => Err(format!("it is still busy with {busy:?}")),
        None => Ok(status),
    }
}

/// Takes over the state that the VMM reports. The caller holds the VM's locks.
async fn settle(daemon: &Arc<Daemon>, vm: &Arc<Vm>, phase: Phase, status: &Status) {
    let seen = Seen::Answers { paused: status.paused };
    let verdict = decide(phase, Stays::UntilRemoved, seen);
    tracing::info!(vm = %vm.id, name = %vm.name, ?seen, ?verdict, "asked");
    match verdict {
        Verdict::Adopt(phase) => vm.update(|live| {
            // It may have ended meanwhile.
            if live.phase.alive() {
                live.phase = phase;
            }
        }),
        Verdict::Resume => {
            interrupted::settle(daemon, vm, status).await;
            // A failure is logged, and the VM is ended.
            let _ = save::thaw(daemon, vm).await;
        }
        _ => {}
    }
    vm.wait_for_vmm(None);
    space::noticed(vm, None, status.no_space);
    record::note(&daemon.registry, vm).await;
}

/// Watches an adopted VM's process, and serves its guest's requests.
fn follow(daemon: &Arc<Daemon>, vm: &Arc<Vm>, process: Arc<Process>) {
    vm.hold(process.clone());
    vm.connect_ports(&daemon.config);
    remove::watch(daemon, vm.clone(), process);
    expiry::watch(daemon, vm);
    own_program::watch(daemon, vm);
    volumes::follow(daemon, vm);
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

/// Why a VM of an earlier boot of the host cannot be started: what its VMM wrote last may be lost.
const REBOOTED: &str = "the host has started again since, and its layers were not synced before";

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
                if let Err(e) = end_with(&vmm, &vm.dir.exit(), cause, &daemon.groups) {
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
