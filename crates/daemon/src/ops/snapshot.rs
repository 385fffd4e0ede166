//! A snapshot of a running VM: sealed, frozen, saved, resumed.
//!
//! ```text
//!  Running ─▶ Precopy ─Freeze▶ seal ─▶ pause, save, go on ─▶ Identity ─Thaw▶ Running
//!                              ╰────── a failure goes straight here ──▲       │
//!                                                       hash, sync, publish ◀─╯
//! ```
//!
//! RAM is hashed, compressed and written by a process in the VM's control group
//! ([`crate::ops::packer`]).
//!
//! RAM is copied while the VM runs. The VM is paused to copy the pages that it wrote last
//! (`dayfly_vmm::memory::live`).
//!
//! The section from `Freeze` to `Thaw` runs to its end even if the client goes away, because no
//! other task would resume the VM.

use crate::base::error::{Outcome, blocking};
use crate::base::progress::ProgressSender;
use crate::daemon::Daemon;
use crate::model::state::Event;
use crate::ops::awake::awake;
use crate::ops::publish::{free, release, spec, store, to_its_end};
use crate::ops::save::{
    Saved, allowed, arrived, begin, can_be_stored, end_precopy, precopy, save_into, thaw,
};
use crate::ops::section::section;
use crate::ops::{admit, flatten, immutable};
use crate::vm::{Vm, record};
use dayfly_api::types::{Snapshot, SnapshotRequest};
use dayfly_store::Committed;
use dayfly_units::{Name, failpoint};
use dayfly_vmm::control::{Command, Frozen};
use std::sync::Arc;
use tokio::sync::OwnedMutexGuard;

/// Takes a snapshot of a running VM, which goes on, or of a paused one, which runs for it
/// ([`crate::ops::awake`]).
///
/// # Errors
/// The name is taken, the VM does not run or has too many layers, or a step failed. There is no
/// snapshot then; if possible, the VM goes on.
pub async fn snapshot(
    daemon: Arc<Daemon>,
    vm: Arc<Vm>,
    request: SnapshotRequest,
    progress: ProgressSender,
) -> Outcome<Snapshot> {
    // Snapshots take turns, hashing included, because the next depends on the layers of this one.
    // The task that works owns the lock: a client that goes away does not release it.
    let one = vm.snapshots.clone().lock_owned().await;
    free(&daemon, &request.name).await?;
    allowed(&vm)?;
    can_be_stored(&daemon, &vm)?;
    admit::snapshot(&daemon, &vm).await?;
    let awake = awake(&daemon, &vm).await?;
    arrived(&daemon, &vm, Some(&progress)).await?;
    progress
        .phase(format!("saving {} of memory", dayfly_units::Bytes(vm.facts.memory_bytes)))
        .await;
    let (work, same, name) = (daemon.clone(), vm.clone(), request.name.clone());
    let within = 2 * daemon.config.deadlines.save;
    let (saved, one) = section(&daemon, &vm, "a snapshot", within, async move {
        Ok((freeze(&work, &same, &name).await?, one))
    })
    .await?;
    drop(awake);
    if let Some(Frozen { paused_us, pages }) = saved.frozen {
        let (ms, tenths) = (paused_us / 1000, paused_us % 1000 / 100);
        progress
            .phase(format!("stood still for {ms}.{tenths} ms, while {pages} pages were copied"))
            .await;
    }
    progress.phase("hashing and storing").await;
    immutable::prove(&daemon, &vm).await?;
    failpoint::reached("daemon.snapshot.proven");
    let committed = commit(&daemon, &vm, one, saved, request.name, &progress).await?;
    daemon.snapshotted(&vm, committed.manifest.name.clone());
    Ok(daemon.templates.shown(&committed.manifest))
}

/// Copies and saves the VM, which goes on.
async fn freeze(daemon: &Arc<Daemon>, vm: &Arc<Vm>, name: &Name) -> Outcome<Saved> {
    let deadlines = daemon.config.deadlines;
    let writer = begin(daemon, vm, name).await?;
    failpoint::reached("daemon.snapshot.begun");
    precopy(daemon, vm, PRECOPY, writer.memory()).await?;
    failpoint::reached("daemon.snapshot.precopied");
    let turn = vm.take_turn(deadlines.control).await;
    let _turn = match turn.and_then(|turn| Ok(vm.step(Event::Freeze).map(|_| turn)?)) {
        Ok(turn) => turn,
        Err(error) => {
            end_precopy(daemon, vm, PRECOPY).await;
            return Err(error);
        }
    };
    record::note(&daemon.registry, vm).await;
    failpoint::reached("daemon.snapshot.freezing");
    let saved = save_into(daemon, vm, writer, Command::Freeze).await;
    let awake = thaw(daemon, vm).await;
    record::note(&daemon.registry, vm).await;
    failpoint::reached("daemon.snapshot.thawed");
    let saved = saved?;
    awake?;
    Ok(saved)
}

/// Copies all of RAM, not only pages that differ from the backing.
const PRECOPY: Command = Command::Precopy { own: false };

/// Hashes, syncs and publishes a saved VM. Its frozen layers are stored then, and the VM pins them.
///
/// This runs to its end even if the client goes away, because the VM's record must name its layers.
/// It holds `one`, the lock `snapshots` of the VM, until then.
async fn commit(
    daemon: &Arc<Daemon>,
    vm: &Arc<Vm>,
    one: OwnedMutexGuard<()>,
    saved: Saved,
    name: Name,
    progress: &ProgressSender,
) -> Outcome<Box<Committed>> {
    let spec = spec(vm);
    let (work, same) = (daemon.clone(), vm.clone());
    to_its_end(daemon, name, progress, |meter| async move {
        let (shared, vm) = (work.clone(), same.clone());
        let result = blocking(move || store(&shared, &vm, saved, &spec, &meter)).await;
        let noted = record::note(&work.registry, &same).await;
        failpoint::reached("daemon.snapshot.recorded");
        let (mut committed, flattened) = result?;
        failpoint::reached("daemon.snapshot.recorded");
        if noted {
            let (work, replaced) = (work.clone(), std::mem::take(&mut committed.replaced));
            let _ = blocking(move || {
                release(&work, &replaced);
                Ok(())
            })
            .await;
            failpoint::reached("daemon.snapshot.released");
        }
        // After the record is written: if the daemon dies in between, the record has fewer layers
        // than the VMM uses, never more.
        flatten::rebase(&work, &same, flattened).await;
        failpoint::reached("daemon.snapshot.rebased");
        drop(one);
        Ok(committed)
    })
    .await
}
