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
use std::sync::{Arc, MutexGuard, PoisonError};

/// Folders in one stage, each with the first layer of a VM that is not known yet.
#[derive(Debug, Default)]
pub(crate) struct Spares {
    stage: Option<Arc<Stage>>,
    made: u64,
    ready: Vec<Spare>,
}

/// One of these: its name, and the layer.
#[derive(Debug)]
struct Spare {
    name: String,
    data: File,
}

impl Inner {
    fn spares(&self) -> MutexGuard<'_, Spares> {
        self.spares.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The number of the next layer of a disk.
pub(crate) fn next_number(dir: &Dir, disk: u8) -> IoResult<u32> {
    let numbers = dir.entries()?.into_iter().filter_map(|name| {
        name.strip_prefix(&format!("disk{disk}."))?.split('.').next()?.parse::<u32>().ok()
    });
    Ok(numbers.max().map_or(0, |n| n.saturating_add(1)))
}

/// Names of shared layers that are tried before all are listed.
const TRIED: u32 = 4;

/// Gives a frozen layer another name; says whether that was free. First its map: data without one is a writable layer.
fn link_layer(from: &Dir, layer: &VmLayer, to: &Dir, shared: &VmLayer) -> IoResult<bool> {
    let link = |old: &str, new: &str| match from.link(old, to, new) {
        Err(e) if e.source.kind() == ErrorKind::AlreadyExists => Ok(false),
        linked => linked.map(|()| true),
    };
    let map = shared.map_name();
    if !link(&layer.map_name(), &map)? {
        return Ok(false);
    }
    let data = link(&layer.data_name(), &shared.data_name())?;
    if !data {
        to.unlink(&map)?;
    }
    Ok(data)
}

impl Store {
    /// Makes the first writable layers of the next VMs ahead, until so many are ready (a few more where several ask at once): finding room for a folder and a file takes a file
    /// system 0.1 ms and more, and all that depends on the VM is the folder's name.
    ///
    /// # Errors
    /// The host cannot make one.
    pub fn prepare_vm_layers(&self, count: usize) -> Result<(), IoError> {
        loop {
            // Whoever wants one that is ready does not wait for the next.
            let (stage, name) = {
                let mut spares = self.0.spares();
                if spares.ready.len() >= count {
                    return Ok(());
                }
                let stage = match &spares.stage {
                    Some(stage) => stage.clone(),
                    None => spares.stage.insert(Arc::new(self.0.stage()?)).clone(),
                };
                spares.made += 1;
                (stage, format!("vm{}", spares.made))
            };
            let data = stage.make(&name)?.create(VmLayer::FIRST_DATA)?;
            self.0.spares().ready.push(Spare { name, data });
        }
    }

    /// Removes what is ready of these beyond so many.
    ///
    /// # Errors
    /// The host cannot remove one.
    pub fn trim_vm_layers(&self, count: usize) -> Result<(), IoError> {
        let (stage, surplus) = {
            let mut spares = self.0.spares();
            let kept = count.min(spares.ready.len());
            (spares.stage.clone(), spares.ready.split_off(kept))
        };
        let Some(stage) = stage else { return Ok(()) };
        surplus.into_iter().try_for_each(|spare| stage.remove(&spare.name))
    }

    /// A layer made ahead, if there is one and `vm` has none yet.
    fn take_spare(&self, vm: VmId) -> IoResult<Option<File>> {
        let (stage, spare) = {
            let mut spares = self.0.spares();
            let (Some(stage), Some(spare)) = (spares.stage.clone(), spares.ready.pop()) else {
                return Ok(None);
            };
            (stage, spare)
        };
        let Err(e) = stage.rename(&spare.name, &self.0.vms, &vm.to_string(), IfTaken::Refuse) else {
            return Ok(Some(spare.data));
        };
        self.0.spares().ready.push(spare);
        if e.source.kind() == ErrorKind::AlreadyExists { Ok(None) } else { Err(e) }
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
        let to = match self.0.vms.sub(&vm.to_string()) {
            Err(e) if e.is_not_found() => self.0.vms.make_or_open(&vm.to_string())?,
            there => there?,
        };
        // A new clone has nothing but a writable one and a few of these: to try takes less than to list them.
        let mut number = 1;
        loop {
            let shared = VmLayer { vm, number, ..*layer };
            if link_layer(&from, layer, &to, &shared)? {
                return Ok(shared);
            }
            number = if number < TRIED { number + 1 } else { next_number(&to, layer.disk)? };
        }
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
