//! One disk: where each block is, and reading and writing it.

use super::IoList;
use super::layer::{LayerMap, LayerMapError};
use crate::config::{DISK_BLOCK_BYTES, MAX_LAYERS};
use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

/// The largest disk: 1 TiB, whose index would take 256 MiB of address space.
pub const MAX_DISK_BYTES: u64 = 1 << 40;

#[expect(clippy::cast_possible_truncation, reason = "4096 fits")]
const BLOCK: usize = DISK_BLOCK_BYTES as usize;

/// What a disk is made of, with owned descriptors; the meaning is that of [`crate::config::DiskConfig`].
#[derive(Debug)]
pub struct DiskSpec {
    /// Size that the guest sees, a multiple of [`DISK_BLOCK_BYTES`], at most [`MAX_DISK_BYTES`].
    pub size_bytes: u64,
    /// The raw base image; what it lacks at the end reads as zero.
    pub base: OwnedFd,
    /// Frozen layers, the lowest first.
    pub layers: Vec<LayerSpec>,
    /// An empty file for writes; `None`: read-only.
    pub writable: Option<OwnedFd>,
}

/// A frozen layer's files.
#[derive(Debug)]
pub struct LayerSpec {
    /// Sparse data, as long as the disk.
    pub data: OwnedFd,
    /// The sealed map ([`super::layer`]).
    pub map: OwnedFd,
}

/// Why a disk was refused.
#[derive(Debug, thiserror::Error)]
pub enum OpenDiskError {
    /// Not a size a disk can have.
    #[error("disk size: expected 1 to {MAX_DISK_BYTES} bytes, a multiple of {DISK_BLOCK_BYTES}, got {0}")]
    Size(u64),
    /// Too many frozen layers.
    #[error("disk layers: expected at most {MAX_LAYERS}, got {0}")]
    Layers(usize),
    /// A file is not what it should be.
    #[error("{what}: expected {expected}, got {got}")]
    File {
        /// Which of the disk's files.
        what: String,
        /// What it should be.
        expected: String,
        /// What it is.
        got: String,
    },
    /// A layer's map was refused.
    #[error("layer {number}: {source}")]
    Map {
        /// Which, the lowest is 1.
        number: usize,
        /// Why.
        source: LayerMapError,
    },
    /// A layer is of a disk of another size.
    #[error("layer {number}: expected a map of {expected} blocks, got {got}")]
    Blocks {
        /// Which, the lowest is 1.
        number: usize,
        /// Blocks of this disk.
        expected: u64,
        /// Blocks of the layer's disk.
        got: u64,
    },
    /// Layers that were to replace others hold other blocks.
    #[error(
        "block {block}: expected from layer {was} or one that took its place, 0 being the base, got {now}"
    )]
    Differs {
        /// Which.
        block: usize,
        /// The layer it is in.
        was: u8,
        /// The new layer it would be in.
        now: u8,
    },
    /// The host refused.
    #[error("{what}")]
    Host {
        /// What was done to which file.
        what: String,
        /// The cause.
        source: io::Error,
    },
}

/// Why a writable layer was not frozen.
#[derive(Debug, thiserror::Error)]
pub enum FreezeError {
    /// There is no writable layer.
    #[error("freeze: the disk is read-only")]
    ReadOnly,
    /// The chain would become too deep to be opened again.
    #[error("freeze: expected at most {MAX_LAYERS} frozen layers, this would be number {0}")]
    Layers(usize),
    /// The map's file or the new layer's file cannot be used.
    #[error("freeze: {0}")]
    File(#[from] OpenDiskError),
    /// The map could not be written.
    #[error("freeze: writing the layer's map")]
    WriteMap(#[source] io::Error),
}

/// A disk, open.
#[derive(Debug)]
pub struct Disk {
    size_bytes: u64,
    /// `None`: no medium, and no bytes.
    base: Option<OwnedFd>,
    base_bytes: u64,
    /// Frozen layers, the lowest first: layer n of the index is `frozen[n - 1]`.
    frozen: Vec<OwnedFd>,
    writable: Option<OwnedFd>,
    /// For each block the layer that has it: 0 is the base, `frozen.len() + 1` the writable layer.
    ///
    /// Allocated as zero pages of the host; a page becomes resident only where one of its 4096 blocks is in a layer.
    index: Vec<u8>,
}

fn host(what: impl Into<String>) -> impl FnOnce(rustix::io::Errno) -> OpenDiskError {
    let what = what.into();
    move |errno| OpenDiskError::Host { what, source: errno.into() }
}

/// The size of a regular file.
fn regular_size(file: BorrowedFd<'_>, what: &str) -> Result<u64, OpenDiskError> {
    let stat = rustix::fs::fstat(file).map_err(host(format!("fstat of {what}")))?;
    let kind = rustix::fs::FileType::from_raw_mode(stat.st_mode);
    if kind != rustix::fs::FileType::RegularFile {
        let (expected, got) = ("a regular file".into(), format!("{kind:?}"));
        return Err(OpenDiskError::File { what: what.into(), expected, got });
    }
    Ok(u64::try_from(stat.st_size).unwrap_or(0))
}

/// Checks that a file is empty and open for reading and writing (or only writing).
fn check_empty(file: BorrowedFd<'_>, what: &str, read: bool) -> Result<(), OpenDiskError> {
    use rustix::fs::OFlags;
    let refuse = |expected: &str, got: String| {
        Err(OpenDiskError::File { what: what.into(), expected: expected.into(), got })
    };
    let size = regular_size(file, what)?;
    if size != 0 {
        return refuse("an empty file", format!("{size} bytes"));
    }
    let flags = rustix::fs::fcntl_getfl(file).map_err(host(format!("flags of {what}")))?;
    if flags.contains(OFlags::APPEND) {
        return refuse("a file not opened for appending", "O_APPEND".into());
    }
    match flags & OFlags::RWMODE {
        OFlags::RDWR => Ok(()),
        OFlags::WRONLY if !read => Ok(()),
        mode => refuse("a file opened read-write", format!("{mode:?}")),
    }
}

/// Makes an empty file the writable layer's data: sparse, as long as the disk.
fn make_writable(file: BorrowedFd<'_>, size_bytes: u64, what: &str) -> Result<(), OpenDiskError> {
    check_empty(file, what, true)?;
    rustix::fs::ftruncate(file, size_bytes).map_err(host(format!("extending {what} to {size_bytes} bytes")))
}

/// Opens and verifies the frozen layers of a disk: their data, and the index of what they hold.
fn open_layers(size_bytes: u64, layers: Vec<LayerSpec>) -> Result<(Vec<OwnedFd>, Vec<u8>), OpenDiskError> {
    if layers.len() > MAX_LAYERS {
        return Err(OpenDiskError::Layers(layers.len()));
    }
    let blocks = size_bytes / DISK_BLOCK_BYTES;
    let mut index = vec![0; usize::try_from(blocks).map_err(|_| OpenDiskError::Size(size_bytes))?];
    let mut frozen = Vec::with_capacity(layers.len());
    for (layer, number) in layers.into_iter().zip(1_u8..) {
        let place = usize::from(number);
        let what = format!("data of layer {number}");
        let data_bytes = regular_size(layer.data.as_fd(), &what)?;
        if data_bytes != size_bytes {
            let (expected, got) = (format!("{size_bytes} bytes"), format!("{data_bytes} bytes"));
            return Err(OpenDiskError::File { what, expected, got });
        }
        let map = LayerMap::read(layer.map.as_fd())
            .map_err(|source| OpenDiskError::Map { number: place, source })?;
        if map.blocks() != blocks {
            return Err(OpenDiskError::Blocks { number: place, expected: blocks, got: map.blocks() });
        }
        for run in map.runs() {
            index[span(&run)].fill(number);
        }
        frozen.push(layer.data);
    }
    Ok((frozen, index))
}

impl Disk {
    /// A drive without a medium.
    #[must_use]
    pub const fn none() -> Self {
        Self {
            size_bytes: 0,
            base: None,
            base_bytes: 0,
            frozen: Vec::new(),
            writable: None,
            index: Vec::new(),
        }
    }

    /// Opens a disk: reads and verifies every layer's map, and builds the index.
    ///
    /// # Errors
    /// [`OpenDiskError`].
    pub fn open(spec: DiskSpec) -> Result<Self, OpenDiskError> {
        let size_bytes = spec.size_bytes;
        if size_bytes == 0 || !size_bytes.is_multiple_of(DISK_BLOCK_BYTES) || size_bytes > MAX_DISK_BYTES {
            return Err(OpenDiskError::Size(size_bytes));
        }
        let base_bytes = regular_size(spec.base.as_fd(), "base image")?;
        if base_bytes > size_bytes {
            let (expected, got) = (format!("at most {size_bytes} bytes"), format!("{base_bytes} bytes"));
            return Err(OpenDiskError::File { what: "base image".into(), expected, got });
        }
        let (frozen, index) = open_layers(size_bytes, spec.layers)?;
        if let Some(file) = &spec.writable {
            make_writable(file.as_fd(), size_bytes, "writable layer")?;
        }
        Ok(Self { size_bytes, base: Some(spec.base), base_bytes, frozen, writable: spec.writable, index })
    }

    /// Size that the guest sees.
    #[must_use]
    pub const fn size_bytes(&self) -> u64 {
        self.size_bytes
    }

    /// Whether there is no writable layer.
    #[must_use]
    pub const fn read_only(&self) -> bool {
        self.writable.is_none()
    }

    /// How many layers are frozen.
    #[must_use]
    pub const fn frozen_layers(&self) -> usize {
        self.frozen.len()
    }

    #[cfg(test)]
    pub(crate) fn frozen_file(&self, n: usize) -> &OwnedFd {
        &self.frozen[n]
    }

    /// The number that marks the writable layer's blocks in the index.
    fn writable_number(&self) -> u8 {
        u8::try_from(self.frozen.len() + 1).unwrap_or(u8::MAX)
    }

    /// Checks that `offset` and `len` lie on the disk; returns the end.
    fn end(&self, offset: u64, len: usize) -> io::Result<u64> {
        let end = offset.checked_add(len as u64).filter(|end| *end <= self.size_bytes);
        end.ok_or_else(|| io::ErrorKind::InvalidInput.into())
    }

    /// Fills `data` from byte `offset` on. One system call for each run of blocks in one layer.
    ///
    /// # Errors
    /// `InvalidInput` past the disk's end; the host's error; `UnexpectedEof` where a layer's file became shorter.
    pub fn read(&self, offset: u64, data: &IoList<'_>) -> io::Result<()> {
        let end = self.end(offset, data.len())?;
        let mut at = offset;
        while at < end {
            let (layer, blocks) = self.run(at / DISK_BLOCK_BYTES, end.div_ceil(DISK_BLOCK_BYTES));
            let stop = end.min(blocks * DISK_BLOCK_BYTES);
            let part = data.window(length(at - offset), length(stop - at));
            let (file, file_bytes) = self.file(layer)?;
            let there = length(file_bytes.min(stop).saturating_sub(at));
            if there > 0 {
                let got = part.window(0, there).read_at(file.as_fd(), at)?;
                if got < there {
                    return Err(io::ErrorKind::UnexpectedEof.into());
                }
            }
            part.window(there, part.len()).zero();
            at = stop;
        }
        Ok(())
    }

    /// The layer that has `block`, and the block (at most `end`) at which that changes.
    pub(super) fn run(&self, block: u64, end: u64) -> (u8, u64) {
        let rest = self.index.get(span(&(block..end))).unwrap_or_default();
        let layer = rest.first().copied().unwrap_or_default();
        let same = rest.iter().take_while(|l| **l == layer).count();
        (layer, block + (same as u64).max(1))
    }

    /// The file of layer `layer` of the index, and its length in bytes.
    pub(super) fn file(&self, layer: u8) -> io::Result<(&OwnedFd, u64)> {
        let Some(n) = layer.checked_sub(1).map(usize::from) else {
            return Ok((self.base.as_ref().ok_or(io::ErrorKind::NotFound)?, self.base_bytes));
        };
        let file = if n == self.frozen.len() { self.writable.as_ref() } else { self.frozen.get(n) };
        let file = file.ok_or_else(|| {
            io::Error::other(format!("index names layer {}, there are {}", n + 1, self.frozen.len()))
        })?;
        Ok((file, self.size_bytes))
    }

    fn writable(&self) -> io::Result<BorrowedFd<'_>> {
        self.writable.as_ref().map(AsFd::as_fd).ok_or_else(|| io::ErrorKind::ReadOnlyFilesystem.into())
    }

    /// Writes `data` at byte `offset`, in one system call; blocks that it covers in part and that are not in the
    /// writable layer yet are completed from the layers below.
    ///
    /// After an error the blocks that were not in the writable layer read as before.
    ///
    /// # Errors
    /// `InvalidInput` past the disk's end, `ReadOnlyFilesystem` without a writable layer, the host's error.
    pub fn write(&mut self, offset: u64, data: &IoList<'_>) -> io::Result<()> {
        let end = self.end(offset, data.len())?;
        self.writable()?;
        if data.is_empty() {
            return Ok(());
        }
        let blocks = offset / DISK_BLOCK_BYTES..end.div_ceil(DISK_BLOCK_BYTES);
        let (mut before, mut after) = ([0; BLOCK], [0; BLOCK]);
        let before = self.complete(blocks.start, blocks.start * DISK_BLOCK_BYTES..offset, &mut before)?;
        let after = self.complete(blocks.end - 1, end..blocks.end * DISK_BLOCK_BYTES, &mut after)?;
        let start = offset - before.len() as u64;
        if before.is_empty() && after.is_empty() {
            data.write_at(self.writable()?, start)?;
        } else {
            let mut whole = before;
            whole.append(data);
            whole.append(&after);
            whole.write_at(self.writable()?, start)?;
        }
        let number = self.writable_number();
        self.index[span(&blocks)].fill(number);
        Ok(())
    }

    /// Reads `missing` bytes of `block` into `buffer`, unless the writable layer has the block.
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

    /// Makes the bytes read as zero. Whole blocks become holes of the writable layer.
    ///
    /// # Errors
    /// As [`Self::write`].
    pub fn zero(&mut self, offset: u64, len: u64) -> io::Result<()> {
        let end = self.end(offset, usize::try_from(len).map_err(|_| io::ErrorKind::InvalidInput)?)?;
        let inner = offset.next_multiple_of(DISK_BLOCK_BYTES)..end - end % DISK_BLOCK_BYTES;
        let mut zeros = [0; BLOCK];
        if inner.start >= inner.end {
            // Within one block, or over the border of two.
            let border = inner.start.min(end);
            self.write(offset, &IoList::of(&mut zeros[..length(border - offset)]))?;
            return self.write(border, &IoList::of(&mut zeros[..length(end - border)]));
        }
        self.write(offset, &IoList::of(&mut zeros[..length(inner.start - offset)]))?;
        self.write(inner.end, &IoList::of(&mut zeros[..length(end - inner.end)]))?;
        self.discard(inner.start, inner.end - inner.start)
    }

    /// Makes the whole blocks within the bytes read as zero and gives their space back; the rest is left as it is.
    ///
    /// # Errors
    /// As [`Self::write`].
    pub fn discard(&mut self, offset: u64, len: u64) -> io::Result<()> {
        let end = self.end(offset, usize::try_from(len).map_err(|_| io::ErrorKind::InvalidInput)?)?;
        let blocks = offset.div_ceil(DISK_BLOCK_BYTES)..end / DISK_BLOCK_BYTES;
        let file = self.writable()?;
        if blocks.is_empty() {
            return Ok(());
        }
        let bytes = blocks.start * DISK_BLOCK_BYTES..blocks.end * DISK_BLOCK_BYTES;
        punch(file, &bytes)?;
        let number = self.writable_number();
        self.index[span(&blocks)].fill(number);
        Ok(())
    }

    /// The map of the writable layer as it is now.
    ///
    /// # Errors
    /// [`FreezeError::ReadOnly`].
    pub fn writable_map(&self) -> Result<LayerMap, FreezeError> {
        if self.read_only() {
            return Err(FreezeError::ReadOnly);
        }
        let blocks = self.size_bytes / DISK_BLOCK_BYTES;
        let mut map = LayerMap::empty(blocks)
            .map_err(|source| OpenDiskError::Map { number: self.frozen.len() + 1, source })?;
        let number = self.writable_number();
        for (block, layer) in (0..).zip(&self.index) {
            if *layer == number {
                map.insert(block);
            }
        }
        Ok(map)
    }

    /// The first half of a freeze, which can fail and changes nothing of the disk: writes the writable layer's map to
    /// the empty file `map`, and checks and extends the empty file `next`. Nothing may be written until
    /// [`Self::freeze`].
    ///
    /// # Errors
    /// [`FreezeError`].
    pub fn prepare_freeze(&self, map: BorrowedFd<'_>, next: BorrowedFd<'_>) -> Result<(), FreezeError> {
        if self.frozen.len() >= MAX_LAYERS {
            return Err(FreezeError::Layers(self.frozen.len() + 1));
        }
        let mut bytes = self.writable_map()?.encode();
        check_empty(map, "file for the map", false)?;
        make_writable(next, self.size_bytes, "new writable layer")?;
        IoList::of(&mut bytes).write_at(map, 0).map_err(FreezeError::WriteMap)
    }

    /// Puts `layers` in the place of the frozen ones up to the one with the data file `top`: they hold the same blocks in another
    /// number of files. Who asks knows the file: he may not know how many layers lie under it, nor that others were frozen since.
    ///
    /// # Errors
    /// There is no such layer, they cannot be used, or hold other blocks; the disk is as it was.
    pub fn rebase(&mut self, top: BorrowedFd<'_>, layers: Vec<LayerSpec>) -> Result<(), OpenDiskError> {
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
        frozen.extend(self.frozen.drain(replaced..));
        (self.frozen, self.index) = (frozen, index);
        Ok(())
    }

    /// Which of the frozen layers, from 0, has this very file as its data.
    fn place(&self, data: BorrowedFd<'_>) -> Result<usize, OpenDiskError> {
        let identity = |file: BorrowedFd<'_>| {
            let stat = rustix::fs::fstat(file).map_err(host("fstat of a layer's data"))?;
            Ok::<_, OpenDiskError>((stat.st_dev, stat.st_ino))
        };
        let wanted = identity(data)?;
        for (place, file) in self.frozen.iter().enumerate().rev() {
            if identity(file.as_fd())? == wanted {
                return Ok(place);
            }
        }
        let (expected, got) = ("a frozen layer of this disk".into(), format!("inode {}", wanted.1));
        Err(OpenDiskError::File { what: "layer to replace".into(), expected, got })
    }

    /// The second half of a freeze: the writable layer becomes a frozen one, `next` the writable one.
    pub fn freeze(&mut self, next: OwnedFd) {
        self.frozen.extend(self.writable.replace(next));
    }
}

/// Frees a range of a file; where the file system cannot, writes zeroes.
fn punch(file: BorrowedFd<'_>, bytes: &Range<u64>) -> io::Result<()> {
    use rustix::fs::FallocateFlags;
    use rustix::io::Errno;
    let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    match rustix::fs::fallocate(file, flags, bytes.start, bytes.end - bytes.start) {
        Err(Errno::OPNOTSUPP | Errno::NOSYS) => {
            let mut zeros = vec![0; 64 << 10];
            let mut at = bytes.start;
            while at < bytes.end {
                let take = zeros.len().min(length(bytes.end - at));
                IoList::of(&mut zeros[..take]).write_at(file, at)?;
                at += take as u64;
            }
            Ok(())
        }
        other => Ok(other?),
    }
}

/// A length within one disk, which is below 2^40.
fn length(bytes: u64) -> usize {
    usize::try_from(bytes).unwrap_or(usize::MAX)
}

pub(super) fn span(blocks: &Range<u64>) -> Range<usize> {
    length(blocks.start)..length(blocks.end)
}
