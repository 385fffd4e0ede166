//! Finds rows of frames that two snapshots' RAM have in common, by comparing tables; no page is
//! read.

use super::table::{Kind, Table};
use dayfly_units::Digest;
use std::collections::HashMap;
use std::ops::Range;

/// Every `STEP`-th frame of the other snapshots is indexed, so every common row of 2 × `STEP`
/// frames is found.
const STEP: u32 = 8;

/// A row of frames that another snapshot's RAM also contains.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Alike {
    /// The first frame.
    pub first: u32,
    /// Number of frames.
    pub frames: u32,
    /// Index of the other snapshot.
    pub other: usize,
    /// The first frame in the other snapshot's RAM.
    pub from: u32,
}

/// The content of a frame, by which frames are compared.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Content<'a> {
    Page(&'a Digest),
    /// A block of the file with that sparse digest.
    Block(&'a Digest, u32),
}

impl Content<'_> {
    /// A key, not 0, that differs for most different contents.
    fn key(self) -> u64 {
        let start = |digest: &Digest| u64::from_le_bytes(std::array::from_fn(|n| digest.0[n]));
        match self {
            Self::Page(digest) => start(digest).max(1),
            Self::Block(file, block) => {
                let mixed =
                    start(file) ^ (u64::from(block) + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
                mixed.max(1)
            }
        }
    }
}

/// A snapshot's RAM, prepared for comparison.
#[derive(Debug)]
pub struct Comparable<'a> {
    table: &'a Table,
    /// A key for each frame; 0 if the frame must not be taken from this snapshot.
    keys: Vec<u64>,
}

impl<'a> Comparable<'a> {
    /// The RAM of `table` without the frames in `but`, which are not in this snapshot's own memory.
    #[must_use]
    pub fn of(table: &'a Table, but: &[Range<u32>]) -> Self {
        let mut keys = vec![0; table.frames() as usize];
        for run in table.runs() {
            for n in 0..run.frames {
                if let Some(content) = content(table, run.kind, n) {
                    keys[(run.first + n) as usize] = content.key();
                }
            }
        }
        for range in but {
            let end = (range.end as usize).min(keys.len());
            keys[(range.start as usize).min(end)..end].fill(0);
        }
        Self { table, keys }
    }

    fn key(&self, frame: u32) -> u64 {
        self.keys.get(frame as usize).copied().unwrap_or(0)
    }

    /// Number of frames from `here` on that have the keys of `other` from `there` on.
    fn alike_from(&self, here: u32, other: &Self, there: u32) -> u32 {
        let (ours, theirs) =
            (&self.keys[here as usize..], other.keys.get(there as usize..).unwrap_or(&[]));
        let row = ours.iter().zip(theirs).take_while(|(a, b)| a == b && **a != 0).count();
        u32::try_from(row).unwrap_or(0)
    }

    /// Number of frames before `here`, at most `most`, that have the keys of `other` before
    /// `there`.
    fn alike_before(&self, here: u32, other: &Self, there: u32, most: u32) -> u32 {
        let same = |n: &u32| {
            let key = self.key(here - n);
            key != 0 && there >= *n && key == other.key(there - n)
        };
        (1..=most).take_while(same).last().unwrap_or(0)
    }
}

/// The content of the `n`-th frame of a run; `None` if it is zero or free.
fn content(table: &Table, kind: Kind, n: u32) -> Option<Content<'_>> {
    match kind {
        Kind::Zero | Kind::Free => None,
        Kind::Page { hash } => table.hashes().get((hash + n) as usize).map(Content::Page),
        Kind::Disk { disk, layer, block } => {
            let file = table.disks.get(usize::from(disk))?.get(usize::from(layer))?;
            Some(Content::Block(file, block + n))
        }
    }
}

/// Whether a row has equal contents, and not only equal keys.
fn is_true(table: &Table, other: &Table, row: &Alike) -> bool {
    let of = |table: &'_ Table, frame: u32| -> Option<(Kind, u32)> {
        let run = table.from_frame(frame)?;
        Some((run.kind, run.frames))
    };
    let mut n = 0;
    while n < row.frames {
        let (Some((ours, left)), Some((theirs, left_there))) =
            (of(table, row.first + n), of(other, row.from + n))
        else {
            return false;
        };
        let together = left.min(left_there).min(row.frames - n);
        let same =
            |n| content(table, ours, n).is_some_and(|ours| content(other, theirs, n) == Some(ours));
        if !(0..together).all(same) {
            return false;
        }
        n += together;
    }
    true
}

/// The rows of at least `least` frames that `ram` has in common with `others`: the `most` longest
/// ones found, in ascending order and without overlap. Snapshots of other tenants give no rows.
#[must_use]
pub fn alike(
    ram: &Comparable<'_>,
    others: &[Comparable<'_>],
    least: u32,
    most: usize,
) -> Vec<Alike> {
    let ours = |other: &Comparable<'_>| other.table.tenant == ram.table.tenant;
    let others: Vec<(usize, &Comparable<'_>)> =
        others.iter().enumerate().filter(|(_, other)| ours(other)).collect();
    let mut places: HashMap<u64, (usize, u32)> = HashMap::new();
    for (number, (_, other)) in others.iter().enumerate() {
        for frame in (0..other.table.frames()).step_by(STEP as usize) {
            let key = other.key(frame);
            if key != 0 {
                places.entry(key).or_insert((number, frame));
            }
        }
    }
    let mut rows: Vec<Alike> = Vec::new();
    let (mut frame, mut free_from) = (0, 0);
    while frame < ram.table.frames() {
        let key = ram.key(frame);
        // A snapshot made from another one has most common frames at the same place.
        let in_place =
            others.iter().enumerate().filter(|(_, (_, other))| key != 0 && other.key(frame) == key);
        let elsewhere = places.get(&key).filter(|_| key != 0).copied();
        let found =
            in_place.map(|(number, _)| (number, frame)).chain(elsewhere).map(|(number, there)| {
                let other = others[number].1;
                let before = ram.alike_before(frame, other, there, frame - free_from);
                let frames = before + ram.alike_from(frame, other, there);
                Alike {
                    first: frame - before,
                    frames,
                    other: others[number].0,
                    from: there - before,
                }
            });
        match found.max_by_key(|row| row.frames).filter(|row| row.frames >= least) {
            Some(row) => {
                frame = row.first + row.frames;
                free_from = frame;
                rows.push(row);
            }
            None => frame += 1,
        }
    }
    rows.sort_by_key(|row| std::cmp::Reverse(row.frames));
    rows.truncate(most);
    let of = |number: usize| {
        others.iter().find(|(other, _)| *other == number).map(|(_, other)| other.table)
    };
    rows.retain(|row| of(row.other).is_some_and(|other| is_true(ram.table, other, row)));
    rows.sort_unstable_by_key(|row| row.first);
    rows
}

#[cfg(test)]
#[path = "alike_tests.rs"]
mod tests;
