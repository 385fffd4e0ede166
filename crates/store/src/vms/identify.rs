//! Finds the layers of a VM's disk by the identities of the files that its VMM has open.
//!
//! A daemon that was killed may have left a record that names fewer layers than the VMM uses, or
//! other ones. The VMM knows its files, but not their names. A layer keeps its inode when it is
//! stored, so an open file of a layer is found under each name that it has. No other file gets the
//! inode while the VMM has it open.

use crate::blob::Dir;
use crate::errors::{IoError, IoResult};
use crate::inner::{Inner, Store};
use crate::integrity::verify::{Kind, digest};
use crate::objects::manifest::{self, SnapshotManifest};
use crate::objects::types::{ChainLayer, DATA, LayerId, LayerRef, MAP, VmLayer};
use dayfly_units::VmId;
use rustix::fs::{AtFlags, statat};
use rustix::io::Errno;
use std::collections::BTreeMap;

/// The identity of a file on this host: device and inode, as in fstat(2).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct FileId {
    /// Number of the device.
    pub dev: u64,
    /// Number of the inode.
    pub ino: u64,
}

/// The layers that have a wanted file as their data.
type Found = BTreeMap<FileId, ChainLayer>;

impl Store {
    /// The layer of which each file is the data: a layer of `vm` itself (`Frozen`, which includes
    /// the writable layer), a stored layer, or a layer of another VM (`Shared`). `None` for a file
    /// that is none of these, or that has no name left: nothing needs the layer, or it was copied
    /// because a process could write to it ([`crate::ReplacedLayer`]).
    ///
    /// `files` are those of disk number `disk` in any order, so the answer for a VMM's whole chain
    /// is the chain. A layer that is stored and has a name in the folder of `vm` too counts as the
    /// VM's own: until the VM's record names the stored layer, both are right.
    ///
    /// # Errors
    /// A folder cannot be listed, or a stored layer that no snapshot references cannot be read.
    pub fn find_layers(
        &self,
        vm: VmId,
        disk: u8,
        files: &[FileId],
    ) -> Result<Vec<Option<ChainLayer>>, IoError> {
        let inner = &self.0;
        let mut found = Found::new();
        let missing = |found: &Found| files.iter().any(|file| !found.contains_key(file));
        inner.find_own(vm, disk, files, &mut found)?;
        if missing(&found) {
            inner.find_stored(files, &mut found)?;
        }
        if missing(&found) {
            inner.find_shared(vm, disk, files, &mut found)?;
        }
        Ok(files.iter().map(|file| found.get(file).copied()).collect())
    }
}

/// The identity of an entry; `None` if it does not exist any more.
fn id_at(dir: &Dir, name: &str) -> IoResult<Option<FileId>> {
    match statat(dir, name, AtFlags::SYMLINK_NOFOLLOW) {
        Ok(stat) => Ok(Some(FileId { dev: stat.st_dev, ino: stat.st_ino })),
        Err(Errno::NOENT) => Ok(None),
        Err(e) => Err(IoError::new("looking at", &dir.path().join(name))(e.into())),
    }
}

/// The subfolder `name`; `None` if it does not exist any more.
fn sub(dir: &Dir, name: &str) -> IoResult<Option<Dir>> {
    match dir.sub(name) {
        Err(e) if e.is_not_found() => Ok(None),
        other => other.map(Some),
    }
}

impl Inner {
    /// Adds layers of a VM's folder whose data is one of `files`, as `kind` has them.
    fn find_in_folder(
        &self,
        vm: VmId,
        disk: u8,
        files: &[FileId],
        kind: fn(VmLayer) -> ChainLayer,
        found: &mut Found,
    ) -> IoResult<()> {
        let Some(dir) = sub(&self.vms, &vm.to_string())? else { return Ok(()) };
        for name in dir.entries()? {
            let layer = VmLayer::named(vm, &name).filter(|layer| layer.disk == disk);
            let Some(layer) = layer.filter(|layer| name == layer.data_name()) else { continue };
            if let Some(id) = id_at(&dir, &name)?.filter(|id| files.contains(id)) {
                found.entry(id).or_insert_with(|| kind(layer));
            }
        }
        Ok(())
    }

    fn find_own(&self, vm: VmId, disk: u8, files: &[FileId], found: &mut Found) -> IoResult<()> {
        self.find_in_folder(vm, disk, files, ChainLayer::Frozen, found)
    }

    fn find_shared(&self, vm: VmId, disk: u8, files: &[FileId], found: &mut Found) -> IoResult<()> {
        let others = self.vms.entries()?.into_iter().filter_map(|name| name.parse().ok());
        for other in others.filter(|other| *other != vm) {
            self.find_in_folder(other, disk, files, ChainLayer::Shared, found)?;
        }
        Ok(())
    }

    fn find_stored(&self, files: &[FileId], found: &mut Found) -> IoResult<()> {
        let mut ids: Vec<(FileId, LayerId)> = Vec::new();
        for name in self.layers.entries()? {
            let Ok(id) = name.parse() else { continue };
            let Some(dir) = sub(&self.layers, &name)? else { continue };
            let file = id_at(&dir, DATA)?.filter(|f| files.contains(f) && !found.contains_key(f));
            ids.extend(file.map(|file| (file, id)));
        }
        if ids.is_empty() {
            return Ok(());
        }
        let snapshots = manifest::list::<SnapshotManifest>(&self.snapshots)?.items;
        let layers = snapshots.iter().flat_map(|s| &s.disks).flat_map(|d| &d.layers);
        let known: BTreeMap<LayerId, LayerRef> = layers.map(|layer| (layer.id, *layer)).collect();
        for (file, id) in ids {
            let layer = known.get(&id).copied();
            let layer = layer.map_or_else(|| self.hashed_layer(id), |layer| Ok(Some(layer)))?;
            if let Some(layer) = layer {
                found.insert(file, ChainLayer::Stored(layer));
            }
        }
        Ok(())
    }

    /// A stored layer that no readable manifest names, from its files. `None` if it is gone or
    /// damaged.
    fn hashed_layer(&self, id: LayerId) -> IoResult<Option<LayerRef>> {
        let Some(dir) = sub(&self.layers, &id.to_string())? else { return Ok(None) };
        let file = |name: &str, kind| {
            digest(&dir.open(name)?, kind).map_err(IoError::new("reading", &dir.path().join(name)))
        };
        let (data, map) = (file(DATA, Kind::Sparse)?, file(MAP, Kind::Plain)?);
        Ok((LayerId::of(&data, &map) == id).then_some(LayerRef { id, data, map }))
    }
}

#[cfg(test)]
#[path = "identify_tests.rs"]
mod tests;
