//! Layers that VMs have frozen, kept under a second name by what is no VM: the fork that becomes a template.

use super::Depot;
use crate::error::Outcome;
use crate::vm::Disk;
use crate::vm::registry::lock;
use dayfly_store::{ChainLayer, Store};
use dayfly_units::VmId;
use std::collections::HashSet;
use std::sync::{Arc, Mutex};

/// Under which ids: none of a VM's, and none of a leak's.
#[derive(Debug, Clone, Default)]
pub struct Keepers(Arc<Mutex<HashSet<VmId>>>);

/// Layers are there until this is dropped.
#[derive(Debug)]
pub struct Kept {
    store: Store,
    keepers: Keepers,
    id: VmId,
}

impl Depot {
    /// Keeps the frozen layers of `disks`, which stand on the second names from then on. Blocks.
    ///
    /// # Errors
    /// A layer is not there, or the host cannot.
    pub fn keep_frozen(&self, disks: &mut [Disk]) -> Outcome<Kept> {
        let kept = Kept { store: self.store.clone(), keepers: self.keepers.clone(), id: VmId::random() };
        lock(&self.keepers.0).insert(kept.id);
        for layer in disks.iter_mut().flat_map(|disk| &mut disk.layers) {
            if let ChainLayer::Frozen(layer) = layer {
                *layer = self.store.share_vm_layer(layer, kept.id)?;
            }
        }
        Ok(kept)
    }

    /// The folders among those of VMs that are kept so.
    #[must_use]
    pub fn keepers(&self) -> Vec<VmId> {
        lock(&self.keepers.0).iter().copied().collect()
    }
}

impl Drop for Kept {
    fn drop(&mut self) {
        if let Err(e) = self.store.remove_vm(self.id) {
            // The next start sweeps it.
            tracing::warn!("leaving layers of a fork: {e}");
        }
        lock(&self.keepers.0).remove(&self.id);
    }
}
