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
use crate::error::chain;
use crate::vm::{Vm, control_link};
use dayfly_store::{ChainLayer, LayerRef, Merged, SnapshotManifest, SnapshotSpec};
use dayfly_vmm::control::{Answer, Command};
use dayfly_vmm::disk::Merge;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;

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
        ChainLayer::Stored(_) => None,
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
