//! The store as a source: compressed groups of packs, and blocks of disks.

use crate::policy::{COLOURS, Policy, UNIT};
use crate::source::{Batch, ELSEWHERE, Layout, Put, Source, SourceError, ZERO};
use dayfly_store::{GroupBuffer, GroupId, Kind, PageReader, PagesError};
use dayfly_units::{PAGE_SIZE, sync::lock};
use std::cell::RefCell;
use std::collections::{HashMap, VecDeque};
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

/// The most frames of a batch, which bounds the wait for one frame: a guest may have filled all of
/// its RAM with one page.
const MOST_FRAMES: usize = 64;
/// Number of recently read groups that stay decompressed, for faults on other parts of a group.
/// Some MiB with groups of 16 pages.
const KEPT_GROUPS: usize = 64;
const PAGE: usize = 4096;
const _: () = assert!(PAGE as u64 == PAGE_SIZE);
const _: () = assert!(UNIT as u64 * PAGE_SIZE == dayfly_units::tree::LEAF_BYTES);

/// The stored place of a frame's page.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Place {
    /// A group, and the number of the page's hash in the table.
    Page(GroupId, u32),
    /// Disk, layer and block.
    Block(u8, u8, u32),
}

/// The result of one read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
enum Unit {
    Group(GroupId),
    /// Disk, layer, and the number of a range of [`UNIT`] blocks.
    Blocks(u8, u8, u32),
}

impl Unit {
    /// Whether `other` is stored right behind this unit.
    fn is_before(self, other: Self) -> bool {
        match (self, other) {
            (Self::Group(a), Self::Group(b)) => {
                a.pack == b.pack && a.group.checked_add(1) == Some(b.group)
            }
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
    /// The frames of all batches, batch by batch.
    slots: Vec<Slot>,
    /// For each batch its range in `slots`.
    ranges: Vec<Range<usize>>,
    kept: Kept,
    /// Stored bytes read so far.
    read_bytes: AtomicU64,
}

/// All frames that are not zero, in ascending order.
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

/// The expected accesses of clones.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Expected {
    /// Frames of the working set, in order.
    pub first: Vec<u32>,
    /// For other frames a bit for each recorded run that touched the frame. Adjacent frames touched
    /// by the same runs mostly belong to one file; they come together.
    pub together: HashMap<u32, u64>,
    /// Frames that clones map from other templates, as ascending ranges without overlap; they are
    /// not fetched.
    pub elsewhere: Vec<Range<u32>>,
}

/// Divides frames into batches, in stored order. With `policy.blind`, a batch is a window of
/// consecutive frames. Otherwise a batch has frames of one read, and of one of three kinds:
///
/// - frames of the working set, of any colour, uncut;
/// - frames of one colour that the same runs touched, uncut;
/// - other frames of one colour, cut by the colour's window.
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
            // Frames of the working set in one read come together, whatever their colours.
            let runs = expected.together.get(&slot.frame).copied().filter(|_| !early).unwrap_or(0);
            let colour = if early { 0 } else { slot.colour };
            batches.entry((slot.place.unit(), early, colour, runs)).or_default().push(slot);
        }
    }
    let cut = |((_, early, colour, runs), mut slots): ((Unit, bool, u8, u64), Vec<Slot>)| {
        slots.sort_unstable_by_key(|slot| (slot.place, slot.frame));
        let whole = early || runs != 0;
        let most = if whole { MOST_FRAMES } else { usize::from(policy.window(colour)) };
        // Frames with the same page count once.
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

/// The batches as a [`Layout`]; adjacent batches that belong together get one group number.
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

/// The stored places of a snapshot's frames, without the files to read.
#[derive(Debug, Clone)]
pub struct Shape {
    frames: u32,
    slots: Vec<Slot>,
    /// By frame; `None` if the frame is zero.
    colours: Vec<Option<u8>>,
}

impl Shape {
    /// The shape of a plan's RAM.
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

    /// The colour of a frame; `None` if it is zero.
    #[must_use]
    pub fn colour(&self, frame: u32) -> Option<u8> {
        self.colours.get(frame as usize).copied().flatten()
    }

    /// The division into batches for these expectations, if all windows are `window`.
    #[must_use]
    pub fn layout(&self, expected: &Expected, window: u8) -> Layout {
        let policy = Policy::colour([window; COLOURS]).with_working_set();
        layout(self.frames, &batches(self.slots.clone(), expected, &policy), &[])
    }
}

impl Stored {
    /// The source for a plan's RAM.
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

    /// Reads and puts these frames, in their order.
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

    /// Puts frames of one group.
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
        // Consecutive frames are put at once, wherever their pages are in the group.
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

    /// Puts frames that are blocks of one unit. The blocks are read at once, because a unit is a
    /// leaf of the disk file's hash tree.
    fn blocks(
        &self,
        slots: &[Slot],
        bytes: &mut Vec<u8>,
        put: &mut Put<'_>,
    ) -> Result<(), SourceError> {
        let follows = |a: &Slot, b: &Slot| match (a.place, b.place) {
            (Place::Block(disk, layer, block), Place::Block(d, l, next)) => {
                (disk, layer, block.checked_add(1)) == (d, l, Some(next)) && a.frame + 1 == b.frame
            }
            _ => false,
        };
        let block = |slot: &Slot| match slot.place {
            Place::Block(_, _, block) => Some(block),
            Place::Page(..) => None,
        };
        let all = || slots.iter().filter_map(block);
        let (Some(first), Some(last)) = (all().min(), all().max()) else { return Ok(()) };
        let Some(Place::Block(disk, layer, _)) = slots.first().map(|slot| slot.place) else {
            return Ok(());
        };
        bytes.resize((last - first + 1) as usize * PAGE, 0);
        self.reader.read_blocks(disk, layer, first, bytes)?;
        for run in slots.chunk_by(follows) {
            let start = block(&run[0]).map_or(0, |block| (block - first) as usize * PAGE);
            let Some(part) = bytes.get(start..start + run.len() * PAGE) else { continue };
            self.count(part.len());
            put(run[0].frame, part).map_err(SourceError::Install)?;
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

/// Recently read groups, the most recent last.
#[derive(Debug, Default)]
struct Kept(Mutex<VecDeque<(GroupId, Arc<GroupBuffer>)>>);

impl Kept {
    /// The group, from the cache or read by `read`.
    fn get(
        &self,
        id: GroupId,
        read: impl FnOnce(&mut GroupBuffer) -> Result<(), PagesError>,
    ) -> Result<Arc<GroupBuffer>, PagesError> {
        let kept = || lock(&self.0);
        let mut oldest = {
            let mut kept = kept();
            if let Some((_, group)) = kept.iter().rev().find(|(known, _)| *known == id) {
                return Ok(Arc::clone(group));
            }
            let oldest = if kept.len() >= KEPT_GROUPS { kept.pop_front() } else { None };
            oldest.and_then(|(_, group)| Arc::into_inner(group)).unwrap_or_default()
        };
        read(&mut oldest)?;
        let group = Arc::new(oldest);
        kept().push_back((id, Arc::clone(&group)));
        Ok(group)
    }
}

#[cfg(test)]
#[path = "stored_tests.rs"]
mod tests;
