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

    /// Whether a layer of this VM is held.
    pub(crate) fn has(&self, vm: VmId) -> bool {
        let layer = |disk, number| VmLayer { vm, disk, number };
        self.lock().range(layer(0, 0)..=layer(u8::MAX, u32::MAX)).next().is_some()
    }

    /// Removes a layer, now or when nobody holds it any more.
    pub(crate) fn let_go(&self, layer: &VmLayer) -> IoResult<()> {
        let mut all = self.lock();
        if let Some(holders) = all.get_mut(layer) {
            holders.let_go = true;
            return Ok(());
        }
        let dir = self.folder(layer)?;
        Self::end(dir.as_ref(), layer)?;
        drop(all);
        Self::remove(dir.as_ref(), layer)
    }

    /// The folder of its VM; `None` where that has gone.
    fn folder(&self, layer: &VmLayer) -> IoResult<Option<Dir>> {
        match self.vms.sub(&layer.vm.to_string()) {
            Err(e) if e.is_not_found() => Ok(None),
            dir => dir.map(Some),
        }
    }

    /// From now on nobody finds it: whoever holds a layer looks for its map ([`crate::Store::pin`]). Small, so that it is done under the lock.
    fn end(dir: Option<&Dir>, layer: &VmLayer) -> IoResult<()> {
        dir.map_or(Ok(()), |dir| dir.unlink(&layer.map_name()))
    }

    fn remove(dir: Option<&Dir>, layer: &VmLayer) -> IoResult<()> {
        dir.map_or(Ok(()), |dir| dir.unlink(&layer.data_name()))
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
                let ended = self.held.folder(&layer).and_then(|dir| {
                    Held::end(dir.as_ref(), &layer)?;
                    Ok(dir)
                });
                free.push((layer, ended));
            }
        }
        drop(all);
        for (layer, ended) in free {
            // And the folder of a VM that has gone, when it was the last in it: that of one that lives has the layer that it writes.
            let removed = ended.and_then(|dir| Held::remove(dir.as_ref(), &layer));
            let removed = removed.and_then(|()| self.held.vms.remove_if_empty(&layer.vm.to_string()));
            if let Err(e) = removed {
                // The next start sweeps it.
                tracing::warn!("leaving a layer that nobody stands on: {}", told(&e));
            }
        }
    }
}

#[cfg(test)]
#[path = "held_tests.rs"]
mod tests;
