//! The layers that belong to running VMs: `vms/<id>/disk<d>.<n>.data`. They outlive a daemon, and go with their VM.

use crate::blob::{Dir, IfTaken, Stage};
use crate::errors::{IoError, IoResult};
use crate::layers::VmLayer;
use crate::{Inner, Store};
use dayfly_units::VmId;
use std::fs::File;
use std::io::ErrorKind;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::sync::{MutexGuard, PoisonError};

/// A folder in `staging/` for a folder with the first layer of a VM that is not known yet.
#[derive(Debug)]
pub(crate) struct Spare {
    stage: Stage,
    /// The layer, while it is there.
    data: Option<File>,
}

const SPARE: &str = "vm";

impl Inner {
    fn spare(&self) -> MutexGuard<'_, Option<Spare>> {
        self.spare.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The number of the next layer of a disk.
pub(crate) fn next_number(dir: &Dir, disk: u8) -> IoResult<u32> {
    let numbers = dir.entries()?.into_iter().filter_map(|name| {
        name.strip_prefix(&format!("disk{disk}."))?.split('.').next()?.parse::<u32>().ok()
    });
    Ok(numbers.max().map_or(0, |n| n.saturating_add(1)))
}

impl Store {
    /// Makes the first writable layer of the next VM ahead, if that is not done yet: finding room for a folder and a file takes a file
    /// system 0.1 ms and more, and all that depends on the VM is the folder's name.
    ///
    /// # Errors
    /// The host cannot make it.
    pub fn prepare_vm_layer(&self) -> Result<(), IoError> {
        let mut spare = self.0.spare();
        let stage = match spare.take() {
            Some(there @ Spare { data: Some(_), .. }) => {
                *spare = Some(there);
                return Ok(());
            }
            Some(Spare { stage, data: None }) => stage,
            None => self.0.stage()?,
        };
        let data = Some(stage.make(SPARE)?.create(VmLayer::FIRST_DATA)?);
        *spare = Some(Spare { stage, data });
        Ok(())
    }

    /// The layer made ahead, if there is one and `vm` has none yet.
    fn take_spare(&self, vm: VmId) -> IoResult<Option<File>> {
        let mut spare = self.0.spare();
        let Some(Spare { stage, data }) = spare.as_mut() else { return Ok(None) };
        if data.is_none() {
            return Ok(None);
        }
        match stage.rename(SPARE, &self.0.vms, &vm.to_string(), IfTaken::Refuse) {
            Ok(()) => Ok(data.take()),
            Err(e) if e.source.kind() == ErrorKind::AlreadyExists => Ok(None),
            Err(e) => Err(e),
        }
    }

    /// A fresh empty writable layer for disk number `disk` of `vm`: open for reading and writing.
    ///
    /// # Errors
    /// The host cannot make it.
    pub fn create_vm_layer(&self, vm: VmId, disk: u8) -> Result<(VmLayer, File), IoError> {
        let layer = VmLayer { vm, disk, number: 0 };
        if disk == 0
            && let Some(data) = self.take_spare(vm)?
        {
            return Ok((layer, data));
        }
        let dir = self.0.vms.make_or_open(&vm.to_string())?;
        let layer = VmLayer { number: next_number(&dir, disk)?, ..layer };
        let file = dir.create(&layer.data_name())?;
        Ok((layer, file))
    }

    /// The data of a VM's layer: its writable one for reading and writing, a frozen one read-only.
    ///
    /// # Errors
    /// It is not there.
    pub fn open_vm_layer(&self, layer: &VmLayer, writable: bool) -> Result<File, IoError> {
        let dir = self.0.vms.sub(&layer.vm.to_string())?;
        if writable { dir.open_rw(&layer.data_name()) } else { dir.open(&layer.data_name()) }
    }

    /// Data and map of a layer that a VM has frozen.
    ///
    /// # Errors
    /// One is not there.
    pub fn open_frozen_layer(&self, layer: &VmLayer) -> Result<(File, File), IoError> {
        let dir = self.0.vms.sub(&layer.vm.to_string())?;
        Ok((dir.open(&layer.data_name())?, dir.open(&layer.map_name())?))
    }

    /// Gives a layer that another VM has frozen a second name among those of `vm`, which from then on stands on it by itself.
    ///
    /// # Errors
    /// It is not there, or the host cannot.
    pub fn share_vm_layer(&self, layer: &VmLayer, vm: VmId) -> Result<VmLayer, IoError> {
        let from = self.0.vms.sub(&layer.vm.to_string())?;
        let to = self.0.vms.make_or_open(&vm.to_string())?;
        let shared = VmLayer { vm, number: next_number(&to, layer.disk)?, ..*layer };
        from.link(&layer.map_name(), &to, &shared.map_name())?;
        from.link(&layer.data_name(), &to, &shared.data_name())?;
        Ok(shared)
    }

    /// Removes one layer of a VM, such as a new writable one when the VM's `Save` failed. One that is not there is no error.
    ///
    /// # Errors
    /// The host cannot remove it.
    pub fn remove_vm_layer(&self, layer: &VmLayer) -> Result<(), IoError> {
        match self.0.vms.sub(&layer.vm.to_string()) {
            Err(e) if e.is_not_found() => Ok(()),
            Err(e) => Err(e),
            Ok(dir) => dir.unlink(&layer.map_name()).and_then(|()| dir.unlink(&layer.data_name())),
        }
    }

    /// Removes every layer of `vm`. Nothing there is no error.
    ///
    /// # Errors
    /// The host cannot remove it.
    pub fn remove_vm(&self, vm: VmId) -> Result<(), IoError> {
        self.0.vms.remove(&vm.to_string())
    }

    /// The VMs that have a folder here, and anything else that is in its place, by path; for a search for leaks.
    ///
    /// # Errors
    /// The folder cannot be listed.
    pub fn vm_folders(&self) -> Result<Vec<(Option<VmId>, PathBuf)>, IoError> {
        let names = self.0.vms.entries()?;
        Ok(names.into_iter().map(|n| (n.parse().ok(), self.0.vms.path().join(n))).collect())
    }

    /// Bytes of disk that only `vm` takes: the blocks of its own layers, but for those that others stand on too.
    ///
    /// # Errors
    /// The folder cannot be read.
    pub fn vm_disk_bytes(&self, vm: VmId) -> Result<u64, IoError> {
        let dir = match self.0.vms.sub(&vm.to_string()) {
            Err(e) if e.is_not_found() => return Ok(0),
            other => other?,
        };
        let allocated = |name: &String| -> IoResult<u64> {
            let path = dir.path().join(name);
            let meta = dir.open(name)?.metadata().map_err(IoError::new("looking at", &path))?;
            Ok(if meta.nlink() > 1 { 0 } else { meta.blocks() * 512 })
        };
        dir.entries()?.iter().map(allocated).sum()
    }
}
