//! Shared layers: frozen by one VM, and referenced by clones that were forked from it or by pending
//! snapshots.
//!
//! A frozen layer has one file name, in the folder of the VM that froze it. That VM releases the
//! layer when its disk no longer uses it or when the VM is removed. The files are deleted when the
//! last reference is dropped. A name for each clone would cost two hard links, each a change of a
//! folder and of an inode that all clones share.

use crate::blob::Dir;
use crate::errors::IoResult;
use crate::integrity::verify::{Stamp, Verifier};
use crate::objects::types::VmLayer;
use dayfly_units::VmId;
use dayfly_units::error::chain;
use dayfly_units::failpoint;
use dayfly_units::sync::lock;
use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::os::unix::fs::MetadataExt;
use std::sync::{Arc, Mutex, MutexGuard};

/// The reference counts of all shared layers, in memory only. A restarted daemon first
/// [`crate::Store::pin`]s what its VMs depend on, and then reports which layers each VM has
/// ([`crate::Store::keep_vm_layers`]).
#[derive(Debug)]
pub(crate) struct SharedLayers {
    vms: Dir,
    verifier: Arc<Verifier>,
    layers: Mutex<BTreeMap<VmLayer, References>>,
}

#[derive(Debug, Default)]
struct References {
    count: u64,
    /// Whether the VM that froze the layer has released it.
    released: bool,
}

/// References to layers, released on drop.
#[derive(Debug)]
pub(crate) struct Retained {
    counts: Arc<SharedLayers>,
    layers: Vec<VmLayer>,
}

impl SharedLayers {
    pub(crate) const fn new(vms: Dir, verifier: Arc<Verifier>) -> Self {
        Self { vms, verifier, layers: Mutex::new(BTreeMap::new()) }
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<VmLayer, References>> {
        lock(&self.layers)
    }

    pub(crate) fn retain(self: &Arc<Self>, layers: Vec<VmLayer>) -> Retained {
        let mut all = self.lock();
        layers.iter().for_each(|layer| all.entry(*layer).or_default().count += 1);
        drop(all);
        Retained { counts: Arc::clone(self), layers }
    }

    /// The layer's reference count, and whether its own VM has released it.
    pub(crate) fn references(&self, layer: &VmLayer) -> (u64, bool) {
        self.lock()
            .get(layer)
            .map_or((0, false), |references| (references.count, references.released))
    }

    /// The VMs that own a referenced layer.
    pub(crate) fn vms(&self) -> Vec<VmId> {
        let mut vms: Vec<VmId> = self.lock().keys().map(|layer| layer.vm).collect();
        vms.dedup();
        vms
    }

    /// Whether a layer of this VM is referenced.
    pub(crate) fn of_vm(&self, vm: VmId) -> bool {
        let layer = |disk, number| VmLayer { vm, disk, number };
        self.lock().range(layer(0, 0)..=layer(u8::MAX, u32::MAX)).next().is_some()
    }

    /// Releases a layer for its own VM: removes it now, or when the last reference is dropped.
    pub(crate) fn release(&self, layer: &VmLayer) -> IoResult<()> {
        let mut all = self.lock();
        if let Some(references) = all.get_mut(layer) {
            references.released = true;
            return Ok(());
        }
        let dir = self.folder(layer)?;
        self.end(dir.as_ref(), layer)?;
        drop(all);
        failpoint::reached("store.release_layer.map_removed");
        self.remove(dir.as_ref(), layer)?;
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
    fn end(&self, dir: Option<&Dir>, layer: &VmLayer) -> IoResult<()> {
        dir.map_or(Ok(()), |dir| self.unlink(dir, &layer.map_name()))
    }

    fn remove(&self, dir: Option<&Dir>, layer: &VmLayer) -> IoResult<()> {
        dir.map_or(Ok(()), |dir| self.unlink(dir, &layer.data_name()))
    }

    /// Unlinks a file that may have a second name in `layers/`. It need not be hashed again.
    fn unlink(&self, dir: &Dir, name: &str) -> IoResult<()> {
        // Without a descriptor left, the file is hashed again before its next use.
        let stored = dir.open(name).ok().filter(|f| f.metadata().is_ok_and(|m| m.nlink() > 1));
        let stamp = || stored.as_ref().and_then(|file| Stamp::of(file).ok());
        let before = stamp();
        dir.unlink(name)?;
        if let Some((before, after)) = before.zip(stamp()) {
            self.verifier.unlinked(before, after);
        }
        Ok(())
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
        let mut free = Vec::new();
        for layer in self.layers.drain(..) {
            let Entry::Occupied(mut entry) = all.entry(layer) else { continue };
            entry.get_mut().count -= 1;
            if entry.get().count == 0 && entry.remove().released {
                let ended = self.counts.folder(&layer).and_then(|dir| {
                    self.counts.end(dir.as_ref(), &layer)?;
                    Ok(dir)
                });
                free.push((layer, ended));
            }
        }
        drop(all);
        for (layer, ended) in free {
            // The folder of a removed VM is removed with its last layer. The folder of a running VM
            // is never empty, because it has the writable layer.
            let removed = ended.and_then(|dir| self.counts.remove(dir.as_ref(), &layer));
            let removed =
                removed.and_then(|()| self.counts.vms.remove_if_empty(&layer.vm.to_string()));
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
