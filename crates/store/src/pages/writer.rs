//! Writes packs: completely into a stage, `fsync`ed, then renamed into the tenant's folder.

use super::pack::{Footer, GROUP_PAGES, LEVEL, MAX_PACK_PAGES, PAGE, Pack, PackError, Sum, sum};
use super::sound::is_whole;
use crate::blob::{Dir, IfTaken, Stage};
use crate::errors::{IoError, IoResult};
use crate::workers;
use dayfly_units::{Digest, Name};
use std::fs::File;

/// Compressed bytes collected before a write; few in tests, so that crash tests have several writes
/// to tear and lose.
const WRITE_BYTES: usize = if cfg!(test) { 8 << 10 } else { 1 << 20 };

/// A pack that is being written in a stage.
struct Writer<'a> {
    dir: &'a Dir,
    name: String,
    file: File,
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
    fn new(dir: &'a Dir, name: String) -> IoResult<Self> {
        let file = dir.create(&name)?;
        let zstd = zstd::bulk::Compressor::new(LEVEL);
        let zstd =
            zstd.map_err(IoError::new("making a compressor for", &dir.path().join(&name)))?;
        let group = Vec::with_capacity(GROUP_PAGES as usize * PAGE);
        let (pending, groups, hashes) = (Vec::new(), Vec::new(), Vec::new());
        let stored = Vec::new();
        Ok(Self { dir, name, file, at: 0, pending, groups, hashes, group, stored, zstd })
    }

    fn push(&mut self, hash: Digest, page: &[u8]) -> IoResult<()> {
        self.hashes.push(hash);
        self.group.extend_from_slice(page);
        if self.group.len() == GROUP_PAGES as usize * PAGE { self.end_group() } else { Ok(()) }
    }

    fn end_group(&mut self) -> IoResult<()> {
        self.stored.clear();
        self.stored.reserve(zstd::zstd_safe::compress_bound(self.group.len()));
        let length = self.zstd.compress_to_buffer(&self.group, &mut self.stored);
        let length =
            length.map_err(IoError::new("compressing", &self.dir.path().join(&self.name)))?;
        self.groups.push((u32::try_from(length).unwrap_or(u32::MAX), sum(&self.stored)));
        self.pending.extend_from_slice(&self.stored);
        self.group.clear();
        if self.pending.len() >= WRITE_BYTES { self.flush() } else { Ok(()) }
    }

    fn flush(&mut self) -> IoResult<()> {
        self.dir.write_at(&self.name, &self.file, &self.pending, self.at)?;
        self.at += self.pending.len() as u64;
        self.pending.clear();
        Ok(())
    }

    /// Writes the footer, and `fsync`s the pack.
    fn finish(mut self, tenant: &Name) -> IoResult<Staged> {
        if !self.group.is_empty() {
            self.end_group()?;
        }
        let footer =
            Footer { tenant, group_pages: GROUP_PAGES, groups: &self.groups, hashes: &self.hashes };
        let (id, footer) = footer.encode(self.at + self.pending.len() as u64);
        self.pending.extend_from_slice(&footer);
        self.flush()?;
        self.dir.finish(&self.name, &self.file)?;
        Ok(Staged { id, name: self.name, hashes: self.hashes, file: self.file })
    }
}

/// A pack that is on disk, but not yet in the tenant's folder.
pub(super) struct Staged {
    id: Digest,
    name: String,
    pub(super) hashes: Vec<Digest>,
    file: File,
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
    let group = GROUP_PAGES as usize;
    let share = source.count().div_ceil(workers::threads()).next_multiple_of(group);
    let pages = share.clamp(64 * group, MAX_PACK_PAGES as usize);
    let packs = source.count().div_ceil(pages);
    workers::map(
        packs,
        || (),
        |(), n| {
            let mut writer = Writer::new(stage, format!("pack{n}"))?;
            let range = n * pages..source.count().min((n + 1) * pages);
            source.pages(range, &mut |hash, page| writer.push(hash, page))?;
            Ok(writer.finish(tenant)?)
        },
    )
}

/// Renames staged packs into the tenant's folder, and `fsync`s the folder. An existing file of that
/// name has the same pages, or is damaged in its footer or in a group and is replaced: it is read
/// and compared with its sums. After an error, new files are unlinked again, if the host allows it.
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
        let there = dir.has(&name)?;
        let opened = if there { dir.open(&name).ok() } else { None };
        let sound = match &opened {
            Some(file) => is_whole(&path, file, tenant).map_err(PackError::into_io)?,
            None => false,
        };
        if !sound {
            let if_taken = if there { IfTaken::Exchange } else { IfTaken::Refuse };
            stage.rename(&pack.name, dir, &name, if_taken)?;
            if !there {
                fresh.push(name);
            }
        }
        packs.push(open(&path, &pack.file, tenant)?);
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

/// Opens a pack just written, from the page cache.
fn open(path: &std::path::Path, file: &File, tenant: &Name) -> IoResult<Pack> {
    Pack::open(path, file, tenant).map_err(PackError::into_io)
}
