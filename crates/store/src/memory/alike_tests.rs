use super::super::table::Run;
use super::*;
use crate::fixture::name;
use crate::objects::types::FileRef;
use proptest::prelude::*;

/// RAM with these pages, 0 for zeroes; numbers above 1000 are blocks of a file.
fn table(tenant: &str, frames: &[u32]) -> Table {
    let digest = |n: u32| Digest(*blake3::hash(&n.to_le_bytes()).as_bytes());
    let mut hashes = Vec::new();
    let runs = (0..).zip(frames).map(|(first, page)| {
        let kind = match page {
            0 => Kind::Zero,
            page @ 1001.. => Kind::Disk { disk: 0, layer: 0, block: page - 1001 },
            page => {
                hashes.push(digest(*page));
                Kind::Page { hash: u32::try_from(hashes.len()).unwrap() - 1 }
            }
        };
        Run { first, frames: 1, kind, colour: 0 }
    });
    let runs: Vec<Run> = runs.collect();
    let bytes = frames.len() as u64 * 4096;
    Table {
        tenant: name(tenant),
        ram: FileRef { digest: digest(0), bytes, data_bytes: 0 },
        frames_digest: digest(0),
        disks: vec![vec![digest(u32::MAX)]],
        runs,
        hashes,
    }
}

fn found(
    ram: &Table,
    others: &[(&Table, &[Range<u32>])],
    least: u32,
    most: usize,
) -> Vec<(u32, u32, usize, u32)> {
    let others: Vec<Comparable<'_>> =
        others.iter().map(|(table, but)| Comparable::of(table, but)).collect();
    let rows = alike(&Comparable::of(ram, &[]), &others, least, most);
    rows.iter().map(|row| (row.first, row.frames, row.other, row.from)).collect()
}

/// Consecutive pages.
fn row(first: u32, count: u32) -> Vec<u32> {
    (first..first + count).collect()
}

#[test]
fn rows_are_found_in_place_and_elsewhere_and_the_longest_are_kept() {
    let parent = table("one", &[row(1, 40), vec![0; 8], row(1001, 20)].concat());
    let child =
        table("one", &[row(1, 20), row(500, 3), row(24, 17), row(1003, 18), row(300, 9)].concat());
    let all: [(&Table, &[Range<u32>]); 1] = [(&parent, &[])];
    assert_eq!(found(&child, &all, 16, 9), [(0, 20, 0, 0), (23, 17, 0, 23), (40, 18, 0, 50)]);
    assert_eq!(found(&child, &all, 18, 9), [(0, 20, 0, 0), (40, 18, 0, 50)]);
    assert_eq!(found(&child, &all, 16, 1), [(0, 20, 0, 0)]);
    // Frames that the other snapshot has from a third one cannot be taken from it.
    assert_eq!(found(&child, &[(&parent, &[0..30, 50..99])], 8, 9), [(30, 10, 0, 30)]);
    let none = 0..99;
    let second: [(&Table, &[Range<u32>]); 2] =
        [(&parent, std::slice::from_ref(&none)), (&parent, &[])];
    assert_eq!(found(&child, &second, 18, 9), [(0, 20, 1, 0), (40, 18, 1, 50)]);
}

#[test]
fn other_tenants_have_no_pages() {
    let (ours, theirs) = (table("one", &row(1, 64)), table("two", &row(1, 64)));
    assert_eq!(found(&ours, &[(&theirs, &[])], 1, 9), []);
    assert_eq!(found(&ours, &[(&theirs, &[]), (&ours, &[])], 1, 9), [(0, 64, 1, 0)]);
}

#[test]
fn blocks_of_other_files_are_other_pages() {
    let ours = table("one", &row(1001, 32));
    let mut theirs = ours.clone();
    theirs.disks[0][0].0[31] ^= 1;
    // The keys are equal, the contents are not.
    assert_eq!(found(&ours, &[(&theirs, &[])], 1, 9), []);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]
    #[test]
    fn what_is_found_is_the_same_and_long_rows_are_found(
        ram in prop::collection::vec(0_u32..12, 0..200),
        other in prop::collection::vec(0_u32..12, 1..200),
        unique in 0_u32..60,
        at in 0_usize..200,
        there in 0_usize..200,
        least in 1_u32..20,
    ) {
        let mut ram = if ram.is_empty() { vec![0] } else { ram };
        let mut other = other;
        let at = at.min(ram.len());
        let there = there.min(other.len());
        ram.splice(at..at, row(100, unique));
        other.splice(there..there, row(100, unique));
        let rows = found(&table("one", &ram), &[(&table("one", &other), &[])], least, 1000);
        let mut covered = vec![false; ram.len()];
        let mut end = 0;
        for (first, frames, _, from) in rows {
            prop_assert!(first >= end && frames >= least);
            end = first + frames;
            for n in 0..frames {
                let (ours, theirs) = (ram[(first + n) as usize], other[(from + n) as usize]);
                prop_assert!(ours == theirs && ours != 0);
                covered[(first + n) as usize] = true;
            }
        }
        if unique >= least.max(2 * STEP) {
            prop_assert!(covered[at..at + unique as usize].iter().all(|covered| *covered));
        }
    }
}
