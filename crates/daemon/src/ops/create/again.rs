//! Starts a VM that has ended: it boots from its own disks, under its id and name.
//!
//! ```text
//!  Exited ─▶ disks and kernel open, pinned ─▶ memory, network, slot ─▶ a new Vm in its place
//!            ─▶ run directory made anew, VMM started ─▶ Ready ─▶ Identity ─▶ recorded
//! ```
//!
//! A start that is refused before the new [`Vm`] is there changes nothing. One that fails later
//! leaves a VM that has ended, with the reason. The record is that of the ended VM until the guest
//! has its identity, so a daemon that is killed meanwhile leaves a VM that can be started: the next
//! daemon's sweep ends the VMM, which no record names.

use crate::base::cpus::Booking;
use crate::base::error::{ApiError, Outcome, blocking};
use crate::base::time::{Asked, boottime_us, unix_ms};
use crate::daemon::Daemon;
use crate::model::deadline::Deadline;
use crate::model::exit::exit_now;
use crate::model::facts::Facts;
use crate::model::state::{Event, Phase};
use crate::model::step::Step;
use crate::net::Attachment;
use crate::ops::create::attempt::bring_up;
use crate::ops::create::last_lines::explain;
use crate::ops::create::start::{held, listener};
use crate::ops::{admit, expiry, remove, stop, volumes};
use crate::vm::{Vm, record};
use crate::vmm::again::{Again, kernel, open};
use crate::vmm::guest_socket;
use crate::vmm::link::Link;
use dayfly_api::types::{ErrorCode, EventKind, ExitKind};
use dayfly_host::cpu_time;
use dayfly_units::failpoint;
use dayfly_vmm::config::MAX_VCPUS;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Duration;
use tokio::net::UnixListener;
use tokio::time::timeout;

/// Stops a VM as [`stop::stop`], if it has not ended, and starts it.
///
/// # Errors
/// As [`stop::stop`] and [`start`].
pub async fn restart(daemon: &Arc<Daemon>, vm: &Arc<Vm>, grace: Duration) -> Outcome<Arc<Vm>> {
    // Before it is stopped, because it would not start again.
    if vm.phase() == Phase::Starting {
        return Err(refused(vm, "it is starting"));
    }
    stays(vm)?;
    disks_are_known(vm)?;
    let (shared, same) = (daemon.clone(), vm.clone());
    let kernel = blocking(move || kernel(&shared.templates, &same).map(drop)).await;
    kernel.map_err(|e| not_there(vm, e))?;
    // Not in the middle of a snapshot or a fork, after which its disks might not be known.
    drop(vm.snapshots.lock().await);
    match stop::stop(daemon, vm, grace).await {
        Err(e) if vm.phase().alive() => return Err(e),
        // It may have ended by itself.
        _ => {}
    }
    start(daemon, vm).await
}

/// Starts a VM that has ended, and returns it when it is ready. A VM that runs is returned as it
/// is. The start goes on if the caller goes away, and is undone if the daemon ends.
///
/// # Errors
/// Why it cannot be started; or the start failed, and the VM has ended.
pub async fn start(daemon: &Arc<Daemon>, vm: &Arc<Vm>) -> Outcome<Arc<Vm>> {
    let (work, vm) = (daemon.clone(), vm.clone());
    let started = daemon.undo.spawn(async move { begin(&work, &vm).await });
    started.await.unwrap_or_else(|e| Err(ApiError::internal(format_args!("a start ended: {e}"))))
}

fn refused(vm: &Vm, why: impl std::fmt::Display) -> ApiError {
    ApiError::new(ErrorCode::State, format_args!("VM {} cannot be started: {why}", vm.name))
}

/// The error of something that the VM needs. The VM itself is there.
fn not_there(vm: &Vm, mut error: ApiError) -> ApiError {
    if error.0.code == ErrorCode::NotFound {
        error.0.code = ErrorCode::State;
    }
    error.during(format_args!("VM {} cannot be started", vm.name))
}

/// Checks that the VM is not removed when it ends.
fn stays(vm: &Vm) -> Outcome<()> {
    if vm.facts.ephemeral || vm.facts.auto_remove {
        return Err(refused(vm, "it is removed when it has ended (--rm)"));
    }
    Ok(())
}

/// Checks that the disks of an ended VM are those that its guest had.
fn disks_are_known(vm: &Vm) -> Outcome<()> {
    let live = vm.live();
    if let Some(why) = vm.unadopted.as_ref().or(live.no_snapshot.as_ref()) {
        return Err(refused(vm, format_args!("its disks are not known: {why}")));
    }
    if !live.zeroes_written {
        let why = "a VMM of an earlier version wrote its disk, and did not write zeroes; copy what \
                   you need from its snapshots";
        return Err(refused(vm, why));
    }
    Ok(())
}

async fn begin(daemon: &Arc<Daemon>, ended: &Arc<Vm>) -> Outcome<Arc<Vm>> {
    let asked = Asked::now();
    match ended.phase() {
        Phase::Exited => {}
        Phase::Running | Phase::Freezing | Phase::Forking => return Ok(ended.clone()),
        Phase::Paused => {
            let why = format!("it is paused; `dayfly unpause {}` lets it go on", ended.name);
            return Err(refused(ended, why));
        }
        phase => return Err(refused(ended, format_args!("it is {phase}"))),
    }
    stays(ended)?;
    timeout(daemon.config.deadlines.reap, ended.wait_gone())
        .await
        .map_err(|_| refused(ended, "its process is still there"))?;
    // A snapshot or a fork changes its layers.
    let _one = ended.snapshots.clone().try_lock_owned().map_err(|_| {
        refused(ended, "a snapshot or a fork of it is under way; try again when it has ended")
    })?;
    disks_are_known(ended)?;
    daemon.groups.check(&ended.facts.limits, ended.facts.vcpus).map_err(|e| {
        e.during(format_args!("VM {} cannot be started with its limits", ended.name))
    })?;
    let booking = admit::cpus(daemon, ended.facts.limits.cpus_booked).await;
    let booking = booking.map_err(|e| not_there(ended, e))?;
    let _under_way = daemon.pool.creation();
    let (shared, same) = (daemon.clone(), ended.clone());
    let again = blocking(move || open(&shared.templates, &same)).await;
    let again = again.map_err(|e| not_there(ended, e))?;
    let folders = volumes::open(daemon, &ended.facts.volumes).await;
    let folders = folders.map_err(|e| not_there(ended, e))?;
    let vm = replaced(daemon, ended, asked, booking).await?;
    vm.volumes.keep(folders);
    failpoint::reached("daemon.start.reserved");
    match run(daemon, &vm, asked, again).await {
        Ok(()) => Ok(vm),
        Err(error) => Err(failed(daemon, &vm, error).await),
    }
}

/// Reserves memory, network and slot, and puts a new VM with its booked CPUs in the place of the
/// ended one.
async fn replaced(
    daemon: &Arc<Daemon>,
    ended: &Arc<Vm>,
    asked: Asked,
    booking: Option<Booking>,
) -> Outcome<Arc<Vm>> {
    // Its snapshot is no part of its past any more: its guest boots.
    let facts = Facts {
        snapshot: None,
        ancestors: Vec::new(),
        max_vcpus: MAX_VCPUS,
        network: ended.network_now(),
        ..ended.facts.clone()
    };
    let memory = admit::memory(daemon, facts.memory_bytes, booking.as_ref(), None)?;
    let share = admit::one(daemon).await?;
    let had = ended.live().network.map(|had| had.published).unwrap_or_default();
    let attachment = Attachment::allocate(&daemon.networks, &facts, &had).await;
    let attachment = attachment.map_err(Step::Network.failed())?;
    // The next daemon may find it in the middle of the start.
    record::write(&daemon.registry, ended).await?;
    // So that a removal of the ended VM, which has the same files, is over or finds the new one.
    let removal = ended.removal.lock().await;
    let vm = daemon.registry.restart(ended, facts, memory)?;
    drop(removal);
    vm.keep_share(share);
    vm.keep_booking(booking);
    vm.attach(attachment);
    if let Some(pin) = ended.pinned() {
        vm.keep_pinned(pin);
    }
    // Not the last pin, so that no layer is removed here.
    ended.release_pin();
    let before = ended.live();
    vm.update(|live| {
        live.disks = before.disks;
        live.identity = before.identity;
        // For the end of this start, or the next one if this one fails.
        live.deadline = live.deadline.or(before.deadline);
        live.asked_us = Some(asked.at_us());
    });
    Ok(vm)
}

/// Starts the VMM, and waits until the guest has its identity.
async fn run(daemon: &Arc<Daemon>, vm: &Arc<Vm>, asked: Asked, again: Again) -> Outcome<()> {
    let (mut link, ready) = launch(daemon, vm, again).await?;
    failpoint::reached("daemon.start.launched");
    vm.mark("vmm runs", asked.elapsed_us());
    daemon.launcher.prepare(vm.node);
    if vm.facts.fork.max_clones > 0 {
        daemon.serve_self_forks(vm.clone(), guest_socket::listen(vm)?);
    }
    let connected_us = AtomicU64::new(0);
    let alive = bring_up(daemon, vm, asked, &mut link, Some(ready), None, &connected_us);
    tokio::select! {
        biased;
        alive = alive => alive.map(drop).map_err(|e| e.during(Step::Identity.text()))?,
        () = vm.wait_gone() => return Err(ApiError::new(ErrorCode::Guest, "its VMM ended")),
        () = daemon.stop.cancelled() => return Err(ApiError::stopping()),
    }
    failpoint::reached("daemon.start.identity");
    vm.cap().await?;
    let ready_us = asked.elapsed_us();
    vm.update(|live| {
        live.ready_us = Some(ready_us);
        live.timeline.push(("identity taken".into(), ready_us));
    });
    vm.step(Event::Ready)?;
    // The time to live counts anew. In one step, because a client may change it meanwhile, and the
    // task that waits for the deadline must not find none.
    vm.update(|live| {
        let ttl_ms = live.deadline.and_then(|deadline| deadline.ttl_ms);
        live.deadline = ttl_ms.map(|ms| Deadline::after(ms, boottime_us(), unix_ms()));
    });
    expiry::watch(daemon, vm);
    record::write(&daemon.registry, vm).await.map_err(|e| e.during("its record"))?;
    failpoint::reached("daemon.start.recorded");
    daemon.happened(vm, EventKind::Started);
    tracing::info!(vm = %vm.id, name = %vm.name, ready_us, "started again");
    Ok(())
}

/// Starts the VMM in the run directory of the ended VM.
async fn launch(daemon: &Arc<Daemon>, vm: &Arc<Vm>, again: Again) -> Outcome<(Link, UnixListener)> {
    let launching = vm.launching.clone().lock_owned().await;
    if !vm.phase().alive() {
        return Err(ApiError::new(ErrorCode::State, "it was removed meanwhile"));
    }
    let turn = daemon.makers.clone().acquire_owned().await.map_err(ApiError::internal)?;
    let (shared, same) = (daemon.clone(), vm.clone());
    let launched = blocking(move || {
        let (_launching, _turn) = (launching, turn);
        let Again { start, fds, pin } = again;
        same.keep_pinned(pin);
        let (launched, took) = cpu_time::of(|| {
            let launched = shared.launcher.launch_again(same.placement(), start, fds)?;
            held(&shared, &same, launched.process, launched.group)?;
            Ok::<_, ApiError>((
                launched.link,
                launched.ready,
                Duration::from_micros(launched.zygote_us),
            ))
        });
        let (link, ready, of_zygote) = launched?;
        same.costs(took.saturating_add(of_zygote));
        Ok((link, ready))
    });
    let (link, ready) = launched.await.map_err(|e| e.during(Step::Vmm.text()))?;
    let ready = listener(ready)?;
    let ready = ready.ok_or_else(|| ApiError::internal("a boot without a socket for its agent"))?;
    Ok((link, ready))
}

/// Ends a VM whose start failed. It stays as one that has ended, with the reason.
async fn failed(daemon: &Arc<Daemon>, vm: &Arc<Vm>, error: ApiError) -> ApiError {
    let error = explain(vm, error).await;
    let why = format!("it was not started: {}", error.0.message.lines().next().unwrap_or_default());
    vm.update(|live| {
        live.exit.get_or_insert_with(|| exit_now(ExitKind::Failed, why));
    });
    if let Err(e) = remove::kill(daemon, vm).await {
        tracing::error!(vm = %vm.id, "after a start that failed: {e}");
    }
    // The task that waits for its process does both too, if there is a process.
    if vm.is_gone() && vm.streams.close() {
        daemon.registry.release_slot(vm);
    }
    record::note(&daemon.registry, vm).await;
    error.during(format_args!("VM {} was not started", vm.name))
}
