//! Pins: what running VMs stand on. Held in memory by whoever holds a VM; a restarted daemon pins again what its VMs need
//! before it calls [`Store::gc`].

use crate::errors::{Damage, IoError};
use crate::held::Hold;
use crate::layers::{LayerId, VmLayer};
use crate::manifest::{ImageManifest, ImageRef, ManifestError, SnapshotManifest};
use crate::{Store, manifest};
use dayfly_units::Name;
use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

/// All pins of a store.
#[derive(Default)]
pub(crate) struct Pins {
    all: Mutex<All>,
    /// Called when the last has gone that kept a layer.
    garbage: OnceLock<Box<dyn Fn() + Send + Sync>>,
}

#[derive(Debug, Default)]
struct All {
    next: u64,
    pins: BTreeMap<u64, Pinned>,
    /// How many pins hold each layer.
    layers: BTreeMap<LayerId, u64>,
    /// Layers that were there for pins alone when that was last looked at.
    kept: BTreeSet<LayerId>,
}

/// What one pin holds.
#[derive(Debug, Clone, Default)]
pub(crate) struct Pinned {
    /// Who holds it, for people.
    pub(crate) holder: String,
    pub(crate) images: BTreeSet<Name>,
    pub(crate) layers: BTreeSet<LayerId>,
}

impl Pinned {
    /// What a snapshot, or a VM like it, needs.
    pub(crate) fn of(manifest: &SnapshotManifest, holder: String) -> Self {
        let images = manifest.disks.iter().map(|d| d.image.name.clone()).collect();
        Self { holder, images, layers: manifest.layer_ids().into_iter().collect() }
    }
}

/// Images and layers that stay while this lives.
#[derive(Debug)]
pub struct Pin {
    pins: Arc<Pins>,
    key: u64,
    /// Layers that VMs have frozen, and the VM that has this stands on.
    borrowed: Option<Hold>,
}

/// Why something was not pinned.
#[derive(Debug, thiserror::Error)]
pub enum PinError {
    /// The host could not look.
    #[error(transparent)]
    Io(#[from] IoError),
    /// It is not there any more, or is another one by now.
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
        self.all.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn pin(self: &Arc<Self>, pinned: Pinned) -> Pin {
        let mut all = self.lock();
        let key = all.next;
        all.next += 1;
        for layer in &pinned.layers {
            *all.layers.entry(*layer).or_default() += 1;
        }
        all.pins.insert(key, pinned);
        Pin { pins: Arc::clone(self), key, borrowed: None }
    }

    pub(crate) fn all(&self) -> Vec<Pinned> {
        self.lock().pins.values().cloned().collect()
    }

    pub(crate) fn when_garbage(&self, call: impl Fn() + Send + Sync + 'static) {
        let _is_set = self.garbage.set(Box::new(call));
    }

    /// Of layers that no snapshot needs, those that no pin holds either. When the last pin goes that holds one of the others, it is garbage.
    pub(crate) fn unheld(&self, layers: BTreeSet<LayerId>) -> BTreeSet<LayerId> {
        let mut all = self.lock();
        let (kept, unheld) = layers.into_iter().partition(|layer| all.layers.contains_key(layer));
        all.kept = kept;
        unheld
    }
}

impl All {
    /// Whether a layer was kept for the pin `key` alone, which has gone then.
    fn remove(&mut self, key: u64) -> bool {
        let Some(pinned) = self.pins.remove(&key) else { return false };
        let mut garbage = false;
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
    /// Another that holds the same.
    fn clone(&self) -> Self {
        let pinned = self.pins.lock().pins.get(&self.key).cloned().unwrap_or_default();
        let mut pin = self.pins.pin(pinned);
        pin.borrowed = self.borrowed.clone();
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

impl Store {
    /// From now on `call` is called whenever a layer that [`Self::gc`] left for pins alone has lost the last of them: it is time for another. From
    /// the thread that lets go, so it should only tell somebody. Once for a store; a second call changes nothing.
    pub fn when_garbage(&self, call: impl Fn() + Send + Sync + 'static) {
        self.0.pins.when_garbage(call);
    }

    /// Pins what a VM stands on: images, stored layers, and those that other VMs have frozen. `holder` is shown to who wants to remove it, such as `VM web-1`.
    ///
    /// # Errors
    /// Something of it is missing; nothing is pinned then. Content is not verified: the VM has it open already.
    pub fn pin(
        &self,
        holder: &str,
        images: &[ImageRef],
        layers: &[LayerId],
        borrowed: &[VmLayer],
    ) -> Result<Pin, PinError> {
        // Held first: what is found then stays.
        let hold = (!borrowed.is_empty()).then(|| self.0.held.hold(borrowed.to_vec()));
        for layer in borrowed {
            self.0.vm_layer_is(layer, holder)?;
        }
        let _publishing = self.0.publishing();
        for image in images {
            self.0.image_is(image, holder)?;
        }
        for &layer in layers {
            self.0.layer_is(layer, holder)?;
        }
        let images = images.iter().map(|i| i.name.clone()).collect();
        let layers = layers.iter().copied().collect();
        let mut pin = self.0.pins.pin(Pinned { holder: holder.to_owned(), images, layers });
        pin.borrowed = hold;
        Ok(pin)
    }
}

impl crate::Inner {
    /// Whether the image of that name is there and has that digest in its manifest.
    pub(crate) fn image_is(&self, image: &ImageRef, by: &str) -> Result<(), PinError> {
        let name = image.name.as_str();
        let path = self.images.path().join(name);
        if !self.images.has(name)? {
            return Err(
                Damage::Missing { file: path, what: format!("image {name}"), by: by.to_owned() }.into()
            );
        }
        let found: ImageManifest = match manifest::read(&self.images.sub(name)?) {
            Ok(found) => found,
            Err(ManifestError::Io(e)) => return Err(e.into()),
            Err(ManifestError::Damage(d)) => return Err(d.into()),
        };
        if found.disk.digest != image.digest {
            let place = format!("digest of image {name}, which {by} needs");
            let (expected, got) = (image.digest.to_string(), found.disk.digest.to_string());
            return Err(Damage::Content { file: path.join(manifest::FILE), place, expected, got }.into());
        }
        Ok(())
    }

    /// Whether the layer that a VM has frozen is there.
    fn vm_layer_is(&self, layer: &VmLayer, by: &str) -> Result<(), PinError> {
        // Its map goes first (`Held::end`).
        let (vm, map) = (layer.vm.to_string(), layer.map_name());
        let there = match self.vms.sub(&vm) {
            Err(e) if e.is_not_found() => false,
            dir => dir?.has(&map)?,
        };
        if there {
            return Ok(());
        }
        let (file, what) = (self.vms.path().join(&vm).join(map), format!("a layer that VM {vm} has frozen"));
        Err(Damage::Missing { file, what, by: by.to_owned() }.into())
    }

    /// Whether the layer is there.
    pub(crate) fn layer_is(&self, layer: LayerId, by: &str) -> Result<(), PinError> {
        let name = layer.to_string();
        if self.layers.has(&name)? {
            return Ok(());
        }
        let (file, what) = (self.layers.path().join(&name), format!("layer {name}"));
        Err(Damage::Missing { file, what, by: by.to_owned() }.into())
    }
}
