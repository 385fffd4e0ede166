//! # introspect
//!
//! Reads a guest's frozen memory from outside, without an agent in the guest. The result is the use
//! of each frame, its **colour** (Kaleidoscope, section 4, "VM State Coloring"). The result also
//! shows which frames of the page cache belong to one file.
//!
//! This crate does not write to a guest's memory, knows no file formats of other crates, and makes
//! no decisions based on a colour.
//!
//! [`introspect`] finds a Linux kernel by its VMCOREINFO, verifies it, and reads every `struct
//! page`. Then it walks the kernel's page tables, recognises the tables of all processes, and walks
//! these. If it does not know the kernel, the colours come from page tables alone, and
//! [`Report::degraded`] reports the cause.
//!
//! | colour | recognised by |
//! |---|---|
//! | free | `struct page`: in a free block of the buddy allocator, or offline (virtio-mem) |
//! | kernel code | the kernel's page tables can execute it, and it has no other owner |
//! | kernel data | in use, and none of the others; also unmarked free pages on CPUs' own lists |
//! | user code | page cache that a process' page tables can execute |
//! | user data | `struct page`: anonymous (also code made at run time), or a huge page |
//! | page cache | `struct page`: its file's `address_space` (also tmpfs and shared memory) |
//! | page tables | reached as a table in a walk, or marked in its `struct page` |
//! | slab | `struct page` |
//! | unknown | no `struct page`, or one never initialised |
//!
//! **Guest memory is hostile.** No content of it can make this crate loop, recurse beyond five
//! levels, or panic. Allocations are at most a constant number of bytes for each frame of RAM. The
//! reasons:
//!
//! - A walk enters a frame as a table once.
//! - A text has at most a page, and at most 256 texts are tested.
//! - Compound pages are followed one step.
//! - Free blocks have at most 64 MiB and end with their chunk.
//!
//! A lying guest gets wrong colours and nothing more. If a frame in use is called free, that guest
//! loses its own content, and no other guest is affected.

mod colour;
mod degraded;
mod frame_set;
mod hint;
mod kernel;
pub mod memory;
mod owners;
mod paging;
mod parallel;
pub mod picture;
mod rejection;
mod report;
mod roots;
mod shape;
mod vmcoreinfo;

pub use colour::Colour;
pub use hint::{KernelInfo, RootHint};
pub use memory::{Extent, Layout, PhysMemory, RamFile};
pub use paging::Levels;
pub use rejection::Rejection;
pub use report::{Census, Degraded, FileGroup, Report};
pub use shape::ShapeError;
pub use vmcoreinfo::NoteError;

use kernel::Kernel;
use memory::Frame;
use owners::Owners;
use paging::{Half, Mapped, Tables, Walk};
use shape::Owner;

/// Colours every frame of a guest's memory.
///
/// `hints` are the page tables of those vCPUs that use any (CR0.PG), if they are known. The hints
/// distinguish a running kernel from the remains of an earlier one. They are also the starting
/// points for the page tables of an unknown kernel.
#[must_use]
pub fn introspect(memory: &dyn PhysMemory, hints: &[RootHint]) -> Report {
    let search = Kernel::search(memory, hints);
    if let Some(kernel) = search.kernel {
        return with_kernel(memory, &kernel, hints);
    }
    let (colours, roots) = degraded::colours(memory, hints);
    let degraded = match search.rejection {
        Some(first) => Degraded::Rejected { rejected: search.rejected, first, roots },
        None => Degraded::NoNote { roots },
    };
    Report {
        files: vec![0; colours.len()],
        colours,
        groups: Vec::new(),
        kernel: None,
        processes: 0,
        degraded: Some(degraded),
    }
}

fn with_kernel(memory: &dyn PhysMemory, kernel: &Kernel<'_>, hints: &[RootHint]) -> Report {
    let Owners { mut colours, files, groups } = Owners::read(memory, kernel);

    let mut walk = Walk::new(memory);
    let (mut kernel_code, mut user_code) = (Mapped::new(memory), Mapped::new(memory));
    let mut see_kernel = |leaf: paging::Leaf| {
        if leaf.executable {
            kernel_code.insert(memory, leaf);
        }
    };
    walk.half(kernel.tables, Half::Kernel, &mut see_kernel);

    // A top-level table is the kernel's memory; from Linux 6.14 it is marked as a table.
    let eligible = |frame: Frame| {
        frame != kernel.tables.root
            && matches!(colours.get(frame.0), Some(Colour::KernelData | Colour::PageTable))
    };
    let upper = roots::upper_half(memory.page(kernel.tables.root));
    let mut processes = roots::sharing(memory, &upper, eligible);
    // CPUs' lists of free pages hold tables of processes that have ended.
    processes.retain(|&root| {
        let owner = memory.layout().pfn(root).and_then(|pfn| kernel.owner(pfn));
        matches!(owner, Some(Owner::Kernel | Owner::Table))
    });
    for &root in &processes {
        let tables = Tables { root, levels: kernel.tables.levels };
        walk.half(tables, Half::User, &mut |leaf| {
            if leaf.user && leaf.executable {
                user_code.insert(memory, leaf);
            }
        });
        if let Some(root) = roots::isolated_twin(memory, root) {
            walk.half(Tables { root, ..tables }, Half::Kernel, &mut see_kernel);
        }
    }

    for (frame, (pfn, colour)) in pfns(memory).zip(&mut colours).enumerate() {
        let frame = Frame(frame);
        *colour = match *colour {
            Colour::KernelData | Colour::Unknown if walk.tables().contains(frame.0) => {
                Colour::PageTable
            }
            Colour::KernelData | Colour::Unknown if kernel_code.contains(frame, pfn) => {
                Colour::KernelCode
            }
            Colour::PageCache if user_code.contains(frame, pfn) => Colour::UserCode,
            other => other,
        };
    }
    let kernel = Some(KernelInfo { runs: kernel.runs(hints), ..kernel.info.clone() });
    Report { colours, files, groups, kernel, processes: processes.len(), degraded: None }
}

/// The page numbers of all frames, in order.
fn pfns(memory: &dyn PhysMemory) -> impl Iterator<Item = memory::Pfn> + '_ {
    memory
        .layout()
        .stretches()
        .flat_map(|(first, frames)| (first.0..).take(frames.len()).map(memory::Pfn))
}

#[doc(hidden)]
pub mod synthetic;

#[cfg(test)]
#[path = "lib_tests.rs"]
mod tests;
