//! Chains of layers that a commit made shorter: what the daemon then believes of a VM, and telling its VMM.
//!
//! ```text
//! VMM and daemon: image a b c d │ e writable      commit: the manifest has image ab c d e
//! daemon:         image ab c d e │ writable       noted in vm.json, pinned
//! VMM:            image ab c d e │ writable       Rebase: gives up the files of a and b
//! ```
//! Both chains read the same, so nothing is wrong while the two believe in different ones, or if the VMM never changes: it keeps files
//! open that nobody else needs, and its page map's hints are wrong more often.

use crate::daemon::Daemon;
use crate::error::{Fault, Outcome, blocking, chain};
use crate::vm::{Vm, control_link, death};
use dayfly_store::{ChainLayer, LayerRef, Merged, SnapshotManifest, SnapshotSpec, VmLayer};
use dayfly_vmm::control::{Answer, Command};
use dayfly_vmm::disk::Merge;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;

/// So many layers a VM's disk may have frozen for its forks before they are merged.
const MOST_FROZEN: usize = 4;

/// What a VMM is to be told of one of its disks.
#[derive(Debug)]
pub struct Rebase {
    disk: u8,
    /// As [`Command::Rebase`] says.
    fds: Vec<OwnedFd>,
}

/// What layers with these maps are as one.
///
/// # Errors
/// They are no maps, or not of one disk.
pub fn merge(maps: &[BorrowedFd<'_>]) -> Result<Merged, Box<dyn std::error::Error + Send + Sync>> {
    let merge = Merge::of(maps)?;
    let map = merge.map().encode();
    Ok(Merged { map, runs: Box::new(merge.into_runs()) })
}

/// The chain of a VM's disk after a commit: `was` is what was committed, `stored` what it became. Layers that were frozen since lie above.
pub fn stored(chain: &mut Vec<ChainLayer>, was: &[ChainLayer], stored: &[LayerRef]) {
    let Some(top) = was.last() else { return };
    if let Some(place) = chain.iter().rposition(|layer| layer == top) {
        chain.splice(..=place, stored.iter().copied().map(ChainLayer::Stored));
    }
}

/// For each disk the data of the layer that the VM froze last, while it has a name.
pub fn tops(daemon: &Daemon, spec: &SnapshotSpec) -> Vec<Option<OwnedFd>> {
    let top = |layers: &Vec<ChainLayer>| match layers.last()? {
        ChainLayer::Frozen(layer) => daemon.depot.store().open_vm_layer(layer, false).ok().map(OwnedFd::from),
        ChainLayer::Stored(_) | ChainLayer::Borrowed(_) => None,
    };
    spec.disks.iter().map(|disk| top(&disk.layers)).collect()
}

/// What is to be told of the disks that have fewer layers now.
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
        match daemon.depot.store().open_layers(&now.layers, "a VM that goes on") {
            Ok(open) => {
                let files = open.into_iter().flat_map(|layer| [layer.data.into(), layer.map.into()]);
                rebases.push(Rebase { disk: number, fds: std::iter::once(top).chain(files).collect() });
            }
            Err(e) => tracing::warn!("layers that were just stored: {}", chain(&e)),
        }
    }
    rebases
}

/// Tells the VMM. One that does not do it goes on as it is.
pub async fn rebase(daemon: &Daemon, vm: &Arc<Vm>, rebases: Vec<Rebase>) {
    for Rebase { disk, fds } in rebases {
        if !vm.phase().alive() {
            return;
        }
        let within = daemon.config.deadlines.control;
        match control_link::with_fds(&vm.dir.control(), Command::Rebase { disk }, fds, within).await {
            Ok(Answer::Ok) => {}
            Ok(got) => tracing::warn!(vm = %vm.id, ?got, "its disk {disk} keeps its layers"),
            Err(e) => tracing::warn!(vm = %vm.id, "its disk {disk} keeps its layers: {e}"),
        }
    }
}

/// Merges what a VM has frozen for its forks, and what it has borrowed as a fork itself, where that is more than a few layers: each clone gets two files to open
/// for each of them. Whoever calls holds `vm.snapshots`. What cannot be merged stays as it is.
pub async fn merge_frozen(daemon: &Arc<Daemon>, vm: &Arc<Vm>) {
    for disk in 0..vm.live().disks.len() {
        if let Err(fault) = merge_disk(daemon, vm, disk).await
            && vm.phase().alive()
        {
            tracing::warn!(vm = %vm.id, "its disk {disk} keeps its layers: {fault}");
        }
    }
}

async fn merge_disk(daemon: &Arc<Daemon>, vm: &Arc<Vm>, number: usize) -> Outcome<()> {
    let live = vm.live();
    let Some(disk) = live.disks.get(number) else { return Ok(()) };
    let stored: Vec<LayerRef> = disk
        .layers
        .iter()
        .map_while(|layer| match layer {
            ChainLayer::Stored(layer) => Some(*layer),
            ChainLayer::Frozen(_) | ChainLayer::Borrowed(_) => None,
        })
        .collect();
    let frozen: Vec<VmLayer> = disk.layers[stored.len()..]
        .iter()
        .filter_map(|layer| match layer {
            ChainLayer::Frozen(layer) | ChainLayer::Borrowed(layer) => Some(*layer),
            ChainLayer::Stored(_) => None,
        })
        .collect();
    // None lies beneath one that is stored.
    if frozen.len() <= MOST_FROZEN || stored.len() + frozen.len() != disk.layers.len() {
        return Ok(());
    }
    let failed = |e: &dyn std::error::Error| Fault::internal(format_args!("merging layers: {}", chain(e)));
    let (store, size_bytes, id, below) =
        (daemon.depot.store().clone(), disk.size_bytes, vm.id, stored.clone());
    let own: Vec<VmLayer> = frozen.iter().copied().filter(|layer| layer.vm == id).collect();
    let made = blocking(move || {
        let merged = store.merge_vm_layers(id, &frozen, size_bytes, merge).map_err(|e| failed(&e))?;
        let Some((merged, top)) = merged.zip(frozen.last()) else { return Ok(None) };
        let mut fds = vec![OwnedFd::from(store.open_vm_layer(top, false)?)];
        for layer in store.open_layers(&below, "a VM that goes on")? {
            fds.extend([OwnedFd::from(layer.data), OwnedFd::from(layer.map)]);
        }
        let (data, map) = store.open_frozen_layer(&merged)?;
        fds.extend([OwnedFd::from(data), OwnedFd::from(map)]);
        Ok(Some((merged, fds)))
    });
    let Some((merged, fds)) = made.await? else { return Ok(()) };
    let command = Command::Rebase { disk: u8::try_from(number).unwrap_or(u8::MAX) };
    let answer =
        control_link::with_fds(&vm.dir.control(), command, fds, daemon.config.deadlines.control).await;
    let store = daemon.depot.store().clone();
    match answer {
        Ok(Answer::Ok) => {
            let disks = vm.update(|live| {
                if let Some(disk) = live.disks.get_mut(number) {
                    disk.layers = stored.iter().copied().map(ChainLayer::Stored).collect();
                    disk.layers.push(ChainLayer::Frozen(merged));
                }
                live.disks.clone()
            });
            // Before they go: a daemon that dies in between believes in them.
            death::note(daemon, vm).await;
            let (depot, vm) = (daemon.depot.clone(), vm.clone());
            blocking(move || {
                let pinned = depot.pin(&vm.name, &disks).map(|pin| vm.keep_pinned(pin));
                own.iter().try_for_each(|layer| store.remove_vm_layer(layer))?;
                pinned
            })
            .await
        }
        // It keeps its files open, and both chains read the same.
        Ok(got) => {
            blocking(move || Ok(store.remove_vm_layer(&merged)?)).await?;
            Err(Fault::internal(format_args!("the VMM, for a rebase: expected Ok, got {got:?}")))
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
        stored(&mut chain, &was, &now);
        assert_eq!(chain, expected);

        // Another save, and another commit that ended first.
        let mut chain = vec![stored_as(layer(9)), frozen(0), frozen(1)];
        stored(&mut chain, &was, &now);
        assert_eq!(chain, [&expected[..], &[frozen(1)]].concat());

        let mut chain = vec![stored_as(layer(9))];
        stored(&mut chain, &was, &now);
        assert_eq!(chain, [stored_as(layer(9))], "not the chain that was committed");
    }
}
