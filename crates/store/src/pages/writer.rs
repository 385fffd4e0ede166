//! Writes packs: completely into a stage, `fsync`ed, then renamed into the tenant's folder.

use super::pack::{Footer, GROUP_PAGES, LEVEL, MAX_PACK_PAGES, PAGE, Pack, PackError, Sum, sum};
use super::sound::is_whole;
use crate::blob::{Dir, IfTaken, Stage};
use crate::errors::{IoError, IoResult};
use crate::workers;
use dayfly_units::{Digest, Name};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;

/// Compressed bytes collected before a write; few in tests, so that crash tests have several writes
/// to tear and lose.
const WRITE_BYTES: usize = if cfg!(test) { 8 << 10 } else { 1 << 20 };

/// Writes bytes at a place of a pack's file.
type Write<'a> = &'a mut dyn FnMut(&[u8], u64) -> IoResult<()>;

/// Takes the next page of a pack: its hash, and its bytes.
type Push<'a> = &'a mut dyn FnMut(Digest, &[u8]) -> IoResult<()>;

/// A pack that is being written.
pub(super) struct Writer<'a> {
    /// The pack's path in errors.
    path: PathBuf,
    write: Write<'a>,
    /// Bytes written so far.
    at: u64,
    pending: Vec<u8>,
    groups: Vec<(u32, Sum)>,
    hashes: Vec<Digest>,
    group: Vec<u8>,
    /// The last group, compressed.
    stored: Vec<u8>,
    zstd: zstd::bulk::Compressor<'static>,
}

impl<'a> Writer<'a> {
    pub(super) fn new(path: PathBuf, write: Write<'a>) -> IoResult<Self> {
        let zstd = zstd::bulk::Compressor::new(LEVEL);
        let zstd = zstd.map_err(IoError::new("making a compressor for", &path))?;
        let group = Vec::with_capacity(GROUP_PAGES as usize * PAGE);
        let (pending, groups, hashes) = (Vec::new(), Vec::new(), Vec::new());
        let stored = Vec::new();
        Ok(Self { path, write, at: 0, pending, groups, hashes, group, stored, zstd })
    }

    pub(super) fn push(&mut self, hash: Digest, page: &[u8]) -> IoResult<()> {
        self.hashes.push(hash);
        self.group.extend_from_slice(page);
        if self.group.len() == GROUP_PAGES as usize * PAGE { self.end_group() } else { Ok(()) }
    }

    fn end_group(&mut self) -> IoResult<()> {
        self.stored.clear();
        self.stored.reserve(zstd::zstd_safe::compress_bound(self.group.len()));
        let length = self.zstd.compress_to_buffer(&self.group, &mut self.stored);
        let length = length.map_err(IoError::new("compressing", &self.path))?;
        self.groups.push((u32::try_from(length).unwrap_or(u32::MAX), sum(&self.stored)));
        self.pending.extend_from_slice(&self.stored);
        self.group.clear();
        if self.pending.len() >= WRITE_BYTES { self.flush() } else { Ok(()) }
    }

    fn flush(&mut self) -> IoResult<()> {
        (self.write)(&self.pending, self.at)?;
        self.at += self.pending.len() as u64;
        self.pending.clear();
        Ok(())
    }

    /// Writes the footer. Returns the pack's id, and the hashes of its pages.
    pub(super) fn finish(mut self, tenant: &Name) -> IoResult<(Digest, Vec<Digest>)> {
        if !self.group.is_empty() {
            self.end_group()?;
        }
        let footer =
            Footer { tenant, group_pages: GROUP_PAGES, groups: &self.groups, hashes: &self.hashes };
        let (id, footer) = footer.encode(self.at + self.pending.len() as u64);
        self.pending.extend_from_slice(&footer);
        self.flush()?;
        Ok((id, self.hashes))
    }
}

/// A pack that is on disk, but not yet in the tenant's folder.
pub(super) struct Staged {
    pub(super) id: Digest,
    pub(super) name: String,
    pub(super) hashes: Vec<Digest>,
    pub(super) file: File,
}

/// Numbered pages to write, each with its hash and bytes.
pub(super) trait Source: Sync {
    fn count(&self) -> usize;
    /// Calls `push` with the pages of a range, in order.
    fn pages(
        &self,
        range: std::ops::Range<usize>,
        push: &mut dyn FnMut(Digest, &[u8]) -> IoResult<()>,
    ) -> Result<(), PackError>;
}

/// Writes all pages of `source` to packs in `stage`, on all cores. Each thread writes whole packs,
/// so the pages are in the source's order, within a pack and from pack to pack.
pub(super) fn stage(
    stage: &Stage,
    tenant: &Name,
    source: &dyn Source,
) -> Result<Vec<Staged>, PackError> {
    let pages = pages_of_packs(source.count(), workers::threads());
    let packs = source.count().div_ceil(pages);
    workers::map(
        packs,
        || (),
        |(), n| {
            let name = format!("pack{n}");
            let file = stage.create(&name)?;
            let mut write = |bytes: &[u8], at| stage.write_at(&name, &file, bytes, at);
            let mut writer = Writer::new(stage.path().join(&name), &mut write)?;
            let range = n * pages..source.count().min((n + 1) * pages);
            source.pages(range, &mut |hash, page| writer.push(hash, page))?;
            let (id, hashes) = writer.finish(tenant)?;
            stage.finish(&name, &file)?;
            Ok(Staged { id, name, hashes, file })
        },
    )
}

/// The number of pages of each pack but the last, for `count` pages that `threads` threads write.
pub(super) fn pages_of_packs(count: usize, threads: usize) -> usize {
    let group = GROUP_PAGES as usize;
    let share = count.div_ceil(threads.max(1)).next_multiple_of(group);
    share.clamp(64 * group, MAX_PACK_PAGES as usize)
}

/// Writes a pack of these pages to the empty `file`, and syncs it: in a process that knows no
/// folder of the store.
pub(crate) fn write_pack(
    file: &File,
    tenant: &Name,
    pages: &mut dyn FnMut(Push<'_>) -> IoResult<()>,
) -> IoResult<()> {
    let path = PathBuf::from("a pack");
    let writing = path.clone();
    let mut write =
        |bytes: &[u8], at| file.write_all_at(bytes, at).map_err(IoError::new("writing", &writing));
    let mut writer = Writer::new(path.clone(), &mut write)?;
    pages(&mut |hash, page| writer.push(hash, page))?;
    writer.finish(tenant)?;
    file.sync_data().map_err(IoError::new("syncing", &path))
}

/// Renames staged packs into the tenant's folder, and `fsync`s the folder. An existing file of that
/// name has the same pages, or is damaged in its footer or in a group and is replaced: it is read
/// and compared with its sums. After an error, new files are unlinked again, if the host allows it.
///
/// The returned packs are those that `staged` names: each has its id and its number of pages.
pub(super) fn publish(
    stage: &Stage,
    dir: &Dir,
    tenant: &Name,
    staged: &[Staged],
) -> IoResult<Vec<Pack>> {
    if staged.is_empty() {
        return Ok(Vec::new());
    }
    stage.sync()?;
    let mut packs = Vec::with_capacity(staged.len());
    let mut fresh: Vec<String> = Vec::new();
    let all = staged.iter().try_for_each(|pack| {
        let name = pack.id.to_string();
        let path = dir.path().join(&name);
        let now = open(&path, &pack.file, tenant)?;
        if now.id != pack.id || now.pages as usize != pack.hashes.len() {
            return Err(other(path, "its footer is not the one that was checked"));
        }
        let there = dir.has(&name)?;
        let opened = if there { dir.open(&name).ok() } else { None };
        let sound = match &opened {
            Some(file) => is_whole(&path, file, tenant, &pack.id).map_err(PackError::into_io)?,
            None => false,
        };
        if !sound {
            // A process that was taken over may have written it, with the footer of the damaged
            // pack whose place it is to take.
            if there
                && !is_whole(&stage.path().join(&pack.name), &pack.file, tenant, &pack.id)
                    .map_err(PackError::into_io)?
            {
                return Err(other(path, "its groups have other sums than its footer names"));
            }
            let if_taken = if there { IfTaken::Exchange } else { IfTaken::Refuse };
            stage.rename(&pack.name, dir, &name, if_taken)?;
            if !there {
                fresh.push(name);
            }
        }
        packs.push(now);
        Ok(())
    });
    all.and_then(|()| dir.sync()).inspect_err(|_| {
        for name in &fresh {
            // A leftover pack is harmless: the next open finds its pages, and the next gc removes
            // them if nothing references them.
            let _best_effort = dir.unlink(name);
        }
    })?;
    Ok(packs)
}

/// The error for a pack that is not what was written.
fn other(path: PathBuf, text: &str) -> IoError {
    let source = std::io::Error::new(std::io::ErrorKind::InvalidData, text.to_owned());
    IoError { doing: "reading back", path, source }
}

/// Opens a pack just written, from the page cache.
fn open(path: &std::path::Path, file: &File, tenant: &Name) -> IoResult<Pack> {
    Pack::open(path, file, tenant).map_err(PackError::into_io)
}
