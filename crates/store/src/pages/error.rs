//! Why pages were not put or not fetched.

use super::pack::PackError;
use crate::errors::{Damage, IoError};

/// The process that works has failed, or has given an answer that no sound one gives.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("the process that stores the VM's memory: {text}")]
pub struct WorkError {
    /// The cause.
    pub text: String,
    /// Whether the process reports that the disk is full.
    pub is_no_space: bool,
}

impl WorkError {
    /// An error with another cause than a full disk.
    #[must_use]
    pub const fn new(text: String) -> Self {
        Self { text, is_no_space: false }
    }
}

/// Why pages were not put or not fetched.
#[derive(Debug, thiserror::Error)]
pub enum PagesError {
    /// The caller's arguments do not fit together.
    #[error("{place}: expected {expected}, got {got}")]
    Invalid {
        /// The argument, such as `bytes of the file`.
        place: String,
        /// The allowed values.
        expected: String,
        /// The value given.
        got: String,
    },
    /// A pack, a table or a page is damaged, of another format, or missing.
    #[error(transparent)]
    Damage(#[from] Damage),
    /// The host could not read or write.
    #[error(transparent)]
    Io(IoError),
    /// The process that reads and writes pages in place of this one has failed.
    #[error(transparent)]
    Work(#[from] WorkError),
}

impl PagesError {
    /// Whether the disk is full or a quota is used up.
    #[must_use]
    pub fn is_no_space(&self) -> bool {
        match self {
            Self::Io(e) => e.is_no_space(),
            Self::Work(e) => e.is_no_space,
            Self::Invalid { .. } | Self::Damage(_) => false,
        }
    }

    /// Whether stored bytes are damaged, or the disk cannot read them.
    pub(super) fn is_damage(&self) -> bool {
        match self {
            Self::Damage(_) => true,
            Self::Io(e) => e.is_damage(),
            Self::Invalid { .. } | Self::Work(_) => false,
        }
    }
}

impl From<PackError> for PagesError {
    fn from(e: PackError) -> Self {
        match e {
            PackError::Io(e) => Self::Io(e),
            PackError::Damage(d) => Self::Damage(d),
        }
    }
}

impl From<IoError> for PagesError {
    fn from(e: IoError) -> Self {
        Self::Io(e)
    }
}
