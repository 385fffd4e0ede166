//! The page tables that a caller knows, and the kernel that was recognised.

use crate::memory::{Frame, Pfn, PhysMemory};
use crate::paging::{ADDRESS, Levels};
use dayfly_units::PAGE_SIZE;

/// CR4.LA57: page tables have five levels.
const CR4_LA57: u64 = 1 << 12;

/// A vCPU's page tables at the time of the freeze.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RootHint {
    /// The vCPU's CR3.
    pub cr3: u64,
    /// Number of levels of the page tables.
    pub levels: Levels,
}

impl RootHint {
    /// Makes a hint from a vCPU's control registers.
    #[must_use]
    pub fn from_registers(cr3: u64, cr4: u64) -> Self {
        Self { cr3, levels: if cr4 & CR4_LA57 == 0 { Levels::Four } else { Levels::Five } }
    }

    /// The frame of the top-level table.
    pub(crate) fn root(&self, memory: &dyn PhysMemory) -> Option<Frame> {
        memory.layout().frame(Pfn((self.cr3 & ADDRESS) / PAGE_SIZE))
    }
}

/// A recognised kernel.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KernelInfo {
    /// Release, as `uname -r` prints it.
    pub release: String,
    /// Number of levels of its page tables.
    pub levels: Levels,
    /// Guest-physical address of `swapper_pg_dir`.
    pub root: u64,
    /// Whether a vCPU uses this kernel's page tables, by the hints. Such a kernel is not the
    /// remains of an earlier one.
    pub runs: bool,
}
