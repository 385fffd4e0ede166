//! Pages out of the store: compressed groups of packs, and blocks of disks.

use crate::source::{Batch, Layout, Put, Source, SourceError, ZERO};
use dayfly_store::{GroupBuffer, GroupId, Kind, PageReader, Run};
use dayfly_units::PAGE_SIZE;
use std::cell::RefCell;
use std::collections::BTreeMap;

/// Blocks of a disk that are read at once: those in the same aligned window of so many frames, as many as a pack's group has pages. Who waits
/// for one waits for all. Other sizes were not measured.
const WINDOW: u32 = 16;
/// The most frames of a batch, which bounds what who waits for one waits for: a guest may have filled all of its RAM with one page.
const MOST_FRAMES: usize = 64;
const PAGE: usize = 4096;
const _: () = assert!(PAGE as u64 == PAGE_SIZE);

/// What a batch is made of.
#[derive(Debug)]
enum Place {
    /// Pages of a group: frames with their hashes' numbers, in the order of the frames.
    Group(GroupId, Vec<(u32, u32)>),
    /// Blocks in a row for frames in a row.
    Blocks { first: u32, frames: u32, disk: u8, layer: u8, block: u32 },
}

/// A snapshot's RAM.
#[derive(Debug)]
pub struct Stored {
    reader: PageReader,
    layout: Layout,
    places: Vec<Place>,
}

impl Stored {
    /// That of a plan's reader.
    #[must_use]
    pub fn new(reader: PageReader) -> Self {
        let table = reader.table();
        let mut groups: BTreeMap<GroupId, Vec<(u32, u32)>> = BTreeMap::new();
        let mut blocks = Vec::new();
        for run in table.runs() {
            match run.kind {
                Kind::Zero | Kind::Free => {}
                Kind::Page { hash } => {
                    for (frame, hash) in (run.first..run.first + run.frames).zip(hash..) {
                        if let Some(group) = reader.group_of(hash) {
                            groups.entry(group).or_default().push((frame, hash));
                        }
                    }
                }
                Kind::Disk { disk, layer, block } => windows(*run, (disk, layer, block), &mut blocks),
            }
        }
        // As they lie: pack by pack, then disk by disk.
        let of_groups = groups.into_iter().flat_map(|(id, frames)| {
            let parts: Vec<Place> =
                frames.chunks(MOST_FRAMES).map(|part| Place::Group(id, part.to_vec())).collect();
            parts
        });
        blocks.sort_unstable_by_key(|b: &Place| match b {
            Place::Blocks { disk, layer, block, .. } => (*disk, *layer, *block),
            Place::Group(..) => (0, 0, 0),
        });
        let places: Vec<Place> = of_groups.chain(blocks).collect();
        let mut layout = Layout { batch_of: vec![ZERO; table.frames() as usize], ..Layout::default() };
        for (number, place) in (0..).zip(&places) {
            let frames: Vec<u32> = place.frames().collect();
            for frame in &frames {
                layout.batch_of[*frame as usize] = number;
            }
            let first = frames.first().copied().unwrap_or(0);
            let colour = table.from_frame(first).map_or(0, |run| run.colour);
            layout.batches.push(Batch {
                first,
                frames: u32::try_from(frames.len()).unwrap_or(u32::MAX),
                colour,
            });
            layout.by_place.push(number);
        }
        Self { reader, layout, places }
    }
}

impl Place {
    fn frames(&self) -> Box<dyn Iterator<Item = u32> + '_> {
        match self {
            Self::Group(_, frames) => Box::new(frames.iter().map(|(frame, _)| *frame)),
            Self::Blocks { first, frames, .. } => Box::new(*first..first + frames),
        }
    }
}

/// Cuts a run of blocks, from `block` of a layer of a disk on, where windows end.
fn windows(run: Run, (disk, layer, mut block): (u8, u8, u32), out: &mut Vec<Place>) {
    let (mut first, mut left) = (run.first, run.frames);
    while left > 0 {
        let frames = left.min(WINDOW - first % WINDOW);
        out.push(Place::Blocks { first, frames, disk, layer, block });
        (first, left, block) = (first + frames, left - frames, block + frames);
    }
}

/// Memory that a thread uses again and again.
#[derive(Default)]
struct Scratch {
    group: GroupBuffer,
    bytes: Vec<u8>,
}

impl Source for Stored {
    fn layout(&self) -> &Layout {
        &self.layout
    }

    fn fetch(&self, batch: u32, put: &mut Put<'_>) -> Result<(), SourceError> {
        thread_local!(static SCRATCH: RefCell<Scratch> = RefCell::default());
        let unknown = || SourceError::Damaged(format!("batch {batch}: there is none"));
        let place = self.places.get(batch as usize).ok_or_else(unknown)?;
        SCRATCH.with_borrow_mut(|Scratch { group, bytes }| match place {
            Place::Group(id, frames) => {
                self.reader.read_group(*id, group)?;
                // Frames in a row are put at once, wherever their pages lie in the group.
                for run in frames.chunk_by(|a, b| a.0 + 1 == b.0) {
                    bytes.clear();
                    for (_, hash) in run {
                        bytes.extend_from_slice(self.reader.page(*hash, group)?);
                    }
                    put(run[0].0, bytes).map_err(SourceError::Install)?;
                }
                Ok(())
            }
            Place::Blocks { first, frames, disk, layer, block } => {
                bytes.resize(*frames as usize * PAGE, 0);
                self.reader.read_blocks(*disk, *layer, *block, bytes)?;
                put(*first, bytes).map_err(SourceError::Install)
            }
        })
    }
}
