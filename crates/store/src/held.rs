//! Layers that VMs have frozen and others stand on: clones that were forked from them, and templates that are not stored yet.
//!
//! Such a layer keeps its one name, in the folder of who froze it. Who froze it lets it go when it stands on another, or has gone; the file goes with
//! the last who holds it. A name of its own for each clone would be two links, each a change of a folder and of an inode that all of them share.

use crate::blob::Dir;
use crate::errors::{IoResult, told};
use crate::layers::VmLayer;
use dayfly_units::VmId;
use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// All such layers of a store, counted in memory: a restarted daemon [`crate::Store::pin`]s what its VMs stand on again, then tells what each VM has.
#[derive(Debug)]
pub(crate) struct Held {
    vms: Dir,
    layers: Mutex<BTreeMap<VmLayer, Holders>>,
}

#[derive(Debug, Default)]
struct Holders {
    count: u64,
    /// Who froze it needs it no more.
    let_go: bool,
}

/// Layers that stay while this lives.
#[derive(Debug)]
pub(crate) struct Hold {
    held: Arc<Held>,
    layers: Vec<VmLayer>,
}

impl Held {
    pub(crate) const fn new(vms: Dir) -> Self {
        Self { vms, layers: Mutex::new(BTreeMap::new()) }
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<VmLayer, Holders>> {
        self.layers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn hold(self: &Arc<Self>, layers: Vec<VmLayer>) -> Hold {
        let mut all = self.lock();
        layers.iter().for_each(|layer| all.entry(*layer).or_default().count += 1);
        drop(all);
        Hold { held: Arc::clone(self), layers }
    }

    /// How many hold it, and whether they alone keep it.
    pub(crate) fn holders(&self, layer: &VmLayer) -> (u64, bool) {
        self.lock().get(layer).map_or((0, false), |holders| (holders.count, holders.let_go))
    }

    /// The VMs of which a layer is held.
    pub(crate) fn vms(&self) -> Vec<VmId> {
        let mut vms: Vec<VmId> = self.lock().keys().map(|layer| layer.vm).collect();
        vms.dedup();
        vms
    }

    /// Removes a layer, now or when nobody holds it any more.
    pub(crate) fn let_go(&self, layer: &VmLayer) -> IoResult<()> {
        if let Some(holders) = self.lock().get_mut(layer) {
            holders.let_go = true;
            return Ok(());
        }
        self.remove(layer)
    }

    /// The same of all layers of a VM that are held; these.
    pub(crate) fn let_go_held(&self, vm: VmId) -> Vec<VmLayer> {
        let layer = |disk, number| VmLayer { vm, disk, number };
        let mut all = self.lock();
        let held = all.range_mut(layer(0, 0)..=layer(u8::MAX, u32::MAX));
        held.map(|(layer, holders)| {
            holders.let_go = true;
            *layer
        })
        .collect()
    }

    fn remove(&self, layer: &VmLayer) -> IoResult<()> {
        match self.vms.sub(&layer.vm.to_string()) {
            Err(e) if e.is_not_found() => Ok(()),
            Err(e) => Err(e),
            Ok(dir) => dir.unlink(&layer.map_name()).and_then(|()| dir.unlink(&layer.data_name())),
        }
    }

    /// The same, and the folder of a VM that has gone, when it was the last in it: that of one that lives has the layer that it writes.
    fn remove_last(&self, layer: &VmLayer) -> IoResult<()> {
        self.remove(layer)?;
        self.vms.remove_if_empty(&layer.vm.to_string())
    }
}

impl Clone for Hold {
    fn clone(&self) -> Self {
        self.held.hold(self.layers.clone())
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        let mut all = self.held.lock();
        let mut free = Vec::new();
        for layer in self.layers.drain(..) {
            let Entry::Occupied(mut entry) = all.entry(layer) else { continue };
            entry.get_mut().count -= 1;
            if entry.get().count == 0 && entry.remove().let_go {
                free.push(layer);
            }
        }
        drop(all);
        for layer in free {
            if let Err(e) = self.held.remove_last(&layer) {
                // The next start sweeps it.
                tracing::warn!("leaving a layer that nobody stands on: {}", told(&e));
            }
        }
    }
}

#[cfg(test)]
#[path = "held_tests.rs"]
mod tests;
