//! A raw memory file, mapped read-only.

use super::access::{Page, PhysMemory, ZERO_PAGE};
use super::layout::{Frame, Layout};
use crate::frame_set::FrameSet;
use dayfly_units::PAGE_SIZE;
use rustix::fs::SeekFrom;
use rustix::mm::{MapFlags, ProtFlags};
use std::ffi::c_void;
use std::fs::File;
use std::io;
use std::ptr::NonNull;

/// Upper limit for the data ranges that are distinguished in a file; everything after them counts
/// as data. Skipping holes gains nothing in a file with more ranges.
const MAX_STRETCHES: usize = 1 << 16;

/// Why a file cannot be read as guest memory.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// The file ends before the RAM does.
    #[error("memory file: expected {expected} bytes or more, got {got}")]
    Short {
        /// Bytes that the layout needs.
        expected: u64,
        /// Length of the file in bytes.
        got: u64,
    },
    /// A system call failed.
    #[error("memory file: {doing}")]
    Io {
        /// The operation that failed.
        doing: &'static str,
        /// The system's error.
        #[source]
        source: io::Error,
    },
}

/// A memory file in a read-only mapping. Holes of the file are never touched, because on tmpfs a
/// read would fill them.
///
/// Another process may write to the file meanwhile, which only gives stale answers. The file must
/// not become shorter, and its disk must not fail. Otherwise this process gets SIGBUS, as for every
/// mapping of a file.
#[derive(Debug)]
pub struct RamFile {
    layout: Layout,
    base: NonNull<c_void>,
    bytes: usize,
    data: FrameSet,
}

// SAFETY: only `drop` changes the mapping at `base`, and `drop` has exclusive access to the value;
// all reads are atomic.
unsafe impl Send for RamFile {}
// SAFETY: as for Send: `&RamFile` allows only atomic loads of a read-only mapping.
unsafe impl Sync for RamFile {}

impl RamFile {
    /// Maps `file`, whose RAM has the given layout. Moves the file's offset.
    ///
    /// # Errors
    /// [`OpenError`] if the file is too short, or if seeking or mapping fails.
    pub fn open(file: &File, layout: Layout) -> Result<Self, OpenError> {
        let io = |doing| move |source| OpenError::Io { doing, source };
        let got = file.metadata().map_err(io("asking for its length"))?.len();
        let expected = layout.file_bytes();
        if got < expected {
            return Err(OpenError::Short { expected, got });
        }
        let bytes = usize::try_from(expected).map_err(|_| OpenError::Short { expected, got })?;
        let data = data_frames(file, &layout, expected).map_err(io("looking for its holes"))?;
        // SAFETY: the kernel chooses the address (none is given, and MAP_FIXED is not set), so no
        // other mapping is touched.
        let base = unsafe {
            rustix::mm::mmap(
                std::ptr::null_mut(),
                bytes,
                ProtFlags::READ,
                MapFlags::SHARED,
                file,
                0,
            )
        };
        let base = base.map_err(|e| io("mapping it")(e.into()))?;
        let base = NonNull::new(base)
            .ok_or_else(|| io("mapping it")(io::ErrorKind::AddrNotAvailable.into()))?;
        Ok(Self { layout, base, bytes, data })
    }
}

impl Drop for RamFile {
    fn drop(&mut self) {
        // SAFETY: `base` and `bytes` are those of the mapping that `open` made, and no borrow of
        // `self` is left. The only error, EINVAL for an invalid range, cannot occur.
        let _ = unsafe { rustix::mm::munmap(self.base.as_ptr(), self.bytes) };
    }
}

impl PhysMemory for RamFile {
    fn layout(&self) -> &Layout {
        &self.layout
    }

    fn page(&self, frame: Frame) -> &Page {
        let place = self.layout.offset(frame).and_then(|offset| usize::try_from(offset).ok());
        match place {
            Some(offset) if self.data.contains(frame.0) => {
                assert!(
                    offset + size_of::<Page>() <= self.bytes,
                    "the mapping is as long as the layout"
                );
                // SAFETY: the assertion above keeps the page inside the mapping, which lives as
                // long as `self`. Offsets are multiples of 4096 (`Layout::new`), so the page is
                // aligned. Every bit pattern is a valid page, and words are atomic.
                unsafe { self.base.byte_add(offset).cast::<Page>().as_ref() }
            }
            _ => &ZERO_PAGE,
        }
    }

    fn may_hold_data(&self, frame: Frame) -> bool {
        self.data.contains(frame.0)
    }
}

/// The frames outside holes. A file system without holes reports all frames.
fn data_frames(file: &File, layout: &Layout, len: u64) -> io::Result<FrameSet> {
    let mut data = FrameSet::new(layout.frames());
    let mut mark = |start: u64, end: u64| {
        for placed in &layout.placed {
            let from = start.max(placed.offset);
            let to = end.min(placed.offset + placed.frames as u64 * PAGE_SIZE);
            if from < to {
                // Data ranges end at the file system's blocks, which may be smaller than a page.
                let first = (from - placed.offset) / PAGE_SIZE;
                let behind = (to - placed.offset).div_ceil(PAGE_SIZE);
                let frame = |n| usize::try_from(n).map_or(usize::MAX, |n: usize| placed.frame + n);
                data.insert_range(frame(first)..frame(behind));
            }
        }
    };
    let mut at = 0;
    for _ in 0..MAX_STRETCHES {
        let start = match rustix::fs::seek(file, SeekFrom::Data(at)) {
            Ok(start) if start < len => start,
            // The rest of the file is a hole.
            Ok(_) | Err(rustix::io::Errno::NXIO) => return Ok(data),
            Err(e) => return Err(e.into()),
        };
        let end = rustix::fs::seek(file, SeekFrom::Hole(start))?;
        mark(start, end);
        at = end;
        if end <= start || end >= len {
            break;
        }
    }
    mark(at, len);
    Ok(data)
}
