//! Pins: what running VMs stand on. Held in memory by whoever holds a VM; a restarted daemon pins again what its VMs need
//! before it calls [`Store::gc`].

use crate::errors::{Damage, IoError};
use crate::held::Hold;
use crate::layers::{LayerId, VmLayer};
use crate::manifest::{ImageManifest, ImageRef, ManifestError, SnapshotManifest};
use crate::{Store, manifest};
use dayfly_units::Name;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, PoisonError};

/// All pins of a store.
#[derive(Debug, Default)]
pub(crate) struct Pins(Mutex<(u64, BTreeMap<u64, Pinned>)>);

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

impl Pins {
    pub(crate) fn pin(self: &Arc<Self>, pinned: Pinned) -> Pin {
        let mut inner = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let key = inner.0;
        inner.0 += 1;
        inner.1.insert(key, pinned);
        Pin { pins: Arc::clone(self), key, borrowed: None }
    }

    pub(crate) fn all(&self) -> Vec<Pinned> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).1.values().cloned().collect()
    }
}

impl Clone for Pin {
    /// Another that holds the same.
    fn clone(&self) -> Self {
        let pinned = {
            let inner = self.pins.0.lock().unwrap_or_else(PoisonError::into_inner);
            inner.1.get(&self.key).cloned().unwrap_or_default()
        };
        let mut pin = self.pins.pin(pinned);
        pin.borrowed = self.borrowed.clone();
        pin
    }
}

impl Drop for Pin {
    fn drop(&mut self) {
        self.pins.0.lock().unwrap_or_else(PoisonError::into_inner).1.remove(&self.key);
    }
}

impl Store {
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
