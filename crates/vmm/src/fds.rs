//! Taking ownership of the descriptors that a [`VmmConfig`](crate::config::VmmConfig) names.

use crate::config::{DiskConfig, FdNumber, Start, VmmConfig};
use crate::disk::{DiskSpec, LayerSpec};
use std::collections::BTreeSet;
use std::os::fd::{FromRawFd, OwnedFd};

/// Why a configured descriptor cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum FdError {
    /// Not a descriptor that could be passed.
    #[error("descriptor {number} for {what}: expected an open descriptor other than 0 to 2")]
    Bad {
        /// What it is for.
        what: &'static str,
        /// Its number.
        number: FdNumber,
    },
    /// Named for two purposes.
    #[error("descriptor {number} for {what}: already used for something else")]
    Twice {
        /// What it is for.
        what: &'static str,
        /// Its number.
        number: FdNumber,
    },
}

/// Every descriptor this process was given, each handed out once.
#[derive(Debug, Default)]
pub struct FdTable {
    taken: BTreeSet<FdNumber>,
}

impl FdTable {
    /// Checks that `number` is open and not yet in use.
    ///
    /// # Errors
    /// When it is not.
    pub fn claim(&mut self, what: &'static str, number: FdNumber) -> Result<FdNumber, FdError> {
        // SAFETY: F_GETFD only reads the descriptor's flags.
        let open = number > 2 && unsafe { libc::fcntl(number, libc::F_GETFD) } >= 0;
        if !open {
            return Err(FdError::Bad { what, number });
        }
        if !self.taken.insert(number) {
            return Err(FdError::Twice { what, number });
        }
        Ok(number)
    }

    /// Takes `number`.
    ///
    /// # Errors
    /// When it is not open or already taken.
    pub fn take(&mut self, what: &'static str, number: FdNumber) -> Result<OwnedFd, FdError> {
        let number = self.claim(what, number)?;
        // SAFETY: it is open, and `claim` gives every number out once; the configuration passed them to this process.
        Ok(unsafe { OwnedFd::from_raw_fd(number) })
    }

    /// Takes a disk's descriptors.
    ///
    /// # Errors
    /// When one is not open or already taken.
    pub fn take_disk(&mut self, disk: &DiskConfig) -> Result<DiskSpec, FdError> {
        let base = self.take("a disk's base image", disk.base_fd)?;
        let mut layers = Vec::new();
        for layer in &disk.layers {
            let data = self.take("a layer's data", layer.data_fd)?;
            layers.push(LayerSpec { data, map: self.take("a layer's map", layer.map_fd)? });
        }
        let writable =
            disk.writable_fd.map(|number| self.take("a disk's writable layer", number)).transpose()?;
        Ok(DiskSpec { size_bytes: disk.size_bytes, base, layers, writable })
    }
}

/// Every descriptor number in a configuration.
#[must_use]
pub fn all(config: &VmmConfig) -> BTreeSet<FdNumber> {
    let mut numbers = BTreeSet::from([
        config.kvm_fd,
        config.control_fd,
        config.vsock_fd,
        config.console_fd,
        config.exit_fd,
    ]);
    let disks = match &config.start {
        Start::Boot(boot) => {
            numbers.insert(boot.kernel_fd);
            numbers.extend(boot.initrd_fd);
            &boot.disks
        }
        Start::Restore(restore) => {
            numbers.extend([restore.state_fd, restore.memory_fd]);
            numbers.extend(restore.working_set_fd);
            &restore.disks
        }
    };
    for disk in disks {
        numbers.insert(disk.base_fd);
        numbers.extend(disk.layers.iter().flat_map(|layer| [layer.data_fd, layer.map_fd]));
        numbers.extend(disk.writable_fd);
    }
    numbers
}
