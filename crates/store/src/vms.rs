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

/// What is made ahead, in one stage.
#[derive(Debug, Default)]
pub(crate) struct Spares {
    stage: Option<Arc<Stage>>,
    made: u64,
    /// Folders, each with the first layer of a VM that is not known yet.
    ready: Vec<Spare>,
    /// Empty files for whoever freezes his layers next.
    files: Vec<Spare>,
    /// How many of these there should be: none before somebody froze one.
    files_wanted: usize,
}

/// The name of a folder or a file, and the file.
#[derive(Debug)]
struct Spare {
    name: String,
    data: File,
}

/// A map and a layer for each of two disks, or for one that is frozen twice in a row.
const FILES: usize = 4;

/// How often the folder of a VM that ends is emptied, into which a fork of it, or a merge of its layers, may put another file just then.
const EMPTIED: usize = 16;

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

impl Store {
    /// Makes the first writable layers of the next VMs ahead, until so many are ready (a few more where several ask at once), and empty files where VMs
    /// freeze theirs: finding room for a folder or a file takes a file system 0.1 ms, or 0.5 where many were removed just before, and all that depends on the VM
    /// is the name.
    ///
    /// # Errors
    /// The host cannot make one.
    pub fn prepare_vm_layers(&self, count: usize) -> Result<(), IoError> {
        loop {
            // Whoever wants one that is ready does not wait for the next.
            let (stage, number, folder) = {
                let mut spares = self.0.spares();
                let folder = spares.ready.len() < count;
                if !folder && spares.files.len() >= spares.files_wanted {
                    return Ok(());
                }
                let stage = match &spares.stage {
                    Some(stage) => stage.clone(),
                    None => spares.stage.insert(Arc::new(self.0.stage()?)).clone(),
                };
                spares.made += 1;
                (stage, spares.made, folder)
            };
            if folder {
                let name = format!("vm{number}");
                let data = stage.make(&name)?.create(VmLayer::FIRST_DATA)?;
                self.0.spares().ready.push(Spare { name, data });
            } else {
                let name = format!("file{number}");
                let data = stage.create(&name)?;
                self.0.spares().files.push(Spare { name, data });
            }
        }
    }

    /// A new empty file for a layer that is frozen or the one that follows: one made ahead, if there is one.
    pub(crate) fn fresh_file(&self, dir: &Dir, name: &str) -> IoResult<File> {
        let spare = {
            let mut spares = self.0.spares();
            spares.files_wanted = FILES;
            spares.stage.clone().zip(spares.files.pop())
        };
        if let Some((stage, spare)) = spare {
            if stage.rename(&spare.name, dir, name, IfTaken::Refuse).is_ok() {
                return Ok(spare.data);
            }
            self.0.spares().files.push(spare);
        }
        dir.create(name)
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

    /// Removes one layer of a VM, such as a new writable one when the VM's `Save` failed; one that others stand on goes with the last of them. One that is not
    /// there is no error.
    ///
    /// # Errors
    /// The host cannot remove it.
    pub fn remove_vm_layer(&self, layer: &VmLayer) -> Result<(), IoError> {
        self.0.held.let_go(layer)
    }

    /// Removes every layer of `vm`; those that others stand on go with the last of them. Nothing there is no error.
    ///
    /// # Errors
    /// The host cannot remove it.
    pub fn remove_vm(&self, vm: VmId) -> Result<(), IoError> {
        for _ in 1..EMPTIED {
            self.keep_vm_layers(vm, &[])?;
            // Who holds one removes the folder with it; but nobody may have held it for long.
            let held = self.0.held.has(vm);
            self.0.vms.remove_if_empty(&vm.to_string())?;
            if held || !self.0.vms.has(&vm.to_string())? {
                return Ok(());
            }
        }
        self.0.vms.remove(&vm.to_string())
    }

    /// Removes every layer of `vm` but these, as [`Self::remove_vm_layer`]: what a daemon before had removed already, but that others stood on it.
    ///
    /// # Errors
    /// The host cannot remove one.
    pub fn keep_vm_layers(&self, vm: VmId, layers: &[VmLayer]) -> Result<(), IoError> {
        let dir = match self.0.vms.sub(&vm.to_string()) {
            Err(e) if e.is_not_found() => return Ok(()),
            dir => dir?,
        };
        let names = match dir.entries() {
            // It was removed since.
            Err(e) if e.is_not_found() => return Ok(()),
            names => names?,
        };
        for name in names {
            match VmLayer::named(vm, &name) {
                Some(layer) if layers.contains(&layer) => {}
                Some(layer) => self.0.held.let_go(&layer)?,
                None => dir.remove(&name)?,
            }
        }
        Ok(())
    }

    /// VMs of which others stand on a layer, and which may have gone.
    #[must_use]
    pub fn held_vms(&self) -> Vec<VmId> {
        self.0.held.vms()
    }

    /// The VMs that have a folder here, and anything else that is in its place, by path; for a search for leaks.
    ///
    /// # Errors
    /// The folder cannot be listed.
    pub fn vm_folders(&self) -> Result<Vec<(Option<VmId>, PathBuf)>, IoError> {
        let names = self.0.vms.entries()?;
        Ok(names.into_iter().map(|n| (n.parse().ok(), self.0.vms.path().join(n))).collect())
    }

    /// Bytes of disk that only `vm` takes: the blocks of its own layers and of those it has `borrowed`, but for those that others stand on too.
    ///
    /// # Errors
    /// The folder cannot be read.
    pub fn vm_disk_bytes(&self, vm: VmId, borrowed: &[VmLayer]) -> Result<u64, IoError> {
        let mut bytes = 0;
        let dir = self.0.vms.sub(&vm.to_string());
        if !dir.as_ref().is_err_and(IoError::is_not_found) {
            let dir = dir?;
            for name in dir.entries()? {
                let shared = VmLayer::named(vm, &name).is_some_and(|layer| self.0.held.holders(&layer).0 > 0);
                bytes += if shared { 0 } else { allocated(&dir, &name)? };
            }
        }
        for layer in borrowed.iter().filter(|layer| self.0.held.holders(layer) == (1, true)) {
            let dir = self.0.vms.sub(&layer.vm.to_string())?;
            bytes += allocated(&dir, &layer.data_name())? + allocated(&dir, &layer.map_name())?;
        }
        Ok(bytes)
    }
}

/// Bytes of disk of a file that has this name alone.
fn allocated(dir: &Dir, name: &str) -> IoResult<u64> {
    let meta = dir.open(name)?.metadata().map_err(IoError::new("looking at", &dir.path().join(name)))?;
    Ok(if meta.nlink() > 1 { 0 } else { meta.blocks() * 512 })
}
