use super::*;
use crate::fixture::name;
use crate::fixture_pages::golden;
use proptest::prelude::*;

fn path() -> &'static Path {
    Path::new("/snapshots/base/table")
}

/// A table with one run of each kind.
fn sample() -> Table {
    let digest = |n| Digest([n; 32]);
    let run = |first, frames, kind, colour| Run { first, frames, kind, colour };
    Table {
        tenant: name("one"),
        ram: FileRef { digest: digest(1), bytes: 100 * 4096, data_bytes: 70 * 4096 },
        frames_digest: digest(2),
        disks: vec![vec![digest(3), digest(4)], vec![digest(5)]],
        runs: vec![
            run(0, 20, Kind::Zero, 0),
            run(20, 10, Kind::Free, 1),
            run(30, 40, Kind::Disk { disk: 0, layer: 1, block: 77 }, 2),
            run(70, 2, Kind::Page { hash: 0 }, 2),
            run(72, 28, Kind::Page { hash: 1 }, 255),
        ],
        hashes: (0..29).map(|n| digest(100 + n)).collect(),
    }
}

#[test]
fn the_bytes_of_version_1_are_frozen() {
    let table = sample();
    let frozen = golden("table-1", &table.encode());
    assert!(frozen == table.encode());
    assert_eq!(Table::decode(path(), &frozen).unwrap(), table);
}

#[test]
fn every_truncation_and_every_flipped_bit_is_refused() {
    let whole = sample().encode();
    for length in 0..whole.len() {
        assert!(
            matches!(Table::decode(path(), &whole[..length]), Err(Damage::Seal { .. })),
            "{length}"
        );
    }
    for bit in 0..whole.len() * 8 {
        let mut flipped = whole.clone();
        flipped[bit / 8] ^= 1 << (bit % 8);
        assert!(matches!(Table::decode(path(), &flipped), Err(Damage::Seal { .. })), "bit {bit}");
    }
}

/// Fields out of bounds behind a valid seal.
#[test]
fn fields_out_of_their_bounds_are_refused_with_their_place() {
    let payload = sample().encode()[HEADER_BYTES..].to_vec();
    let runs_at = FIXED_BYTES + 4 + 64 + 4 + 32;
    let refused = |change: &dyn Fn(&mut Vec<u8>)| {
        let mut payload = payload.clone();
        change(&mut payload);
        Table::decode(path(), &sealed::seal(&MAGIC, VERSION, &payload)).unwrap_err().to_string()
    };
    let put = |at: usize, value: u32| {
        move |p: &mut Vec<u8>| p[at..at + 4].copy_from_slice(&value.to_le_bytes())
    };
    for (change, expected) in [
        (&put(0, 0) as &dyn Fn(&mut Vec<u8>), "frames at byte 96: expected 1 to 67108864, got 0"),
        (&put(0, u32::MAX), "frames at byte 96: expected 1 to 67108864, got 4294967295"),
        (&put(0, 99), "frames of a run at byte 400: expected 1 to 27, got 28"),
        (&put(0, 101), "frames of all runs at byte 412: expected 101 to 101, got 100"),
        (&put(4, 0), "runs at byte 100: expected 1 to 100, got 0"),
        (&put(4, 6), "bytes of runs and hashes at byte 352: expected 1000, got 988"),
        (&put(8, 101), "hashes at byte 104: expected 0 to 100, got 101"),
        (&put(8, 100), "bytes of runs and hashes at byte 352: expected 3260, got 988"),
        (&put(12, 9), "disks at byte 108: expected 0 to 8, got 9"),
        (&put(16, u32::MAX), "tenant at byte 112: expected length, name, zeroes"),
        (&|p| p[17] = b'/', "tenant at byte 112: expected length, name, zeroes"),
        (&|p| p[40] = 1, "tenant at byte 112: expected length, name, zeroes"),
        (&|p| p[112..120].fill(255), "data bytes at byte 208: expected 0 to 409600"),
        (&put(152, 0), "layers of a disk at byte 248: expected 1 to 65, got 0"),
        (&put(152, 66), "layers of a disk at byte 248: expected 1 to 65, got 66"),
        (&put(152, 65), "layer at byte 1340: expected 32 bytes, got"),
        (&put(runs_at, 0), "frames of a run at byte 352: expected 1 to 100, got 0"),
        (&|p| p[runs_at + 4] = 4, "run at byte 356: expected kind 0 to 3"),
        (&|p| p[runs_at + 8] = 1, "run at byte 356: expected kind 0 to 3"),
        (&|p| p[runs_at + 36 + 6] = 1, "run at byte 392: expected kind 0 to 3"),
        (&|p| p[runs_at + 24 + 6] = 2, "disk at byte 382: expected 0 to 1, got 2"),
        (&|p| p[runs_at + 24 + 7] = 2, "layer at byte 383: expected 1 to 2, got 3"),
        (
            &put(runs_at + 24 + 8, (1 << 28) - 39),
            "end of blocks at byte 384: expected 1 to 268435456, got 268435457",
        ),
        (&put(runs_at + 24 + 8, u32::MAX), "end of blocks at byte 384: expected 1 to 268435456"),
        (&put(runs_at + 48 + 8, 2), "end of hashes at byte 408: expected 1 to 29, got 30"),
        (
            &put(runs_at + 48 + 8, u32::MAX),
            "end of hashes at byte 408: expected 1 to 29, got 4294967323",
        ),
        (&|p| p.truncate(100), "digest of RAM at byte 176: expected 32 bytes, got 20"),
    ] {
        let text = refused(change);
        let expected = expected.trim_end();
        assert!(
            text.starts_with(&format!("{}: {expected}", path().display())),
            "{text}, not {expected}"
        );
    }
}

#[test]
fn a_frame_is_found_in_its_run() {
    let table = sample();
    assert_eq!(table.frames(), 100);
    assert_eq!(
        table.from_frame(19),
        Some(Run { first: 19, frames: 1, kind: Kind::Zero, colour: 0 })
    );
    let disk = Kind::Disk { disk: 0, layer: 1, block: 82 };
    assert_eq!(table.from_frame(35), Some(Run { first: 35, frames: 35, kind: disk, colour: 2 }));
    let page = Kind::Page { hash: 28 };
    assert_eq!(table.from_frame(99), Some(Run { first: 99, frames: 1, kind: page, colour: 255 }));
    assert_eq!(table.from_frame(100), None);
}

proptest! {
    /// Any sealed payload is an error or a table that encodes to the same bytes; decoding never
    /// panics.
    #[test]
    fn any_payload_is_a_table_or_an_error(
        head in (0_u32..20, 0_u32..4, 0_u32..6, 0_u32..3),
        body in prop::collection::vec(
            prop_oneof![3 => Just(0_u8), 1 => 1_u8..4, 1 => any::<u8>()],
            0..400,
        ),
        exact in any::<bool>(),
    ) {
        let mut payload = Vec::new();
        for n in [head.0, head.1, head.2, head.3] {
            payload.extend_from_slice(&n.to_le_bytes());
        }
        payload.extend_from_slice(&tenant_field(&name("one")));
        payload.extend_from_slice(&[0; 72]);
        for _ in 0..head.3 {
            payload.extend_from_slice(&1_u32.to_le_bytes());
            payload.extend_from_slice(&[7; 32]);
        }
        payload.extend_from_slice(&body);
        if exact {
            let [disks, runs, hashes] = [head.3, head.1, head.2].map(|count| count as usize);
            payload.resize(FIXED_BYTES + disks * 36 + runs * RUN_BYTES + hashes * 32, 0);
        }
        let sealed = sealed::seal(&MAGIC, VERSION, &payload);
        if let Ok(table) = Table::decode(path(), &sealed) {
            prop_assert_eq!(table.encode(), sealed);
        }
    }
}
