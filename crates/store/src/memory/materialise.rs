//! Writes a snapshot's RAM from its table. Packs are read in the order of their pages, on all
//! cores; every page is hashed before it is written.
//!
//! The hashes of all frames written, including those of disk blocks, must combine to the table's
//! digest of frames. This proves the written RAM without reading it again.

use super::table::{FramesDigest, Kind, Run, Table};
use super::types::DiskLayer;
use crate::errors::{Damage, IoError, IoResult};
use crate::meter::Meter;
use crate::pages::pack::PAGE;
use crate::pages::put::PIECE_BYTES;
use crate::pages::read::Given;
use crate::pages::space::Space;
use crate::pages::{PagesError, Tenant};
use crate::workers;
use dayfly_units::{Digest, PAGE_SIZE};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;

/// The origin of RAM, in frames.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Materialised {
    /// Frames from pages of the tenant's namespace.
    pub pages: u64,
    /// Frames from blocks of the snapshot's disks.
    pub disk: u64,
    /// Frames left as holes: zero and free.
    pub zero: u64,
}

impl Tenant {
    /// Writes the RAM that `table` describes to the empty file `to`; zero and free frames stay
    /// holes. `disks` are the files that the table refers to, verified by the caller. Hold a lease
    /// of the table's pages ([`Tenant::lease`]) unless the snapshot cannot be removed meanwhile.
    ///
    /// # Errors
    /// `Invalid`: `to` is not empty, or the table is of another tenant, or the table refers to
    /// other files than `disks`. `Damage`: a page is missing or damaged, or RAM as a whole differs
    /// from the table's digest. `to` then holds a part of RAM, in which every page is right.
    pub fn materialise(
        &self,
        table: &Table,
        disks: &[Vec<DiskLayer>],
        to: &File,
    ) -> Result<Materialised, PagesError> {
        self.check(table, disks)?;
        let meter = &Meter::default();
        let job = Job {
            space: &self.space,
            table,
            disks,
            to: Some(to),
            path: self.space.dir.path(),
            meter,
        };
        let io = |e| IoError::new("writing RAM to a file for", job.path)(e);
        let length = to.metadata().map_err(io)?.len();
        if length != 0 {
            let place = "bytes of the file that RAM is written to".to_owned();
            let (expected, got) = ("0".to_owned(), length.to_string());
            return Err(PagesError::Invalid { place, expected, got });
        }
        to.set_len(table.ram.bytes).map_err(io)?;
        job.run()
    }

    /// Checks that the table's hashes and the disk blocks as they are now combine to the table's
    /// digest of frames. Pages are not read: the caller has hashed them. `meter` counts the bytes
    /// of the blocks.
    pub(crate) fn prove(
        &self,
        table: &Table,
        disks: &[Vec<DiskLayer>],
        meter: &Meter,
    ) -> Result<(), PagesError> {
        self.check(table, disks)?;
        let job =
            Job { space: &self.space, table, disks, to: None, path: self.space.dir.path(), meter };
        let blocks = job.blocks()?;
        job.prove(&blocks)
    }

    /// Checks that the table is of this tenant and of these disks.
    fn check(&self, table: &Table, disks: &[Vec<DiskLayer>]) -> Result<(), PagesError> {
        if table.tenant != self.space.tenant {
            let (expected, got) = (self.space.tenant.to_string(), table.tenant.to_string());
            return Err(PagesError::Invalid {
                place: "tenant of the table".to_owned(),
                expected,
                got,
            });
        }
        let given = disks.iter().map(|disk| disk.iter().map(|layer| layer.digest).collect());
        let given: Vec<Vec<Digest>> = given.collect();
        if given != table.disks {
            let (expected, got) = (format!("{given:?}"), format!("{:?}", table.disks));
            return Err(PagesError::Invalid {
                place: "disks of the table".to_owned(),
                expected,
                got,
            });
        }
        Ok(())
    }
}

struct Job<'a> {
    space: &'a Space,
    table: &'a Table,
    disks: &'a [Vec<DiskLayer<'a>>],
    /// The file to write; `None` to prove RAM without writing it.
    to: Option<&'a File>,
    path: &'a Path,
    meter: &'a Meter,
}

/// A run of frames with the hash of each frame written.
type Written = (Run, Vec<Digest>);

impl Job<'_> {
    fn run(&self) -> Result<Materialised, PagesError> {
        let pages = self.pages()?;
        let blocks = self.blocks()?;
        self.prove(&blocks)?;
        let disk = blocks.iter().map(|(_, hashes)| hashes.len() as u64).sum();
        Ok(Materialised { pages, disk, zero: u64::from(self.table.frames()) - pages - disk })
    }

    /// Writes all frames that are pages, and returns their number.
    fn pages(&self) -> Result<u64, PagesError> {
        let frames: Vec<u32> =
            self.runs(|kind| matches!(kind, Kind::Page { .. })).flat_map(of_run).collect();
        let hash = |frame: u32| match self.table.from_frame(frame).map(|run| run.kind) {
            Some(Kind::Page { hash }) => self.table.hashes[hash as usize],
            // Unreachable, because `frames` contains only page frames.
            _ => Digest([0; 32]),
        };
        self.space.scatter(&frames, &hash, &|bytes, pages| {
            // Consecutive frames whose pages are consecutive in the group become one write.
            let joined =
                |a: &Given, b: &Given| a.tag.checked_add(1) == Some(b.tag) && a.at + PAGE == b.at;
            for run in pages.chunk_by(joined) {
                self.write(run[0].tag, &bytes[run[0].at..run[0].at + run.len() * PAGE])?;
            }
            Ok(())
        })?;
        Ok(frames.len() as u64)
    }

    fn runs(&self, keep: impl Fn(Kind) -> bool) -> impl Iterator<Item = Run> {
        self.table.runs.iter().copied().filter(move |run| keep(run.kind))
    }

    fn write(&self, frame: u32, bytes: &[u8]) -> IoResult<()> {
        let at = u64::from(frame) * PAGE_SIZE;
        let Some(to) = self.to else { return Ok(()) };
        to.write_all_at(bytes, at).map_err(IoError::new("writing RAM to a file for", self.path))
    }

    /// Copies all frames that are blocks, in disk order. Returns their hashes in frame order.
    fn blocks(&self) -> Result<Vec<Written>, PagesError> {
        let most = u32::try_from(PIECE_BYTES / PAGE_SIZE).unwrap_or(1);
        let mut pieces = Vec::new();
        for run in self.runs(|kind| matches!(kind, Kind::Disk { .. })) {
            let starts = (run.first..run.first + run.frames).step_by(most as usize);
            pieces.extend(starts.filter_map(|first| {
                let rest = self.table.from_frame(first)?;
                Some(Run { frames: rest.frames.min(most), ..rest })
            }));
        }
        pieces.sort_unstable_by_key(|run| match run.kind {
            Kind::Disk { disk, layer, block } => (disk, layer, block),
            _ => (0, 0, 0),
        });
        let mut written = workers::map(pieces.len(), Vec::new, |buffer, n| {
            self.copy(pieces[n], buffer).map(|h| (pieces[n], h))
        })?;
        written.sort_unstable_by_key(|(run, _)| run.first);
        Ok(written)
    }

    fn copy(&self, run: Run, buffer: &mut Vec<u8>) -> Result<Vec<Digest>, PagesError> {
        let Kind::Disk { disk, layer, block } = run.kind else { return Ok(Vec::new()) };
        let file =
            self.disks.get(usize::from(disk)).and_then(|layers| layers.get(usize::from(layer)));
        let what = || {
            format!("blocks {block} to {} of layer {layer} of disk {disk}", block + run.frames - 1)
        };
        let missing = || Damage::Missing {
            file: self.path.to_owned(),
            what: what(),
            by: format!("frame {}", run.first),
        };
        let file = file.ok_or_else(missing)?.file;
        buffer.resize(run.frames as usize * PAGE, 0);
        match file.read_exact_at(buffer, u64::from(block) * PAGE_SIZE) {
            Err(e) if e.kind() == std::io::ErrorKind::UnexpectedEof => return Err(missing().into()),
            other => other.map_err(IoError::new("reading a disk for", self.path))?,
        }
        self.write(run.first, buffer)?;
        self.meter.step_at(buffer.len() as u64, self.path)?;
        Ok(buffer.chunks_exact(PAGE).map(Digest::of).collect())
    }

    /// Compares the digest of the frames written with the table's.
    fn prove(&self, blocks: &[Written]) -> Result<(), PagesError> {
        let mut blocks = blocks.iter().flat_map(|(run, hashes)| of_run(*run).zip(hashes));
        let mut digest = FramesDigest::default();
        for run in &self.table.runs {
            match run.kind {
                Kind::Zero | Kind::Free => {}
                Kind::Page { hash } => {
                    let hashes = &self.table.hashes[hash as usize..][..run.frames as usize];
                    of_run(*run).zip(hashes).for_each(|(frame, hash)| digest.frame(frame, hash));
                }
                Kind::Disk { .. } => {
                    let of_run = blocks.by_ref().take(run.frames as usize);
                    of_run.for_each(|(frame, hash)| digest.frame(frame, hash));
                }
            }
        }
        let got = digest.finish(self.table.frames());
        if got == self.table.frames_digest {
            return Ok(());
        }
        let place = "digest of the frames as written".to_owned();
        let (expected, got) = (self.table.frames_digest.to_string(), got.to_string());
        Err(Damage::Content { file: self.path.to_owned(), place, expected, got }.into())
    }
}

/// The frames of a run, as a range.
fn of_run(run: Run) -> std::ops::Range<u32> {
    run.first..run.first + run.frames
}
