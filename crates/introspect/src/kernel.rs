//! Finds a Linux kernel in frozen memory by its VMCOREINFO, and verifies it against page tables and
//! `struct page`s.
//!
//! A VMCOREINFO text is a claim. The claim is accepted if it passes these tests, in this order:
//!
//! 1. It has every number that is needed.
//! 2. The page tables at `swapper_pg_dir` map `swapper_pg_dir` to themselves.
//! 3. `init_uts_ns`, read through these tables, has the release that the text has.
//! 4. The tables map the array of `struct page`s.
//! 5. That array says that the frame with the text belongs to the kernel.
//!
//! The last two tests reject copies in files and in processes' memory, and the remains of an
//! earlier kernel in free memory. If several claims are accepted, one whose tables a vCPU uses
//! wins.

use crate::hint::{KernelInfo, RootHint};
use crate::memory::{self, Frame, PAGE_WORDS, Page, Pfn, PhysMemory};
use crate::paging::{ADDRESS, Levels, Tables};
use crate::rejection::Rejection;
use crate::shape::{Owner, PageShape};
use crate::vmcoreinfo::{NoteError, VmcoreInfo};
use crate::{parallel, roots};
use dayfly_units::PAGE_SIZE;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Address at which x86-64 Linux maps its image (`__START_KERNEL_map`).
const KERNEL_MAP: u64 = 0xffff_ffff_8000_0000;
/// Offset of `release` in a `new_utsname`: after two fields of 65 bytes
/// (include/uapi/linux/utsname.h).
const UTS_RELEASE: u64 = 130;
/// Flag bits of `mem_section.section_mem_map`; the rest is a page-aligned address.
const SECTION_FLAGS: u64 = PAGE_SIZE - 1;
/// Longest `inode` in bytes. An `inode` contains an `address_space`.
const MAX_INODE_BYTES: u64 = 4096;
/// Upper limit for the tested claims. A guest that fills its memory with copies harms only its own
/// colours.
const MAX_CLAIMS: usize = 256;
/// Frames that a thread scans at a time: 64 MiB.
const SCAN_FRAMES: usize = 1 << 14;

/// A verified kernel.
pub(crate) struct Kernel<'m> {
    memory: &'m dyn PhysMemory,
    pub(crate) info: KernelInfo,
    /// The kernel's own page tables.
    pub(crate) tables: Tables,
    pub(crate) shape: PageShape,
    vmemmap: u64,
}

/// The result of a search.
pub(crate) struct Search<'m> {
    /// The kernel, if one was found.
    pub(crate) kernel: Option<Kernel<'m>>,
    /// Number of rejected claims.
    pub(crate) rejected: usize,
    /// Why the first claim was rejected.
    pub(crate) rejection: Option<Rejection>,
}

impl<'m> Kernel<'m> {
    /// Scans RAM from its start for a kernel. The result is the first kernel that a vCPU's tables
    /// confirm, or else the first kernel.
    pub(crate) fn search(memory: &'m dyn PhysMemory, hints: &[RootHint]) -> Search<'m> {
        // The first frame with a kernel that needs no better candidate; frames after it are not
        // scanned.
        let end = AtomicUsize::new(usize::MAX);
        let claims = AtomicUsize::new(0);
        let found = parallel::chunks(memory.layout().frames(), SCAN_FRAMES, |frames| {
            let (mut kernels, mut rejections) = (Vec::new(), Vec::new());
            for frame in frames.map(Frame) {
                if frame.0 > end.load(Ordering::Relaxed) {
                    break;
                }
                let Some(info) = VmcoreInfo::in_frame(memory, frame) else { continue };
                if claims.fetch_add(1, Ordering::Relaxed) >= MAX_CLAIMS {
                    break;
                }
                match Self::accept(memory, &info, frame) {
                    Ok(kernel) => {
                        if hints.is_empty() || kernel.runs(hints) {
                            end.fetch_min(frame.0, Ordering::Relaxed);
                        }
                        kernels.push(kernel);
                    }
                    Err(rejection) => rejections.push(rejection),
                }
            }
            (kernels, rejections)
        });
        let mut search = Search { kernel: None, rejected: 0, rejection: None };
        let mut kernels = Vec::new();
        for (some, rejections) in found {
            kernels.extend(some);
            search.rejected += rejections.len();
            search.rejection = search.rejection.or_else(|| rejections.into_iter().next());
        }
        let best = kernels.iter().position(|kernel| kernel.runs(hints)).unwrap_or(0);
        search.kernel = kernels.into_iter().nth(best);
        search
    }

    /// Tests a claim.
    fn accept(
        memory: &'m dyn PhysMemory,
        info: &VmcoreInfo,
        frame: Frame,
    ) -> Result<Self, Rejection> {
        let page_size = info.page_size()?;
        if page_size != PAGE_SIZE {
            return Err(Rejection::PageSize(page_size));
        }
        let levels = if info.number("pgtable_l5_enabled").unwrap_or(0) == 1 {
            Levels::Five
        } else {
            Levels::Four
        };
        let swapper = info.symbol("swapper_pg_dir")?;
        let expected = swapper.wrapping_sub(KERNEL_MAP).wrapping_add(info.number("phys_base")?);
        let root = memory.layout().frame(Pfn(expected / PAGE_SIZE));
        let tables =
            root.filter(|_| expected.is_multiple_of(PAGE_SIZE)).map(|root| Tables { root, levels });
        let tables = tables.ok_or(Rejection::Tables { expected, got: None })?;
        let got = tables.translate(memory, swapper);
        if got != Some(expected) {
            return Err(Rejection::Tables { expected, got });
        }

        let release = info.release();
        let name = info.symbol("init_uts_ns")?.wrapping_add(info.offset("uts_namespace.name")?);
        let got = tables.bytes(memory, name.wrapping_add(UTS_RELEASE), release.len() + 1);
        if got.strip_suffix(&[0]) != Some(release.as_bytes()) {
            let got =
                got.iter().take_while(|b| b.is_ascii_graphic()).map(|&b| char::from(b)).collect();
            return Err(Rejection::Release { expected: release, got });
        }

        let shape = PageShape::new(info)?;
        let vmemmap = match info.symbol("vmemmap") {
            Ok(vmemmap) => vmemmap,
            Err(_) => memmap_by_sections(memory, info, tables)?.ok_or(Rejection::Memmap)?,
        };
        let info = KernelInfo { release, levels, root: expected, runs: false };
        let kernel = Self { memory, info, tables, shape, vmemmap };
        let pfn = memory.layout().pfn(frame).unwrap_or(Pfn(0));
        match kernel.owner(pfn) {
            None => Err(Rejection::Memmap),
            Some(Owner::Kernel) => Ok(kernel),
            Some(owner) => Err(Rejection::Owner { pfn: pfn.0, owner: format!("{owner:?}") }),
        }
    }

    /// Whether a vCPU uses this kernel's tables, or a process's tables with the same kernel in the
    /// upper half.
    pub(crate) fn runs(&self, hints: &[RootHint]) -> bool {
        let top = |root| memory::word(self.memory.page(root), PAGE_WORDS - 1) & ADDRESS;
        let same = |root| top(root) == top(self.tables.root);
        hints.iter().filter(|hint| hint.levels == self.tables.levels).any(|hint| {
            let root = hint.root(self.memory);
            root.is_some_and(|root| {
                same(root) || roots::whole_of_twin(self.memory, root).is_some_and(same)
            })
        })
    }

    /// The page that holds the `struct page` of a page number, and the word where the structure
    /// starts. `None` if there is no such structure.
    pub(crate) fn struct_page(&self, pfn: Pfn) -> Option<(&'m Page, usize)> {
        let bytes = pfn.0.checked_mul(self.shape.size as u64)?;
        let phys = self.tables.translate(self.memory, self.vmemmap.checked_add(bytes)?)?;
        let frame = self.memory.layout().frame(Pfn(phys / PAGE_SIZE))?;
        Some((self.memory.page(frame), memory::word_index(phys)))
    }

    /// The owner of a frame by its `struct page`.
    pub(crate) fn owner(&self, pfn: Pfn) -> Option<Owner> {
        let (page, at) = self.struct_page(pfn)?;
        Some(self.shape.owner(page, at))
    }

    /// The page number whose `struct page` lies at a virtual address.
    pub(crate) fn pfn_of(&self, address: u64) -> Option<Pfn> {
        let bytes = address.checked_sub(self.vmemmap)?;
        let size = self.shape.size as u64;
        bytes.is_multiple_of(size).then_some(Pfn(bytes / size))
    }

    /// Whether an `address_space` lies at a virtual address: its first field points to the inode
    /// that contains it.
    pub(crate) fn is_file(&self, mapping: u64) -> bool {
        let inode = self.tables.word(self.memory, mapping);
        inode.is_some_and(|inode| {
            mapping >> 63 == 1
                && mapping.checked_sub(inode).is_some_and(|n| (1..MAX_INODE_BYTES).contains(&n))
        })
    }
}

/// Address that the array of `struct page`s would have for page number 0. It is computed from the
/// first section of RAM that has one (SPARSEMEM_EXTREME, include/linux/mmzone.h). `mem_section` is
/// an array of pointers to pages of sections.
fn memmap_by_sections(
    memory: &dyn PhysMemory,
    info: &VmcoreInfo,
    tables: Tables,
) -> Result<Option<u64>, NoteError> {
    let (roots, length) = (info.symbol("mem_section")?, info.length("mem_section")?);
    let (size, offset) = (info.size("mem_section")?, info.offset("mem_section.section_mem_map")?);
    let bits = u32::try_from(info.number("SECTION_SIZE_BITS")?).unwrap_or(0);
    if !(24..=40).contains(&bits) || !(8..=PAGE_SIZE).contains(&size) || offset >= size {
        return Ok(None);
    }
    let per_root = PAGE_SIZE / size;
    let base = |section: u64| {
        let root = Some(section / per_root).filter(|&root| root < length)?;
        let sections = tables.word(memory, roots.checked_add(root * 8)?)?;
        let coded =
            tables.word(memory, sections.checked_add(section % per_root * size + offset)?)?;
        Some(coded & !SECTION_FLAGS).filter(|&base| base != 0)
    };
    let sections = memory.layout().stretches().flat_map(|(pfn, frames)| {
        let last = pfn.0 + frames.len() as u64 - 1;
        pfn.0 >> (bits - 12)..=last >> (bits - 12)
    });
    Ok(sections.take(memory.layout().frames()).find_map(base))
}
