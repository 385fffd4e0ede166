//! The end of a VM: noticed, requested, cleaned up.
//!
//! One task per VM waits for its process (pidfd) and sets the exit reason. Every other task
//! requests the end, and waits until that task has seen it. Two ends have no such task: that of a
//! VM without a process, and one that a new daemon finds ([`crate::ops::adopt`]).

use crate::base::config::VmDir;
use crate::base::error::{ApiError, Outcome, blocking};
use crate::base::pidfd::readable;
use crate::base::time::monotonic_us;
use crate::daemon::Daemon;
use crate::model::exit::exit_now;
use crate::model::live::Live;
use crate::model::state::Phase;
use crate::net::Attachment;
use crate::ops::classify::{classify_end, classify_expired, classify_memory};
use crate::templates::cache::TemplateCache;
use crate::vm::Vm;
use crate::vm::record::{note, read_exit};
use crate::vm::registry::RestartError;
use crate::vm::survey;
use dayfly_api::types::{ErrorCode, EventKind, ExitKind, VmExit};
use dayfly_host::priority;
use dayfly_host::process::Process;
use dayfly_host::reaper::Booked;
use dayfly_units::failpoint;
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::oneshot;
use tokio::time::timeout;

/// Waits for the end of `process`, the VMM of `vm`, and then marks the VM as exited. The daemon
/// need not reap the process, which is a child of a zygote.
pub fn watch(daemon: &Arc<Daemon>, vm: Arc<Vm>, process: Arc<Process>) {
    let daemon = daemon.clone();
    tokio::spawn(async move {
        if let Err(e) = readable(&process).await {
            // Logged, because without the end of the wait the VM's resources stay reserved.
            tracing::error!("waiting for VM {}: {e}", vm.id);
        }
        let ended_us = monotonic_us();
        // Kept until its record says that the VM has ended: the next daemon must not find the group
        // with another VM in it.
        let group = vm.take_group();
        let exit = if daemon.registry.holds(&vm) {
            let Live { kill_asked, expired, .. } = vm.live();
            let (ended, dir, uid, group) = (vm.clone(), vm.dir.clone(), vm.uid, group.clone());
            let limited = vm.facts.limits.memory_max_bytes.is_some();
            let seen = move || {
                // Before Linux 6.15 the signal of a process that was reaped is unknown.
                let signal = process.killed_by(WITHIN).unwrap_or_else(|e| {
                    tracing::error!("which signal ended process {}: {e}", process.id().pid);
                    None
                });
                let (metered, record) = read_exit(&dir.exit());
                let exit = classify_end(signal, record, kill_asked);
                let exit = classify_expired(exit, expired);
                let usage = group.and_then(|group| group.usage());
                let exit = classify_memory(exit, Some(process.id()), uid, usage, limited);
                Ok(ended.last_bill(ended_us, usage.as_ref(), metered).close(exit))
            };
            match blocking(seen).await {
                Ok(exit) => exit,
                Err(error) => exit_now(ExitKind::Lost, error.0.message),
            }
        } else {
            let (ended, group) = (vm.clone(), group.clone());
            let bill = move || {
                let usage = group.and_then(|group| group.usage());
                Ok(ended.last_bill(ended_us, usage.as_ref(), None))
            };
            let bill = blocking(bill).await.unwrap_or_default();
            bill.close(exit_now(ExitKind::Killed, "removed"))
        };
        if exit.reason == ExitKind::Killed {
            tracing::debug!(vm = %vm.id, name = %vm.name, "ended: {}", exit.message);
        } else {
            // The end was not requested.
            let VmExit { reason, message, .. } = &exit;
            tracing::info!(vm = %vm.id, name = %vm.name, ?reason, "ended: {message}");
        }
        vm.mark_now("vmm gone");
        end(&daemon, &vm, exit).await;
        if vm.ledger.closed() {
            daemon.happened(&vm, EventKind::Billed);
        }
        if vm.facts.ephemeral || vm.facts.auto_remove {
            // Callers that wait for the VM have a reference to it; no other request shall find it.
            if let Err(e) = discard(&daemon, &vm, None).await {
                tracing::error!("removing VM {}: {e}", vm.id);
            }
        } else {
            note(&daemon.registry, &vm).await;
        }
        // Its processes of streams have its user, which is that of the next VM in its slot.
        vm.streams.end(LAST_BYTES).await;
        daemon.registry.release_slot(&vm);
        drop(group);
    });
}

/// Marks the VM as exited, and drops what it had on its node's threads, because that may free RAM
/// and delete layers. Returns when the VM has nothing any more.
async fn end(daemon: &Daemon, vm: &Vm, exit: VmExit) {
    // `remains` has the booking until the thread has freed everything else.
    let cpus: Arc<dyn Booked> = Arc::new(vm.cpus());
    let remains = vm.ended(exit);
    daemon.reapers.run_on(vm.node, || Some(cpus), move || drop(remains));
    vm.wait_gone().await;
    exited(daemon, vm);
}

/// Adds the event that the VM has ended, unless it was added already. A removal, which does not
/// wait for the end of the process, adds it before its own event.
fn exited(daemon: &Daemon, vm: &Vm) {
    vm.announce_end(|| daemon.happened(vm, EventKind::Exited));
}

/// From the end of a process, which the pidfd reports, until the kernel has reaped it.
const WITHIN: Duration = Duration::from_secs(1);

/// Time for clients of a VM's streams to take their last bytes, before its processes of streams are
/// killed.
const LAST_BYTES: Duration = Duration::from_secs(1);

/// The most RAM that is freed at real-time priority. munmap(2) of this much written memory takes 15
/// to 40 ms (`make bench BENCH=death`).
const SHORT_BYTES: u64 = 512 << 20;

/// Kills a VM, and waits until its memory is free and its process is gone. A VM that is to be
/// removed when it has ended is removed too.
///
/// # Errors
/// Its process survives SIGKILL.
pub async fn kill(daemon: &Arc<Daemon>, vm: &Arc<Vm>) -> Outcome<()> {
    find_unknown(daemon, vm).await?;
    let Some(process) = mark_removed(daemon, vm).await else { return Ok(()) };
    let _under_way = daemon.pool.removal();
    let asked = Instant::now();
    let (capped, killed) = (vm.clone(), process.clone());
    let kill = move || {
        capped.lift_cap();
        send_kill(&killed);
    };
    freed(daemon, vm, false, kill, move || release(&process)).await?;
    let freed = asked.elapsed();
    gone(daemon, vm).await?;
    daemon.metrics.destroyed(freed, asked.elapsed());
    if vm.facts.auto_remove {
        // So that no later request finds it.
        return discard(daemon, vm, None).await;
    }
    // Before the answer, because no later daemon can find out what its destruction has taken.
    note(&daemon.registry, vm).await;
    Ok(())
}

/// Ends a VM if it lives, and removes everything of it. Returns when its memory is free, its files
/// are gone and its name is free.
///
/// Neither the guest nor the VMM is asked. After SIGKILL, a thread on the VM's memory node frees
/// the memory while the kernel still destroys the KVM VM, which waits for RCU grace periods. When
/// the call returns, destroyed means free (Swift Birth and Quick Death, section 5). The VM's slot
/// may be used again only after the end of the process and of those of its streams; [`watch`]
/// releases it.
///
/// # Errors
/// Its process survives SIGKILL, or a file cannot be removed.
pub async fn remove(daemon: &Arc<Daemon>, vm: &Arc<Vm>) -> Outcome<()> {
    find_unknown(daemon, vm).await?;
    let process = mark_removed(daemon, vm).await;
    failpoint::reached("daemon.remove.asked");
    discard(daemon, vm, process).await
}

/// Looks again for the process of a VM that could not be adopted, if it was not found at the start.
///
/// # Errors
/// The host still does not say whether there is one.
async fn find_unknown(daemon: &Arc<Daemon>, vm: &Arc<Vm>) -> Outcome<()> {
    if vm.phase() != Phase::Unknown || vm.process().is_some() {
        return Ok(());
    }
    let (shared, id) = (daemon.clone(), vm.id);
    let look = move || {
        survey::vmm_of(&shared.config, id)
            .map_err(|e| ApiError::internal(format_args!("looking for the VMM of VM {id}: {e}")))
    };
    if let Some(process) = blocking(look).await?.map(Arc::new) {
        vm.hold(process.clone());
        watch(daemon, vm.clone(), process);
    }
    Ok(())
}

/// Marks the VM's end as requested. Returns the process to kill, if there is one.
async fn mark_removed(daemon: &Daemon, vm: &Vm) -> Option<Arc<Process>> {
    vm.update(|live| live.kill_asked = true);
    vm.leaves_cpus();
    vm.attachment(Attachment::unpublish);
    // A start in progress ends first, so that its process is known.
    let _started = vm.launching.lock().await;
    let Some(process) = vm.process() else {
        // The VMM was never started, so no process can end.
        if vm.phase().alive() {
            let exit = exit_now(ExitKind::Killed, "ended before its VMM was started");
            end(daemon, vm, exit).await;
        }
        return None;
    };
    vm.mark_now("end asked for");
    Some(process)
}

fn send_kill(process: &Process) {
    if let Err(e) = process.kill() {
        tracing::error!("SIGKILL for process {}: {e}", process.id().pid);
    }
}

/// Frees the memory of a killed process at once with process_mrelease(2), before all threads have
/// ended. Returns whether the memory is free; otherwise it is freed with the process.
fn release(process: &Process) -> bool {
    match process.release_memory() {
        Ok(()) => true,
        Err(e) => {
            let pid = process.id().pid;
            tracing::debug!("the memory of process {pid} is freed when it ends: {e}");
            false
        }
    }
}

/// Runs `kill` on any CPU, so that SIGKILL does not wait for one that is busy. Then `work`, which
/// returns whether it has freed the VM's memory, on the CPUs that the VM has booked, or else on its
/// node. The VM is billed for both. If the memory is not free then, waits until the process is
/// gone.
///
/// With `is_short`, both come before the threads of VMs, on the CPUs of the node.
async fn freed(
    daemon: &Daemon,
    vm: &Arc<Vm>,
    is_short: bool,
    kill: impl FnOnce() + Send + 'static,
    work: impl FnOnce() -> bool + Send + 'static,
) -> Outcome<()> {
    let (done, free) = oneshot::channel();
    // The caller may have been cancelled.
    let dead = vm.clone();
    let destroying = Arc::new(vm.destroying());
    if is_short {
        daemon.reapers.run(vm.node, move || {
            let all = || {
                kill();
                work()
            };
            let free = priority::first(|| destroying.by(all));
            drop(destroying);
            let _ = done.send(free);
        });
    } else {
        let killing = destroying.clone();
        let first = move || {
            // If the VM has ended meanwhile, its CPUs may be another's.
            let booked = dead.booked();
            killing.by(kill);
            booked
        };
        daemon.reapers.run_on(vm.node, first, move || {
            let free = destroying.by(work);
            drop(destroying);
            let _ = done.send(free);
        });
    }
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
        ApiError::new(
            ErrorCode::Timeout,
            format_args!(
                "VM {}: its process is still there {} s after SIGKILL",
                vm.id,
                within.as_secs()
            ),
        )
    })
}

/// Removes the files of a VM whose process is gone, and forgets the VM. With `process`, kills that
/// process and frees its memory first. A repeated call does nothing.
async fn discard(daemon: &Daemon, vm: &Arc<Vm>, process: Option<Arc<Process>>) -> Outcome<()> {
    let _one = vm.removal.lock().await;
    if !daemon.registry.holds(vm) {
        // Its files belong to the VM that was started in its place.
        if daemon.registry.has(vm.id) {
            return Err(RestartError::Gone(vm.name.clone()).into());
        }
        return Ok(());
    }
    let _under_way = daemon.pool.removal();
    let asked = Instant::now();
    let killed = process.is_some();
    let is_late = killed && vm.ledger.removed();
    let (templates, dead) = (daemon.templates.clone(), vm.clone());
    let (done, removed) = oneshot::channel();
    let (first, victim) = (vm.clone(), process.clone());
    let kill = move || {
        // First, so that a daemon that is started in the middle sweeps the rest: it does that with
        // a VM without a record, alive or not.
        if let Err(e) = unlinked(&first.dir.record()) {
            tracing::error!("removing VM {}: {e}", first.id);
        }
        failpoint::reached("daemon.remove.unrecorded");
        first.lift_cap();
        if let Some(process) = victim {
            send_kill(&process);
        }
    };
    let work = move || {
        let free = process.is_none_or(|process| release(&process));
        failpoint::reached("daemon.remove.killed");
        // When its files are gone, its bill is still open.
        dead.keep_metered();
        drop(done.send(files(&templates, &dead)));
        free
    };
    // If many VMMs are killed at once, their threads compete with this one for the CPUs. With the
    // normal policy, 512 removals take five times as long (`make bench BENCH=death`). On CPUs that
    // the VM has booked there is no other VM that would have to wait.
    let is_short = vm.facts.limits.cpus_booked.is_none() && vm.facts.memory_bytes <= SHORT_BYTES;
    freed(daemon, vm, is_short, kill, work).await?;
    let freed = asked.elapsed();
    removed
        .await
        .unwrap_or_else(|e| Err(ApiError::internal(format_args!("removing VM {}: {e}", vm.id))))?;
    if killed {
        daemon.metrics.destroyed(freed, asked.elapsed());
    }
    daemon.registry.forget(vm);
    exited(daemon, vm);
    daemon.happened(vm, EventKind::Removed);
    if is_late {
        // [`watch`] did not know of the removal.
        daemon.happened(vm, EventKind::Billed);
    }
    failpoint::reached("daemon.remove.forgotten");
    if vm.snapshots.try_lock().is_err() {
        remove_what_comes_late(daemon, vm);
    }
    Ok(())
}

/// Removes layers again after a running fork, snapshot or merge, which may create one more file
/// before it learns that the VM has gone.
fn remove_what_comes_late(daemon: &Daemon, vm: &Arc<Vm>) {
    let (templates, vm) = (daemon.templates.clone(), vm.clone());
    daemon.undo.spawn(async move {
        let _over = vm.snapshots.lock().await;
        let id = vm.id;
        if let Err(error) = blocking(move || templates.remove_vm(id)).await {
            // The next start of the daemon sweeps it.
            tracing::warn!(vm = %id, "leaving layers of a VM that has gone: {error}");
        }
    });
}

fn unlinked(path: &Path) -> io::Result<()> {
    match std::fs::remove_file(path) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => {
            Err(io::Error::new(e.kind(), format!("{}: {e}", path.display())))
        }
        _ => Ok(()),
    }
}

/// Removes the folder of a VM. Most have known files only: to list the folders first would take
/// twice as many system calls.
fn remove_folder(dir: &VmDir) -> io::Result<()> {
    let [console, other] = dir.console();
    for path in [dir.control(), console, other, dir.exit(), dir.vsock()] {
        // What cannot be removed is met again.
        let _ = std::fs::remove_file(path);
    }
    let emptied = std::fs::remove_dir(dir.root()).and_then(|()| std::fs::remove_dir(dir.path()));
    emptied.or_else(|_| match std::fs::remove_dir_all(dir.path()) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(()),
        removed => removed,
    })
}

fn files(templates: &TemplateCache, vm: &Vm) -> Outcome<()> {
    remove_folder(&vm.dir).map_err(|e| {
        ApiError::internal(format_args!("removing {}: {e}", vm.dir.path().display()))
    })?;
    failpoint::reached("daemon.remove.folder");
    // Before `remove_vm`, because dropping the pin may delete shared layers of which this VM was
    // the last user.
    vm.release_pin();
    failpoint::reached("daemon.remove.unpinned");
    templates.remove_vm(vm.id)?;
    failpoint::reached("daemon.remove.layers");
    Ok(())
}

#[cfg(test)]
#[path = "remove_tests.rs"]
mod tests;
