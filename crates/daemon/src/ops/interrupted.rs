//! A freeze that a daemon did not see the end of.
//!
//! The record of a VM that is being frozen has its layers from before. Whether the VMM froze them is
//! told by the files that it has open: it writes either the recorded layer, or a new one above it.

use crate::base::error::{ApiError, Outcome, blocking};
use crate::daemon::Daemon;
use crate::model::disk::Disk;
use crate::vm::Vm;
use dayfly_store::{ChainLayer, FileId};
use dayfly_vmm::control::Status;
use std::sync::Arc;

/// Finds out which layers a VM has whose freeze was interrupted. `status` is its VMM's answer after
/// the freeze. If that cannot be told, the VM runs on, but cannot be saved any more.
pub async fn settle(daemon: &Arc<Daemon>, vm: &Arc<Vm>, status: &Status) {
    let recorded = vm.live().disks;
    let (work, same, open) = (daemon.clone(), vm.clone(), status.layers.clone());
    let found = blocking(move || {
        let store = work.templates.store();
        let disks = resolve(recorded, open.len(), |number, from_top| {
            let files = open.get(usize::from(number)).map(Vec::as_slice).unwrap_or_default();
            let file = files.iter().rev().nth(from_top);
            let Some(file) = file else { return Ok(None) };
            let file = FileId { dev: file.dev, ino: file.ino };
            Ok(store.find_layers(same.id, number, &[file])?.pop().flatten())
        })?;
        let own: Vec<_> = disks.iter().flat_map(Disk::own).collect();
        store.keep_vm_layers(same.id, &own)?;
        let pin = work.templates.pin(&same.name, &disks)?;
        Ok((disks, pin))
    });
    match found.await {
        Ok((disks, pin)) => {
            vm.update(|live| {
                live.disks = disks;
                live.no_snapshot = None;
            });
            vm.keep_pinned(pin);
        }
        Err(error) => tracing::warn!(vm = %vm.id, "its layers are unknown: {error}"),
    }
}

/// The VM's disks after a freeze of which it is unknown whether it happened. `recorded` are the
/// disks before it. `layer` gives the layer that the VMM has open of a disk, by its place from the
/// top.
///
/// Only the two highest layers are asked for, and only layers of the VM itself are accepted: a VMM
/// that was taken over must not get a layer of another VM into its chain.
///
/// # Errors
/// What does not fit. The VM's layers are then unknown.
fn resolve(
    recorded: Vec<Disk>,
    disks: usize,
    layer: impl Fn(u8, usize) -> Outcome<Option<ChainLayer>>,
) -> Outcome<Vec<Disk>> {
    if recorded.len() != disks {
        let expected = recorded.len();
        return Err(ApiError::internal(format_args!(
            "its VMM: expected the layers of {expected} disks, got those of {disks}"
        )));
    }
    let resolved = (0..).zip(recorded).map(|(number, mut disk)| {
        let Some(writable) = disk.writable else { return Ok(disk) };
        let own = |place| {
            Ok::<_, ApiError>(match layer(number, place)? {
                Some(ChainLayer::Frozen(layer)) if layer.vm == writable.vm => Some(layer),
                _ => None,
            })
        };
        match own(0)? {
            Some(top) if top == writable => Ok(disk),
            Some(next) if next.number > writable.number && own(1)? == Some(writable) => {
                disk.layers.push(ChainLayer::Frozen(writable));
                disk.writable = Some(next);
                Ok(disk)
            }
            got => Err(ApiError::internal(format_args!(
                "disk {number}: expected that its VMM writes layer {} or the next one, got {got:?}",
                writable.number
            ))),
        }
    });
    resolved.collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use dayfly_store::{Digest, ImageRef, VmLayer};
    use dayfly_units::VmId;

    #[test]
    fn the_files_that_a_vmm_has_open_say_whether_its_layers_were_frozen() {
        let [vm, other] = [VmId::random(), VmId::random()];
        let frozen = |disk, number| ChainLayer::Frozen(VmLayer { vm, disk, number });
        let disk = |disk: u8, layers: &[u32], writable| Disk {
            image: ImageRef { name: "i".parse().unwrap(), digest: Digest::of(b"i") },
            size_bytes: 4096,
            layers: layers.iter().map(|number| frozen(disk, *number)).collect(),
            writable: Some(VmLayer { vm, disk, number: writable }),
        };
        let read_only = Disk { writable: None, ..disk(1, &[], 0) };
        let recorded = || vec![disk(0, &[0], 1), read_only.clone(), disk(2, &[0], 1)];
        // What the VMM has open of disks 0 and 2, the lowest layer first.
        let resolved = |first: &[ChainLayer], last: &[ChainLayer]| {
            resolve(recorded(), 3, |number, place| {
                let open = if number == 0 { first } else { last };
                Ok(open.iter().rev().nth(place).copied())
            })
        };
        let [before, after] = [0, 2].map(|disk| [frozen(disk, 0), frozen(disk, 1)]);
        assert_eq!(resolved(&before, &after).unwrap(), recorded());
        // Both were frozen; a freeze before it failed and had used a number.
        let now = [&before[..], &[frozen(0, 3)]].concat();
        let then = [&after[..], &[frozen(2, 2)]].concat();
        assert_eq!(
            resolved(&now, &then).unwrap(),
            [disk(0, &[0, 1], 3), read_only.clone(), disk(2, &[0, 1], 2)]
        );
        // Merged layers below make no difference.
        assert_eq!(resolved(&now[1..], &after[1..]).unwrap()[0], disk(0, &[0, 1], 3));

        let stranger = VmLayer { vm: other, disk: 0, number: 5 };
        for wrong in [
            vec![],
            vec![frozen(0, 0)],
            vec![frozen(0, 0), frozen(0, 2)],
            vec![frozen(0, 1), frozen(0, 0)],
            vec![frozen(0, 1), ChainLayer::Frozen(stranger)],
            vec![frozen(0, 1), ChainLayer::Shared(stranger)],
        ] {
            let error = resolved(&wrong, &after).unwrap_err().0.message;
            assert!(error.contains("disk 0: expected that its VMM writes layer 1"), "{error}");
        }
        let error = resolve(recorded(), 1, |_, _| Ok(None)).unwrap_err().0.message;
        assert!(error.contains("expected the layers of 3 disks, got those of 1"), "{error}");
    }
}
