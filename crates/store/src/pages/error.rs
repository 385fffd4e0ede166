//! Why pages were not put or not fetched.

use super::pack::PackError;
use crate::errors::{Damage, IoError};

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
}

impl PagesError {
    /// Whether stored bytes are damaged, or the disk cannot read them.
    pub(super) fn is_damage(&self) -> bool {
        match self {
            Self::Damage(_) => true,
            Self::Io(e) => e.is_damage(),
            Self::Invalid { .. } => false,
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
