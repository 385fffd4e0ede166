//! Pages out of the store: compressed groups of packs, and blocks of disks.

use crate::policy::{COLOURS, Policy, UNIT};
use crate::source::{Batch, ELSEWHERE, Layout, Put, Source, SourceError, ZERO};
use dayfly_store::{GroupBuffer, GroupId, Kind, PageReader, PagesError};
use dayfly_units::PAGE_SIZE;
use std::cell::RefCell;
use std::collections::{HashMap, VecDeque};
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

/// The most frames of a batch, which bounds what who waits for one waits for: a guest may have filled all of its RAM with one page.
const MOST_FRAMES: usize = 64;
/// Groups that were read last: whoever asks for another part of one need not have it read and unpacked again. Some MiB, with groups of 16 pages.
const KEPT_GROUPS: usize = 64;
const PAGE: usize = 4096;
const _: () = assert!(PAGE as u64 == PAGE_SIZE);

/// Where a frame's page is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Place {
    /// The table's hash of that number, in that group.
    Page(GroupId, u32),
    /// A block of a layer of a disk.
    Block(u8, u8, u32),
}

/// What one read gives.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
enum Unit {
    Group(GroupId),
    /// Blocks in a row of a layer of a disk, from that multiple of [`UNIT`] on.
    Blocks(u8, u8, u32),
}

impl Unit {
    /// Whether the other is the next.
    fn is_before(self, other: Self) -> bool {
        match (self, other) {
            (Self::Group(a), Self::Group(b)) => a.pack == b.pack && a.group.checked_add(1) == Some(b.group),
            (Self::Blocks(disk, layer, n), Self::Blocks(d, l, next)) => {
                (disk, layer, n.checked_add(1)) == (d, l, Some(next))
            }
            _ => false,
        }
    }
}

impl Place {
    fn unit(self) -> Unit {
        match self {
            Self::Page(group, _) => Unit::Group(group),
            Self::Block(disk, layer, block) => Unit::Blocks(disk, layer, block / u32::from(UNIT)),
        }
    }
}

/// A frame that is not zero.
#[derive(Debug, Clone, Copy)]
struct Slot {
    frame: u32,
    place: Place,
    colour: u8,
}

/// A snapshot's RAM.
#[derive(Debug)]
pub struct Stored {
    reader: PageReader,
    layout: Layout,
    /// Batch by batch.
    slots: Vec<Slot>,
    /// Where in `slots` each batch is.
    ranges: Vec<Range<usize>>,
    kept: Kept,
    /// Bytes that were read, as they are stored.
    read_bytes: AtomicU64,
}

/// All frames that are not zero, by number.
fn slots(reader: &PageReader) -> Vec<Slot> {
    let mut slots = Vec::new();
    for run in reader.table().runs() {
        let place = |n: u32| match run.kind {
            Kind::Zero | Kind::Free => None,
            Kind::Page { hash } => Some(Place::Page(reader.group_of(hash + n)?, hash + n)),
            Kind::Disk { disk, layer, block } => Some(Place::Block(disk, layer, block + n)),
        };
        let colour = run.colour;
        let slot = |n| Some(Slot { frame: run.first + n, place: place(n)?, colour });
        slots.extend((0..run.frames).filter_map(slot));
    }
    slots
}

/// What is known of what clones touch.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Expected {
    /// Frames of the working set, the first first.
    pub first: Vec<u32>,
    /// Of other frames, which recorded runs touched them, one bit each: those that lie side by side and were touched by the same runs belong together
    /// (they are of one file, mostly), and come together.
    pub together: HashMap<u32, u64>,
    /// Frames that clones have from other templates, ascending and apart: these are not fetched.
    pub elsewhere: Vec<Range<u32>>,
}

/// Frames that come together, in the order in which they lie in the store: by what one read gives, apart what is in the working set, whole where they belong
/// together, and as many as the windows say elsewhere.
fn batches(slots: Vec<Slot>, expected: &Expected, policy: &Policy) -> Vec<(u64, Vec<Slot>)> {
    let mut batches: HashMap<(Unit, bool, u8, u64), Vec<Slot>> = HashMap::new();
    let mut blind: HashMap<(u32, bool), Vec<Slot>> = HashMap::new();
    let early: std::collections::HashSet<u32> =
        expected.first.iter().copied().filter(|_| policy.working_set).collect();
    for slot in slots {
        let early = early.contains(&slot.frame);
        if policy.blind {
            let window = slot.frame / u32::from(policy.window(slot.colour));
            blind.entry((window, early)).or_default().push(slot);
        } else {
            // All of the working set that one read gives comes with it, whatever its colour.
            let runs = expected.together.get(&slot.frame).copied().filter(|_| !early).unwrap_or(0);
            let colour = if early { 0 } else { slot.colour };
            batches.entry((slot.place.unit(), early, colour, runs)).or_default().push(slot);
        }
    }
    let cut = |((_, early, colour, runs), mut slots): ((Unit, bool, u8, u64), Vec<Slot>)| {
        slots.sort_unstable_by_key(|slot| (slot.place, slot.frame));
        let whole = early || runs != 0;
        let most = if whole { MOST_FRAMES } else { usize::from(policy.window(colour)) };
        // Frames of one page come with it.
        let mut parts: Vec<Vec<Slot>> = Vec::new();
        let mut pages = 0;
        for slot in slots {
            let same = |part: &Vec<Slot>| part.last().is_some_and(|last| last.place == slot.place);
            let full = |part: &Vec<Slot>| part.len() >= MOST_FRAMES || pages >= most && !same(part);
            match parts.last_mut() {
                Some(part) if !full(part) => {
                    pages += usize::from(!same(part));
                    part.push(slot);
                }
                _ => {
                    pages = 1;
                    parts.push(vec![slot]);
                }
            }
        }
        parts.into_iter().map(move |part| (runs, part))
    };
    let blind = blind.into_values().map(|batch| (0, batch));
    let mut all: Vec<(u64, Vec<Slot>)> = batches.into_iter().flat_map(cut).chain(blind).collect();
    for (_, batch) in &mut all {
        batch.sort_unstable_by_key(|slot| (slot.place.unit(), slot.frame));
    }
    all.sort_unstable_by_key(|(_, batch)| batch.first().map(|slot| (slot.place, slot.frame)));
    all
}

/// Batches as [`Layout`] has them: neighbours that belong together are of one group.
fn layout(frames: u32, batches: &[(u64, Vec<Slot>)], elsewhere: &[Range<u32>]) -> Layout {
    let mut layout = Layout { batch_of: vec![ZERO; frames as usize], ..Layout::default() };
    for range in elsewhere {
        let frames = layout.batch_of.get_mut(range.start as usize..range.end as usize);
        frames.into_iter().for_each(|frames| frames.fill(ELSEWHERE));
    }
    let mut before: Option<(u64, u8, Unit)> = None;
    let mut group = 0;
    for (number, (runs, batch)) in (0..).zip(batches) {
        for slot in batch {
            layout.batch_of[slot.frame as usize] = number;
        }
        let (Some(first), Some(last)) = (batch.first(), batch.last()) else { continue };
        let this = (*runs, first.colour, first.place.unit());
        let goes_on = before.is_some_and(|(runs, colour, unit)| {
            (runs, colour) == (this.0, this.1) && (unit == this.2 || unit.is_before(this.2))
        });
        group += u32::from(!goes_on);
        layout.batches.push(Batch {
            first: first.frame,
            frames: u32::try_from(batch.len()).unwrap_or(u32::MAX),
            colour: first.colour,
            group: if *runs == 0 { 0 } else { group },
        });
        before = Some((*runs, first.colour, last.place.unit()));
    }
    layout
}

/// Where a snapshot's frames are, without anything to read them with.
#[derive(Debug, Clone)]
pub struct Shape {
    frames: u32,
    slots: Vec<Slot>,
    /// By frame; nothing where it is zero.
    colours: Vec<Option<u8>>,
}

impl Shape {
    /// That of a plan's reader.
    #[must_use]
    pub fn of(reader: &PageReader) -> Self {
        Self::new(reader.table().frames(), slots(reader))
    }

    fn new(frames: u32, slots: Vec<Slot>) -> Self {
        let mut colours = vec![None; frames as usize];
        for slot in &slots {
            colours[slot.frame as usize] = Some(slot.colour);
        }
        Self { frames, slots, colours }
    }

    /// The colour of a frame that is not zero.
    #[must_use]
    pub fn colour(&self, frame: u32) -> Option<u8> {
        self.colours.get(frame as usize).copied().flatten()
    }

    /// Which frames come together where this is expected and all windows are `window`.
    #[must_use]
    pub fn layout(&self, expected: &Expected, window: u8) -> Layout {
        let policy = Policy::colour([window; COLOURS]).with_working_set();
        layout(self.frames, &batches(self.slots.clone(), expected, &policy), &[])
    }
}

impl Stored {
    /// That of a plan's reader.
    #[must_use]
    pub fn new(reader: PageReader, expected: &Expected, policy: &Policy) -> Self {
        let mut slots = slots(&reader);
        let mut apart = expected.elsewhere.iter().peekable();
        slots.retain(|slot| {
            while apart.next_if(|range| range.end <= slot.frame).is_some() {}
            apart.peek().is_none_or(|range| slot.frame < range.start)
        });
        let batches = batches(slots, expected, policy);
        let layout = layout(reader.table().frames(), &batches, &expected.elsewhere);
        let (mut slots, mut ranges) = (Vec::new(), Vec::with_capacity(batches.len()));
        for (_, batch) in batches {
            let start = slots.len();
            slots.extend(batch);
            ranges.push(start..slots.len());
        }
        Self { reader, layout, slots, ranges, kept: Kept::default(), read_bytes: AtomicU64::new(0) }
    }

    fn count(&self, bytes: usize) {
        self.read_bytes.fetch_add(bytes as u64, Ordering::Relaxed);
    }

    /// What lies in these places, in their order.
    fn read(&self, slots: &[Slot], put: &mut Put<'_>) -> Result<(), SourceError> {
        thread_local!(static BYTES: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) });
        BYTES.with_borrow_mut(|bytes| {
            for part in slots.chunk_by(|a, b| a.place.unit() == b.place.unit()) {
                match part[0].place {
                    Place::Page(id, _) => self.group(id, part, bytes, put)?,
                    Place::Block(..) => self.blocks(part, bytes, put)?,
                }
            }
            Ok(())
        })
    }

    fn slots_of(&self, batch: u32) -> Result<&[Slot], SourceError> {
        let slots = self.ranges.get(batch as usize).and_then(|range| self.slots.get(range.clone()));
        slots.ok_or_else(|| SourceError::Damaged(format!("batch {batch}: there is none")))
    }

    /// Frames of one group.
    fn group(
        &self,
        id: GroupId,
        slots: &[Slot],
        bytes: &mut Vec<u8>,
        put: &mut Put<'_>,
    ) -> Result<(), SourceError> {
        let group = self.kept.get(id, |buffer| {
            self.count(self.reader.read_group(id, buffer)?);
            Ok(())
        })?;
        // Frames in a row are put at once, wherever their pages lie in the group.
        for run in slots.chunk_by(|a, b| a.frame + 1 == b.frame) {
            bytes.clear();
            for slot in run {
                if let Place::Page(_, hash) = slot.place {
                    bytes.extend_from_slice(self.reader.page(hash, &group)?);
                }
            }
            put(run[0].frame, bytes).map_err(SourceError::Install)?;
        }
        Ok(())
    }

    /// Frames that are blocks.
    fn blocks(&self, slots: &[Slot], bytes: &mut Vec<u8>, put: &mut Put<'_>) -> Result<(), SourceError> {
        let follows = |a: &Slot, b: &Slot| match (a.place, b.place) {
            (Place::Block(disk, layer, block), Place::Block(d, l, next)) => {
                (disk, layer, block.checked_add(1)) == (d, l, Some(next)) && a.frame + 1 == b.frame
            }
            _ => false,
        };
        for run in slots.chunk_by(follows) {
            let Place::Block(disk, layer, block) = run[0].place else { continue };
            bytes.resize(run.len() * PAGE, 0);
            self.reader.read_blocks(disk, layer, block, bytes)?;
            self.count(bytes.len());
            put(run[0].frame, bytes).map_err(SourceError::Install)?;
        }
        Ok(())
    }
}

impl Source for Stored {
    fn layout(&self) -> &Layout {
        &self.layout
    }

    fn read_bytes(&self) -> u64 {
        self.read_bytes.load(Ordering::Relaxed)
    }

    fn fetch(&self, batch: u32, put: &mut Put<'_>) -> Result<(), SourceError> {
        self.read(self.slots_of(batch)?, put)
    }

    fn fetch_all(&self, batches: &[u32], put: &mut Put<'_>) -> Result<(), SourceError> {
        if let [batch] = batches {
            return self.fetch(*batch, put);
        }
        let mut slots = Vec::new();
        for batch in batches {
            slots.extend_from_slice(self.slots_of(*batch)?);
        }
        slots.sort_unstable_by_key(|slot| (slot.place.unit(), slot.frame));
        self.read(&slots, put)
    }
}

/// The groups that were read last, the last one at the end.
#[derive(Debug, Default)]
struct Kept(Mutex<VecDeque<(GroupId, Arc<GroupBuffer>)>>);

impl Kept {
    /// The group, read by `read` where it is not there.
    fn get(
        &self,
        id: GroupId,
        read: impl FnOnce(&mut GroupBuffer) -> Result<(), PagesError>,
    ) -> Result<Arc<GroupBuffer>, PagesError> {
        let kept = || self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let mut spare = {
            let mut kept = kept();
            if let Some((_, group)) = kept.iter().rev().find(|(known, _)| *known == id) {
                return Ok(Arc::clone(group));
            }
            let oldest = if kept.len() >= KEPT_GROUPS { kept.pop_front() } else { None };
            oldest.and_then(|(_, group)| Arc::into_inner(group)).unwrap_or_default()
        };
        read(&mut spare)?;
        let group = Arc::new(spare);
        kept().push_back((id, Arc::clone(&group)));
        Ok(group)
    }
}

#[cfg(test)]
#[path = "learn_tests.rs"]
mod learning;

#[cfg(test)]
mod tests {
    use super::*;

    pub(super) fn page(frame: u32, group: u32, hash: u32, colour: u8) -> Slot {
        Slot { frame, place: Place::Page(GroupId { pack: 0, group }, hash), colour }
    }

    fn block(frame: u32, block: u32) -> Slot {
        Slot { frame, place: Place::Block(0, 0, block), colour: 6 }
    }

    fn frames(slots: Vec<Slot>, first: &[u32], policy: &Policy) -> Vec<Vec<u32>> {
        together(slots, &Expected { first: first.to_vec(), ..Expected::default() }, policy)
    }

    fn together(slots: Vec<Slot>, expected: &Expected, policy: &Policy) -> Vec<Vec<u32>> {
        let batches = batches(slots, expected, policy);
        batches.iter().map(|(_, batch)| batch.iter().map(|slot| slot.frame).collect()).collect()
    }

    /// Two groups and blocks in a row across a unit's end; frame 30 has the page of frame 3.
    fn sample() -> Vec<Slot> {
        let mut slots: Vec<Slot> = (0..4).map(|n| page(n, 0, n, 3)).collect();
        slots.extend([page(8, 1, 4, 5), page(9, 1, 5, 5), page(7, 1, 6, 3), page(30, 0, 3, 3)]);
        slots.extend((20..24).map(|n| block(n, n - 6)));
        slots
    }

    #[test]
    fn what_one_read_gives_in_one_colour_comes_together() {
        let whole = Policy::colour([16; 16]);
        let expected: [&[u32]; 5] = [&[0, 1, 2, 3, 30], &[8, 9], &[7], &[20, 21], &[22, 23]];
        assert_eq!(frames(sample(), &[1], &whole), expected);
        let mut windows = [1; 16];
        windows[3] = 2;
        let expected: [&[u32]; 9] = [&[0, 1], &[2, 3, 30], &[8], &[9], &[7], &[20], &[21], &[22], &[23]];
        assert_eq!(
            frames(sample(), &[1], &Policy::colour(windows)),
            expected,
            "frames of one page count once"
        );
    }

    #[test]
    fn the_working_set_is_apart_and_whole() {
        let minimal = Policy::colour([1; 16]).with_working_set();
        let expected: [&[u32]; 8] = [&[0], &[1, 2, 30], &[3], &[8], &[7, 9], &[20], &[21], &[22, 23]];
        assert_eq!(frames(sample(), &[30, 9, 7, 22, 2, 1, 23], &minimal), expected);
    }

    #[test]
    fn what_the_same_runs_touched_comes_together_and_has_a_group() {
        let known = [(1, 2), (2, 2), (3, 1), (20, 4), (21, 4), (22, 4), (23, 1), (8, 1), (9, 1)];
        let expected = Expected { first: vec![9], together: known.into(), ..Expected::default() };
        let policy = Policy::colour([1; 16]).with_working_set();
        let batches = [
            vec![0],
            vec![1, 2],
            vec![3],
            vec![30],
            vec![9],
            vec![8],
            vec![7],
            vec![20, 21],
            vec![22],
            vec![23],
        ];
        let mut got = together(sample(), &expected, &policy);
        let mut wanted = batches.to_vec();
        got.sort_unstable();
        wanted.sort_unstable();
        assert_eq!(got, wanted);
        let layout = layout(40, &super::batches(sample(), &expected, &policy), &[]);
        let group = |frame: usize| layout.batches[layout.batch_of[frame] as usize].group;
        assert_eq!([0, 30, 7, 9].map(group), [0; 4]);
        assert!(group(20) != 0 && group(20) == group(22), "across the end of what one read gives");
        assert!(group(22) != group(23) && group(1) != group(3) && group(1) != 0, "{layout:?}");
    }

    #[test]
    fn the_blind_take_what_lies_beside_in_ram() {
        let mut got = frames(sample(), &[], &Policy::blind(16));
        got.iter_mut().for_each(|batch| batch.sort_unstable());
        assert_eq!(got, [vec![0, 1, 2, 3, 7, 8, 9], vec![20, 21, 22, 23, 30]]);
        assert_eq!(frames(sample(), &[], &Policy::MINIMAL).len(), sample().len());
    }

    #[test]
    fn a_batch_has_a_most() {
        let slots: Vec<Slot> = (0..1000).map(|n| page(n, 0, 7, 3)).collect();
        for policy in [Policy::default(), Policy::colour([1; 16])] {
            let got = frames(slots.clone(), &[5], &policy);
            assert!(got.iter().all(|batch| batch.len() <= MOST_FRAMES), "{got:?}");
            assert_eq!(got.iter().map(Vec::len).sum::<usize>(), 1000);
        }
    }

    #[test]
    fn a_group_is_read_once_while_it_is_kept() {
        let kept = Kept::default();
        let id = |group| GroupId { pack: 0, group };
        let get = |group| {
            let mut read = false;
            let result = kept.get(id(group), |_| {
                read = true;
                Ok(())
            });
            result.map(|_| read)
        };
        assert!(get(0).unwrap() && !get(0).unwrap());
        for group in 1..=u32::try_from(KEPT_GROUPS).unwrap() {
            assert!(get(group).unwrap());
        }
        assert!(get(0).unwrap(), "the oldest went");
        assert_eq!(kept.0.lock().unwrap().len(), KEPT_GROUPS);
        let failed = kept.get(id(1 << 20), |_| {
            Err(PagesError::Invalid { place: String::new(), expected: String::new(), got: String::new() })
        });
        assert!(failed.is_err() && get(1 << 20).unwrap(), "one that could not be read is not kept");
    }
}
