//! The commands of `dayfly store`: used space, freed space, and damage.

use crate::harness::{BASE, dayfly, ok, on_host, sh, state_dir, until, world};
use serde_json::Value;

fn json(words: &[&str]) -> Value {
    serde_json::from_str(&ok(words)).unwrap()
}

/// A snapshot's row of `store du`.
fn du(name: &str) -> Option<Value> {
    let lines = ok(&["store", "du", "--format", "json"]);
    let mut rows = lines.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    rows.find(|row| row["name"] == name)
}

fn number(value: &Value) -> u64 {
    value.as_u64().unwrap_or_else(|| panic!("a number: {value}"))
}

#[test]
fn a_snapshot_gives_back_what_only_it_kept() {
    let world = world();
    // The layer of an earlier test is removed with the process of its last VM, which may end after
    // the answer to the removal.
    let base_layers = number(&du(BASE).unwrap()["layers"]["count"]);
    let stats = || json(&["store", "stats", "--format", "json"]);
    until("only the base's layers", || number(&stats()["layers"]["count"]) == base_layers);
    let before = stats();
    ok(&["create", "--name", "source", BASE]);
    // Unique pages, in memory and on disk.
    sh(
        "source",
        "head -c 6000000 /dev/urandom >/dev/shm/own; \
         head -c 3000000 /dev/urandom >/root/own; sync",
    );
    ok(&["snapshot", "source", "-t", "e2e-own"]);
    ok(&["rm", "-f", "source"]);
    let row = du("e2e-own").unwrap();
    let kinds = ["zero_bytes", "free_bytes", "disk_bytes", "shared_bytes", "own_bytes"];
    let sum: u64 = kinds.iter().map(|kind| number(&row["memory"][kind])).sum();
    assert_eq!(sum, number(&row["memory_bytes"]), "{row}");
    assert!(number(&row["memory"]["own_bytes"]) >= 6_000_000, "{row}");
    assert!(number(&row["memory"]["shared_bytes"]) > 1 << 20, "with {BASE}: {row}");
    assert!(
        number(&row["own_page_bytes"]) >= 5_000_000 && number(&row["own_layer_bytes"]) >= 3_000_000,
        "{row}"
    );
    let base = du(BASE).unwrap();
    assert!(number(&base["memory"]["shared_bytes"]) > 1 << 20, "{base}");
    let table = ok(&["store", "du"]);
    assert!(
        table.starts_with("SNAPSHOT") && table.contains("e2e-own") && table.contains("total"),
        "{table}"
    );
    let shown = json(&["inspect", "e2e-own"]);
    assert_eq!(shown["store"], row);

    let with = json(&["store", "stats", "--format", "json"]);
    let stored = |stats: &Value| number(&stats["pages"]["stored_bytes"]);
    assert!(stored(&with) >= stored(&before) + 5_000_000, "{before}, {with}");
    assert!(
        with["dedup_ratio"].as_f64().unwrap() > 1.0
            && with["compression_ratio"].as_f64().unwrap() > 1.0
    );
    let one = json(&["store", "verify", "--format", "json", "e2e-own"]);
    assert_eq!(
        (number(&one["snapshots"]), one["damaged"].as_array().unwrap().len()),
        (1, 0),
        "{one}"
    );

    ok(&["snapshots", "rm", "e2e-own"]);
    let collected = dayfly(&["store", "gc"]);
    assert!(collected.code == 0 && collected.out.starts_with("REMOVED"), "{collected:?}");
    let after = json(&["store", "stats", "--format", "json"]);
    assert!(stored(&after) + 5_000_000 <= stored(&with), "{with}, {after}");
    assert_eq!(number(&after["layers"]["count"]), number(&before["layers"]["count"]), "{after}");
    assert!(du("e2e-own").is_none());
    assert_eq!(ok(&["run", BASE, "echo", "well"]), "well");
    world.clean();
}

#[test]
fn a_flipped_byte_of_a_pack_is_found_and_named() {
    let world = world();
    let packs = format!("{}/pages/default", state_dir());
    let pack = on_host(&format!("ls -S {packs} | head -n 1")).out;
    let pack = format!("{packs}/{}", pack.trim());
    // Byte 100 is in the first group, because groups begin at the pack's first byte.
    let flip = format!(
        "set -e; f={pack}; chmod u+w $f; \
         b=$(dd if=$f bs=1 skip=100 count=1 2>/dev/null | od -An -tu1 | tr -d ' '); \
         printf \"\\\\$(printf %o $((b ^ 4)))\" | dd of=$f bs=1 seek=100 conv=notrunc 2>/dev/null"
    );
    let flipped = on_host(&flip);
    assert_eq!(flipped.code, 0, "{flipped:?}");
    let got = dayfly(&["store", "verify"]);
    let again = on_host(&flip);
    assert_eq!(again.code, 0, "{again:?}");
    assert_eq!(got.code, 1, "{got:?}");
    for says in [pack.as_str(), "group 0, page 0: ", "expected", "got", BASE, "next: ", "damaged\n"]
    {
        assert!(got.out.contains(says), "expected {says:?} in {got:?}");
    }
    let sound = dayfly(&["store", "verify", BASE]);
    assert!(sound.code == 0 && sound.out.contains("nothing is damaged"), "{sound:?}");
    let absent = dayfly(&["store", "verify", "absent"]);
    assert!(absent.code == 125 && absent.err.contains("absent"), "{absent:?}");
    world.clean();
}
