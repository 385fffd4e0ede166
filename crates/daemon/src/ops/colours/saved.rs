//! The colours of a saved RAM, found by `introspect`, in the store's form.
//!
//! Free pages are not stored and read as zero in every clone, as if a balloon had taken them.
//! (Efficiently Restoring VMs, section 2.1, leaves out pages that are on disk; free pages are a
//! larger class.) A guest's kernel does not depend on the content of a free page. It overwrites or
//! clears the page before the next use, and zero is what `init_on_free` leaves. Free pages are
//! trusted only if a vCPU runs the kernel that was found. Some kernels fill free pages with a
//! pattern to find writes after freeing (`page_poison=1`, never a default). They would complain, so
//! images must not ask for it.

use dayfly_introspect::{Census, Colour, Extent, Layout, RamFile, Report, RootHint, introspect};
use dayfly_units::error::chain;
use dayfly_vmm::arch::layout;
use dayfly_vmm::state::{self, VmState};
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;

/// CR0.PG: the vCPU uses page tables.
const CR0_PG: u64 = 1 << 31;
/// Bytes of the longest state file.
const MAX_STATE: u64 = state::MAX_BYTES + dayfly_units::sealed::HEADER_BYTES as u64;

/// The colours of a saved RAM.
#[derive(Debug, Default)]
pub struct Coloured {
    /// The number of each frame's [`Colour`]; empty if no colours were found.
    pub colours: Vec<u8>,
    /// Frames that the guest does not use, in rising order.
    pub free: Vec<Range<u32>>,
}

/// Why a RAM has no colours.
#[derive(Debug, thiserror::Error)]
pub enum ColourError {
    /// The state file cannot be read.
    #[error("reading the state")]
    Read(#[source] io::Error),
    /// The state file is longer than any.
    #[error("the state: expected at most {MAX_STATE} bytes, got {0}")]
    Long(u64),
    /// The state file is damaged.
    #[error(transparent)]
    State(#[from] state::DecodeError),
    /// No guest has RAM of this size.
    #[error(transparent)]
    Layout(#[from] dayfly_introspect::memory::LayoutError),
    /// RAM cannot be mapped.
    #[error(transparent)]
    Memory(#[from] dayfly_introspect::memory::OpenError),
}

/// Finds the colours of `memory`, RAM of `memory_bytes` in a file with a sealed length. `state` is
/// the VMM's state file, which has the vCPUs' registers. Takes some 10 ms for each GiB.
///
/// # Errors
/// [`ColourError`]: without colours, all of RAM is stored.
pub fn coloured(
    memory: &File,
    state: &File,
    memory_bytes: u64,
) -> Result<(Coloured, Report), ColourError> {
    let roots = roots(&decode(state)?);
    let extents: Vec<Extent> = layout::ram(memory_bytes)
        .into_iter()
        .map(|(guest, offset, bytes)| Extent { guest: guest.0, offset, bytes })
        .collect();
    let report = introspect(&RamFile::open(memory, Layout::new(&extents)?)?, &roots);
    let believed = report.kernel.as_ref().is_some_and(|kernel| kernel.runs);
    let free = if believed { free(&report.colours) } else { Vec::new() };
    Ok((Coloured { colours: report.colours.iter().map(|c| c.number()).collect(), free }, report))
}

fn decode(file: &File) -> Result<VmState, ColourError> {
    let length = file.metadata().map_err(ColourError::Read)?.len();
    if length > MAX_STATE {
        return Err(ColourError::Long(length));
    }
    let mut bytes = vec![0; usize::try_from(length).unwrap_or(0)];
    file.read_exact_at(&mut bytes, 0).map_err(ColourError::Read)?;
    Ok(state::decode(&bytes)?)
}

fn roots(state: &VmState) -> Vec<RootHint> {
    let sregs = state.vcpus.iter().map(|vcpu| &vcpu.sregs);
    sregs.filter(|s| s.cr0 & CR0_PG != 0).map(|s| RootHint::from_registers(s.cr3, s.cr4)).collect()
}

fn free(colours: &[Colour]) -> Vec<Range<u32>> {
    let mut ranges: Vec<Range<u32>> = Vec::new();
    for (frame, _) in (0..).zip(colours).filter(|(_, colour)| **colour == Colour::Free) {
        match ranges.last_mut() {
            Some(last) if last.end == frame => last.end = frame + 1,
            _ => ranges.push(frame..frame + 1),
        }
    }
    ranges
}

/// The census of colours, in one line for the log.
pub fn census_line(report: &Report) -> String {
    let census: Census = report.census();
    let counts = Colour::ALL.map(|colour| format!("{colour} {}", census.frames(colour)));
    let kernel = match (&report.kernel, &report.degraded) {
        (Some(kernel), _) => kernel.release.clone(),
        (None, Some(why)) => chain(why),
        (None, None) => "no kernel".to_owned(),
    };
    format!("{kernel}: {}", counts.join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn free_frames_are_listed_in_ranges() {
        let (free_frame, used) = (Colour::Free, Colour::Slab);
        let colours = [free_frame, free_frame, used, free_frame, used, used, free_frame];
        assert_eq!(free(&colours), [0..2, 3..4, 6..7]);
        assert_eq!(free(&[used]), []);
    }

    #[test]
    fn a_state_that_is_none_says_so() {
        let file = tempfile::tempfile().unwrap();
        file.write_all_at(&[7; 500], 0).unwrap();
        let memory = tempfile::tempfile().unwrap();
        assert!(matches!(coloured(&memory, &file, 64 << 20), Err(ColourError::State(_))));
        file.set_len(MAX_STATE + 1).unwrap();
        assert!(matches!(coloured(&memory, &file, 64 << 20), Err(ColourError::Long(_))));
    }
}
