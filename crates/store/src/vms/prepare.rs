//! Prepares folders and files for the next VM layers, and takes them.

use crate::blob::{Dir, IfTaken};
use crate::errors::{IoError, IoResult};
use crate::inner::{Inner, Store};
use crate::objects::types::VmLayer;
use crate::vms::prepared::{PreparedFile, PreparedFiles};
use dayfly_units::VmId;
use dayfly_units::sync::lock;
use std::fs::File;
use std::io::ErrorKind;
use std::sync::{Arc, MutexGuard};

/// A map and a data file for each of two disks, or for two freezes of one disk.
const FILES: usize = 4;

impl Inner {
    fn prepared(&self) -> MutexGuard<'_, PreparedFiles> {
        lock(&self.prepared)
    }
}

impl Store {
    /// Prepares the first writable layers of the next VMs until `count` are ready, and empty files
    /// for freezes. Concurrent callers may make a few more.
    ///
    /// Creating a folder or a file takes a file system 0.1 ms, or 0.5 ms after many removals. Only
    /// the name depends on the VM, so the rest is done ahead.
    ///
    /// # Errors
    /// The host cannot create a folder or a file.
    pub fn prepare_vm_layers(&self, count: usize) -> Result<(), IoError> {
        loop {
            // The lock is not held while files are made, so that a VM can take one meanwhile.
            let (stage, number, folder) = {
                let mut prepared = self.0.prepared();
                let folder = prepared.ready.len() < count;
                if !folder && prepared.files.len() >= prepared.files_wanted {
                    return Ok(());
                }
                let stage = match &prepared.stage {
                    Some(stage) => stage.clone(),
                    None => prepared.stage.insert(Arc::new(self.0.stage()?)).clone(),
                };
                prepared.made += 1;
                (stage, prepared.made, folder)
            };
            if folder {
                let name = format!("vm{number}");
                let data = stage.make(&name)?.create(VmLayer::FIRST_DATA)?;
                self.0.prepared().ready.push(PreparedFile { name, data });
            } else {
                let name = format!("file{number}");
                let data = stage.create(&name)?;
                self.0.prepared().files.push(PreparedFile { name, data });
            }
        }
    }

    /// A new empty file for a frozen layer's map or for the next layer: a prepared one, if there is
    /// one.
    pub(crate) fn fresh_file(&self, dir: &Dir, name: &str) -> IoResult<File> {
        let taken = {
            let mut prepared = self.0.prepared();
            prepared.files_wanted = FILES;
            prepared.stage.clone().zip(prepared.files.pop())
        };
        if let Some((stage, taken)) = taken {
            if stage.rename(&taken.name, dir, name, IfTaken::Refuse).is_ok() {
                return Ok(taken.data);
            }
            self.0.prepared().files.push(taken);
        }
        dir.create(name)
    }

    /// Removes prepared first layers beyond `count`.
    ///
    /// # Errors
    /// The host cannot remove a folder.
    pub fn trim_vm_layers(&self, count: usize) -> Result<(), IoError> {
        let (stage, surplus) = {
            let mut prepared = self.0.prepared();
            let kept = count.min(prepared.ready.len());
            (prepared.stage.clone(), prepared.ready.split_off(kept))
        };
        let Some(stage) = stage else { return Ok(()) };
        surplus.into_iter().try_for_each(|taken| stage.remove(&taken.name))
    }

    /// A prepared first layer, if there is one and `vm` has no folder yet.
    pub(super) fn take_prepared(&self, vm: VmId) -> IoResult<Option<File>> {
        let (stage, taken) = {
            let mut prepared = self.0.prepared();
            let (Some(stage), Some(taken)) = (prepared.stage.clone(), prepared.ready.pop()) else {
                return Ok(None);
            };
            (stage, taken)
        };
        let Err(e) = stage.rename(&taken.name, &self.0.vms, &vm.to_string(), IfTaken::Refuse)
        else {
            return Ok(Some(taken.data));
        };
        self.0.prepared().ready.push(taken);
        if e.source.kind() == ErrorKind::AlreadyExists { Ok(None) } else { Err(e) }
    }
}
