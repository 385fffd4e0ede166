//! Which pages a VM's memory is made of, and which node a page belongs to.

use crate::{prelude::*, proc};
use dayfly_sys::pagemap::{self, Entry};
use std::ops::Range;

/// Entries of a pagemap that are read at once.
const AT_ONCE: usize = 1 << 16;

/// The numbers of all pages that are this process's alone in mappings that contain a guest's RAM of
/// at least `memory_bytes`.
pub fn guest_pages(pid: u32, memory_bytes: u64) -> Result<Vec<u64>> {
    let maps = proc::read(&format!("/proc/{pid}/maps"))?;
    let file = std::fs::File::open(format!("/proc/{pid}/pagemap")).context("a VMM's pagemap")?;
    let mut pages = Vec::new();
    for run in runs(&maps).into_iter().filter(|run| run.end - run.start >= memory_bytes) {
        let last = run.end / PAGE_SIZE;
        for first in (run.start / PAGE_SIZE..last).step_by(AT_ONCE) {
            let count = AT_ONCE.min(usize::try_from(last - first)?);
            let mut entries = vec![Entry::default(); count];
            pagemap::read(&file, first, &mut entries).context("a VMM's pagemap")?;
            entries.retain(|entry| entry.is_own() && entry.is_exclusive());
            pages.extend(entries.iter().map(|entry| entry.frame()));
        }
    }
    // Other users read zero for each number.
    ensure!(!pages.contains(&0), "a VMM's pagemap: page numbers are hidden; root may read them");
    Ok(pages)
}

/// Addresses of private writable mappings in a `/proc/PID/maps`, those that touch as one: a guest's
/// RAM is a file here and none there.
fn runs(maps: &str) -> Vec<Range<u64>> {
    let mut runs: Vec<Range<u64>> = Vec::new();
    let one = |line: &str| {
        let mut fields = line.split_ascii_whitespace();
        let (start, end) = fields.next()?.split_once('-')?;
        let (start, end) =
            (u64::from_str_radix(start, 16).ok()?, u64::from_str_radix(end, 16).ok()?);
        (fields.next()? == "rw-p").then_some(start..end)
    };
    for run in maps.lines().filter_map(one) {
        match runs.last_mut() {
            Some(last) if last.end == run.start => last.end = run.end,
            _ => runs.push(run),
        }
    }
    runs
}

/// Ranges of page numbers and the nodes that they belong to.
#[derive(Debug, PartialEq, Eq)]
pub struct Spans(Vec<(Range<u64>, u32)>);

impl Spans {
    /// This host's.
    pub fn read() -> Result<Self> {
        Self::parse(&proc::read("/proc/zoneinfo")?)
    }

    /// From the zones of a `/proc/zoneinfo`.
    pub fn parse(zoneinfo: &str) -> Result<Self> {
        let (mut spans, mut node, mut spanned) = (Vec::new(), None, 0);
        for line in zoneinfo.lines().map(str::trim) {
            if let Some(zone) = line.strip_prefix("Node ") {
                node = zone.split_once(',').and_then(|(number, _)| number.parse::<u32>().ok());
                spanned = 0;
            } else if let Some(pages) = line.strip_prefix("spanned") {
                spanned = pages.trim().parse::<u64>().context("/proc/zoneinfo: spanned")?;
            } else if let Some(first) = line.strip_prefix("start_pfn:") {
                let first: u64 = first.trim().parse().context("/proc/zoneinfo: start_pfn")?;
                let node = node.context("/proc/zoneinfo: a zone without a node")?;
                spans.push((first..first + spanned, node));
            }
        }
        spans.retain(|(span, _)| !span.is_empty());
        spans.sort_by_key(|(span, _)| span.start);
        ensure!(!spans.is_empty(), "/proc/zoneinfo: no zone has pages");
        let mut pairs = spans.windows(2);
        ensure!(
            pairs.all(|two| two[0].0.end <= two[1].0.start || two[0].1 == two[1].1),
            "/proc/zoneinfo: zones of two nodes overlap, so a page's number has no single node"
        );
        Ok(Self(spans))
    }

    /// The node of a page.
    pub fn node(&self, page: u64) -> Option<u32> {
        self.0.iter().find(|(span, _)| span.contains(&page)).map(|(_, node)| *node)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mappings_that_touch_are_one_and_only_private_writable_ones_count() {
        let maps = "\
10000-20000 rw-p 00000000 fe:00 12 /snapshots/a/memory
20000-50000 rw-p 00000000 00:00 0
50000-60000 rw-s 00000000 00:00 0 [anon]
60000-70000 rw-p 00000000 00:00 0
80000-90000 ---p 00000000 00:00 0
nonsense
90000-a0000 rw-p 00000000 00:00 0 [stack]
";
        assert_eq!(runs(maps), [0x10000..0x50000, 0x60000..0x70000, 0x90000..0xa0000]);
    }

    #[test]
    fn pages_of_this_process_are_found() {
        let block = std::hint::black_box(vec![1_u8; 4 << 20]);
        // Only root sees their numbers.
        if let Ok(pages) = guest_pages(std::process::id(), 4 << 20) {
            assert!(pages.len() >= 1024, "{}", pages.len());
        }
        drop(block);
    }

    #[test]
    fn the_node_of_a_page_is_that_of_its_zone() {
        let zoneinfo = "\
Node 0, zone      DMA
  per-node stats
      nr_inactive_anon 35
        spanned  4095
        present  3998
  start_pfn:           1
Node 0, zone    DMA32
        spanned  520157
  start_pfn:           4096
Node 0, zone   Normal
        spanned  0
Node 1, zone   Normal
        spanned  524288
  node_unreclaimable:  0
  start_pfn:           1048576
";
        let spans = Spans::parse(zoneinfo).unwrap();
        let got = [0, 1, 4095, 4096, 524_252, 524_253, 1_048_576, 1_572_863, 1_572_864];
        let nodes = got.map(|page| spans.node(page));
        let (zero, one) = (Some(0), Some(1));
        assert_eq!(nodes, [None, zero, zero, zero, zero, None, one, one, None]);
        let overlapping = zoneinfo.replace("1048576", "4097");
        assert!(Spans::parse(&overlapping).is_err());
        assert!(Spans::parse("").is_err());
        assert!(Spans::read().is_ok());
    }
}
