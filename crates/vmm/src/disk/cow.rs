//! One disk: the layer that holds each block, and reading and writing blocks.

use super::block_set::BlockSet;
use super::checked::Checked;
use super::error::{DamagedFile, FreezeError, OpenDiskError, host};
use super::files::{check_empty, make_writable, open_layers, regular_size};
use super::iolist::IoList;
use super::layer;
use super::reads::Nowait;
use super::room::{NoSpace, Room};
use super::span::{length, span};
use super::spec::{DiskSpec, FileId, LayerSpec, MAX_DISK_BYTES};
use crate::config::{DISK_BLOCK_BYTES, MAX_LAYERS};
use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

#[expect(clippy::cast_possible_truncation, reason = "4096 fits")]
pub(super) const BLOCK: usize = DISK_BLOCK_BYTES as usize;

/// A part of a read: consecutive bytes of one layer's file.
#[derive(Debug, Clone)]
pub(super) struct Part<'a> {
    /// The layer's number; 0 is the base.
    pub(super) layer: u8,
    /// The offset of its first byte, the same in the file and on the disk.
    pub(super) at: u64,
    /// Where the bytes go.
    pub(super) list: IoList<'a>,
}

/// An open disk.
#[derive(Debug)]
pub struct Disk {
    size_bytes: u64,
    /// The base image; `None`: a drive without a medium.
    base: Option<OwnedFd>,
    base_bytes: u64,
    /// Frozen layers, the lowest first: layer n of the index is `frozen[n - 1]`.
    frozen: Vec<OwnedFd>,
    writable: Option<OwnedFd>,
    /// For each block the layer that has it: 0 is the base, `frozen.len() + 1` the writable layer.
    ///
    /// Allocated as zero pages of the host. A page becomes resident only if one of its 4096 blocks
    /// is in a layer.
    index: Vec<u8>,
    /// The blocks of the writable layer: those with its number in the index.
    written: BlockSet,
    /// The hash trees, by number of the layer; 0 is the base. May be shorter than the chain.
    checks: Vec<Option<Checked>>,
    /// How the files of the first layers can be read, as far as known; 0 is the base.
    pub(super) nowait: Vec<Nowait>,
}

impl Disk {
    /// A drive without a medium.
    #[must_use]
    pub fn none() -> Self {
        Self {
            size_bytes: 0,
            base: None,
            base_bytes: 0,
            frozen: Vec::new(),
            writable: None,
            index: Vec::new(),
            written: BlockSet::default(),
            checks: Vec::new(),
            nowait: Vec::new(),
        }
    }

    /// Opens a disk: reads and verifies every layer's map, and builds the index. The writable layer
    /// must be an empty file.
    ///
    /// # Errors
    /// [`OpenDiskError`].
    pub fn open(spec: DiskSpec) -> Result<Self, OpenDiskError> {
        let disk = Self::open_any(spec)?;
        if let Some(file) = &disk.writable {
            make_writable(file.as_fd(), disk.size_bytes, "writable layer")?;
        }
        Ok(disk)
    }

    /// As [`Self::open`], with a writable layer that nothing is known of yet.
    pub(super) fn open_any(spec: DiskSpec) -> Result<Self, OpenDiskError> {
        let size_bytes = spec.size_bytes;
        if size_bytes == 0
            || !size_bytes.is_multiple_of(DISK_BLOCK_BYTES)
            || size_bytes > MAX_DISK_BYTES
        {
            return Err(OpenDiskError::Size(size_bytes));
        }
        let base_bytes = regular_size(spec.base.as_fd(), "base image")?;
        if base_bytes > size_bytes {
            let (expected, got) =
                (format!("at most {size_bytes} bytes"), format!("{base_bytes} bytes"));
            return Err(OpenDiskError::File { what: "base image".into(), expected, got });
        }
        let (frozen, index) = open_layers(size_bytes, spec.layers)?;
        let lengths = std::iter::once(base_bytes).chain(std::iter::repeat(size_bytes));
        let check = |(tree, bytes): (Option<_>, u64)| tree.map(|tree| Checked::new(tree, bytes));
        let checks = spec.trees.into_iter().take(1 + frozen.len()).zip(lengths).map(check);
        Ok(Self {
            size_bytes,
            base: Some(spec.base),
            base_bytes,
            checks: checks.collect(),
            frozen,
            writable: spec.writable,
            index,
            written: BlockSet::default(),
            nowait: Vec::new(),
        })
    }

    /// The size that the guest sees, in bytes.
    #[must_use]
    pub const fn size_bytes(&self) -> u64 {
        self.size_bytes
    }

    /// Whether the disk has no writable layer.
    #[must_use]
    pub const fn read_only(&self) -> bool {
        self.writable.is_none()
    }

    /// The number of frozen layers.
    #[must_use]
    pub const fn frozen_layers(&self) -> usize {
        self.frozen.len()
    }

    /// The files below the writable layer, each with the bytes of the disk that it may have.
    pub(super) fn below(&self) -> impl Iterator<Item = (BorrowedFd<'_>, u64)> {
        let base = self.base.iter().map(|file| (file.as_fd(), self.base_bytes));
        base.chain(self.frozen.iter().map(|file| (file.as_fd(), self.size_bytes)))
    }

    /// The files of the layers: the frozen ones, the lowest first, then the writable one. A file of
    /// which the host reports no identity has the default id.
    #[must_use]
    pub fn layer_files(&self) -> Vec<FileId> {
        let files = self.frozen.iter().chain(&self.writable);
        files.map(|file| identity(file.as_fd()).unwrap_or_default()).collect()
    }

    #[cfg(test)]
    pub(crate) fn frozen_file(&self, n: usize) -> &OwnedFd {
        &self.frozen[n]
    }

    /// The writable layer's number in the index.
    pub(super) fn writable_number(&self) -> u8 {
        u8::try_from(self.frozen.len() + 1).unwrap_or(u8::MAX)
    }

    /// Checks that `offset` and `len` lie on the disk; returns the end in bytes.
    pub(super) fn end(&self, offset: u64, len: usize) -> io::Result<u64> {
        let end = offset.checked_add(len as u64).filter(|end| *end <= self.size_bytes);
        end.ok_or_else(|| io::ErrorKind::InvalidInput.into())
    }

    /// Fills `data` from byte `offset` on, with one system call for each run of blocks in one
    /// layer, apart from leaves of hash trees that are read for the first time.
    ///
    /// # Errors
    /// `InvalidInput` past the disk's end; the host's error; `UnexpectedEof` if a layer's file
    /// became shorter; `InvalidData` with a [`DamagedFile`] if a file is not what its hash tree
    /// says. After an error the content of `data` is not to be used.
    pub fn read(&self, offset: u64, data: &IoList<'_>) -> io::Result<()> {
        self.each_part(offset, data, |part| self.read_part(&part))
    }

    /// Calls `act` for each part of a read that comes from a file, in order. Zeroes what no file
    /// has.
    ///
    /// # Errors
    /// `InvalidInput` past the disk's end; that of `act`, and no further part is done.
    pub(super) fn each_part<'a>(
        &self,
        offset: u64,
        data: &IoList<'a>,
        mut act: impl FnMut(Part<'a>) -> io::Result<()>,
    ) -> io::Result<()> {
        let end = self.end(offset, data.len())?;
        let mut at = offset;
        while at < end {
            let (layer, blocks) = self.run(at / DISK_BLOCK_BYTES, end.div_ceil(DISK_BLOCK_BYTES));
            let stop = end.min(blocks * DISK_BLOCK_BYTES);
            let all = data.window(length(at - offset), length(stop - at));
            let (_, file_bytes) = self.file(layer)?;
            let there = length(file_bytes.min(stop).saturating_sub(at));
            if there > 0 {
                act(Part { layer, at, list: all.window(0, there) })?;
            }
            all.window(there, all.len()).zero();
            at = stop;
        }
        Ok(())
    }

    /// Performs a part of a read.
    ///
    /// # Errors
    /// As [`Self::read`].
    pub(super) fn read_part(&self, Part { layer, at, list }: &Part<'_>) -> io::Result<()> {
        let file = self.file(*layer)?.0.as_fd();
        match self.check(*layer) {
            Some(check) => check.read(file, *at, list).map_err(|e| damaged(e, *layer, file)),
            None if list.read_at(file, *at)? < list.len() => {
                Err(io::ErrorKind::UnexpectedEof.into())
            }
            None => Ok(()),
        }
    }

    /// The hash tree of a layer's file.
    pub(super) fn check(&self, layer: u8) -> Option<&Checked> {
        self.checks.get(usize::from(layer)).and_then(Option::as_ref)
    }

    /// The layer that has `block`, and the block (at most `end`) at which the layer changes.
    pub(super) fn run(&self, block: u64, end: u64) -> (u8, u64) {
        let rest = self.index.get(span(&(block..end))).unwrap_or_default();
        let layer = rest.first().copied().unwrap_or_default();
        let same = rest.iter().take_while(|l| **l == layer).count();
        (layer, block + (same as u64).max(1))
    }

    /// The file of layer `layer` of the index, and the file's length in bytes.
    pub(super) fn file(&self, layer: u8) -> io::Result<(&OwnedFd, u64)> {
        let Some(n) = layer.checked_sub(1).map(usize::from) else {
            return Ok((self.base.as_ref().ok_or(io::ErrorKind::NotFound)?, self.base_bytes));
        };
        let file = if n == self.frozen.len() { self.writable.as_ref() } else { self.frozen.get(n) };
        let file = file.ok_or_else(|| {
            io::Error::other(format!(
                "index names layer {}, there are {}",
                n + 1,
                self.frozen.len()
            ))
        })?;
        Ok((file, self.size_bytes))
    }

    pub(super) fn writable(&self) -> io::Result<BorrowedFd<'_>> {
        self.writable
            .as_ref()
            .map(AsFd::as_fd)
            .ok_or_else(|| io::ErrorKind::ReadOnlyFilesystem.into())
    }

    /// Writes `data` at byte `offset` in one system call. If the first or last block is covered in
    /// part and not in the writable layer yet, the layers below supply its other bytes.
    ///
    /// After an error, blocks that were not in the writable layer read as before.
    ///
    /// # Errors
    /// `InvalidInput` past the disk's end, `ReadOnlyFilesystem` without a writable layer, the
    /// host's error.
    pub fn write(&mut self, offset: u64, data: &IoList<'_>) -> io::Result<()> {
        let end = self.end(offset, data.len())?;
        self.writable()?;
        if data.is_empty() {
            return Ok(());
        }
        let blocks = offset / DISK_BLOCK_BYTES..end.div_ceil(DISK_BLOCK_BYTES);
        let (mut before, mut after) = ([0; BLOCK], [0; BLOCK]);
        let before =
            self.complete(blocks.start, blocks.start * DISK_BLOCK_BYTES..offset, &mut before)?;
        let after =
            self.complete(blocks.end - 1, end..blocks.end * DISK_BLOCK_BYTES, &mut after)?;
        let start = offset - before.len() as u64;
        let written = if before.is_empty() && after.is_empty() {
            data.write_at(self.writable()?, start)
        } else {
            let mut whole = before;
            whole.append(data);
            whole.append(&after);
            whole.write_at(self.writable()?, start)
        };
        if written.is_err() {
            self.forget(&blocks);
            return written;
        }
        self.note_written(&blocks);
        Ok(())
    }

    /// Reads the bytes `missing` of `block` into `buffer`, unless the writable layer has the block.
    fn complete<'b>(
        &self,
        block: u64,
        missing: Range<u64>,
        buffer: &'b mut [u8; BLOCK],
    ) -> io::Result<IoList<'b>> {
        if self.run(block, block + 1).0 == self.writable_number() {
            return Ok(IoList::new());
        }
        let list = IoList::of(&mut buffer[..length(missing.end - missing.start)]);
        self.read(missing.start, &list)?;
        Ok(list)
    }

    /// Notes that the writable layer has these blocks.
    pub(super) fn note_written(&mut self, blocks: &Range<u64>) {
        let number = self.writable_number();
        self.index[span(blocks)].fill(number);
        self.written.insert_run(blocks);
    }

    /// Checks that a write of `len` bytes at `offset` may grow the writable layer of disk `number`.
    ///
    /// # Errors
    /// Why the write has to wait.
    pub fn check_room(
        &self,
        room: &mut Room,
        number: usize,
        offset: u64,
        len: u64,
    ) -> Result<(), NoSpace> {
        let Some(layer) = &self.writable else { return Ok(()) };
        let blocks =
            offset / DISK_BLOCK_BYTES..offset.saturating_add(len).div_ceil(DISK_BLOCK_BYTES);
        // The blocks that are covered in part are completed.
        let bytes = (blocks.end - blocks.start).saturating_mul(DISK_BLOCK_BYTES);
        let own = self.writable_number();
        let grows =
            || self.index.get(span(&blocks)).is_none_or(|all| all.iter().any(|of| *of != own));
        room.check(number, layer.as_fd(), bytes, grows)
    }

    /// How many leaves of the base's hash tree were hashed.
    #[cfg(test)]
    pub(crate) fn hashed(&self) -> usize {
        self.check(0).map_or(0, Checked::hashed)
    }

    /// The blocks of the writable layer.
    #[cfg(test)]
    pub(crate) const fn written(&self) -> &BlockSet {
        &self.written
    }

    /// The layer of each block.
    #[cfg(test)]
    pub(super) fn index(&self) -> &[u8] {
        &self.index
    }

    /// The first half of a freeze, which can fail and does not change the disk. Writes the writable
    /// layer's map to the empty file `map`, and checks and extends the empty file `next`. The
    /// caller writes nothing to the disk until [`Self::freeze`].
    ///
    /// The VM stands still meanwhile. The work depends on the blocks of the writable layer, not on
    /// the size of the disk.
    ///
    /// # Errors
    /// [`FreezeError`].
    pub fn prepare_freeze(
        &self,
        map: BorrowedFd<'_>,
        next: BorrowedFd<'_>,
    ) -> Result<(), FreezeError> {
        if self.read_only() {
            return Err(FreezeError::ReadOnly);
        }
        if self.frozen.len() >= MAX_LAYERS {
            return Err(FreezeError::Layers(self.frozen.len() + 1));
        }
        let blocks = self.size_bytes / DISK_BLOCK_BYTES;
        let mut bytes = layer::encode(blocks, || self.written.runs());
        check_empty(map, "file for the map", false)?;
        make_writable(next, self.size_bytes, "new writable layer")?;
        IoList::of(&mut bytes).write_at(map, 0).map_err(FreezeError::WriteMap)
    }

    /// Replaces the lowest frozen layers, up to the one with the data file `top`, by `layers`. The
    /// new layers hold the same blocks in another number of files. The caller identifies the
    /// highest layer by its file, because it may not know the depth of the chain or of later
    /// freezes.
    ///
    /// # Errors
    /// When no frozen layer has that file, or `layers` cannot be used or hold other blocks. The
    /// disk is then unchanged.
    pub fn rebase(
        &mut self,
        top: BorrowedFd<'_>,
        layers: Vec<LayerSpec>,
    ) -> Result<(), OpenDiskError> {
        let replaced = 1 + self.place(top)?;
        let (mut frozen, mut index) = open_layers(self.size_bytes, layers)?;
        let number = |layers: usize| u8::try_from(layers).unwrap_or(u8::MAX);
        let (old, new) = (number(replaced), number(frozen.len()));
        let above = self.frozen.len() - replaced;
        if frozen.len() + above > MAX_LAYERS {
            return Err(OpenDiskError::Layers(frozen.len() + above));
        }
        for (block, (now, was)) in index.iter_mut().zip(&self.index).enumerate() {
            if *was > old {
                *now = was - old + new;
            } else if (*was == 0) != (*now == 0) {
                return Err(OpenDiskError::Differs { block, was: *was, now: *now });
            }
        }
        let mut checks: Vec<Option<Checked>> = Vec::with_capacity(1 + frozen.len());
        checks.push(self.checks.first_mut().and_then(Option::take));
        for file in &frozen {
            checks.push(self.take_check(file.as_fd())?);
        }
        checks.extend(self.checks.drain(self.checks.len().min(1 + replaced)..));
        frozen.extend(self.frozen.drain(replaced..));
        (self.frozen, self.index, self.checks) = (frozen, index, checks);
        self.nowait.clear();
        Ok(())
    }

    /// Takes the hash tree of the layer that has this file as its data. A merged layer has none:
    /// it was written on this host since the VM started.
    fn take_check(&mut self, data: BorrowedFd<'_>) -> Result<Option<Checked>, OpenDiskError> {
        let wanted = identity(data)?;
        for (file, check) in self.frozen.iter().zip(self.checks.iter_mut().skip(1)) {
            if check.is_some() && identity(file.as_fd())? == wanted {
                return Ok(check.take());
            }
        }
        Ok(None)
    }

    /// The index in `frozen` of the layer that has this file as its data.
    fn place(&self, data: BorrowedFd<'_>) -> Result<usize, OpenDiskError> {
        let wanted = identity(data)?;
        for (place, file) in self.frozen.iter().enumerate().rev() {
            if identity(file.as_fd())? == wanted {
                return Ok(place);
            }
        }
        let (expected, got) =
            ("a frozen layer of this disk".into(), format!("inode {}", wanted.ino));
        Err(OpenDiskError::File { what: "layer to replace".into(), expected, got })
    }

    /// The second half of a freeze: the writable layer becomes frozen, and `next` becomes the
    /// writable layer.
    pub fn freeze(&mut self, next: OwnedFd) {
        self.frozen.extend(self.writable.replace(next));
        self.written = BlockSet::default();
    }

    /// Checks that `file` is the data of the writable layer, opened read-only.
    ///
    /// # Errors
    /// [`FreezeError`].
    pub fn check_read_only(&self, file: BorrowedFd<'_>) -> Result<(), FreezeError> {
        use rustix::fs::OFlags;
        let what = "frozen layer, opened read-only";
        let refuse = |expected: String, got: String| {
            Err(OpenDiskError::File { what: what.into(), expected, got }.into())
        };
        let writable = self.writable.as_ref().ok_or(FreezeError::ReadOnly)?;
        let (expected, got) = (identity(writable.as_fd())?, identity(file)?);
        if got != expected {
            return refuse(format!("inode {}", expected.ino), format!("inode {}", got.ino));
        }
        let flags = rustix::fs::fcntl_getfl(file).map_err(host(format!("flags of {what}")))?;
        match flags & OFlags::RWMODE {
            OFlags::RDONLY => Ok(()),
            mode => refuse("a file opened read-only".into(), format!("{mode:?}")),
        }
    }

    /// Puts the descriptor `read_only` of the layer frozen last in the place of the writable one,
    /// and returns that. While it is open, the daemon does not share the layer.
    pub fn keep_read_only(&mut self, read_only: OwnedFd) -> Option<OwnedFd> {
        self.frozen.last_mut().map(|file| std::mem::replace(file, read_only))
    }
}

/// Adds to the error of a hash tree which file of the disk it is about.
pub(super) fn damaged(error: io::Error, layer: u8, file: BorrowedFd<'_>) -> io::Error {
    if error.kind() != io::ErrorKind::InvalidData {
        return error;
    }
    let inode = identity(file).map_or(0, |id| id.ino);
    io::Error::new(io::ErrorKind::InvalidData, DamagedFile { layer, inode, source: error })
}

/// The device and inode of a layer's file.
fn identity(file: BorrowedFd<'_>) -> Result<FileId, OpenDiskError> {
    let stat = rustix::fs::fstat(file).map_err(host("fstat of a layer's data"))?;
    Ok(FileId { dev: stat.st_dev, ino: stat.st_ino })
}
