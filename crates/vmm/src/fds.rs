//! Taking ownership of the descriptors that a [`VmmConfig`](crate::config::VmmConfig) or a message
//! names.

use crate::config::{DiskConfig, FdNumber, Start, TreeConfig, VmmConfig};
use crate::disk::{DiskSpec, LayerSpec, TreeSpec};
use std::collections::BTreeSet;
use std::os::fd::{FromRawFd, OwnedFd};

/// Why a configured descriptor cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum FdError {
    /// The number is 0 to 2, or names no open descriptor.
    #[error("descriptor {number} for {what}: expected an open descriptor other than 0 to 2")]
    Bad {
        /// The descriptor's purpose.
        what: &'static str,
        /// The number in the configuration.
        number: FdNumber,
    },
    /// The place is not among the descriptors of the message.
    #[error(
        "descriptor {number} for {what}: expected a place among the {expected} that came along"
    )]
    Missing {
        /// The descriptor's purpose.
        what: &'static str,
        /// The place in the configuration.
        number: FdNumber,
        /// The number of descriptors that came with the message.
        expected: usize,
    },
    /// The configuration names the descriptor for two purposes.
    #[error("descriptor {number} for {what}: already used for something else")]
    Twice {
        /// The second purpose.
        what: &'static str,
        /// The descriptor's number or place.
        number: FdNumber,
    },
}

/// A source of descriptors that gives each of them out once.
pub trait Descriptors {
    /// Takes ownership of descriptor `number`; an error quotes the purpose `what`.
    ///
    /// # Errors
    /// [`FdError`] if the descriptor is missing or taken already.
    fn take(&mut self, what: &'static str, number: FdNumber) -> Result<OwnedFd, FdError>;

    /// Takes the descriptors of a disk: base image, layers with their maps, writable layer, hash
    /// trees.
    ///
    /// # Errors
    /// [`FdError`] if one is missing or taken already.
    fn take_disk(&mut self, disk: &DiskConfig) -> Result<DiskSpec, FdError> {
        let base = self.take("a disk's base image", disk.base_fd)?;
        let mut layers = Vec::new();
        for layer in &disk.layers {
            let data = self.take("a layer's data", layer.data_fd)?;
            layers.push(LayerSpec { data, map: self.take("a layer's map", layer.map_fd)? });
        }
        let writable = disk
            .writable_fd
            .map(|number| self.take("a disk's writable layer", number))
            .transpose()?;
        let mut trees = Vec::with_capacity(disk.trees.len());
        for tree in &disk.trees {
            let take = |TreeConfig(number, root): &TreeConfig| {
                let file = self.take("a disk file's hash tree", *number)?;
                Ok::<_, FdError>(TreeSpec { file, root: *root })
            };
            trees.push(tree.as_ref().map(take).transpose()?);
        }
        Ok(DiskSpec { size_bytes: disk.size_bytes, base, layers, writable, trees })
    }
}

/// The descriptors that this process inherited, by their numbers.
#[derive(Debug, Default)]
pub struct FdTable {
    taken: BTreeSet<FdNumber>,
}

impl FdTable {
    /// Checks that `number` is open and not claimed yet, without taking ownership.
    ///
    /// # Errors
    /// [`FdError`] if it is 0 to 2, not open, or claimed already.
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
}

impl Descriptors for FdTable {
    fn take(&mut self, what: &'static str, number: FdNumber) -> Result<OwnedFd, FdError> {
        let number = self.claim(what, number)?;
        // SAFETY: the descriptor is open, and `claim` gives out each number once. The configuration
        // passed it to this process, so nothing else owns it.
        Ok(unsafe { OwnedFd::from_raw_fd(number) })
    }
}

/// The descriptors that came with a message, by their places.
#[derive(Debug)]
pub struct Received(Vec<Option<OwnedFd>>);

impl Received {
    /// Takes ownership of all descriptors of a message, in their order.
    #[must_use]
    pub fn new(fds: Vec<OwnedFd>) -> Self {
        Self(fds.into_iter().map(Some).collect())
    }
}

impl Descriptors for Received {
    fn take(&mut self, what: &'static str, number: FdNumber) -> Result<OwnedFd, FdError> {
        let expected = self.0.len();
        let place = usize::try_from(number).ok().and_then(|place| self.0.get_mut(place));
        place
            .ok_or(FdError::Missing { what, number, expected })?
            .take()
            .ok_or(FdError::Twice { what, number })
    }
}

/// Every descriptor number in a configuration.
#[must_use]
pub fn all(config: &VmmConfig) -> BTreeSet<FdNumber> {
    let mut numbers = BTreeSet::from([config.control_fd, config.vsock_fd, config.exit_fd]);
    numbers.extend(config.console_fds);
    numbers.extend(config.kvm_fd);
    numbers.extend(config.link_fd);
    numbers.extend(config.limits_fd);
    let Start::Boot(boot) = &config.start else { return numbers };
    numbers.insert(boot.kernel_fd);
    numbers.extend(boot.initrd_fd);
    for disk in &boot.disks {
        numbers.insert(disk.base_fd);
        numbers.extend(disk.layers.iter().flat_map(|layer| [layer.data_fd, layer.map_fd]));
        numbers.extend(disk.writable_fd);
        numbers.extend(disk.trees.iter().flatten().map(|TreeConfig(number, _)| number));
    }
    numbers
}
