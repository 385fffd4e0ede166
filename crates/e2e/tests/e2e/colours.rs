//! The colours of a snapshot's memory, as JSON, table and picture.

use crate::harness::{BASE, dayfly, ok, sh, world};
use serde_json::Value;

fn bytes(colours: &Value, colour: &str, kind: &str) -> u64 {
    let all = colours["colours"].as_array().unwrap();
    let of = all
        .iter()
        .find(|of| of["colour"] == colour)
        .unwrap_or_else(|| panic!("{colour}: {colours}"));
    of[kind].as_u64().unwrap()
}

#[test]
fn a_snapshot_lists_and_draws_what_its_memory_is_used_for() {
    let world = world();
    ok(&["create", "--name", "painter", BASE]);
    sh("painter", "head -c 16000000 /dev/urandom >/dev/shm/file; rm -f /dev/shm/gone");
    sh("painter", "head -c 24000000 /dev/urandom >/dev/shm/gone; rm /dev/shm/gone");
    ok(&["snapshot", "painter", "-t", "e2e-painted"]);
    let colours: Value =
        serde_json::from_str(&ok(&["colours", "--no-picture", "--format", "json", "e2e-painted"]))
            .unwrap();
    for colour in ["kernel code", "kernel data", "user code", "user data", "page tables", "slab"] {
        assert!(bytes(&colours, colour, "page_bytes") > 100 << 10, "{colour}: {colours}");
    }
    assert!(bytes(&colours, "page cache", "page_bytes") >= 15 << 20, "the file: {colours}");
    // Pages of the deleted file are free, and are not stored.
    assert!(bytes(&colours, "free", "free_bytes") >= 64 << 20, "{colours}");
    assert_eq!(bytes(&colours, "free", "page_bytes"), 0, "{colours}");
    assert_eq!(bytes(&colours, "unknown", "page_bytes"), 0, "{colours}");

    let folder = tempfile::tempdir().unwrap();
    let picture = folder.path().join("painted.png");
    let path = picture.to_str().unwrap();
    let table = ok(&["colours", "-o", path, "e2e-painted"]);
    assert!(table.starts_with("COLOUR") && table.contains("page tables"), "{table}");
    let png = std::fs::read(&picture).unwrap();
    // A pixel for each of 65,536 pages, in rows of 512 (PNG, section 11.2.2).
    assert_eq!(png[..8], *b"\x89PNG\r\n\x1a\n");
    assert_eq!(png[16..24], [0, 0, 2, 0, 0, 0, 0, 128]);
    ok(&["rm", "-f", "painter"]);
    ok(&["snapshots", "rm", "e2e-painted"]);
    let gone = dayfly(&["colours", "e2e-painted"]);
    assert!(gone.code != 0 && gone.err.contains("no snapshot named e2e-painted"), "{gone:?}");
    world.clean();
}
