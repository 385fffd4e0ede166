//! A checksum of the memory of stopped programs.
//!
//! Only pages that are present, private and anonymous count: they are in RAM before the snapshot
//! and must be in the clone. Reading a missing page would allocate it, and so change the snapshot.
//! The checksum of the files covers pages of files.

use crate::error::{Result, at};
use crate::programs;
use crate::sum::Sum;
use std::fs::{self, File};
use std::os::unix::fs::FileExt;

const PAGE: u64 = 4096;
/// Entries of /proc/PID/pagemap at a time.
const ENTRIES: u64 = 512;
/// Bits of an entry (admin-guide/mm/pagemap.rst): present; of a file, or shared.
const PRESENT: u64 = 1 << 63;
const FILE_OR_SHARED: u64 = 1 << 61;

/// Ranges with anonymous memory, from the text of /proc/PID/smaps.
fn ranges(smaps: &str) -> Result<Vec<(u64, u64)>> {
    let mut ranges = Vec::new();
    let mut last = None;
    for line in smaps.lines() {
        if let Some(kib) = line.strip_prefix("Anonymous:") {
            if kib.trim_start() != "0 kB" {
                ranges.extend(last.take());
            }
        } else if let Some((range, rest)) = line.split_once(' ')
            && let Some((from, to)) = range.split_once('-')
            && let (Ok(from), Ok(to)) = (u64::from_str_radix(from, 16), u64::from_str_radix(to, 16))
        {
            if from >= to || from % PAGE != 0 || to % PAGE != 0 {
                return Err(format!("smaps: expected a range of pages, got {range}").into());
            }
            // Pages of the kernel, which no program writes.
            let kernels = ["[vvar]", "[vvar_vclock]", "[vdso]", "[vsyscall]"];
            last = (!kernels.iter().any(|name| rest.ends_with(name))).then_some((from, to));
        }
    }
    Ok(ranges)
}

/// Adds the pages of `from..to` that count to `sum`. Returns their number.
fn pages(pid: i32, (from, to): (u64, u64), sum: &mut Sum) -> Result<u64> {
    let (map, mem) = (format!("/proc/{pid}/pagemap"), format!("/proc/{pid}/mem"));
    let (map, mem) = (at(File::open(&map), &map)?, at(File::open(&mem), &mem)?);
    let (mut entries, mut bytes) =
        (vec![0; 8 * usize::try_from(ENTRIES)?], vec![0; usize::try_from(ENTRIES * PAGE)?]);
    let (mut count, mut first) = (0, from / PAGE);
    while first < to / PAGE {
        let many = ENTRIES.min(to / PAGE - first);
        let entries = &mut entries[..8 * usize::try_from(many)?];
        at(
            map.read_exact_at(entries, 8 * first),
            &format_args!("pagemap of {pid} at page {first:#x}"),
        )?;
        for (skipped, run) in runs(entries) {
            let address = (first + skipped) * PAGE;
            let bytes = &mut bytes[..usize::try_from(run * PAGE)?];
            at(
                mem.read_exact_at(bytes, address),
                &format_args!("memory of {pid} at {address:#x}"),
            )?;
            for (n, page) in (0..).zip(bytes.chunks_exact(usize::try_from(PAGE)?)) {
                sum.update(&(address + n * PAGE).to_le_bytes());
                sum.update(page);
            }
            count += run;
        }
        first += many;
    }
    Ok(count)
}

/// Runs of pages that count in these entries of a pagemap: first entry and length.
fn runs(entries: &[u8]) -> Vec<(u64, u64)> {
    let mut runs: Vec<(u64, u64)> = Vec::new();
    for (n, entry) in (0..).zip(entries.chunks_exact(8)) {
        let entry = u64::from_le_bytes(std::array::from_fn(|n| entry[n]));
        if entry & PRESENT == 0 || entry & FILE_OR_SHARED != 0 {
            continue;
        }
        match runs.last_mut() {
            Some((first, count)) if *first + *count == n => *count += 1,
            _ => runs.push((n, 1)),
        }
    }
    runs
}

/// Checksum of all stopped programs, as JSON.
pub fn digest() -> Result<String> {
    let (mut total, mut sum) = (0, Sum::new());
    let stopped = programs::stopped()?;
    for &pid in &stopped {
        let path = format!("/proc/{pid}/smaps");
        let smaps = at(fs::read(&path), &path)?;
        sum.update(&pid.to_le_bytes());
        for range in ranges(&String::from_utf8_lossy(&smaps))? {
            total += pages(pid, range, &mut sum)?;
        }
    }
    Ok(format!(
        "{{\"programs\":{},\"bytes\":{},\"digest\":\"{}\"}}",
        stopped.len(),
        total * PAGE,
        sum.finish()
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_without_anonymous_memory_are_left_alone() {
        let smaps = "1000-3000 r-xp 00000000 fe:00 1 /bin/x\n\
                     Size: 8 kB\nAnonymous:             0 kB\n\
                     7000-9000 rw-p 00000000 00:00 0 [heap]\nAnonymous:             4 kB\n\
                     a000-c000 r-xp 00000000 00:00 0 [vdso]\nAnonymous:             4 kB\n";
        assert_eq!(ranges(smaps).expect("ranges"), [(0x7000, 0x9000)]);
        assert!(ranges("9000-7000 rw-p 0 00:00 0\n").is_err());
    }

    #[test]
    fn runs_are_of_present_private_anonymous_pages() {
        let entries =
            [PRESENT, PRESENT | 7, 0, PRESENT | FILE_OR_SHARED, PRESENT, FILE_OR_SHARED, PRESENT];
        let bytes: Vec<u8> = entries.iter().flat_map(|entry| entry.to_le_bytes()).collect();
        assert_eq!(runs(&bytes), [(0, 2), (4, 1), (6, 1)]);
    }

    #[test]
    fn a_changed_byte_changes_the_digest() {
        let mut kept = vec![7_u8; 64 << 10];
        let own = i32::try_from(std::process::id()).expect("a pid");
        let start = kept.as_ptr() as u64;
        let range = (start.next_multiple_of(PAGE), (start + kept.len() as u64) / PAGE * PAGE);
        let digest = || {
            let mut sum = Sum::new();
            let count = pages(own, range, &mut sum).expect("pages");
            (count, sum.finish())
        };
        let before = digest();
        assert_eq!(before.0, (range.1 - range.0) / PAGE);
        assert_eq!(before, digest());
        kept[32 << 10] ^= 1;
        assert_ne!(before, digest());
    }
}
