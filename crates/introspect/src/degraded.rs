//! Colours for an unknown kernel, by page tables alone (Kaleidoscope, section 4.1).
//!
//! Every kernel has linear maps of all memory, and these do not show what a frame is used for. So a
//! frame that only the kernel may access gets a colour in two cases only. Either the kernel can
//! execute it, or it is data in the top 2 GiB. The x86-64 ABI's kernel code model places a kernel's
//! image there.

use crate::colour::Colour;
use crate::frame_set::FrameSet;
use crate::hint::RootHint;
use crate::memory::{Frame, PhysMemory};
use crate::paging::{Half, Levels, Mapped, Tables, Walk};
use crate::roots;

/// Start address of the top 2 GiB.
const IMAGE_START: u64 = 0xffff_ffff_8000_0000;

/// The colours, and the number of top-level tables that they come from.
pub(crate) fn colours(memory: &dyn PhysMemory, hints: &[RootHint]) -> (Vec<Colour>, usize) {
    let found = find_roots(memory, hints);
    let mut walk = Walk::new(memory);
    let new = || Mapped::new(memory);
    let (mut kernel_code, mut kernel_data, mut user_code, mut user_data) =
        (new(), new(), new(), new());
    for &tables in &found {
        for half in [Half::Kernel, Half::User] {
            walk.half(tables, half, &mut |leaf| {
                let mapped = match (leaf.user, leaf.executable) {
                    (true, true) => &mut user_code,
                    (true, false) => &mut user_data,
                    (false, true) => &mut kernel_code,
                    (false, false) if leaf.address >= IMAGE_START => &mut kernel_data,
                    (false, false) => return,
                };
                mapped.insert(memory, leaf);
            });
        }
    }
    let layout = memory.layout();
    let colour = |frame| {
        let Some(pfn) = layout.pfn(frame) else { return Colour::Unknown };
        if walk.tables().contains(frame.0) {
            return Colour::PageTable;
        }
        let by_rank = [
            (&user_code, Colour::UserCode),
            (&user_data, Colour::UserData),
            (&kernel_code, Colour::KernelCode),
            (&kernel_data, Colour::KernelData),
        ];
        by_rank
            .iter()
            .find(|(mapped, _)| mapped.contains(frame, pfn))
            .map_or(Colour::Unknown, |(_, colour)| *colour)
    };
    ((0..layout.frames()).map(|n| colour(Frame(n))).collect(), found.len())
}

/// The vCPUs' top-level tables and all tables that share their upper halves. Without hints, the
/// frames that look like top-level tables.
fn find_roots(memory: &dyn PhysMemory, hints: &[RootHint]) -> Vec<Tables> {
    let mut found: Vec<Tables> = Vec::new();
    let mut known = FrameSet::new(memory.layout().frames());
    for hint in hints {
        let Some(root) = hint.root(memory) else { continue };
        let root = roots::whole_of_twin(memory, root).unwrap_or(root);
        if known.insert(root.0) {
            let upper = roots::upper_half(memory.page(root));
            let mut same = roots::sharing(memory, &upper, |frame| !known.contains(frame.0));
            same.push(root);
            for root in same {
                known.insert(root.0);
                found.push(Tables { root, levels: hint.levels });
            }
        }
    }
    if found.is_empty() {
        let looks = roots::by_looks(memory);
        let levels = looks.first().map_or(Levels::Four, |&root| levels_by_looks(memory, root));
        found.extend(looks.into_iter().map(|root| Tables { root, levels }));
    }
    found
}

/// Guesses the number of levels: the number under which a table reaches more kernel code in the top
/// 2 GiB. With one level too few, tables look like pages. With one too many, pages look like
/// tables, whose entries hardly ever point to RAM.
fn levels_by_looks(memory: &dyn PhysMemory, root: Frame) -> Levels {
    let code = |levels| {
        let mut pages = 0_u64;
        Walk::new(memory).half(Tables { root, levels }, Half::Kernel, &mut |leaf| {
            let in_ram = memory.layout().frame(leaf.pfn).is_some();
            if leaf.executable && !leaf.user && leaf.address >= IMAGE_START && in_ram {
                pages = pages.saturating_add(leaf.pages);
            }
        });
        pages
    };
    let five = code(Levels::Five);
    if five > 0 && five >= code(Levels::Four) { Levels::Five } else { Levels::Four }
}
