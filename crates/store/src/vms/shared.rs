//! Shared layers: frozen by one VM, and referenced by clones that were forked from it or by pending
//! snapshots.
//!
//! A frozen layer has one file name, in the folder of the VM that froze it. That VM releases the
//! layer when its disk no longer uses it or when the VM is removed. The files are deleted when the
//! last reference is dropped. A name for each clone would cost two hard links, each a change of a
//! folder and of an inode that all clones share.

use crate::blob::Dir;
use crate::blob::interleave::lock;
use crate::errors::IoResult;
use crate::objects::types::VmLayer;
use dayfly_units::VmId;
use dayfly_units::error::chain;
use dayfly_units::failpoint;
use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::sync::{Arc, Mutex, MutexGuard};

/// The reference counts of all shared layers, in memory only. A restarted daemon first
/// [`crate::Store::pin`]s what its VMs depend on, and then reports which layers each VM has
/// ([`crate::Store::keep_vm_layers`]).
#[derive(Debug)]
pub(crate) struct SharedLayers {
    vms: Dir,
    counts: Mutex<Counts>,
}

#[derive(Debug, Default)]
struct Counts {
    layers: BTreeMap<VmLayer, References>,
    /// Number of [`RetainedAll`]. While there is one, released layers stay in `layers`, some of
    /// them with a reference count of 0.
    all: u64,
}

#[derive(Debug, Clone, Copy, Default)]
struct References {
    count: u64,
    /// Whether the VM that froze the layer has released it.
    released: bool,
}

/// A reference to every layer, for a VM whose layers are not known. Released on drop.
#[derive(Debug)]
pub(crate) struct RetainedAll {
    counts: Arc<SharedLayers>,
}

/// References to layers, released on drop.
#[derive(Debug)]
pub(crate) struct Retained {
    counts: Arc<SharedLayers>,
    layers: Vec<VmLayer>,
}

impl SharedLayers {
    pub(crate) const fn new(vms: Dir) -> Self {
        let counts = Mutex::new(Counts { layers: BTreeMap::new(), all: 0 });
        Self { vms, counts }
    }

    fn lock(&self) -> MutexGuard<'_, Counts> {
        lock(&self.counts)
    }

    pub(crate) fn retain(self: &Arc<Self>, layers: Vec<VmLayer>) -> Retained {
        let mut all = self.lock();
        layers.iter().for_each(|layer| all.layers.entry(*layer).or_default().count += 1);
        drop(all);
        Retained { counts: Arc::clone(self), layers }
    }

    /// Keeps the files of every layer, of removed VMs too, until the result is dropped.
    pub(crate) fn retain_all(self: &Arc<Self>) -> RetainedAll {
        self.lock().all += 1;
        RetainedAll { counts: Arc::clone(self) }
    }

    /// Whether a [`RetainedAll`] exists.
    pub(crate) fn retains_all(&self) -> bool {
        self.lock().all > 0
    }

    /// The layer's reference count, and whether its own VM has released it.
    pub(crate) fn references(&self, layer: &VmLayer) -> (u64, bool) {
        self.lock()
            .layers
            .get(layer)
            .map_or((0, false), |references| (references.count, references.released))
    }

    /// The VMs that own a referenced layer.
    pub(crate) fn vms(&self) -> Vec<VmId> {
        let mut vms: Vec<VmId> = self.lock().layers.keys().map(|layer| layer.vm).collect();
        vms.dedup();
        vms
    }

    /// Whether a layer of this VM is referenced.
    pub(crate) fn of_vm(&self, vm: VmId) -> bool {
        let layer = |disk, number| VmLayer { vm, disk, number };
        self.lock().layers.range(layer(0, 0)..=layer(u8::MAX, u32::MAX)).next().is_some()
    }

    /// Releases a layer for its own VM: removes it now, or when the last reference is dropped.
    pub(crate) fn release(&self, layer: &VmLayer) -> IoResult<()> {
        let mut all = self.lock();
        if all.all > 0 {
            all.layers.entry(*layer).or_default();
        }
        if let Some(references) = all.layers.get_mut(layer) {
            references.released = true;
            return Ok(());
        }
        let dir = self.folder(layer)?;
        Self::end(dir.as_ref(), layer)?;
        drop(all);
        failpoint::reached("store.release_layer.map_removed");
        Self::remove(dir.as_ref(), layer)?;
        failpoint::reached("store.release_layer.data_removed");
        Ok(())
    }

    /// The folder of the layer's VM; `None` if it is gone.
    fn folder(&self, layer: &VmLayer) -> IoResult<Option<Dir>> {
        match self.vms.sub(&layer.vm.to_string()) {
            Err(e) if e.is_not_found() => Ok(None),
            dir => dir.map(Some),
        }
    }

    /// Unlinks the map, after which [`crate::Store::pin`] does not find the layer. Unlinking the
    /// small map is quick enough to do under the lock.
    fn end(dir: Option<&Dir>, layer: &VmLayer) -> IoResult<()> {
        dir.map_or(Ok(()), |dir| dir.unlink(&layer.map_name()))
    }

    fn remove(dir: Option<&Dir>, layer: &VmLayer) -> IoResult<()> {
        dir.map_or(Ok(()), |dir| dir.unlink(&layer.data_name()))
    }
}

impl Clone for Retained {
    fn clone(&self) -> Self {
        self.counts.retain(self.layers.clone())
    }
}

impl Drop for Retained {
    fn drop(&mut self) {
        let mut all = self.counts.lock();
        let mut unused = Vec::new();
        for layer in self.layers.drain(..) {
            let retained = all.all > 0;
            let Entry::Occupied(mut entry) = all.layers.entry(layer) else { continue };
            entry.get_mut().count -= 1;
            let References { count, released } = *entry.get();
            if count == 0 && !(retained && released) {
                entry.remove();
                unused.extend(released.then_some(layer));
            }
        }
        self.counts.delete(all, unused);
    }
}

impl Drop for RetainedAll {
    fn drop(&mut self) {
        let mut all = self.counts.lock();
        all.all -= 1;
        let mut unused = Vec::new();
        if all.all == 0 {
            all.layers.retain(|layer, references| {
                if references.count == 0 {
                    unused.push(*layer);
                }
                references.count > 0
            });
        }
        self.counts.delete(all, unused);
    }
}

impl SharedLayers {
    /// Deletes the files of layers that `counts` has no longer.
    fn delete(&self, counts: MutexGuard<'_, Counts>, unused: Vec<VmLayer>) {
        let ended = unused.into_iter().map(|layer| {
            let dir = self.folder(&layer).and_then(|dir| {
                Self::end(dir.as_ref(), &layer)?;
                Ok(dir)
            });
            (layer, dir)
        });
        let ended: Vec<_> = ended.collect();
        drop(counts);
        for (layer, dir) in ended {
            // The folder of a removed VM is removed with its last layer. The folder of a running VM
            // is never empty, because it has the writable layer.
            let removed = dir.and_then(|dir| Self::remove(dir.as_ref(), &layer));
            let removed = removed.and_then(|()| self.vms.remove_if_empty(&layer.vm.to_string()));
            if let Err(e) = removed {
                // The next start of the daemon removes it.
                tracing::warn!("leaving a layer that nothing references: {}", chain(&e));
            }
        }
    }
}

#[cfg(test)]
#[path = "shared_tests.rs"]
mod tests;
