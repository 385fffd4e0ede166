//! The result of [`crate::introspect`].

use crate::colour::Colour;
use crate::hint::KernelInfo;
use crate::rejection::Rejection;
use dayfly_units::{Bytes, PAGE_SIZE};
use std::fmt;

/// A file in the page cache. Only its pages are known, not its name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FileGroup {
    /// Virtual address of its `address_space` in the guest's kernel. Zero groups the pages of
    /// truncated files.
    pub address_space: u64,
    /// Number of its frames.
    pub frames: usize,
}

/// Why colours come from page tables alone.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Degraded {
    /// No VMCOREINFO was found.
    #[error(
        "unknown kernel: no VMCOREINFO in memory; colours are of page tables alone, \
         from {roots} roots"
    )]
    NoNote {
        /// Number of top-level tables that were walked.
        roots: usize,
    },
    /// VMCOREINFO texts were found, and all were rejected.
    #[error(
        "unknown kernel: VMCOREINFO found {rejected} times and not believed (first: {first}); \
         colours are of page tables alone, from {roots} roots"
    )]
    Rejected {
        /// Number of rejected texts.
        rejected: usize,
        /// Why the first text was rejected.
        #[source]
        first: Rejection,
        /// Number of top-level tables that were walked.
        roots: usize,
    },
}

/// The colours of a guest's memory. Frames are in the order of [`crate::memory::Frame`].
#[derive(Debug, Clone)]
pub struct Report {
    /// The colour of each frame of RAM.
    pub colours: Vec<Colour>,
    /// For each frame of RAM, the index of its file in [`Self::groups`] plus one, or 0.
    pub files: Vec<u32>,
    /// The files in the page cache, in the order of their first frames.
    pub groups: Vec<FileGroup>,
    /// The kernel, if one was recognised.
    pub kernel: Option<KernelInfo>,
    /// Number of processes' page tables that were found, without the kernel's own.
    pub processes: usize,
    /// Why the colours come from page tables alone, if they do.
    pub degraded: Option<Degraded>,
}

impl Report {
    /// Counts the frames of each colour.
    #[must_use]
    pub fn census(&self) -> Census {
        let mut frames = [0; Colour::ALL.len()];
        for colour in &self.colours {
            frames[usize::from(colour.number())] += 1;
        }
        Census { frames }
    }
}

/// Number of frames by colour. `Display` prints a table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Census {
    frames: [usize; Colour::ALL.len()],
}

impl Census {
    /// Number of frames of a colour.
    #[must_use]
    pub fn frames(&self, colour: Colour) -> usize {
        self.frames[usize::from(colour.number())]
    }
}

impl fmt::Display for Census {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let all: usize = self.frames.iter().sum();
        writeln!(f, "{:<12} {:>9} {:>11} {:>6}", "colour", "frames", "size", "share")?;
        for colour in Colour::ALL {
            let frames = self.frames(colour);
            let tenths = frames * 1000 / all.max(1);
            let size = Bytes(frames as u64 * PAGE_SIZE);
            writeln!(f, "{colour:<12} {frames:>9} {size:>11} {:>4}.{}%", tenths / 10, tenths % 10)?;
        }
        write!(f, "{:<12} {all:>9} {:>11}", "all", Bytes(all as u64 * PAGE_SIZE))
    }
}
