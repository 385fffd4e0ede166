//! Pins: references from running VMs to images and layers. Pins exist only in memory; a restarted
//! daemon pins what its VMs depend on before it calls [`crate::Store::gc`].

use crate::errors::{Damage, IoError};
use crate::objects::manifest::SnapshotManifest;
use crate::objects::types::LayerId;
use crate::vms::shared::{Retained, RetainedAll};
use dayfly_units::Name;
use dayfly_units::sync::lock;
use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};

/// All pins of a store.
#[derive(Default)]
pub(crate) struct Pins {
    all: Mutex<All>,
    /// Called when the last pin that kept a layer is dropped.
    garbage: OnceLock<Box<dyn Fn() + Send + Sync>>,
}

#[derive(Debug, Default)]
struct All {
    next: u64,
    pins: BTreeMap<u64, Pinned>,
    /// Number of pins on each layer.
    layers: BTreeMap<LayerId, u64>,
    /// Number of pins on every layer.
    every_layer: u64,
    /// Layers that the last gc found without a snapshot, but with a pin.
    kept: BTreeSet<LayerId>,
}

/// The references of one pin.
#[derive(Debug, Clone, Default)]
pub(crate) struct Pinned {
    /// The pin's owner, shown to people.
    pub(crate) holder: String,
    pub(crate) images: BTreeSet<Name>,
    pub(crate) layers: BTreeSet<LayerId>,
    /// Whether it references every layer, those of later snapshots too.
    pub(crate) every_layer: bool,
}

impl Pinned {
    /// References to the images and layers that a snapshot, or a VM with the same manifest, depends
    /// on.
    pub(crate) fn of(manifest: &SnapshotManifest, holder: String) -> Self {
        let images = manifest.disks.iter().map(|d| d.image.name.clone()).collect();
        let layers = manifest.layer_ids().into_iter().collect();
        Self { holder, images, layers, every_layer: false }
    }
}

/// A reference that keeps images and layers in the store until it is dropped.
#[derive(Debug)]
pub struct Pin {
    pins: Arc<Pins>,
    key: u64,
    /// Reference to shared layers that other VMs froze.
    pub(super) shared: Option<Retained>,
    /// Reference to all shared layers.
    pub(super) every_shared: Option<Arc<RetainedAll>>,
}

/// Why a pin was not made.
#[derive(Debug, thiserror::Error)]
pub enum PinError {
    /// The host could not read the store.
    #[error(transparent)]
    Io(#[from] IoError),
    /// An item is missing, or has other content than the caller expects.
    #[error(transparent)]
    Damage(#[from] Damage),
}

impl fmt::Debug for Pins {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pins").field("all", &self.all).finish_non_exhaustive()
    }
}

impl Pins {
    fn lock(&self) -> MutexGuard<'_, All> {
        lock(&self.all)
    }

    pub(crate) fn pin(self: &Arc<Self>, pinned: Pinned) -> Pin {
        let mut all = self.lock();
        let key = all.next;
        all.next += 1;
        for layer in &pinned.layers {
            *all.layers.entry(*layer).or_default() += 1;
        }
        all.every_layer += u64::from(pinned.every_layer);
        all.pins.insert(key, pinned);
        Pin { pins: Arc::clone(self), key, shared: None, every_shared: None }
    }

    pub(crate) fn all(&self) -> Vec<Pinned> {
        self.lock().pins.values().cloned().collect()
    }

    pub(crate) fn when_garbage(&self, call: impl Fn() + Send + Sync + 'static) {
        let _is_set = self.garbage.set(Box::new(call));
    }

    /// Splits `layers`, which no snapshot references: returns those without a pin, and records the
    /// others in `kept`. A kept layer becomes garbage when its last pin is dropped.
    pub(crate) fn unpinned(&self, layers: BTreeSet<LayerId>) -> BTreeSet<LayerId> {
        let mut all = self.lock();
        let every = all.every_layer > 0;
        let pinned = |layer: &LayerId| every || all.layers.contains_key(layer);
        let (kept, unpinned) = layers.into_iter().partition(pinned);
        all.kept = kept;
        unpinned
    }

    /// Whether a pin retains the layer, which no snapshot references. If so, it becomes garbage
    /// when its last pin is dropped.
    pub(crate) fn keeps(&self, layer: LayerId) -> bool {
        let mut all = self.lock();
        let kept = all.every_layer > 0 || all.layers.contains_key(&layer);
        if kept {
            all.kept.insert(layer);
        }
        kept
    }
}

impl All {
    /// Removes the pin `key`. Returns whether a layer in `kept` lost its last pin.
    fn remove(&mut self, key: u64) -> bool {
        let Some(pinned) = self.pins.remove(&key) else { return false };
        let mut garbage = false;
        if pinned.every_layer {
            self.every_layer -= 1;
            garbage = self.every_layer == 0 && !self.kept.is_empty();
        }
        for layer in pinned.layers {
            let Entry::Occupied(mut count) = self.layers.entry(layer) else { continue };
            *count.get_mut() -= 1;
            if *count.get() == 0 {
                count.remove();
                garbage |= self.kept.contains(&layer);
            }
        }
        garbage
    }
}

impl Clone for Pin {
    /// Another pin on the same images and layers.
    fn clone(&self) -> Self {
        let pinned = self.pins.lock().pins.get(&self.key).cloned().unwrap_or_default();
        let mut pin = self.pins.pin(pinned);
        pin.shared = self.shared.clone();
        pin.every_shared = self.every_shared.clone();
        pin
    }
}

impl Drop for Pin {
    fn drop(&mut self) {
        let garbage = self.pins.lock().remove(self.key);
        if garbage && let Some(call) = self.pins.garbage.get() {
            call();
        }
    }
}
