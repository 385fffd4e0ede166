//! Round trips, damage at every place, and the memory use of damaged archives.

use super::*;
use crate::Writer;
use proptest::prelude::*;
use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

/// An allocator that counts the bytes of the current thread, and their maximum.
struct Counting;

thread_local! {
    static NOW: Cell<isize> = const { Cell::new(0) };
    static PEAK: Cell<isize> = const { Cell::new(0) };
}

fn count(bytes: isize) {
    // Fails while a thread ends, when its counters are gone.
    let _ = NOW.try_with(|now| {
        now.set(now.get() + bytes);
        let _ = PEAK.try_with(|peak| peak.set(peak.get().max(now.get())));
    });
}

// SAFETY: every call is passed to the system's allocator unchanged.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout.size().cast_signed());
        // SAFETY: the caller keeps the contract of `alloc`.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        count(-layout.size().cast_signed());
        // SAFETY: the caller keeps the contract of `dealloc`.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// The maximum of the memory that `act` had allocated at one time.
fn peak(act: impl FnOnce()) -> isize {
    let before = NOW.get();
    PEAK.set(before);
    act();
    PEAK.get() - before
}

/// Reads an archive without its data. Claimed lengths could take memory only there.
fn walk(archive: impl Read) -> Result<(), ArchiveError> {
    let mut reader = Reader::new(archive, Limits { max_entries: 1000, max_bytes: u64::MAX });
    while reader.next_entry()?.is_some() {}
    Ok(())
}

fn bytes(most: usize) -> impl Strategy<Value = Vec<u8>> {
    proptest::collection::vec(any::<u8>(), 0..most)
}

fn name() -> impl Strategy<Value = Vec<u8>> {
    let part =
        proptest::collection::vec((1..=255_u8).prop_filter("no slash", |b| *b != b'/'), 1..120);
    proptest::collection::vec(part, 1..4).prop_map(|parts| parts.join(&b'/'))
}

prop_compose! {
    fn head()(
        path in name(),
        link in name(),
        kind in prop_oneof![
            4 => Just(Kind::File), 1 => Just(Kind::Folder), 1 => Just(Kind::Symlink),
            1 => Just(Kind::HardLink), 1 => Just(Kind::Char), 1 => Just(Kind::Fifo),
        ],
        mode in 0..0o10000_u32,
        ids in (0..1_u64 << 32, 0..1_u64 << 32),
        mtime_s in prop_oneof![-1_i64 << 40..1 << 40, Just(0), Just(i64::MAX)],
        mtime_ns in prop_oneof![Just(0), 0..1_000_000_000_u32],
        device in (0..4096_u32, 0..1_u32 << 20),
        xattrs in proptest::collection::btree_map(
            "user\\.[a-z]{1,9}".prop_map(String::into_bytes), bytes(300), 0..3,
        ),
    ) -> Head {
        let mut path = path;
        if kind == Kind::Folder {
            path.push(b'/');
        }
        let link = if matches!(kind, Kind::Symlink | Kind::HardLink) { link } else { Vec::new() };
        let device = if kind == Kind::Char { device } else { (0, 0) };
        Head { path, link, kind, mode, uid: ids.0, gid: ids.1, mtime_s, mtime_ns, device, xattrs }
    }
}

/// An entry, and the runs of its content if it is written as a sparse file.
type Given = (Whole, Option<Vec<(u64, u64)>>);

fn given() -> impl Strategy<Value = Given> {
    let runs = proptest::collection::vec((0..5000_u64, 0..5000_u64), 0..6);
    (head(), bytes(3000), proptest::option::of((runs, 0..5000_u64))).prop_map(
        |(head, content, sparse)| match (head.kind, sparse) {
            (Kind::File, Some((gaps, rest))) => {
                let (mut runs, mut at) = (Vec::new(), 0);
                for (gap, bytes) in gaps {
                    runs.push((at + gap, bytes));
                    at += gap + bytes;
                }
                let mut whole = vec![0; usize::try_from(at + rest).unwrap()];
                for (n, (offset, bytes)) in runs.iter().enumerate() {
                    let range =
                        usize::try_from(*offset).unwrap()..usize::try_from(offset + bytes).unwrap();
                    whole[range].fill(u8::try_from(n).unwrap() + 1);
                }
                (Whole { head, content: whole }, Some(runs))
            }
            (Kind::File, None) => (Whole { head, content }, None),
            _ => (Whole { head, content: Vec::new() }, None),
        },
    )
}

pub fn write(all: &[Given]) -> Vec<u8> {
    let mut writer = Writer::new(Vec::new());
    for (Whole { head, content }, runs) in all {
        let length = content.len() as u64;
        match (head.kind, runs) {
            (Kind::File, Some(runs)) => {
                let range = |(offset, bytes): &(u64, u64)| {
                    let start = usize::try_from(*offset).unwrap();
                    content[start..start + usize::try_from(*bytes).unwrap()].to_vec()
                };
                let data: Vec<u8> = runs.iter().flat_map(range).collect();
                writer.sparse_file(head, length, runs, &mut data.as_slice()).unwrap();
            }
            (Kind::File, None) => writer.file(head, length, &mut content.as_slice()).unwrap(),
            _ => writer.entry(head).unwrap(),
        }
    }
    writer.finish().unwrap()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn what_is_written_is_read(all in proptest::collection::vec(given(), 0..5)) {
        let read = read(write(&all).as_slice()).unwrap();
        let expected: Vec<Whole> = all.into_iter().map(|(whole, _)| whole).collect();
        prop_assert_eq!(read, expected);
    }

    #[test]
    fn a_changed_byte_is_no_panic_and_takes_little_memory(
        all in proptest::collection::vec(given(), 1..3),
        at in any::<proptest::sample::Index>(),
        byte in any::<u8>(),
        right_sum in any::<bool>(),
    ) {
        let mut archive = write(&all);
        let at = at.index(archive.len());
        archive[at] = byte;
        // If the damage is in a header, its checksum is corrected, so that the code behind the
        // check is reached.
        let start = at / 512 * 512;
        if right_sum && start + 512 <= archive.len() {
            let block = summed(archive[start..start + 512].to_vec());
            archive[start..start + 512].copy_from_slice(&block);
        }
        let used = peak(|| drop(walk(archive.as_slice())));
        prop_assert!(used < 1 << 20, "{used} bytes for an archive of {}", archive.len());
        let _ = read(archive.as_slice());
    }

    #[test]
    fn any_blocks_with_a_right_sum_are_no_panic(
        blocks in proptest::collection::vec(bytes(600), 0..4),
    ) {
        let blocks = blocks.into_iter().map(|mut block| {
            block.resize(512, 0);
            block[156] = b"0123456SLKxg\0"[usize::from(block[156]) % 13];
            summed(block)
        });
        let archive = of(&blocks.collect::<Vec<_>>());
        let used = peak(|| drop(walk(archive.as_slice())));
        prop_assert!(used < 1 << 20, "{used} bytes");
    }
}

#[test]
fn a_cut_at_every_byte_is_an_error_or_ends_between_entries() {
    let file = |name: &str, bytes: usize| Whole {
        head: Head { mtime_ns: 5, ..Head::new(name, Kind::File, 0o644) },
        content: vec![7; bytes],
    };
    let mut sparse = file("s", 3000);
    sparse.content[..2000].fill(0);
    let archive =
        write(&[(file("a", 700), None), (sparse, Some(vec![(2000, 1000)])), (file("b", 1), None)]);
    let mut good = 0;
    for length in 0..=archive.len() - 1024 {
        let Ok(all) = read(&archive[..length]) else { continue };
        good += 1;
        // Entries that were read are complete.
        let lengths: Vec<usize> = all.iter().map(|w| w.content.len()).collect();
        assert!([700, 3000, 1].starts_with(&lengths), "{length}: {lengths:?}");
    }
    // The count detects a reader that accepts too much or too little. Accepted are the empty
    // archive and, after each entry's data, any part of its padding.
    let padding = |data: usize| data.next_multiple_of(512) - data + 1;
    assert_eq!(good, 1 + padding(700) + padding(512 + 1000) + padding(1));
}

/// The maximum of memory for the longest accepted header and map.
#[test]
fn the_largest_that_is_accepted_takes_bounded_memory() {
    let value = vec![b'v'; 60_000];
    let keys: Vec<String> = (0..16).map(|n| format!("SCHILY.xattr.user.{n}")).collect();
    let pairs: Vec<(&str, &[u8])> =
        keys.iter().map(|key| (key.as_str(), value.as_slice())).collect();
    let records = of(&[pax(&pairs), raw(b'0', b"x", 0, b"")]);
    let used = peak(|| walk(records.as_slice()).unwrap());
    assert!(used < 4 << 20, "{used} bytes");
    let runs = crate::sparse::MAX_RUNS as u64;
    let mut writer = Writer::new(Vec::new());
    let list: Vec<(u64, u64)> = (0..runs).map(|n| (2 * n, 1)).collect();
    let head = Head::new("s", Kind::File, 0o644);
    writer.sparse_file(&head, 2 * runs - 1, &list, &mut std::io::repeat(1)).unwrap();
    let archive = writer.finish().unwrap();
    let file = tempfile::tempfile().unwrap();
    let used = peak(|| {
        let mut reader = Reader::new(archive.as_slice(), Limits::NONE);
        let entry = reader.next_entry().unwrap().unwrap();
        // The limit ends the copy early, because half a million writes would take long.
        let how = CopyOptions { zeroes_are_holes: false, room: 1 << 20 };
        reader.copy_data(&entry, &file, how).unwrap_err();
    });
    assert!((8 << 20..16 << 20).contains(&used), "{used} bytes");
}
