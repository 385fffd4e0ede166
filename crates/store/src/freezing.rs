//! Freezing the layers that a VM writes: a map for each, and a new layer above it.

use crate::errors::IoError;
use crate::layers::{ChainLayer, VmLayer};
use crate::vms::next_number;
use crate::{Inner, Store};
use std::fs::File;
use std::sync::Arc;

/// A writable disk of the VM whose layers are frozen.
#[derive(Debug)]
pub struct Freeze {
    /// The layer that the VM writes now; frozen once its VMM says so.
    pub frozen: ChainLayer,
    /// An empty file for the map of that layer.
    pub map: File,
    /// The layer that the VM writes afterwards.
    pub next: VmLayer,
    /// Its empty file.
    pub next_data: File,
}

/// Layers that are to be frozen together.
///
/// Dropping it means: the VMM answered that it did not, or was not asked. When it is not known whether it did, they are to be [`Self::keep`]t: then
/// nothing that the VM may stand on is removed.
#[derive(Debug)]
pub struct Freezing {
    store: Store,
    /// The frozen layer and the next, which exist only for this.
    undo: Vec<(VmLayer, VmLayer)>,
}

impl Store {
    /// None yet.
    #[must_use]
    pub fn freezing(&self) -> Freezing {
        Freezing::new(&self.0)
    }
}

impl Freezing {
    pub(crate) fn new(inner: &Arc<Inner>) -> Self {
        Self { store: Store(Arc::clone(inner)), undo: Vec::new() }
    }

    /// Makes ready to freeze the layer that a VM writes now. A map left by an attempt that failed is replaced.
    ///
    /// # Errors
    /// The layer is not there, or the host cannot make the files.
    pub fn freeze(&mut self, writable: &VmLayer) -> Result<Freeze, IoError> {
        let dir = self.store.0.vms.sub(&writable.vm.to_string())?;
        dir.open(&writable.data_name())?;
        dir.unlink(&writable.map_name())?;
        let next = VmLayer { number: next_number(&dir, writable.disk)?, ..*writable };
        let next_data = self.store.fresh_file(&dir, &next.data_name())?;
        self.undo.push((*writable, next));
        let map = self.store.fresh_file(&dir, &writable.map_name())?;
        Ok(Freeze { frozen: ChainLayer::Frozen(*writable), map, next, next_data })
    }

    /// The VMM has frozen them, or may have: the VM stands on them.
    pub fn keep(mut self) {
        self.undo.clear();
    }
}

impl Drop for Freezing {
    /// The maps and the next layers of what did not happen.
    fn drop(&mut self) {
        for (frozen, next) in self.undo.drain(..) {
            let dir = self.store.0.vms.sub(&frozen.vm.to_string());
            let map = dir.and_then(|d| d.unlink(&frozen.map_name()));
            if let Err(error) = map.and_then(|()| self.store.remove_vm_layer(&next)) {
                // It goes with its VM.
                tracing::warn!(%error, cause = %error.source, "leaving a layer of a save that failed");
            }
        }
    }
}
