//! Where a template's pages come from.

use dayfly_store::PagesError;
use std::io;

/// A frame that is in no batch: it reads as zeroes.
pub const ZERO: u32 = u32::MAX;
/// A frame that is in no batch: clones have it from another template's memory.
pub const ELSEWHERE: u32 = u32::MAX - 1;

/// Frames that come at once.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Batch {
    /// The lowest of them.
    pub first: u32,
    /// How many.
    pub frames: u32,
    /// What the guest uses the first for (`dayfly-introspect`'s numbers; 0 is unknown).
    pub colour: u8,
    /// Neighbours of one group belong together; 0 is none.
    pub group: u32,
}

/// Which frames come at once.
#[derive(Debug, Clone, Default)]
pub struct Layout {
    /// For each frame its batch, or [`ZERO`], or [`ELSEWHERE`].
    pub batch_of: Vec<u32>,
    /// By number: in the order in which they lie where they are read from.
    pub batches: Vec<Batch>,
}

/// Why a batch could not be had.
#[derive(Debug, thiserror::Error)]
pub enum SourceError {
    /// It is not what it should be, and will not be.
    #[error("{0}")]
    Damaged(String),
    /// It cannot be read now.
    #[error("{0}")]
    Unreadable(String),
    /// The pages are there, but could not be put into the template.
    #[error("putting pages into the template: {0}")]
    Install(#[source] io::Error),
}

impl From<PagesError> for SourceError {
    fn from(e: PagesError) -> Self {
        match e {
            PagesError::Io(e) => Self::Unreadable(format!("{e}: {}", e.source)),
            e => Self::Damaged(e.to_string()),
        }
    }
}

/// Takes pages: the first frame, and the bytes of as many in a row as there are.
pub type Put<'a> = dyn FnMut(u32, &[u8]) -> io::Result<()> + 'a;

/// Where pages come from.
pub trait Source: Send + Sync {
    /// Which frames come at once.
    fn layout(&self) -> &Layout;

    /// Bytes that were read so far, as they are stored.
    fn read_bytes(&self) -> u64;

    /// Reads a batch and puts every frame of it, verified. Called by several threads at once.
    ///
    /// # Errors
    /// [`SourceError`]; some of its frames may have been put.
    fn fetch(&self, batch: u32, put: &mut Put<'_>) -> Result<(), SourceError>;

    /// As [`Self::fetch`], of several: where they lie side by side they cost no more than one read.
    ///
    /// # Errors
    /// [`SourceError`], of any of them; some frames of any of them may have been put.
    fn fetch_all(&self, batches: &[u32], put: &mut Put<'_>) -> Result<(), SourceError> {
        batches.iter().try_for_each(|batch| self.fetch(*batch, put))
    }
}
