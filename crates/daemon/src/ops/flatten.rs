//! Chains of layers that became shorter: by a commit, or by a merge of frozen layers. Updates the
//! daemon's record of the VM, and asks the VMM to use the new chain.
//!
//! ```text
//!                 stored         │ own
//! VMM and daemon: image a b c d  │ e writable     commit: the manifest has image a b c de
//! daemon:         image a b c de │ writable       noted in vm.json, pinned
//! VMM:            image a b c de │ writable       Rebase: closes the files of d and e
//! ```
//!
//! The chains before and after a merge have the same content. So the daemon and the VMM may use
//! different ones, even for ever. The VMM then keeps files open that no other process needs, and
//! its page map's hints are wrong more often.

use crate::base::error::{ApiError, Outcome, blocking};
use crate::daemon::Daemon;
use crate::vm::{Vm, record};
use crate::vmm::control_link;
use dayfly_store::{ChainLayer, LayerRef, Merged, SnapshotManifest, SnapshotSpec, VmLayer};
use dayfly_units::{error::chain, failpoint};
use dayfly_vmm::control::{Answer, Command};
use dayfly_vmm::disk::Merge;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;

/// The most frozen layers of a VM's disk before they are merged.
const MOST_FROZEN: usize = 4;

/// A request to a VMM to use a shorter chain for one disk.
#[derive(Debug)]
pub struct Rebase {
    disk: u8,
    /// The descriptors of [`Command::Rebase`], in its order.
    fds: Vec<OwnedFd>,
}

/// Merges layers that have these maps.
///
/// # Errors
/// A map is damaged, or the maps are not of one disk.
pub fn merge(maps: &[BorrowedFd<'_>]) -> Result<Merged, Box<dyn std::error::Error + Send + Sync>> {
    let merge = Merge::of(maps)?;
    let map = merge.map().encode();
    Ok(Merged { map, runs: Box::new(merge.into_runs()) })
}

/// Updates a disk's chain after a commit or a merge: the layers `was` became `now`. Layers that
/// were frozen since stay above.
pub fn replace(
    chain: &mut Vec<ChainLayer>,
    was: &[ChainLayer],
    now: impl IntoIterator<Item = ChainLayer>,
) {
    let Some(top) = was.last() else { return };
    if let Some(place) = chain.iter().rposition(|layer| layer == top) {
        chain.splice(..=place, now);
    }
}

/// For each disk the data file of the layer that the VM froze last, opened while the file has a
/// name.
pub fn tops(daemon: &Daemon, spec: &SnapshotSpec) -> Vec<Option<OwnedFd>> {
    let top = |layers: &Vec<ChainLayer>| match layers.last()? {
        ChainLayer::Frozen(layer) => {
            daemon.templates.store().open_vm_layer(layer, false).ok().map(OwnedFd::from)
        }
        ChainLayer::Stored(_) | ChainLayer::Shared(_) => None,
    };
    spec.disks.iter().map(|disk| top(&disk.layers)).collect()
}

/// The rebases of the disks that have fewer layers since the commit.
pub fn rebases(
    daemon: &Daemon,
    tops: Vec<Option<OwnedFd>>,
    spec: &SnapshotSpec,
    manifest: &SnapshotManifest,
) -> Vec<Rebase> {
    let mut rebases = Vec::new();
    for (number, (top, (was, now))) in
        (0_u8..).zip(tops.into_iter().zip(spec.disks.iter().zip(&manifest.disks)))
    {
        let Some(top) = top.filter(|_| now.layers.len() < was.layers.len()) else { continue };
        match daemon.templates.store().open_layers(&now.layers, "a VM that goes on") {
            Ok(open) => {
                let files =
                    open.into_iter().flat_map(|layer| [layer.data.into(), layer.map.into()]);
                rebases.push(Rebase {
                    disk: number,
                    fds: std::iter::once(top).chain(files).collect(),
                });
            }
            Err(e) => tracing::warn!("layers that were just stored: {}", chain(&e)),
        }
    }
    rebases
}

/// Asks the VMM to use the merged layers. If it refuses, it keeps the old ones; that is logged and
/// harmless.
pub async fn rebase(daemon: &Daemon, vm: &Arc<Vm>, rebases: Vec<Rebase>) {
    for Rebase { disk, fds } in rebases {
        if !vm.phase().alive() {
            return;
        }
        let within = daemon.config.deadlines.control;
        match control_link::with_fds(&vm.dir.control(), Command::Rebase { disk }, fds, within).await
        {
            Ok(Answer::Ok) => {}
            Ok(got) => tracing::warn!(vm = %vm.id, ?got, "its disk {disk} keeps its layers"),
            Err(e) => tracing::warn!(vm = %vm.id, "its disk {disk} keeps its layers: {e}"),
        }
    }
}

/// Merges the frozen and shared layers of each disk with more than `MOST_FROZEN`, because every
/// clone opens two files for each. The caller holds `vm.snapshots`. A failed merge is logged and
/// changes nothing.
pub async fn merge_frozen(daemon: &Arc<Daemon>, vm: &Arc<Vm>) {
    for disk in 0..vm.live().disks.len() {
        if let Err(error) = merge_disk(daemon, vm, disk).await
            && vm.phase().alive()
        {
            tracing::warn!(vm = %vm.id, "its disk {disk} keeps its layers: {error}");
        }
    }
}

/// The stored layers at the bottom of a chain, and the frozen and shared layers above them.
fn split(chain: &[ChainLayer]) -> (Vec<LayerRef>, Vec<VmLayer>) {
    let stored = chain.iter().map_while(|layer| match layer {
        ChainLayer::Stored(layer) => Some(*layer),
        ChainLayer::Frozen(_) | ChainLayer::Shared(_) => None,
    });
    let stored: Vec<LayerRef> = stored.collect();
    let frozen = chain[stored.len()..].iter().filter_map(|layer| match layer {
        ChainLayer::Frozen(layer) | ChainLayer::Shared(layer) => Some(*layer),
        ChainLayer::Stored(_) => None,
    });
    (stored, frozen.collect())
}

async fn merge_disk(daemon: &Arc<Daemon>, vm: &Arc<Vm>, number: usize) -> Outcome<()> {
    let live = vm.live();
    let Some(disk) = live.disks.get(number) else { return Ok(()) };
    let (stored, frozen) = split(&disk.layers);
    // No frozen layer may be below a stored one.
    if frozen.len() <= MOST_FROZEN || stored.len() + frozen.len() != disk.layers.len() {
        return Ok(());
    }
    let failed = |e: &dyn std::error::Error| {
        ApiError::internal(format_args!("merging layers: {}", chain(e)))
    };
    let (store, size_bytes, id, below) =
        (daemon.templates.store().clone(), disk.size_bytes, vm.id, stored.clone());
    let was = disk.layers.clone();
    let own: Vec<VmLayer> = frozen.iter().copied().filter(|layer| layer.vm == id).collect();
    let made = blocking(move || {
        let merged =
            store.merge_vm_layers(id, &frozen, size_bytes, merge).map_err(|e| failed(&e))?;
        let Some((merged, top)) = merged.zip(frozen.last()) else { return Ok(None) };
        let mut fds = vec![OwnedFd::from(store.open_vm_layer(top, false)?)];
        for layer in store.open_layers(&below, "a VM that goes on")? {
            fds.extend([OwnedFd::from(layer.data), OwnedFd::from(layer.map)]);
        }
        let merged_files = store.open_frozen_layer(&merged)?;
        fds.extend([OwnedFd::from(merged_files.data), OwnedFd::from(merged_files.map)]);
        Ok(Some((merged, fds)))
    });
    let Some((merged, fds)) = made.await? else { return Ok(()) };
    failpoint::reached("daemon.merge.made");
    let command = Command::Rebase { disk: u8::try_from(number).unwrap_or(u8::MAX) };
    let answer =
        control_link::with_fds(&vm.dir.control(), command, fds, daemon.config.deadlines.control)
            .await;
    failpoint::reached("daemon.merge.rebased");
    let store = daemon.templates.store().clone();
    match answer {
        Ok(Answer::Ok) => {
            let disks = vm.update(|live| {
                if let Some(disk) = live.disks.get_mut(number) {
                    let stored = stored.iter().copied().map(ChainLayer::Stored);
                    replace(&mut disk.layers, &was, stored.chain([ChainLayer::Frozen(merged)]));
                }
                live.disks.clone()
            });
            // Recorded before the old layers are removed, because the next daemon relies on the
            // record.
            record::note(&daemon.registry, vm).await;
            failpoint::reached("daemon.merge.recorded");
            let (templates, vm) = (daemon.templates.clone(), vm.clone());
            blocking(move || {
                let pinned = templates.pin(&vm.name, &disks).map(|pin| vm.keep_pinned(pin));
                own.iter().try_for_each(|layer| store.remove_vm_layer(layer))?;
                failpoint::reached("daemon.merge.removed");
                pinned
            })
            .await
        }
        // The VMM keeps its old files open, and both chains have the same content.
        Ok(got) => {
            blocking(move || Ok(store.remove_vm_layer(&merged)?)).await?;
            Err(ApiError::internal(format_args!("the VMM, for a rebase: expected Ok, got {got:?}")))
        }
        Err(e) => {
            if e.was_refused() {
                blocking(move || Ok(store.remove_vm_layer(&merged)?)).await?;
            }
            Err(e.into())
        }
    }
}

#[cfg(test)]
#[path = "merge_tests.rs"]
mod merge_tests;
#[cfg(test)]
mod tests {
    use super::*;
    use dayfly_store::{Digest, FileRef, LayerId, VmLayer};
    use dayfly_units::VmId;

    #[test]
    fn a_chain_after_a_commit_is_what_was_stored_and_what_was_frozen_since() {
        let layer = |n: u8| {
            let file = FileRef { digest: Digest::of(&[n]), bytes: 4096, data_bytes: 4096 };
            LayerRef { id: LayerId::of(&file, &file), data: file, map: file }
        };
        let (vm, stored_as) = (VmId::random(), ChainLayer::Stored);
        let frozen = |number| ChainLayer::Frozen(VmLayer { vm, disk: 0, number });
        let was = [stored_as(layer(1)), stored_as(layer(2)), frozen(0)];
        let now = [layer(12), layer(3)];
        let expected = [stored_as(layer(12)), stored_as(layer(3))];

        let mut chain = was.to_vec();
        replace(&mut chain, &was, now.map(stored_as));
        assert_eq!(chain, expected);

        // Another save happened, and another commit ended first.
        let mut chain = vec![stored_as(layer(9)), frozen(0), frozen(1)];
        replace(&mut chain, &was, now.map(stored_as));
        assert_eq!(chain, [&expected[..], &[frozen(1)]].concat());

        let mut chain = vec![stored_as(layer(9))];
        replace(&mut chain, &was, now.map(stored_as));
        assert_eq!(chain, [stored_as(layer(9))], "not the chain that was committed");
    }
}
