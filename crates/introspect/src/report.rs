//! What [`crate::introspect`] is told and what it answers.

use crate::colour::Colour;
use crate::kernel::Rejection;
use crate::memory::{Frame, Pfn, PhysMemory};
use crate::paging::{ADDRESS, Levels};
use dayfly_units::{Bytes, PAGE_SIZE};
use std::fmt;

/// CR4.LA57: page tables have five levels.
const CR4_LA57: u64 = 1 << 12;

/// Where a vCPU's page tables were when memory was frozen.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RootHint {
    /// The vCPU's CR3.
    pub cr3: u64,
    /// How many levels its tables have.
    pub levels: Levels,
}

impl RootHint {
    /// From a vCPU's control registers.
    #[must_use]
    pub fn from_registers(cr3: u64, cr4: u64) -> Self {
        Self { cr3, levels: if cr4 & CR4_LA57 == 0 { Levels::Four } else { Levels::Five } }
    }

    /// The frame of the top-level table.
    pub(crate) fn root(&self, memory: &dyn PhysMemory) -> Option<Frame> {
        memory.layout().frame(Pfn((self.cr3 & ADDRESS) / PAGE_SIZE))
    }
}

/// The kernel that was found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KernelInfo {
    /// As `uname -r` says it.
    pub release: String,
    /// Levels of its page tables.
    pub levels: Levels,
    /// Guest-physical address of `swapper_pg_dir`.
    pub root: u64,
    /// Whether a vCPU's page tables, by the hints, are this kernel's: it is then no remains of an earlier one.
    pub runs: bool,
}

/// A file in the page cache. Nothing is known of it but that its pages belong together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FileGroup {
    /// Virtual address of its `address_space` in the guest's kernel; zero for pages whose file was truncated.
    pub address_space: u64,
    /// Its frames.
    pub frames: usize,
}

/// Why colours come from page tables alone.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Degraded {
    /// No kernel has left a description of itself.
    #[error("unknown kernel: no VMCOREINFO in memory; colours are of page tables alone, from {roots} roots")]
    NoNote {
        /// Top-level tables that were walked.
        roots: usize,
    },
    /// There were descriptions, and none was true.
    #[error(
        "unknown kernel: VMCOREINFO found {rejected} times and not believed (first: {first}); colours are of page tables alone, from {roots} roots"
    )]
    Rejected {
        /// How many.
        rejected: usize,
        /// Why the first was not believed.
        #[source]
        first: Rejection,
        /// Top-level tables that were walked.
        roots: usize,
    },
}

/// A guest's memory, coloured. Frames are in the order of [`crate::memory::Frame`].
#[derive(Debug, Clone)]
pub struct Report {
    /// One for each frame of RAM.
    pub colours: Vec<Colour>,
    /// For each frame of RAM its file: an index into [`Self::groups`] plus one, or 0.
    pub files: Vec<u32>,
    /// The files in the page cache, in the order of their first frames.
    pub groups: Vec<FileGroup>,
    /// The kernel, when it was recognised.
    pub kernel: Option<KernelInfo>,
    /// Processes' page tables that were found, without the kernel's own.
    pub processes: usize,
    /// Why the colours are fewer than they could be.
    pub degraded: Option<Degraded>,
}

impl Report {
    /// How many frames have which colour.
    #[must_use]
    pub fn census(&self) -> Census {
        let mut frames = [0; Colour::ALL.len()];
        for colour in &self.colours {
            frames[usize::from(colour.number())] += 1;
        }
        Census { frames }
    }
}

/// Frames by colour. Its text is a table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Census {
    frames: [usize; Colour::ALL.len()],
}

impl Census {
    /// Frames of a colour.
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
