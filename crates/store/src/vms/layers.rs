//! The layers of running VMs: `vms/<id>/disk<d>.<n>.data`. They outlive the daemon, and are removed
//! with their VM.

use crate::blob::Dir;
use crate::errors::{IoError, IoResult};
use crate::inner::Store;
use crate::objects::types::VmLayer;
use dayfly_units::VmId;
use dayfly_units::failpoint;
use std::fs::File;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;

/// How often the removal of a VM empties its folder: a fork or a layer merge may add a file
/// meanwhile.
const EMPTIED: usize = 16;

/// The number for the next layer of a disk.
pub(crate) fn next_number(dir: &Dir, disk: u8) -> IoResult<u32> {
    let numbers = dir.entries()?.into_iter().filter_map(|name| {
        name.strip_prefix(&format!("disk{disk}."))?.split('.').next()?.parse::<u32>().ok()
    });
    Ok(numbers.max().map_or(0, |n| n.saturating_add(1)))
}

impl Store {
    /// Creates an empty writable layer for disk number `disk` of `vm`, open for reading and
    /// writing.
    ///
    /// # Errors
    /// The host cannot create the file.
    pub fn create_vm_layer(&self, vm: VmId, disk: u8) -> Result<(VmLayer, File), IoError> {
        let layer = VmLayer { vm, disk, number: 0 };
        if disk == 0
            && let Some(data) = self.take_prepared(vm)?
        {
            return Ok((layer, data));
        }
        let dir = self.0.vms.make_or_open(&vm.to_string())?;
        let layer = VmLayer { number: next_number(&dir, disk)?, ..layer };
        let file = dir.create(&layer.data_name())?;
        Ok((layer, file))
    }

    /// Opens the data of a VM's layer: for reading and writing if `writable`, else read-only.
    ///
    /// # Errors
    /// The layer does not exist, or cannot be opened.
    pub fn open_vm_layer(&self, layer: &VmLayer, writable: bool) -> Result<File, IoError> {
        let dir = self.0.vms.sub(&layer.vm.to_string())?;
        if writable { dir.open_rw(&layer.data_name()) } else { dir.open(&layer.data_name()) }
    }

    /// Releases one layer of a VM, such as a new writable layer after a failed `Save`. The files of
    /// a shared layer are deleted when its last reference is dropped. A missing layer is no error.
    ///
    /// # Errors
    /// The host cannot remove a file.
    pub fn remove_vm_layer(&self, layer: &VmLayer) -> Result<(), IoError> {
        self.0.shared.release(layer)
    }

    /// Releases layers of a VM that stored ones replaced ([`crate::Committed::replaced`]), after
    /// the VM's record was written: until then a new daemon looks for them. The stored layers are
    /// not hashed again, although they lose a name.
    ///
    /// # Errors
    /// The host cannot remove a file. The files that are left are removed with the VM.
    pub fn remove_vm_layers(&self, layers: &[VmLayer]) -> Result<(), IoError> {
        layers.iter().try_for_each(|layer| self.0.shared.release(layer))
    }

    /// Releases every layer of `vm`. The files of shared layers are deleted when their last
    /// reference is dropped. A missing folder is no error.
    ///
    /// # Errors
    /// The host cannot remove a file.
    pub fn remove_vm(&self, vm: VmId) -> Result<(), IoError> {
        for _ in 1..EMPTIED {
            self.keep_vm_layers(vm, &[])?;
            failpoint::reached("store.remove_vm.emptied");
            // If a layer is still referenced, dropping its last reference removes the folder.
            // Otherwise a file was added meanwhile, and the folder is emptied again.
            let shared = self.0.shared.of_vm(vm);
            self.0.vms.remove_if_empty(&vm.to_string())?;
            if shared || !self.0.vms.has(&vm.to_string())? {
                return Ok(());
            }
        }
        self.0.vms.remove(&vm.to_string())
    }

    /// Releases every layer of `vm` except `layers`, as [`Self::remove_vm_layer`]. A new daemon
    /// calls it because layers that an earlier daemon released may still exist, retained by other
    /// VMs.
    ///
    /// # Errors
    /// The host cannot remove a file.
    pub fn keep_vm_layers(&self, vm: VmId, layers: &[VmLayer]) -> Result<(), IoError> {
        let dir = match self.0.vms.sub(&vm.to_string()) {
            Err(e) if e.is_not_found() => return Ok(()),
            dir => dir?,
        };
        let names = match dir.entries() {
            // The folder was removed after it was opened.
            Err(e) if e.is_not_found() => return Ok(()),
            names => names?,
        };
        for name in names {
            match VmLayer::named(vm, &name) {
                Some(layer) if layers.contains(&layer) => {}
                Some(layer) => self.0.shared.release(&layer)?,
                None if layers.iter().any(|layer| name == layer.unsynced_name()) => {}
                None => dir.remove(&name)?,
            }
        }
        Ok(())
    }

    /// The VMs that own a referenced layer; such a VM may be gone already.
    #[must_use]
    pub fn shared_layer_owners(&self) -> Vec<VmId> {
        self.0.shared.vms()
    }

    /// The paths of all entries in `vms/`, for a leak check: the VM's id, or `None` if the name is
    /// not an id.
    ///
    /// # Errors
    /// The folder cannot be listed.
    pub fn vm_folders(&self) -> Result<Vec<(Option<VmId>, PathBuf)>, IoError> {
        let names = self.0.vms.entries()?;
        Ok(names.into_iter().map(|n| (n.parse().ok(), self.0.vms.path().join(n))).collect())
    }

    /// Disk space in bytes used by `vm` alone: its own layers that no other VM references, and
    /// `shared` layers that only it references.
    ///
    /// # Errors
    /// The folder cannot be read.
    pub fn vm_disk_bytes(&self, vm: VmId, shared: &[VmLayer]) -> Result<u64, IoError> {
        let mut bytes = 0;
        let dir = self.0.vms.sub(&vm.to_string());
        if !dir.as_ref().is_err_and(IoError::is_not_found) {
            let dir = dir?;
            for name in dir.entries()? {
                let shared = VmLayer::named(vm, &name)
                    .is_some_and(|layer| self.0.shared.references(&layer).0 > 0);
                bytes += if shared { 0 } else { allocated(&dir, &name)? };
            }
        }
        for layer in shared.iter().filter(|layer| self.0.shared.references(layer) == (1, true)) {
            let dir = self.0.vms.sub(&layer.vm.to_string())?;
            bytes += allocated(&dir, &layer.data_name())? + allocated(&dir, &layer.map_name())?;
        }
        Ok(bytes)
    }
}

/// Bytes of disk of a file; 0 if the file has other hard links.
fn allocated(dir: &Dir, name: &str) -> IoResult<u64> {
    let meta =
        dir.open(name)?.metadata().map_err(IoError::new("looking at", &dir.path().join(name)))?;
    Ok(if meta.nlink() > 1 { 0 } else { meta.blocks() * 512 })
}
