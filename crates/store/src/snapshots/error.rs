//! Why no snapshot was made.

use crate::errors::{Damage, IoError};
use crate::pages::WorkError;
use crate::vms::pins::PinError;
use dayfly_units::Name;

/// Why no snapshot was made. This attempt left no snapshot under the name.
#[derive(Debug, thiserror::Error)]
pub enum CommitError {
    /// A snapshot has that name.
    #[error("snapshot {name} exists")]
    Exists {
        /// The name in the request.
        name: Name,
    },
    /// An image or a layer that the snapshot depends on is missing or damaged.
    #[error(transparent)]
    Damage(#[from] Damage),
    /// A value is out of its bounds.
    #[error("{place}: expected {expected}, got {got}")]
    Invalid {
        /// The field, such as `disks`.
        place: String,
        /// The allowed values.
        expected: String,
        /// The value given.
        got: String,
    },
    /// The host could not read or write a file.
    #[error(transparent)]
    Io(#[from] IoError),
    /// The process that stores the VM's memory in place of this one has failed.
    #[error(transparent)]
    Work(#[from] WorkError),
}

impl From<PinError> for CommitError {
    fn from(e: PinError) -> Self {
        match e {
            PinError::Damage(d) => Self::Damage(d),
            PinError::Io(e) => Self::Io(e),
        }
    }
}
