//! The first pass: a colour for each frame by its `struct page` (Kaleidoscope, section 4.2), and
//! the file of each page cache frame.

use crate::colour::Colour;
use crate::kernel::Kernel;
use crate::memory::{Page, Pfn, PhysMemory};
use crate::parallel;
use crate::report::FileGroup;
use crate::shape::{MAX_ORDER, Owner};
use std::collections::HashMap;

/// Frames that a thread colours at a time, from a multiple of this number: no free block crosses
/// that boundary.
const CHUNK_FRAMES: u64 = 1 << MAX_ORDER;

/// Address of the `address_space` of a page cache frame. `None`: the frame belongs to no file.
/// Zero: the file was truncated.
type Mapping = Option<u64>;

/// The result of reading all `struct page`s.
pub(crate) struct Owners {
    pub(crate) colours: Vec<Colour>,
    /// For each frame, the number of its file plus one, or 0.
    pub(crate) files: Vec<u32>,
    pub(crate) groups: Vec<FileGroup>,
}

impl Owners {
    /// Reads all `struct page`s.
    pub(crate) fn read(memory: &dyn PhysMemory, kernel: &Kernel<'_>) -> Self {
        let layout = memory.layout();
        let mut jobs = Vec::new();
        for (start, frames) in layout.stretches() {
            let (mut at, end) = (start.0, start.0 + frames.len() as u64);
            while at < end {
                let next = (at / CHUNK_FRAMES + 1).saturating_mul(CHUNK_FRAMES).min(end);
                jobs.push(Pfn(at)..Pfn(next));
                at = next;
            }
        }
        let chunks = parallel::each(jobs, |pfns| Chunk::new(kernel).read(pfns.start.0..pfns.end.0));
        let mut owners = Self {
            colours: Vec::with_capacity(layout.frames()),
            files: vec![0; layout.frames()],
            groups: Vec::new(),
        };
        let mut known = HashMap::new();
        for (colours, mappings) in chunks {
            let base = owners.colours.len();
            owners.colours.extend(colours);
            for (within, mapping) in mappings {
                let file = owners.group(&mut known, mapping);
                owners.files[base + within] = file;
            }
        }
        owners
    }

    /// The number of a file. A file that was not seen before gets a new number.
    fn group(&mut self, known: &mut HashMap<u64, u32>, address_space: u64) -> u32 {
        let groups = &mut self.groups;
        // There are at most as many files as frames, and fewer than 2^32 frames
        // (`MAX_GUEST_BYTES`).
        let next = u32::try_from(groups.len()).map_or(u32::MAX, |n| n + 1);
        let number = *known.entry(address_space).or_insert_with(|| {
            groups.push(FileGroup { address_space, frames: 0 });
            next
        });
        if let Some(group) = groups.get_mut(number as usize - 1) {
            group.frames += 1;
        }
        number
    }
}

/// A thread's view of the `struct page`s, with caches of lookups that neighbouring frames share.
struct Chunk<'k, 'm> {
    kernel: &'k Kernel<'m>,
    per_page: u64,
    /// The last page of `struct page`s that was looked up.
    page: Option<(u64, Option<(&'m Page, usize)>)>,
    /// The last head of a compound page.
    head: Option<(u64, (Colour, Mapping))>,
    /// The last address that was tested for an `address_space`.
    file: Option<(u64, bool)>,
}

impl<'k, 'm> Chunk<'k, 'm> {
    fn new(kernel: &'k Kernel<'m>) -> Self {
        let per_page = dayfly_units::PAGE_SIZE / kernel.shape.size as u64;
        Self { kernel, per_page, page: None, head: None, file: None }
    }

    /// Colours the frames of a contiguous range of page numbers. The second list holds the frames
    /// that belong to files, by their index in the range.
    fn read(mut self, pfns: std::ops::Range<u64>) -> (Vec<Colour>, Vec<(usize, u64)>) {
        let mut colours = Vec::new();
        let mut mappings = Vec::new();
        let mut pfn = pfns.start;
        while pfn < pfns.end {
            let owner = self.owner(pfn);
            if let Some(Owner::Free { order }) = owner {
                // A block is aligned to its size; the order of an unaligned one is false.
                let pages = if pfn.is_multiple_of(1 << order) { 1 << order } else { 1 };
                let pages = pages.min(pfns.end - pfn);
                colours.extend((0..pages).map(|_| Colour::Free));
                pfn += pages;
                continue;
            }
            let (colour, mapping) = match owner {
                Some(Owner::Tail { head }) => self.compound(head),
                owner => self.single(owner),
            };
            mappings.extend(mapping.map(|mapping| (colours.len(), mapping)));
            colours.push(colour);
            pfn += 1;
        }
        (colours, mappings)
    }

    fn owner(&mut self, pfn: u64) -> Option<Owner> {
        let group = pfn / self.per_page;
        let page = match self.page {
            Some((last, page)) if last == group => page,
            _ => {
                let page = self.kernel.struct_page(Pfn(group * self.per_page));
                self.page = Some((group, page));
                page
            }
        };
        let (page, first) = page?;
        let within = usize::try_from(pfn % self.per_page).ok()? * (self.kernel.shape.size / 8);
        Some(self.kernel.shape.owner(page, first + within))
    }

    /// The colour of a compound page, by the address of its head.
    fn compound(&mut self, head: u64) -> (Colour, Mapping) {
        match self.head {
            Some((last, answer)) if last == head => answer,
            _ => {
                let owner = self.kernel.pfn_of(head).and_then(|pfn| self.kernel.owner(pfn));
                let answer = match owner {
                    // Neither the first page of a free block nor a tail can be a head.
                    Some(Owner::Free { .. } | Owner::Tail { .. }) => (Colour::Unknown, None),
                    owner => self.single(owner),
                };
                self.head = Some((head, answer));
                answer
            }
        }
    }

    fn single(&mut self, owner: Option<Owner>) -> (Colour, Mapping) {
        let colour = match owner {
            Some(Owner::File { mapping }) => return (Colour::PageCache, Some(mapping)),
            Some(Owner::MaybeFile { mapping }) => {
                let is_file = match self.file {
                    Some((last, is_file)) if last == mapping => is_file,
                    _ => self.kernel.is_file(mapping),
                };
                self.file = Some((mapping, is_file));
                return if is_file {
                    (Colour::PageCache, Some(mapping))
                } else {
                    (Colour::KernelData, None)
                };
            }
            Some(Owner::Free { .. } | Owner::Offline) => Colour::Free,
            Some(Owner::Slab) => Colour::Slab,
            Some(Owner::Table) => Colour::PageTable,
            Some(Owner::User) => Colour::UserData,
            Some(Owner::Kernel | Owner::Unheld) => Colour::KernelData,
            Some(Owner::Tail { .. } | Owner::Unknown) | None => Colour::Unknown,
        };
        (colour, None)
    }
}
