//! Puts pages: hashes them, looks them up, and writes the new ones.

use super::error::PagesError;
use super::lease::Lease;
use super::pack::{PAGE, PackError};
use super::sound::Asked;
use super::space::Space;
use super::tenant::Tenant;
use super::work::{self, PackWork};
use super::writer::{self, Source};
use crate::errors::{Damage, IoError, IoResult};
use crate::inner::Inner;
use crate::meter::Meter;
use crate::sparse::is_zero;
use crate::workers;
use dayfly_units::failpoint;
use dayfly_units::{Digest, PAGE_SIZE};
use std::collections::{BTreeSet, HashSet};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;

/// Bytes per read.
pub(crate) const PIECE_BYTES: u64 = 1 << 20;
/// The most pages of a file: 1 TiB.
pub(crate) const MAX_FILE_PAGES: u64 = 1 << 28;

/// How often copies that others publish are hashed without the lock of the namespace.
const ROUNDS: u32 = 4;

/// Counts of a put.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct PutStats {
    /// Different pages in the request.
    pub pages: u64,
    /// Pages that the namespace did not have.
    pub new_pages: u64,
}

/// Pages that are now in a tenant's namespace.
#[derive(Debug)]
pub struct Put {
    /// Number and hash of each page of the file that is not all zero, in ascending order.
    pub pages: Vec<(u32, Digest)>,
    /// Counts of the put.
    pub stats: PutStats,
    /// Keeps the pages until a table names them.
    pub lease: Lease,
}

impl Tenant {
    /// Puts every 4 KiB page of `file` that is not all zero, without a table: for disk blocks.
    /// `first` are numbers of pages that will be fetched together, before others; the rest follows
    /// in ascending order. Nothing may write to `file` meanwhile.
    ///
    /// # Errors
    /// [`PagesError`]; pages stored before are unaffected. A length that is not a multiple of 4096
    /// is `Invalid`.
    pub fn put(&self, file: &File, first: &[u32]) -> Result<Put, PagesError> {
        let path = self.space.dir.path();
        let pieces = pieces(file, path)?;
        let found =
            workers::map(pieces.len(), Vec::new, |buffer, n| -> IoResult<Vec<(u32, Digest)>> {
                let (at, bytes) = read_piece(file, &pieces[n], buffer, path)?;
                let pages = (at..).zip(bytes.chunks_exact(PAGE)).filter(|(_, page)| !is_zero(page));
                Ok(pages.map(|(number, page)| (number, Digest::of(page))).collect())
            })?;
        let pages: Vec<(u32, Digest)> = found.into_iter().flatten().collect();
        let lookup =
            |number: &u32| pages.binary_search_by_key(number, |(n, _)| *n).ok().map(|at| pages[at]);
        let ordered = first.iter().filter_map(lookup).chain(pages.iter().copied());
        let (stats, lease) =
            self.space.store(&self.inner, file, ordered, None, &Meter::default())?;
        Ok(Put { pages, stats, lease })
    }
}

/// Splits the data of `file` into ranges of whole pages, each at most [`PIECE_BYTES`].
pub(crate) fn pieces(file: &File, path: &Path) -> Result<Vec<std::ops::Range<u64>>, PagesError> {
    let io = |e| IoError::new("reading", path)(e);
    let length = file.metadata().map_err(io)?.len();
    if !length.is_multiple_of(PAGE_SIZE) || length / PAGE_SIZE > MAX_FILE_PAGES {
        let expected = format!("a multiple of 4096, at most {}", MAX_FILE_PAGES * PAGE_SIZE);
        return Err(PagesError::Invalid {
            place: "bytes of the file".to_owned(),
            expected,
            got: length.to_string(),
        });
    }
    let mut pieces = Vec::new();
    let mut at = 0;
    while let Some((start, end)) = crate::sparse::next_data(file, at, length).map_err(io)? {
        // The file system reports data in its own blocks, which may be smaller than a page.
        at = (start - start % PAGE_SIZE).max(at);
        let end = end.next_multiple_of(PAGE_SIZE);
        while at < end {
            let next = (at + PIECE_BYTES).min(end);
            pieces.push(at..next);
            at = next;
        }
    }
    Ok(pieces)
}

/// Reads a piece. Returns the number of its first page, and its bytes.
pub(crate) fn read_piece<'a>(
    file: &File,
    piece: &std::ops::Range<u64>,
    buffer: &'a mut Vec<u8>,
    path: &Path,
) -> IoResult<(u32, &'a [u8])> {
    let bytes = usize::try_from(piece.end - piece.start).unwrap_or(0);
    buffer.resize(bytes, 0);
    file.read_exact_at(buffer, piece.start).map_err(IoError::new("reading", path))?;
    Ok((u32::try_from(piece.start / PAGE_SIZE).unwrap_or(u32::MAX), buffer))
}

impl Space {
    /// Puts pages of `file` by number, in this order; duplicates of a page are skipped. A page that
    /// is there with damaged bytes is written anew. With `work`, that process writes the packs, has
    /// computed the hashes, and is ended.
    pub(crate) fn store(
        &self,
        inner: &Arc<Inner>,
        file: &File,
        ordered: impl Iterator<Item = (u32, Digest)>,
        mut work: Option<&mut dyn PackWork>,
        meter: &Meter,
    ) -> Result<(PutStats, Lease), PagesError> {
        let mut seen = HashSet::with_capacity(ordered.size_hint().1.unwrap_or(0).min(1 << 20));
        let wanted: Vec<(u32, Digest)> = ordered.filter(|(_, hash)| seen.insert(*hash)).collect();
        drop(seen);
        if work.is_some() {
            work::check_prefixes(&wanted)?;
        }
        let since = self.read().changes();
        let lease = self.lease(wanted.iter().map(|(_, hash)| hash));
        let chunks: Vec<&[(u32, Digest)]> = wanted.chunks(4096).collect();
        let fresh = workers::map(chunks.len(), Asked::default, |asked, n| {
            let mut fresh = Vec::new();
            for page in chunks[n] {
                if !self.has_sound(&page.1, asked)? {
                    fresh.push(*page);
                }
            }
            Ok::<_, IoError>(fresh)
        })?;
        let fresh: Vec<(u32, Digest)> = fresh.into_iter().flatten().collect();
        let stats = PutStats { pages: wanted.len() as u64, new_pages: fresh.len() as u64 };
        if !fresh.is_empty() {
            inner.writable()?;
            let stage = inner.stage()?;
            meter.begin("storing new pages", fresh.len() as u64 * PAGE_SIZE);
            let source = FilePages { file, pages: &fresh, path: self.dir.path(), meter };
            let by_work = work.is_some();
            let staged = match work.take() {
                None => writer::stage(&stage, &self.tenant, &source)?,
                Some(work) => work::stage(&stage, self, &fresh, work, meter)?,
            };
            failpoint::reached("store.put_pages.staged");
            self.publish(&stage, staged, since, by_work)?;
            failpoint::reached("store.put_pages.published");
        }
        if let Some(work) = work {
            work.end()?;
        }
        Ok((stats, lease))
    }

    /// Publishes packs of pages that were not found when the state had made `since` changes;
    /// another process has written them if `by_work`.
    ///
    /// A copy that another put has published meanwhile would hide the copy in these packs, so it is
    /// hashed before: outside of the lock as long as others publish seldom.
    fn publish(
        &self,
        stage: &crate::blob::Stage,
        staged: Vec<writer::Staged>,
        since: u64,
        by_work: bool,
    ) -> Result<(), PagesError> {
        let mut checked = since;
        let own = if by_work { 0 } else { staged.len() };
        let mut trusted: BTreeSet<usize> = (0..own).collect();
        let mut check = || self.check_found(&staged, &mut trusted);
        for _ in 0..ROUNDS {
            let now = self.read().changes();
            if now == checked {
                break;
            }
            check()?;
            checked = now;
        }
        let _changing = self.changing();
        if self.read().changes() != checked {
            check()?;
        }
        let packs = writer::publish(stage, &self.dir, &self.tenant, &staged)?;
        let hashes = staged.into_iter().map(|s| s.hashes);
        Ok(self.add(packs.into_iter().zip(hashes).collect())?)
    }

    /// Hashes the copies that there are of these pages. A wrong one goes into quarantine, and so
    /// hides none. A pack that a right one hides is hashed whole, unless its number is in
    /// `trusted`: after the next start either may be found first.
    fn check_found(
        &self,
        staged: &[writer::Staged],
        trusted: &mut BTreeSet<usize>,
    ) -> Result<(), PagesError> {
        let mut asked = Asked::default();
        for (number, pack) in staged.iter().enumerate() {
            let mut is_hidden = false;
            for hash in &pack.hashes {
                is_hidden |= self.has_sound(hash, &mut asked)?;
            }
            if is_hidden && trusted.insert(number) {
                self.check_whole(pack)?;
            }
        }
        Ok(())
    }
}

/// Pages of a file as a source for packs.
struct FilePages<'a> {
    file: &'a File,
    pages: &'a [(u32, Digest)],
    path: &'a Path,
    meter: &'a Meter,
}

impl Source for FilePages<'_> {
    fn count(&self) -> usize {
        self.pages.len()
    }

    /// Reads neighbouring pages at once, and hashes every page again. If the file changes
    /// meanwhile, a page stored under a wrong hash would corrupt every snapshot that shares the
    /// hash.
    fn pages(
        &self,
        range: std::ops::Range<usize>,
        push: &mut dyn FnMut(Digest, &[u8]) -> IoResult<()>,
    ) -> Result<(), PackError> {
        let mut buffer = Vec::new();
        for run in self.pages[range].chunk_by(|a, b| a.0.checked_add(1) == Some(b.0)) {
            for run in run.chunks(256) {
                let start = u64::from(run[0].0) * PAGE_SIZE;
                let piece = start..start + run.len() as u64 * PAGE_SIZE;
                let (_, bytes) = read_piece(self.file, &piece, &mut buffer, self.path)?;
                for ((number, hash), page) in run.iter().zip(bytes.chunks_exact(PAGE)) {
                    let got = Digest::of(page);
                    if got != *hash {
                        let place = format!("page {number}, while it was put");
                        let (file, expected, got) =
                            (self.path.to_owned(), hash.to_string(), got.to_string());
                        return Err(Damage::Content { file, place, expected, got }.into());
                    }
                    push(*hash, page)?;
                }
                self.meter.add(bytes.len() as u64);
            }
        }
        Ok(())
    }
}
