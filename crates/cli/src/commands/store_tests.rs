use super::*;
use dayfly_api::types::{LeftAlone, LostSnapshot};

fn used(name: &str, own: u64) -> SnapshotUse {
    SnapshotUse {
        name: name.parse().expect("a name"),
        memory_bytes: 256 << 20,
        memory: MemoryKinds {
            zero_bytes: 100 << 20,
            free_bytes: 50 << 20,
            disk_bytes: 40 << 20,
            shared_bytes: 60 << 20,
            own_bytes: 6 << 20,
        },
        own_stored_bytes: own,
        own_page_bytes: own,
        own_layer_bytes: 0,
        layers: Counted { count: 2, apparent_bytes: 1 << 30, disk_bytes: 1 << 20 },
    }
}

#[test]
fn each_snapshot_has_a_row_and_all_have_a_total() {
    let usage = StoreUsage {
        snapshots: vec![used("big", 3 << 20), used("small", 1 << 20)],
        unreadable: Vec::new(),
    };
    let text = usage_text(&usage);
    let lines: Vec<Vec<&str>> = text
        .lines()
        .map(|line| line.split("  ").map(str::trim).filter(|s| !s.is_empty()).collect())
        .collect();
    assert_eq!(lines.len(), 4, "{text}");
    let row = |name, own| {
        vec![
            name,
            "256.0 MiB",
            "100.0 MiB",
            "50.0 MiB",
            "40.0 MiB",
            "60.0 MiB",
            "6.0 MiB",
            "2",
            own,
        ]
    };
    assert_eq!(lines[1], row("big", "3.0 MiB"));
    assert_eq!(lines[2], row("small", "1.0 MiB"));
    let total = [
        "total",
        "512.0 MiB",
        "200.0 MiB",
        "100.0 MiB",
        "80.0 MiB",
        "120.0 MiB",
        "12.0 MiB",
        "4",
        "4.0 MiB",
    ];
    assert_eq!(lines[3], total);
    assert!(
        !usage_text(&StoreUsage { snapshots: vec![used("one", 1)], unreadable: Vec::new() })
            .contains("total")
    );
}

#[test]
fn damage_is_shown_with_its_users_and_the_next_step() {
    let sound = Verified { images: 1, pages: 20, ..Verified::default() };
    let read = "read 1 images, 0 kernels, 0 disk layers, 0 snapshots, 0 packs, 20 pages, 0 block \
                indexes: ";
    assert_eq!(verified_text(&sound), format!("{read}nothing is damaged\n"));
    let damaged = Damaged {
        kind: "pack".into(),
        name: "1f".into(),
        message: "/p/1f: group 0, page 3: digest of the page: expected a, got b".into(),
        snapshots: vec!["base".into(), "next".into()],
        next: "remove them".into(),
    };
    let hurt = Verified { damaged: vec![damaged], more_damaged: 2, ..sound };
    let expected = format!(
        "pack 1f: /p/1f: group 0, page 3: digest of the page: expected a, got b\n  needed by: \
         base, next\n  \
         next: remove them\nand 2 more\n{read}3 damaged\n"
    );
    assert_eq!(verified_text(&hurt), expected);
}

#[test]
fn what_was_left_alone_is_shown_with_what_was_freed() {
    let left = LeftAlone { what: "a pack".into(), message: "why".into(), next: "how".into() };
    let collected = Collected {
        pages: 7,
        pack_bytes: -4096,
        layers: 1,
        layer_bytes: 1 << 20,
        left_alone: vec![left],
        ..Collected::default()
    };
    let text = collected_text(&collected);
    assert!(
        text.contains("disk layers     1       1.0 MiB\n")
            && text.contains("pages           7       -4.0 KiB\n"),
        "{text}"
    );
    assert!(text.ends_with("left alone: a pack\n  why\n  next: how\n"), "{text}");
}

#[test]
fn a_repair_names_what_is_lost_with_its_causes() {
    let (pack_bytes, hash_trees) = (4096, 2);
    let sound =
        Repaired { healed_pages: 3, packs: 1, pack_bytes, hash_trees, ..Repaired::default() };
    let wrote =
        "wrote 3 pages and 2 hash trees anew, removed 1 packs (4.0 KiB) and 0 block indexes: ";
    assert_eq!(repaired_text(&sound), format!("{wrote}no snapshot is lost\n"));
    let lost = LostSnapshot {
        name: "base".into(),
        lost_pages: 16,
        causes: vec!["/p/1f: group 0, page 3: digest of the page: expected a, got b".into()],
        next: "make it again".into(),
    };
    let expected = format!(
        "snapshot base: 16 pages are lost\n  /p/1f: group 0, page 3: digest of the page: expected \
         a, got b\n  next: make it again\n{wrote}1 snapshot is lost\n"
    );
    assert_eq!(repaired_text(&Repaired { lost: vec![lost], ..sound }), expected);
}

#[test]
fn shares_are_of_what_there_is() {
    assert_eq!(
        (share(1, 3), share(0, 0), share(u64::MAX, u64::MAX)),
        ("33.3 %".into(), "0.0 %".into(), "100.0 %".into())
    );
}
