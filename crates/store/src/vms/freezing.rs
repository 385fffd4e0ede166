//! Freezes the layers that a VM writes: each gets a map, and a new writable layer above it.

use crate::errors::IoError;
use crate::inner::{Inner, Store};
use crate::objects::types::{ChainLayer, VmLayer};
use crate::vms::layers::next_number;
use dayfly_units::failpoint;
use std::fs::File;
use std::sync::Arc;

/// The layers and files for freezing one writable disk of a VM.
#[derive(Debug)]
pub struct Freeze {
    /// The layer that the VM writes now; it counts as frozen once the VMM confirms.
    pub frozen: ChainLayer,
    /// The data of that layer, open for reading. The VMM keeps it, and closes its writable
    /// descriptor.
    pub read_only: File,
    /// An empty file for that layer's map.
    pub map: File,
    /// The layer that the VM writes after the freeze.
    pub next: VmLayer,
    /// The empty data file of `next`.
    pub next_data: File,
}

/// Layers that are frozen together.
///
/// Drop it only if the VMM did not freeze: the VMM said so, or was not asked. Drop removes the new
/// files. If the outcome is unknown, call [`Self::keep`], so that no file that the VM may depend on
/// is removed.
#[derive(Debug)]
pub struct Freezing {
    store: Store,
    /// The writable layer and the next one; drop removes the map of the first and the data of the
    /// second.
    undo: Vec<(VmLayer, VmLayer)>,
}

impl Store {
    /// An empty set of layers to freeze.
    #[must_use]
    pub fn freezing(&self) -> Freezing {
        Freezing::new(&self.0)
    }
}

impl Freezing {
    pub(crate) fn new(inner: &Arc<Inner>) -> Self {
        Self { store: Store(Arc::clone(inner)), undo: Vec::new() }
    }

    /// Prepares to freeze the layer that a VM writes now. The map of an earlier attempt that failed
    /// is replaced.
    ///
    /// # Errors
    /// The layer does not exist, or the host cannot create the files.
    pub fn freeze(&mut self, writable: &VmLayer) -> Result<Freeze, IoError> {
        let dir = self.store.0.vms.sub(&writable.vm.to_string())?;
        let read_only = dir.open(&writable.data_name())?;
        dir.unlink(&writable.map_name())?;
        let next = VmLayer { number: next_number(&dir, writable.disk)?, ..*writable };
        let next_data = self.store.fresh_file(&dir, &next.data_name())?;
        self.undo.push((*writable, next));
        failpoint::reached("store.freeze.next_made");
        let map = self.store.fresh_file(&dir, &writable.map_name())?;
        failpoint::reached("store.freeze.map_made");
        Ok(Freeze { frozen: ChainLayer::Frozen(*writable), read_only, map, next, next_data })
    }

    /// Keeps the files: the VMM has frozen the layers, or may have.
    pub fn keep(mut self) {
        self.undo.clear();
    }
}

impl Drop for Freezing {
    /// Removes the maps and next layers that [`Self::keep`] did not keep.
    fn drop(&mut self) {
        for (frozen, next) in self.undo.drain(..) {
            let dir = self.store.0.vms.sub(&frozen.vm.to_string());
            let map = dir.and_then(|d| d.unlink(&frozen.map_name()));
            if let Err(error) = map.and_then(|()| self.store.remove_vm_layer(&next)) {
                // The layer is removed with its VM.
                tracing::warn!(
                    %error,
                    cause = %error.source,
                    "leaving a layer of a save that failed"
                );
            }
        }
    }
}
