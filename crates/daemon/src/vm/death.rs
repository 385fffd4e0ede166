//! The end of a VM: noticed, asked for, cleaned up.
//!
//! One task per VM waits for its process (pidfd) and is the only one that says why it ended. Everyone else asks for the end and
//! waits until that task has seen it.

use super::record::{Record, RecordError, read_json};
use super::{Vm, exit_now};
use crate::daemon::Daemon;
use crate::depot::Depot;
use crate::error::{Fault, Outcome, blocking};
use crate::net::Wires;
use dayfly_api::types::{ErrorCode, ExitKind, VmExit};
use dayfly_host::priority;
use dayfly_host::process::Process;
use dayfly_vmm::control::{ExitReason, ExitRecord};
use std::io;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::Instant;
use tokio::io::unix::AsyncFd;
use tokio::sync::oneshot;
use tokio::time::timeout;

/// Why a VM ended, from what it left: its exit record, whether its end was asked for, and how its process ended.
///
/// No I/O here; see [`watch`].
#[must_use]
pub fn judge(record: Result<ExitRecord, RecordError>, kill_asked: bool) -> VmExit {
    match record {
        Ok(ExitRecord { reason, message }) => {
            let kind = match reason {
                ExitReason::PowerOff => ExitKind::PowerOff,
                ExitReason::Reboot => ExitKind::Reboot,
                ExitReason::Panic => ExitKind::Panic,
                ExitReason::Quit => ExitKind::Killed,
                ExitReason::Failed => ExitKind::Failed,
            };
            exit_now(kind, message)
        }
        Err(_) if kill_asked => exit_now(ExitKind::Killed, "killed on request"),
        Err(e) => exit_now(
            ExitKind::Lost,
            format!("the VMM process was killed from outside: it left no exit record ({e})"),
        ),
    }
}

/// Waits for the end of `process`, the VMM of `vm`, and does what is to be done then. Nobody need reap it: it is a child of a zygote's.
pub fn watch(daemon: &Arc<Daemon>, vm: Arc<Vm>, process: Arc<Process>) {
    let daemon = daemon.clone();
    tokio::spawn(async move {
        if let Err(e) = readable(&process).await {
            // Without this notice nothing would ever free what the VM has.
            tracing::error!("waiting for VM {}: {e}", vm.id);
        }
        drop(process);
        let exit = if daemon.registry.has(vm.id) {
            let dir = vm.dir.clone();
            match blocking(move || Ok(read_json::<ExitRecord>(&dir.exit()))).await {
                Ok(record) => judge(record, vm.live().kill_asked),
                Err(fault) => exit_now(ExitKind::Lost, fault.0.message),
            }
        } else {
            exit_now(ExitKind::Killed, "removed")
        };
        if exit.reason == ExitKind::Killed {
            tracing::debug!(vm = %vm.id, name = %vm.name, "ended: {}", exit.message);
        } else {
            // Nobody asked for it.
            tracing::info!(vm = %vm.id, name = %vm.name, reason = ?exit.reason, "ended: {}", exit.message);
        }
        vm.mark_now("vmm gone");
        vm.ended(exit);
        daemon.registry.release_slot(&vm);
        if vm.facts.ephemeral {
            // Those who wait for it have it in hand; nobody else shall find it.
            if let Err(e) = discard(&daemon, &vm, None).await {
                tracing::error!("removing VM {}: {e}", vm.id);
            }
        } else {
            note(&daemon, &vm).await;
        }
    });
}

/// Resolves when `process` has ended.
///
/// # Errors
/// When it cannot be waited for.
pub async fn readable(process: &Process) -> io::Result<()> {
    let fd = process.as_fd().try_clone_to_owned()?;
    // SAFETY: `OwnedFd` gives the same open descriptor as long as it lives, and the `AsyncFd` owns it.
    let fd = unsafe { AsyncFd::register_with_interest(fd, tokio::io::Interest::READABLE) }?;
    fd.readable().await.map(|_| ())
}

/// Writes the VM's record, where its folder still is.
pub async fn note(daemon: &Daemon, vm: &Arc<Vm>) {
    // A file made while the folder is being removed would keep it from going.
    let _one = vm.removal.lock().await;
    if !daemon.registry.has(vm.id) {
        return;
    }
    let vm = vm.clone();
    let written = blocking(move || match Record::of(&vm).write(&vm.dir) {
        Err(e) if vm.dir.path().exists() => Err(Fault::internal(e)),
        _ => Ok(()),
    });
    // Logged as it was made; a VM without a record lives, and is swept by the next daemon.
    let _ = written.await;
}

/// RAM that is soon freed: munmap(2) of so much, all of it written, took 15 to 40 ms (`make bench BENCH=death`).
const SHORT_BYTES: u64 = 512 << 20;

/// Ends a VM at once and waits until its memory is free and its process is gone.
///
/// # Errors
/// Its process survives SIGKILL.
pub async fn kill(daemon: &Daemon, vm: &Vm) -> Outcome<()> {
    let Some(process) = condemn(vm).await else { return Ok(()) };
    let _under_way = daemon.pool.death();
    let asked = Instant::now();
    freed(daemon, vm, move || strike(&process)).await?;
    let freed = asked.elapsed();
    gone(daemon, vm).await?;
    daemon.metrics.death(freed, asked.elapsed());
    Ok(())
}

/// Ends a VM where it lives, and removes everything of it: answered when its memory is free, its files are gone and its name is free.
///
/// Nobody asks the guest, and not the VMM either: SIGKILL, then a thread on the VM's own memory node frees its memory while the kernel is
/// still taking KVM's VM apart, which waits for grace periods (Swift Birth and Quick Death, section 5: when the call returns,
/// destroyed means free). Its user, which another VM may not have before that is done, is returned by [`watch`].
///
/// # Errors
/// Its process survives SIGKILL, or a file cannot be removed.
pub async fn remove(daemon: &Daemon, vm: &Arc<Vm>) -> Outcome<()> {
    let process = condemn(vm).await;
    discard(daemon, vm, process).await
}

/// From now on the VM's end is asked for. Gives the process that is to be killed, where there is one.
async fn condemn(vm: &Vm) -> Option<Arc<Process>> {
    vm.update(|live| live.kill_asked = true);
    vm.wires(Wires::unpublish);
    // A start that is under way ends first: its process is then known.
    let _started = vm.launching.lock().await;
    let Some(process) = vm.process() else {
        // Never started: there is nothing that could end.
        if vm.phase().alive() {
            vm.ended(exit_now(ExitKind::Killed, "ended before its VMM was started"));
        }
        return None;
    };
    vm.mark_now("end asked for");
    Some(process)
}

/// SIGKILL, and in the same breath, before its threads let go of it, its memory; whether that is free, or goes with the process.
fn strike(process: &Process) -> bool {
    if let Err(e) = process.kill() {
        tracing::error!("SIGKILL for process {}: {e}", process.id().pid);
        return false;
    }
    match process.release_memory() {
        Ok(()) => true,
        Err(e) => {
            tracing::debug!("the memory of process {} goes with it: {e}", process.id().pid);
            false
        }
    }
}

/// Does `work`, which says whether it has freed the memory of `vm`, on the node of that; where it has not, waits until the process is gone.
async fn freed(daemon: &Daemon, vm: &Vm, work: impl FnOnce() -> bool + Send + 'static) -> Outcome<()> {
    let (done, free) = oneshot::channel();
    // Whoever waits may have gone away.
    daemon.reapers.run(vm.node, move || {
        let _ = done.send(work());
    });
    if free.await != Ok(true) {
        gone(daemon, vm).await?;
    }
    vm.return_memory();
    vm.mark_now("memory free");
    Ok(())
}

async fn gone(daemon: &Daemon, vm: &Vm) -> Outcome<()> {
    let within = daemon.config.deadlines.reap;
    timeout(within, vm.wait_gone()).await.map_err(|_| {
        Fault::new(
            ErrorCode::Timeout,
            format_args!("VM {}: its process is still there {} s after SIGKILL", vm.id, within.as_secs()),
        )
    })
}

/// Removes the files of a VM whose process is gone; with `process`, ends that one and frees its memory first. Then forgets it. May be done
/// twice.
async fn discard(daemon: &Daemon, vm: &Arc<Vm>, process: Option<Arc<Process>>) -> Outcome<()> {
    let _one = vm.removal.lock().await;
    if !daemon.registry.has(vm.id) {
        return Ok(());
    }
    let _under_way = daemon.pool.death();
    let asked = Instant::now();
    let killed = process.is_some();
    let (depot, dead) = (daemon.depot.clone(), vm.clone());
    let (told, removed) = oneshot::channel();
    let work = move || {
        let all = || {
            let free = process.is_none_or(|process| strike(&process));
            drop(told.send(files(&depot, &dead)));
            free
        };
        // Of many VMMs that are killed at once each has threads that tear it down, and whoever frees their memory would have his turn after
        // all of these: 512 took 0.33 to 0.45 s, three times what bare processes need for their ends.
        if dead.facts.memory_bytes <= SHORT_BYTES { priority::first(all) } else { all() }
    };
    freed(daemon, vm, work).await?;
    let freed = asked.elapsed();
    removed.await.unwrap_or_else(|e| Err(Fault::internal(format_args!("removing VM {}: {e}", vm.id))))?;
    if killed {
        daemon.metrics.death(freed, asked.elapsed());
    }
    daemon.registry.forget(vm);
    if vm.snapshots.try_lock().is_err() {
        remove_what_comes_late(daemon, vm);
    }
    Ok(())
}

/// A fork or a snapshot of the VM, or a merge of its layers, is under way, and may make one more file of it before it learns that the VM has gone.
fn remove_what_comes_late(daemon: &Daemon, vm: &Arc<Vm>) {
    let (depot, vm) = (daemon.depot.clone(), vm.clone());
    daemon.undo.spawn(async move {
        let _over = vm.snapshots.lock().await;
        let id = vm.id;
        if let Err(fault) = blocking(move || depot.remove_vm(id)).await {
            // The next start sweeps it.
            tracing::warn!(vm = %id, "leaving layers of a VM that has gone: {fault}");
        }
    });
}

fn files(depot: &Depot, vm: &Vm) -> Outcome<()> {
    match std::fs::remove_dir_all(vm.dir.path()) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => {
            return Err(Fault::internal(format_args!("removing {}: {e}", vm.dir.path().display())));
        }
        _ => {}
    }
    // Layers of others that it was the last to stand on are its files too.
    vm.let_go_pinned();
    depot.remove_vm(vm.id)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn missing() -> Result<ExitRecord, RecordError> {
        read_json(std::path::Path::new("/nonexistent/exit.json"))
    }

    #[test]
    fn the_record_says_why_and_its_absence_says_killed_or_lost() {
        for (reason, kind) in [
            (ExitReason::PowerOff, ExitKind::PowerOff),
            (ExitReason::Reboot, ExitKind::Reboot),
            (ExitReason::Panic, ExitKind::Panic),
            (ExitReason::Quit, ExitKind::Killed),
            (ExitReason::Failed, ExitKind::Failed),
        ] {
            let record = || Ok(ExitRecord { reason, message: "why".into() });
            // A guest that ended by itself while it was being killed did end by itself.
            for kill_asked in [false, true] {
                let exit = judge(record(), kill_asked);
                assert_eq!((exit.reason, exit.message.as_str()), (kind, "why"));
            }
        }
        assert_eq!(judge(missing(), true).reason, ExitKind::Killed);
        assert_eq!(judge(missing(), false).reason, ExitKind::Lost);
    }
}
