//! # introspect
//!
//! The room for reading a guest's frozen memory from outside, without an agent in it: what each frame is used for, its
//! **colour** (Kaleidoscope, section 4, "VM State Coloring"), and which frames of the page cache belong to one file.
//!
//! What may not enter: writing to a guest's memory, files and formats of other rooms, policy (what to do with a colour).
//!
//! [`introspect`] looks for a Linux kernel by its VMCOREINFO, tests it, and reads every `struct page`; then it walks the
//! kernel's page tables, recognises those of all processes, and walks these. A kernel that it does not know degrades to what page tables say, and
//! [`Report::degraded`] says so.
//!
//! | colour | by |
//! |---|---|
//! | free | `struct page`: in a free block of the buddy allocator, or offline (balloon, virtio-mem) |
//! | kernel code | the kernel's page tables can execute it, and nobody else owns it |
//! | kernel data | in use, and nothing of all this. Free pages on CPUs' own lists are among them: nothing marks them |
//! | user code | page cache that a process' page tables can execute |
//! | user data | `struct page`: anonymous (code made at run time too), or a huge page |
//! | page cache | `struct page`: its file's `address_space`; tmpfs and memory that processes share are files as well |
//! | page tables | reached as one in a walk, or its `struct page` says so |
//! | slab | `struct page` |
//! | unknown | no `struct page`, or one never initialised |
//!
//! **Guest memory is hostile.** Nothing in it can make this room loop, recurse beyond five levels, panic, or allocate more than a
//! constant number of bytes for each frame of RAM: a walk enters a frame as a table once; texts are at most a page, and at most 256 of them are tested;
//! compound pages are followed one step; free blocks are at most 64 MiB and end with their chunk. Wrong colours are all that a lying guest can
//! get: a guest whose frames are called free and are not loses its own content, nobody else's.

mod colour;
mod degraded;
mod frame_set;
mod kernel;
pub mod memory;
mod owners;
mod paging;
mod parallel;
pub mod picture;
mod report;
mod roots;
mod shape;
mod vmcoreinfo;

pub use colour::Colour;
pub use kernel::Rejection;
pub use memory::{Extent, Layout, PhysMemory, RamFile};
pub use paging::Levels;
pub use report::{Census, Degraded, FileGroup, KernelInfo, Report, RootHint};
pub use shape::ShapeError;
pub use vmcoreinfo::NoteError;

use kernel::Kernel;
use memory::Frame;
use owners::Owners;
use paging::{Half, Mapped, Tables, Walk};
use shape::Owner;

/// Colours every frame of a guest's memory. `hints` are where the page tables are of those of its vCPUs that use any (CR0.PG), when that is known: they tell a running kernel from
/// the remains of an earlier one, and are where an unknown kernel's page tables begin.
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

    // A table of the top level is the kernel's memory, or, from 6.14, marked as a table.
    let eligible = |frame: Frame| {
        frame != kernel.tables.root
            && matches!(colours.get(frame.0), Some(Colour::KernelData | Colour::PageTable))
    };
    let upper = roots::upper_half(memory.page(kernel.tables.root));
    let mut processes = roots::sharing(memory, &upper, eligible);
    // On CPUs' lists of free pages there are tables of processes that have ended.
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
            Colour::KernelData | Colour::Unknown if walk.tables().contains(frame.0) => Colour::PageTable,
            Colour::KernelData | Colour::Unknown if kernel_code.contains(frame, pfn) => Colour::KernelCode,
            Colour::PageCache if user_code.contains(frame, pfn) => Colour::UserCode,
            other => other,
        };
    }
    let kernel = Some(KernelInfo { runs: kernel.runs(hints), ..kernel.info.clone() });
    Report { colours, files, groups, kernel, processes: processes.len(), degraded: None }
}

/// The page numbers of all frames, in order.
fn pfns(memory: &dyn PhysMemory) -> impl Iterator<Item = memory::Pfn> + '_ {
    memory.layout().stretches().flat_map(|(first, frames)| (first.0..).take(frames.len()).map(memory::Pfn))
}

#[cfg(test)]
mod synthetic;

#[cfg(test)]
#[path = "lib_tests.rs"]
mod tests;
