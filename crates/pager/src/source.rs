//! Sources of a template's pages.

use dayfly_store::PagesError;
use std::io;

/// In [`Layout::batch_of`]: the frame reads as zeroes, and is in no batch.
pub const ZERO: u32 = u32::MAX;
/// In [`Layout::batch_of`]: clones map the frame from another template, and it is in no batch.
pub const ELSEWHERE: u32 = u32::MAX - 1;

/// Frames that are fetched together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Batch {
    /// The lowest frame.
    pub first: u32,
    /// Number of frames.
    pub frames: u32,
    /// The colour of the first frame, the guest's use of it (`dayfly-introspect`'s numbers; 0 is
    /// unknown).
    pub colour: u8,
    /// Adjacent batches with one group number belong together; 0 means no group.
    pub group: u32,
}

/// The division of RAM into batches.
#[derive(Debug, Clone, Default)]
pub struct Layout {
    /// For each frame the number of its batch, or [`ZERO`], or [`ELSEWHERE`].
    pub batch_of: Vec<u32>,
    /// The batches, by number: in the order in which they are stored.
    pub batches: Vec<Batch>,
}

/// Why a batch could not be fetched.
#[derive(Debug, thiserror::Error)]
pub enum SourceError {
    /// The stored data is damaged; another attempt would fail too.
    #[error("{0}")]
    Damaged(String),
    /// The data cannot be read now; another attempt may succeed.
    #[error("{0}")]
    Unreadable(String),
    /// The pages were read, but could not be put into the template.
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

/// Takes pages: the first frame, and the bytes of consecutive frames.
pub type Put<'a> = dyn FnMut(u32, &[u8]) -> io::Result<()> + 'a;

/// A source of pages.
pub trait Source: Send + Sync {
    /// The division of RAM into batches.
    fn layout(&self) -> &Layout;

    /// Stored bytes read so far.
    fn read_bytes(&self) -> u64;

    /// Reads a batch, verifies it, and puts every frame of it. Several threads call this
    /// concurrently.
    ///
    /// # Errors
    /// [`SourceError`]; some frames of the batch may have been put.
    fn fetch(&self, batch: u32, put: &mut Put<'_>) -> Result<(), SourceError>;

    /// As [`Self::fetch`], for several batches; adjacent batches cost no more than one read.
    ///
    /// # Errors
    /// [`SourceError`], of any of the batches; some frames of each may have been put.
    fn fetch_all(&self, batches: &[u32], put: &mut Put<'_>) -> Result<(), SourceError> {
        batches.iter().try_for_each(|batch| self.fetch(*batch, put))
    }
}
