//! Pins what a VM depends on, after checking that it is in the store.

use crate::errors::Damage;
use crate::inner::{Inner, Store};
use crate::objects::manifest::{self, ImageManifest, ImageRef, ManifestError};
use crate::objects::types::{LayerId, VmLayer};
use crate::vms::pins::{Pin, PinError, Pinned};
use dayfly_units::Name;
use std::collections::BTreeSet;
use std::sync::Arc;

impl Store {
    /// Sets the callback for garbage: it runs when a layer that [`Self::gc`] kept only because of
    /// pins loses its last pin. The owner then runs gc again.
    ///
    /// `call` runs on the thread that drops the pin, so it should only send a notification. It is
    /// set once for a store; a second call changes nothing.
    pub fn when_garbage(&self, call: impl Fn() + Send + Sync + 'static) {
        self.0.pins.when_garbage(call);
    }

    /// Pins what a VM depends on: images, stored layers, and shared layers that other VMs froze.
    /// Errors about removing an item name `holder`, such as `VM web-1`.
    ///
    /// # Errors
    /// An item is missing; nothing is pinned then. Content is not verified, because the VM has it
    /// open already.
    pub fn pin(
        &self,
        holder: &str,
        images: &[ImageRef],
        layers: &[LayerId],
        shared: &[VmLayer],
    ) -> Result<Pin, PinError> {
        // Retained before the check, so that a layer that is found stays.
        let retained = (!shared.is_empty()).then(|| self.0.shared.retain(shared.to_vec()));
        for layer in shared {
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
        let holder = holder.to_owned();
        let mut pin = self.0.pins.pin(Pinned { holder, images, layers, every_layer: false });
        pin.shared = retained;
        Ok(pin)
    }

    /// Pins every stored layer, every shared layer and `images`, for a VM whose layers are not
    /// known. Nothing is verified. While the pin exists, [`Self::gc`] removes no layer.
    #[must_use]
    pub fn pin_every_layer(&self, holder: &str, images: BTreeSet<Name>) -> Pin {
        let (holder, layers) = (holder.to_owned(), BTreeSet::new());
        let mut pin = self.0.pins.pin(Pinned { holder, images, layers, every_layer: true });
        pin.every_shared = Some(Arc::new(self.0.shared.retain_all()));
        pin
    }

    /// Whether a pin of [`Self::pin_every_layer`] exists.
    #[must_use]
    pub fn every_layer_is_pinned(&self) -> bool {
        self.0.shared.retains_all()
    }
}

impl Inner {
    /// Checks that the image is stored under its name and that its manifest has the expected
    /// digest.
    pub(crate) fn image_is(&self, image: &ImageRef, by: &str) -> Result<(), PinError> {
        let name = image.name.as_str();
        let path = self.images.path().join(name);
        if !self.images.has(name)? {
            return Err(Damage::Missing {
                file: path,
                what: format!("image {name}"),
                by: by.to_owned(),
            }
            .into());
        }
        let found: ImageManifest = match manifest::read(&self.images.sub(name)?) {
            Ok(found) => found,
            Err(ManifestError::Io(e)) => return Err(e.into()),
            Err(ManifestError::Damage(d)) => return Err(d.into()),
        };
        if found.disk.digest != image.digest {
            let place = format!("digest of image {name}, which {by} needs");
            let (expected, got) = (image.digest.to_string(), found.disk.digest.to_string());
            return Err(
                Damage::Content { file: path.join(manifest::FILE), place, expected, got }.into()
            );
        }
        Ok(())
    }

    /// Checks that a layer that a VM froze exists.
    fn vm_layer_is(&self, layer: &VmLayer, by: &str) -> Result<(), PinError> {
        // A layer's map is removed before its data (`SharedLayers::end`), so the map decides.
        let (vm, map) = (layer.vm.to_string(), layer.map_name());
        let there = match self.vms.sub(&vm) {
            Err(e) if e.is_not_found() => false,
            dir => dir?.has(&map)?,
        };
        if there {
            return Ok(());
        }
        let (file, what) =
            (self.vms.path().join(&vm).join(map), format!("a layer that VM {vm} has frozen"));
        Err(Damage::Missing { file, what, by: by.to_owned() }.into())
    }

    /// Checks that the layer is in `layers/`.
    pub(crate) fn layer_is(&self, layer: LayerId, by: &str) -> Result<(), PinError> {
        let name = layer.to_string();
        if self.layers.has(&name)? {
            return Ok(());
        }
        let (file, what) = (self.layers.path().join(&name), format!("layer {name}"));
        Err(Damage::Missing { file, what, by: by.to_owned() }.into())
    }
}
