//! RAM in the process that works for a daemon: classified, and written to packs. That process has
//! no folder of the store.

use super::blocks::{self, BlockIndex};
use super::classify::{self, Frame, FreeFrames, Hints, Sources};
use super::types::{BlockHint, DiskLayer, Known, MemorySpec};
use super::work::{Classified, FoundFrame, RamDisk};
use crate::errors::IoError;
use crate::meter::Meter;
use crate::pages::put::read_piece;
use crate::pages::{PagesError, write_pack};
use dayfly_units::{Digest, Name, PAGE_SIZE};
use std::fs::File;
use std::io;
use std::ops::Range;
use std::path::Path;
use std::sync::Mutex;
use std::thread::Builder;

/// The most frames that are read at a time.
const MAX_RUN: usize = 64;
/// The name of RAM in errors.
const RAM: &str = "RAM";

/// RAM, and what is known about it.
#[derive(Debug)]
pub struct RamSource {
    tenant: Name,
    memory: File,
    frames: u32,
    free: Vec<Range<u32>>,
    hints: Vec<(u32, BlockHint)>,
    disks: Vec<Vec<(RamDisk, BlockIndex)>>,
}

/// Gets the number of a piece's first frame, and the class of each of its frames; `None` for
/// frames that are zero or free. Called from several threads.
pub type GiveFrames<'a> = dyn Fn(u32, &[Option<FoundFrame>]) -> io::Result<()> + Sync + 'a;

impl RamDisk {
    const fn layer(&self) -> DiskLayer<'_> {
        DiskLayer { file: &self.file, digest: self.digest }
    }
}

impl RamSource {
    /// Decodes the block indexes; a damaged one finds nothing.
    ///
    /// # Errors
    /// The length of RAM is no multiple of 4096, or RAM is too large.
    pub fn open(
        tenant: Name,
        memory: File,
        free: Vec<Range<u32>>,
        hints: Vec<(u32, BlockHint)>,
        disks: Vec<Vec<RamDisk>>,
    ) -> Result<Self, PagesError> {
        let known = Known { free: &free, hints: &hints, ..Known::default() };
        let spec = MemorySpec { memory: &memory, known, disks: &[] };
        let frames = super::put::check(&spec, Path::new(RAM))?;
        let index = |disk: RamDisk| {
            let index = disk.index.as_ref().and_then(|file| blocks::read_index(&disk.digest, file));
            (disk, index.unwrap_or_else(BlockIndex::empty))
        };
        let disks = disks.into_iter().map(|files| files.into_iter().map(index).collect());
        let disks = disks.collect();
        Ok(Self { tenant, memory, frames, free, hints, disks })
    }

    /// Classifies all frames.
    ///
    /// # Errors
    /// RAM or a disk cannot be read; or the error of `give`.
    pub fn classify(&self, give: &GiveFrames<'_>) -> Result<Classified, PagesError> {
        let path = Path::new(RAM);
        let free = FreeFrames::new(self.frames, &self.free);
        let layers = self.disks.iter().map(|files| files.iter().map(|(disk, _)| disk.layer()));
        let disks: Vec<Vec<DiskLayer<'_>>> = layers.map(Iterator::collect).collect();
        let indexes = self.disks.iter().map(|files| files.iter().map(|(_, index)| index));
        let indexes: Vec<Vec<&BlockIndex>> = indexes.map(Iterator::collect).collect();
        let known = Known { free: &self.free, hints: &self.hints, ..Known::default() };
        let spec = MemorySpec { memory: &self.memory, known, disks: &disks };
        let meter = &Meter::default();
        let sources = Sources { spec: &spec, free: &free, indexes: &indexes, path, meter };
        let tally = Mutex::new(Hints::default());
        let (ram, found) = std::thread::scope(|scope| {
            let digest = || classify::ram_digest(&spec, &free, path, meter);
            let ram = Builder::new().spawn_scoped(scope, digest);
            let found = classify::each(&sources, &|first, kinds, hints| {
                let mut tally = dayfly_units::sync::lock(&tally);
                tally.right += hints.right;
                tally.wrong += hints.wrong;
                drop(tally);
                let shown = |kind: &Frame| match *kind {
                    Frame::Zero | Frame::Free => None,
                    Frame::Disk(at, hash) => Some(FoundFrame::Disk(at, hash)),
                    Frame::Page(hash) => Some(FoundFrame::Page(hash)),
                };
                let kinds: Vec<_> = kinds.iter().map(shown).collect();
                give(first, &kinds).map_err(IoError::new("sending classes of", path))
            });
            // Without a thread, if the control group allows no more.
            let ram = ram.map_or_else(|_| Ok(digest()), |thread| thread.join());
            (ram, found)
        });
        found?;
        let ram = ram.unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
        let hints = tally.into_inner().unwrap_or_default();
        let hints = (hints.right, hints.wrong);
        Ok(Classified { digest: ram.digest, data_bytes: ram.data_bytes, hints })
    }

    /// Writes a pack of these frames to the empty `file`, and syncs it.
    ///
    /// # Errors
    /// RAM has no such frame, or a file cannot be read or written.
    pub fn write_pack(&self, frames: &[u32], file: &File) -> Result<(), PagesError> {
        if let Some(frame) = frames.iter().find(|frame| **frame >= self.frames) {
            return Err(PagesError::Invalid {
                place: "frame".to_owned(),
                expected: format!("below {}", self.frames),
                got: frame.to_string(),
            });
        }
        let path = Path::new(RAM);
        let mut buffer = Vec::new();
        write_pack(file, &self.tenant, &mut |push| {
            for run in frames.chunk_by(|a, b| a.checked_add(1) == Some(*b)) {
                for run in run.chunks(MAX_RUN) {
                    let start = u64::from(run[0]) * PAGE_SIZE;
                    let piece = start..start + run.len() as u64 * PAGE_SIZE;
                    let (_, bytes) = read_piece(&self.memory, &piece, &mut buffer, path)?;
                    for page in bytes.chunks_exact(crate::sparse::PAGE) {
                        push(Digest::of(page), page)?;
                    }
                }
            }
            Ok(())
        })?;
        Ok(())
    }
}
