//! The working set: the pages that a clone touches first, recorded once and populated ahead in
//! every later clone.
//!
//! A clone spends its first seconds in nested page faults. Each page costs an exit, and a page that
//! is first read and then written costs two, with an invalidation between them. The set of pages
//! repeats from clone to clone (Jaccard 0.93, `docs/lab-notes`), so it is small and known
//! beforehand (Prebaked uVMs, section III).
//!
//! The pages that a throw-away clone touches are recorded once ([`super::recorder`]). A restore
//! with the record populates these pages before the guest runs. Written pages are copied by
//! MADV_POPULATE_WRITE ([`populate`]); then all pages are mapped in KVM by KVM_PRE_FAULT_MEMORY
//! ([`map`], Linux 6.11).
//!
//! KVM may write a page that the guest only reads: a lock that is taken and released, a walk
//! through page tables. Such a page costs two faults. A second throw-away clone therefore runs the
//! same over a private mapping, and its own pages afterwards ([`super::written`]) count as written
//! too: some hundred more of two thousand (30 of 143 ms of an emulated host, Linux 6.12).
//!
//! The record is a hint: wrong pages cost memory or faults, never correctness. It is sealed, and a
//! damaged record is refused. Payload after the seal, all little-endian:
//! - u32 count of runs;
//! - runs of 8 bytes, ascending, disjoint: u32 first page (byte in the memory file ÷ 4096), u32
//!   count of pages × 2 + 1 if they were written;
//! - first touches in their order, 8 bytes each: u32 page, u32 microseconds since the restore.

use super::length::file_bytes;
use super::pre_fault;
use crate::arch::layout;
use dayfly_units::PAGE_SIZE;
use dayfly_units::sealed::{self, Magic, SealError};
use kvm_ioctls::VcpuFd;
use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io;
use vm_memory::{Address, GuestAddress, GuestMemoryBackend, GuestMemoryMmap};

const MAGIC: Magic = *b"DFwset\r\n";
/// Version 1 has only the runs.
const FIRST_VERSION: u32 = 1;
const VERSION: u32 = 2;
const RUN_BYTES: usize = 8;
const WORD_BYTES: usize = 4;
const TOUCH_BYTES: usize = 8;
/// The longest payload of a record, in bytes.
pub const MAX_BYTES: u64 = 4 << 20;
/// Half of [`MAX_BYTES`] for runs, half for their order.
const MAX_RUNS: usize = (2 << 20) / RUN_BYTES - 1;
const MAX_ORDER: usize = (2 << 20) / TOUCH_BYTES;
/// The longest file, in bytes.
pub const MAX_FILE_BYTES: u64 = MAX_BYTES + sealed::HEADER_BYTES as u64;

/// Consecutive pages that are all written, or all only read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Run {
    /// The first page, counted from the start of the memory file.
    pub first: u32,
    /// The number of pages.
    pub pages: u32,
    /// Whether the guest or KVM wrote them.
    pub written: bool,
}

/// The first touch of a page.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Touch {
    /// The page, counted from the start of the memory file.
    pub page: u32,
    /// Microseconds after the restore.
    pub us: u32,
}

/// The pages that a clone touched.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Record {
    /// Every page, ascending, in runs.
    pub runs: Vec<Run>,
    /// First touches in their order, as far as the order is known.
    pub order: Vec<Touch>,
}

/// Why a record was refused.
#[derive(Debug, thiserror::Error)]
pub enum WorkingSetError {
    /// The file could not be read.
    #[error("working set file")]
    Read(#[source] io::Error),
    /// The file exceeds [`MAX_FILE_BYTES`].
    #[error("working set file: expected at most {max} bytes, got {got}")]
    Length {
        /// The limit in bytes.
        max: u64,
        /// The file's length in bytes.
        got: u64,
    },
    /// The record is damaged or of another format.
    #[error("working set file")]
    Seal(#[from] SealError),
    /// A run that is empty, out of order or outside RAM.
    #[error(
        "working set file: run {number} at byte {at}: expected ascending pages \
         below {limit}, got {first} + {pages}"
    )]
    Run {
        /// The run's number, from 0.
        number: usize,
        /// Its offset in the file, in bytes.
        at: usize,
        /// The number of pages of RAM.
        limit: u64,
        /// The run's first page.
        first: u32,
        /// The run's length in pages.
        pages: u32,
    },
    /// A part of the payload has the wrong length.
    #[error("working set file: {what}: expected {expected}, got {got} bytes")]
    Part {
        /// The part.
        what: &'static str,
        /// The allowed length.
        expected: String,
        /// The payload's length in bytes.
        got: usize,
    },
    /// A first touch of a page outside RAM.
    #[error("working set file: order, number {number}: expected a page below {limit}, got {page}")]
    Order {
        /// The touch's number, from 0.
        number: usize,
        /// The number of pages of RAM.
        limit: u64,
        /// The page.
        page: u32,
    },
}

/// The runs of `pages` (page → whether it is written) in RAM of `memory_bytes`. No run crosses from
/// one region to the next, because guest addresses have a hole there that the file does not have.
#[must_use]
pub fn runs(pages: &BTreeMap<u32, bool>, memory_bytes: u64) -> Vec<Run> {
    let starts: Vec<u64> = layout::ram(memory_bytes).iter().map(|(_, start, _)| *start).collect();
    let mut runs: Vec<Run> = Vec::new();
    for (&page, &written) in pages {
        let begins = starts.contains(&(u64::from(page) * PAGE_SIZE));
        match runs.last_mut() {
            Some(run) if run.first + run.pages == page && run.written == written && !begins => {
                run.pages += 1
            }
            _ => runs.push(Run { first: page, pages: 1, written }),
        }
    }
    runs
}

/// Merges two records. A page is written if it is written in either. The order is that of `one`,
/// then that of `other`.
#[must_use]
pub fn merge(one: &Record, other: &Record, memory_bytes: u64) -> Record {
    let mut pages = BTreeMap::new();
    for run in one.runs.iter().chain(&other.runs) {
        for page in run.first..run.first.saturating_add(run.pages) {
            *pages.entry(page).or_insert(false) |= run.written;
        }
    }
    let mut seen = BTreeSet::new();
    let order = one
        .order
        .iter()
        .chain(&other.order)
        .copied()
        .filter(|touch| seen.insert(touch.page))
        .collect();
    Record { runs: runs(&pages, memory_bytes), order }
}

impl Record {
    /// Every page: first those with a known order, then the rest, ascending.
    #[must_use]
    pub fn in_order(&self) -> Vec<u32> {
        let mut seen = BTreeSet::new();
        let rest = self.runs.iter().flat_map(|run| run.first..run.first.saturating_add(run.pages));
        self.order
            .iter()
            .map(|touch| touch.page)
            .chain(rest)
            .filter(|page| seen.insert(*page))
            .collect()
    }
}

/// Encodes and seals the record. Runs and touches beyond the limits are left out; page faults
/// replace them.
#[must_use]
pub fn encode(record: &Record) -> Vec<u8> {
    let Record { runs, order } = record;
    let (runs, order) = (&runs[..runs.len().min(MAX_RUNS)], &order[..order.len().min(MAX_ORDER)]);
    let mut payload =
        Vec::with_capacity(WORD_BYTES + runs.len() * RUN_BYTES + order.len() * TOUCH_BYTES);
    payload.extend_from_slice(&u32::try_from(runs.len()).unwrap_or(u32::MAX).to_le_bytes());
    for run in runs {
        payload.extend_from_slice(&run.first.to_le_bytes());
        payload.extend_from_slice(&((run.pages << 1) | u32::from(run.written)).to_le_bytes());
    }
    for touch in order {
        payload.extend_from_slice(&touch.page.to_le_bytes());
        payload.extend_from_slice(&touch.us.to_le_bytes());
    }
    sealed::seal(&MAGIC, VERSION, &payload)
}

/// Decodes a record for RAM of `memory_bytes`.
///
/// # Errors
/// [`WorkingSetError`].
pub fn decode(bytes: &[u8], memory_bytes: u64) -> Result<Record, WorkingSetError> {
    let (version, payload) = sealed::open(&MAGIC, FIRST_VERSION..=VERSION, MAX_BYTES, bytes)?;
    let limit = memory_bytes / PAGE_SIZE;
    let (words, rest) = payload.as_chunks::<WORD_BYTES>();
    let part =
        |what, expected: String| WorkingSetError::Part { what, expected, got: payload.len() };
    let words: Vec<u32> = words.iter().map(|word| u32::from_le_bytes(*word)).collect();
    let (count, words, count_bytes) = match (words.as_slice(), version) {
        (all, FIRST_VERSION) => (all.len().div_ceil(2), all, 0),
        ([count, words @ ..], _) => {
            (usize::try_from(*count).unwrap_or(usize::MAX), words, WORD_BYTES)
        }
        ([], _) => return Err(part("payload", "a count of runs".to_owned())),
    };
    if !rest.is_empty() {
        return Err(part("payload", format!("words of {WORD_BYTES} bytes")));
    }
    let Some((of_runs, order)) = count.checked_mul(2).and_then(|end| words.split_at_checked(end))
    else {
        return Err(part("runs", format!("{count} of {RUN_BYTES} bytes")));
    };
    let mut next = 0;
    let mut runs = Vec::with_capacity(of_runs.len() / 2);
    for (number, &[first, count]) in of_runs.as_chunks().0.iter().enumerate() {
        let (pages, written) = (count >> 1, count & 1 == 1);
        let end = u64::from(first) + u64::from(pages);
        if pages == 0 || u64::from(first) < next || end > limit {
            let at = sealed::HEADER_BYTES + count_bytes + number * RUN_BYTES;
            return Err(WorkingSetError::Run { number, at, limit, first, pages });
        }
        next = end;
        runs.push(Run { first, pages, written });
    }
    let (touches, rest) = order.as_chunks();
    if !rest.is_empty() {
        return Err(part("order", format!("touches of {TOUCH_BYTES} bytes")));
    }
    let order: Vec<Touch> = touches.iter().map(|&[page, us]| Touch { page, us }).collect();
    let beyond = |(_, touch): &(usize, &Touch)| u64::from(touch.page) >= limit;
    if let Some((number, &Touch { page, .. })) = order.iter().enumerate().find(beyond) {
        return Err(WorkingSetError::Order { number, limit, page });
    }
    Ok(Record { runs, order })
}

/// Reads and decodes the record in `file`.
///
/// # Errors
/// [`WorkingSetError`].
pub fn read(file: &File, memory_bytes: u64) -> Result<Record, WorkingSetError> {
    use std::os::unix::fs::FileExt;
    let got = file_bytes(file).map_err(WorkingSetError::Read)?;
    let max = MAX_FILE_BYTES;
    if got > max {
        return Err(WorkingSetError::Length { max, got });
    }
    let mut bytes = vec![0; usize::try_from(got).unwrap_or(0)];
    file.read_exact_at(&mut bytes, 0).map_err(WorkingSetError::Read)?;
    decode(&bytes, memory_bytes)
}

/// The guest address and the length in bytes of a run; `None` if the run is not in one region.
fn place(ram: &[(GuestAddress, u64, u64)], run: &Run) -> Option<(GuestAddress, u64)> {
    let (start, len) = (u64::from(run.first) * PAGE_SIZE, u64::from(run.pages) * PAGE_SIZE);
    let (guest, offset, _) =
        ram.iter().find(|(_, offset, size)| start >= *offset && start + len <= offset + size)?;
    Some((guest.unchecked_add(start - offset), len))
}

/// Gives the clone its own copy of the pages that will be written. Failures are left to page
/// faults.
pub fn populate(memory: &GuestMemoryMmap, memory_bytes: u64, runs: &[Run]) {
    let ram = layout::ram(memory_bytes);
    for run in runs.iter().filter(|run| run.written) {
        let Some((guest, len)) = place(&ram, run) else { continue };
        let Ok(size) = usize::try_from(len) else { continue };
        let Ok(slice) = memory.get_slice(guest, size) else { continue };
        let host = slice.ptr_guard_mut().as_ptr();
        // SAFETY: the `size` bytes from `host` are guest memory, as the slice shows; populating
        // changes no content.
        unsafe { libc::madvise(host.cast(), size, libc::MADV_POPULATE_WRITE) };
    }
}

/// Maps the pages of `runs` for the guest, if KVM can. `vcpu` has its registers and does not run
/// yet.
pub fn map(memory_bytes: u64, runs: &[Run], vcpu: &VcpuFd) {
    let ram = layout::ram(memory_bytes);
    for (guest, len) in runs.iter().filter_map(|run| place(&ram, run)) {
        if pre_fault::range(vcpu, guest.0, len).is_err() {
            return; // an older kernel, or no nested paging: page faults do it
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::golden::golden;
    use proptest::prelude::*;

    const RAM: u64 = 64 << 20;

    fn touches(pages: &[u32]) -> Vec<Touch> {
        pages.iter().zip(7..).map(|(&page, us)| Touch { page, us }).collect()
    }

    fn sample() -> Record {
        let runs = vec![
            Run { first: 0, pages: 3, written: true },
            Run { first: 3, pages: 1, written: false },
            Run { first: 16_383, pages: 1, written: true },
        ];
        Record { runs, order: touches(&[16_383, 1, 3]) }
    }

    #[test]
    fn what_was_recorded_reads_back() {
        assert_eq!(decode(&encode(&sample()), RAM).unwrap(), sample());
    }

    #[test]
    fn records_of_both_versions_are_read() {
        let now = encode(&sample());
        let second = golden("working-set-2", &now);
        assert!(second == now);
        assert_eq!(decode(&second, RAM).unwrap(), sample());
        let payload: Vec<u8> =
            [0_u32, 3 << 1 | 1, 3, 1 << 1, 16_383, 1 << 1 | 1].map(u32::to_le_bytes).concat();
        let now = sealed::seal(&MAGIC, FIRST_VERSION, &payload);
        let first = golden("working-set-1", &now);
        assert!(first == now);
        assert_eq!(decode(&first, RAM).unwrap(), Record { order: Vec::new(), ..sample() });
    }

    #[test]
    fn every_truncation_and_every_flipped_bit_is_refused() {
        let whole = encode(&sample());
        for len in 0..whole.len() {
            assert!(decode(&whole[..len], RAM).is_err(), "truncated to {len}");
        }
        for bit in 0..whole.len() * 8 {
            let mut flipped = whole.clone();
            flipped[bit / 8] ^= 1 << (bit % 8);
            assert!(decode(&flipped, RAM).is_err(), "flipped bit {bit}");
        }
    }

    #[test]
    fn runs_outside_memory_or_out_of_order_are_refused() {
        let run = |first, pages| Run { first, pages, written: false };
        for bad in [
            vec![run(16_384, 1)],
            vec![run(0, 0)],
            vec![run(5, 2), run(6, 1)],
            vec![run(u32::MAX, 9)],
        ] {
            let bad = Record { runs: bad, order: Vec::new() };
            assert!(
                matches!(decode(&encode(&bad), RAM), Err(WorkingSetError::Run { .. })),
                "{bad:?}"
            );
        }
        let bad = Record { order: touches(&[3, 16_384]), ..sample() };
        assert!(matches!(
            decode(&encode(&bad), RAM),
            Err(WorkingSetError::Order { number: 1, .. })
        ));
    }

    #[test]
    fn a_count_of_runs_that_lies_is_refused() {
        let sealed = |words: &[u32]| {
            let payload: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
            decode(&sealed::seal(&MAGIC, VERSION, &payload), RAM)
        };
        assert_eq!(
            sealed(&[1, 5, 2 << 1]).unwrap().runs,
            [Run { first: 5, pages: 2, written: false }]
        );
        for bad in [&[][..], &[1], &[1, 5], &[u32::MAX, 5, 2], &[1 << 31, 0, 0], &[1, 5, 4, 9]] {
            assert!(matches!(sealed(bad), Err(WorkingSetError::Part { .. })), "{bad:?}");
        }
    }

    #[test]
    fn a_record_of_the_first_version_has_no_order() {
        let payload: Vec<u8> =
            [5_u32, (2 << 1) | 1].iter().flat_map(|word| word.to_le_bytes()).collect();
        let read = |payload: &[u8]| decode(&sealed::seal(&MAGIC, FIRST_VERSION, payload), RAM);
        let runs = vec![Run { first: 5, pages: 2, written: true }];
        assert_eq!(read(&payload).unwrap(), Record { runs, order: Vec::new() });
        assert!(matches!(read(&payload[..4]), Err(WorkingSetError::Part { .. })));
        assert!(matches!(read(&payload[..7]), Err(WorkingSetError::Part { .. })));
    }

    #[test]
    fn a_bad_run_is_reported_at_its_offset_in_both_versions() {
        let place = |version, words: &[u32]| {
            let payload: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
            match decode(&sealed::seal(&MAGIC, version, &payload), RAM) {
                Err(WorkingSetError::Run { number, at, .. }) => (number, at),
                other => panic!("{other:?}"),
            }
        };
        let bad = [5, 2 << 1, 6, 1 << 1];
        assert_eq!(place(FIRST_VERSION, &bad), (1, sealed::HEADER_BYTES + 8));
        assert_eq!(place(VERSION, &[2, 5, 2 << 1, 6, 1 << 1]), (1, sealed::HEADER_BYTES + 12));
    }

    #[test]
    fn pages_whose_order_is_not_known_come_last() {
        assert_eq!(sample().in_order(), [16_383, 1, 3, 0, 2]);
    }

    #[test]
    fn a_merged_record_has_the_pages_of_both_and_what_either_wrote() {
        let run = |first, pages, written| Run { first, pages, written };
        let of =
            |runs: &[Run], order: &[u32]| Record { runs: runs.to_vec(), order: touches(order) };
        let touched = of(&[run(0, 4, false), run(9, 1, true)], &[9, 2, 0]);
        let wrote = of(&[run(2, 1, true), run(20, 2, true)], &[21, 2]);
        let expected = [
            run(0, 2, false),
            run(2, 1, true),
            run(3, 1, false),
            run(9, 1, true),
            run(20, 2, true),
        ];
        let merged = merge(&touched, &wrote, RAM);
        assert_eq!(merged.runs, expected);
        assert_eq!(merged.in_order()[..4], [9, 2, 0, 21]);
        assert_eq!(merge(&touched, &Record::default(), RAM), touched);
        // A run ends at the hole below 4 GiB.
        let large = 8 << 30;
        let (_, below, _) = layout::ram(large)[1];
        let at = u32::try_from(below / PAGE_SIZE).unwrap();
        let across = merge(&of(&[run(at - 1, 2, true)], &[]), &Record::default(), large);
        assert_eq!(across.runs, [run(at - 1, 1, true), run(at, 1, true)]);
    }

    proptest! {
        #[test]
        fn any_sealed_payload_is_read_or_refused(
            payload in proptest::collection::vec(any::<u8>(), 0..200),
        ) {
            if let Ok(record) = decode(&sealed::seal(&MAGIC, VERSION, &payload), RAM) {
                let end = |r: &Run| u64::from(r.first) + u64::from(r.pages);
                prop_assert!(record.runs.iter().all(|r| end(r) <= RAM / PAGE_SIZE));
            }
        }
    }
}
