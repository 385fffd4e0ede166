//! Reading a guest's memory: a small Linux, in which the input changes words.

use crate::events::Events;
use crate::target::{Heap, Outcome, Target, planted};
use dayfly_introspect::memory::{Extent, Layout};
use dayfly_introspect::synthetic::{FRAMES, Guest, Like};
use dayfly_introspect::{Colour, Levels, RootHint, introspect};

/// The targets of this file.
pub const TARGETS: &[Target] = &[
    Target {
        name: "introspect",
        what: "a kernel's structures in guest memory",
        stateful: false,
        most_bytes: 1024,
        // The guest itself, and a constant number of bytes for each frame of it.
        heap: Heap { fixed: 12 << 20, per_byte: 1024 },
        run: guest,
        seeds: || {
            let mut texts = vec![vec![0], vec![1], vec![2], vec![3]];
            texts.push([&[1, TEXT, 10, 0, 4][..], b"x9-y"].concat());
            texts.push([&[0, WORD, 16, 3, 0][..], &7_u64.to_le_bytes()].concat());
            texts.push([&[4, HINT][..], &0x28_000_u64.to_le_bytes()].concat());
            texts.push(vec![0, LOOP, 2, LOOP, 40, LARGE, 41]);
            texts.push(vec![1, ENTRY, 40, 3, 0, 51, 0, 0x87]);
            texts
        },
    },
    Target {
        name: "memory-layout",
        what: "the places of a guest's RAM",
        stateful: false,
        most_bytes: 512,
        heap: Heap { fixed: 64 << 10, per_byte: 16 },
        run: layout,
        seeds: || {
            let extents = [[0_u64, 0, 1 << 20], [1 << 32, 1 << 20, 4096]];
            vec![extents.iter().flatten().flat_map(|n| n.to_le_bytes()).collect()]
        },
    },
];

const WORD: u8 = 0;
const TEXT: u8 = 1;
const HINT: u8 = 2;
const LOOP: u8 = 3;
const LARGE: u8 = 4;
const ENTRY: u8 = 5;
const EVENTS: u8 = 6;
/// Frame of the kernel's VMCOREINFO.
const TEXT_FRAME: u64 = 12;

fn guest(input: &[u8]) -> Outcome {
    let mut events = Events::new(input);
    let Some(kind) = events.byte() else { return Outcome::Refused };
    let like = if kind & 1 == 0 { Like::Linux6_1 } else { Like::Linux6_12 };
    let levels = if kind & 2 == 0 { Levels::Four } else { Levels::Five };
    let guest = Guest::new(like, levels);
    let mut hints = Vec::new();
    while change(&guest, &mut hints, levels, &mut events).is_some() && hints.len() < 16 {}
    let report = introspect(&guest.ram, &hints);
    assert_eq!(report.colours.len(), FRAMES, "a colour for each frame");
    assert_eq!(report.files.len(), FRAMES, "a file for each frame");
    let most = report.groups.len();
    assert!(report.files.iter().all(|file| *file as usize <= most), "files of {most} groups");
    assert!(report.degraded.is_some() != report.kernel.is_some(), "a kernel, or why there is none");
    if let Some(degraded) = &report.degraded {
        assert!(degraded.to_string().len() < 4096, "a long error");
    }
    let _census = report.census();
    planted(|| report.kernel.is_some() && report.colours[70] == Colour::UserCode);
    planted(|| report.kernel.as_ref().is_some_and(|kernel| kernel.release == "test-1.7"));
    Outcome::of(report.kernel.is_some())
}

fn change(
    guest: &Guest,
    hints: &mut Vec<RootHint>,
    levels: Levels,
    events: &mut Events<'_>,
) -> Option<()> {
    match events.byte()? % EVENTS {
        WORD => {
            let place = u64::from(events.byte()?) | u64::from(events.word()?) << 8;
            let words = FRAMES as u64 * 512;
            // Most structures lie in the first 64 frames.
            let at = if place >> 23 == 0 { place % (64 * 512) } else { place % words };
            guest.ram.put(at * 8, events.quad()?);
        }
        TEXT => {
            let at = u64::from(events.word()?) % 2048 / 8 * 8;
            guest.ram.put_bytes(TEXT_FRAME * 4096 + at, events.bytes()?);
        }
        HINT => hints.push(RootHint { cr3: events.quad()?, levels }),
        LOOP => dayfly_introspect::synthetic::loop_at(guest, u64::from(events.byte()?)),
        LARGE => dayfly_introspect::synthetic::all_large(guest, u64::from(events.byte()?)),
        _ => {
            let (table, index) = (u64::from(events.byte()?), u64::from(events.word()? % 512));
            let (to, flags) = (u64::from(events.word()?) % 2048, u64::from(events.byte()?));
            guest.put_entry(table, index, (to * 4096) | flags | 1);
        }
    }
    Some(())
}

fn layout(input: &[u8]) -> Outcome {
    let words: Vec<u64> =
        input.as_chunks().0.iter().map(|word| u64::from_le_bytes(*word)).collect();
    let extents: Vec<Extent> = words
        .as_chunks()
        .0
        .iter()
        .map(|&[guest, offset, bytes]| Extent { guest, offset, bytes })
        .collect();
    let Ok(layout) = Layout::new(&extents) else { return Outcome::Refused };
    let bytes: u64 = extents.iter().map(|extent| extent.bytes).sum();
    assert_eq!(layout.frames() as u64, bytes / 4096, "frames");
    for extent in &extents {
        let pfn = dayfly_introspect::memory::Pfn(extent.guest / 4096);
        let frame = layout.frame(pfn).expect("the first frame of an extent");
        assert_eq!(layout.pfn(frame), Some(pfn), "there and back");
        assert_eq!(layout.offset(frame), Some(extent.offset), "its offset");
    }
    planted(|| extents.len() == 4);
    Outcome::Accepted
}
