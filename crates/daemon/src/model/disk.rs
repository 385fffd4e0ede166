//! A disk of a VM: an image, frozen layers over it, and a layer that takes the writes.

use dayfly_store::{ChainLayer, DiskRef, ImageRef, LayerId, VmLayer};
use serde::{Deserialize, Serialize};

/// One disk of a VM.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Disk {
    /// The image, which is the lowest layer.
    pub image: ImageRef,
    /// The size that the guest sees, in bytes.
    pub size_bytes: u64,
    /// Frozen layers over the image, the lowest first.
    pub layers: Vec<ChainLayer>,
    /// The layer that takes the guest's writes; `None` for a disk of a snapshot or fork point.
    pub writable: Option<VmLayer>,
}

impl Disk {
    /// The disk of a VM that starts from `disk` of a snapshot, still without a writable layer.
    #[must_use]
    pub fn of(disk: &DiskRef) -> Self {
        let layers = disk.layers.iter().copied().map(ChainLayer::Stored).collect();
        Self { image: disk.image.clone(), size_bytes: disk.size_bytes, layers, writable: None }
    }

    /// The stored layers.
    pub fn stored(&self) -> impl Iterator<Item = LayerId> + '_ {
        self.layers.iter().filter_map(|layer| match layer {
            ChainLayer::Stored(layer) => Some(layer.id),
            ChainLayer::Frozen(_) | ChainLayer::Shared(_) => None,
        })
    }

    /// The frozen layers that belong to other VMs.
    pub fn shared_layers(&self) -> impl Iterator<Item = VmLayer> + '_ {
        self.layers.iter().filter_map(|layer| match layer {
            ChainLayer::Shared(layer) => Some(*layer),
            ChainLayer::Stored(_) | ChainLayer::Frozen(_) => None,
        })
    }

    /// The VM's own layers: frozen ones and the writable one.
    pub fn own(&self) -> impl Iterator<Item = VmLayer> + '_ {
        let frozen = self.layers.iter().filter_map(|layer| match layer {
            ChainLayer::Frozen(layer) => Some(*layer),
            ChainLayer::Stored(_) | ChainLayer::Shared(_) => None,
        });
        frozen.chain(self.writable)
    }

    /// The disk as a clone of the VM has it: the VM's frozen layers are shared.
    #[must_use]
    pub fn for_clone(mut self) -> Self {
        for layer in &mut self.layers {
            if let ChainLayer::Frozen(own) = *layer {
                *layer = ChainLayer::Shared(own);
            }
        }
        self
    }
}
