//! Frozen layers that no process can write to any more, by the kernel's word.
//!
//! A VMM closes its writable descriptors of a layer when it freezes the layer. A VMM that its guest
//! took over may keep one, in a descriptor, a shared mapping or a message to itself. So before a
//! frozen layer is shared with another VM or published, the kernel is asked whether any process can
//! write to its files ([`writers`]). If one can, or the kernel does not know, a copy takes the
//! files' names. A process that still writes then writes to files that no other VM reads.
//!
//! A layer whose fsync failed is copied likewise ([`super::unsynced`]).

use crate::blob::{Dir, IfTaken};
use crate::errors::{IoError, IoResult};
use crate::inner::{Inner, Store};
use crate::objects::types::{DATA, MAP, VmLayer};
use dayfly_sys::writers::{Writers, writers};
use dayfly_units::failpoint;
use dayfly_units::sync::lock;
use std::fs::File;
use std::path::Path;

/// The open files of a frozen layer that no process can write to.
#[derive(Debug)]
pub struct FrozenLayer {
    /// Its blocks, sparse.
    pub data: File,
    /// Its sealed map.
    pub map: File,
    /// The files that had the layer's names before, if they had to be copied.
    pub replaced: Option<ReplacedLayer>,
}

/// Files of a frozen layer that a process may be able to write to. A copy has their names now.
#[derive(Debug)]
pub struct ReplacedLayer {
    /// The layer.
    pub layer: VmLayer,
    /// Its former data, open for reading.
    pub data: File,
    map: File,
}

impl ReplacedLayer {
    /// Whether a process can still write to a file, as far as the kernel knows.
    ///
    /// # Errors
    /// The kernel cannot be asked.
    pub fn has_writer(&self) -> std::io::Result<bool> {
        Ok(writers(&self.data)? == Writers::Some || writers(&self.map)? == Writers::Some)
    }
}

/// Whether it is certain that no process can write to `file`.
fn is_immutable(file: &File, path: &Path) -> IoResult<bool> {
    Ok(writers(file).map_err(IoError::new("asking for a lease on", path))? == Writers::None)
}

impl Store {
    /// Opens the data and the map of a layer that a VM froze. If a process may still be able to
    /// write to them, they are copied first, and the copies are opened.
    ///
    /// # Errors
    /// One of the two files does not exist, or cannot be opened or copied.
    pub fn open_frozen_layer(&self, layer: &VmLayer) -> Result<FrozenLayer, IoError> {
        self.0.open_frozen_layer(layer)
    }
}

fn open(dir: &Dir, layer: &VmLayer) -> IoResult<(File, File)> {
    Ok((dir.open(&layer.data_name())?, dir.open(&layer.map_name())?))
}

fn proven(dir: &Dir, layer: &VmLayer, data: &File, map: &File) -> IoResult<bool> {
    Ok(is_immutable(data, &dir.path().join(layer.data_name()))?
        && is_immutable(map, &dir.path().join(layer.map_name()))?)
}

impl Inner {
    /// As [`Store::open_frozen_layer`].
    pub(crate) fn open_frozen_layer(&self, layer: &VmLayer) -> IoResult<FrozenLayer> {
        let dir = self.vms.sub(&layer.vm.to_string())?;
        let (data, map) = open(&dir, layer)?;
        if self.unsynced(&dir, layer)?.is_none() && proven(&dir, layer, &data, &map)? {
            return Ok(FrozenLayer { data, map, replaced: None });
        }
        self.copy_frozen_layer(&dir, layer)
    }

    fn copy_frozen_layer(&self, dir: &Dir, layer: &VmLayer) -> IoResult<FrozenLayer> {
        // One copy at a time: all that share the layer get the same bytes, even if a process
        // writes to the original meanwhile.
        let _one = lock(&self.copying);
        let (data, map) = open(dir, layer)?;
        let unsynced = self.unsynced(dir, layer)?;
        if unsynced.is_none() && proven(dir, layer, &data, &map)? {
            return Ok(FrozenLayer { data, map, replaced: None });
        }
        let stage = self.stage()?;
        for (name, file) in [(DATA, &data), (MAP, &map)] {
            stage.copy(name, file)?;
        }
        if let Some(expected) = unsynced {
            self.sync_copies(&stage, layer, expected)?;
        }
        let (new_data, new_map) = (stage.open(DATA)?, stage.open(MAP)?);
        failpoint::reached("store.copy_layer.copied");
        stage.rename(MAP, dir, &layer.map_name(), IfTaken::Exchange)?;
        failpoint::reached("store.copy_layer.map_exchanged");
        stage.rename(DATA, dir, &layer.data_name(), IfTaken::Exchange)?;
        if unsynced.is_some() {
            self.forget_unsynced(dir, layer)?;
        }
        let replaced = Some(ReplacedLayer { layer: *layer, data, map });
        Ok(FrozenLayer { data: new_data, map: new_map, replaced })
    }
}

#[cfg(test)]
#[path = "immutable_tests.rs"]
mod tests;
