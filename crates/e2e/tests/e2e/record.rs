//! Recorded runs, compared with the working set of the bake.

use crate::harness::{BASE, ok, refused, world};
use serde_json::Value;
use std::collections::BTreeSet;

fn sum(recording: &Value, kind: &str) -> u64 {
    recording["colours"].as_array().unwrap().iter().map(|of| of[kind].as_u64().unwrap()).sum()
}

#[test]
fn a_run_is_recorded_touch_by_touch_and_compared_with_the_working_set() {
    let world = world();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("touches.json");
    let path = path.to_str().unwrap();
    let first = ok(&["record", BASE, "--format", "json", "-o", path]);
    let first: Value = serde_json::from_str(&first).unwrap();
    let (touched, expected) = (sum(&first, "touched_bytes"), sum(&first, "expected_bytes"));
    assert!(touched > 1 << 20, "{first}");
    // The bake has recorded the same run.
    assert!(expected * 100 >= touched * 85, "{expected} of {touched}: {first}");

    let file: Value = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
    let touches: Vec<(u64, u64)> = serde_json::from_value(file["touches"].clone()).unwrap();
    let frames: BTreeSet<u64> = touches.iter().map(|(frame, _)| *frame).collect();
    assert_eq!(frames.len(), touches.len(), "each frame once");
    assert!(touches.is_sorted_by_key(|(_, us)| us), "in their order");
    let memory_bytes = first["memory_bytes"].as_u64().unwrap();
    assert!(frames.iter().all(|frame| frame * 4096 < memory_bytes));
    assert_eq!(frames.len() as u64 * 4096, touched + sum(&first, "zero_bytes"));

    // A run that does more touches pages beyond the working set.
    let more = ok(&[
        "record",
        BASE,
        "--format",
        "json",
        "--cmd",
        "cat /bin/* /sbin/* >/dev/null 2>&1; true",
    ]);
    let more: Value = serde_json::from_str(&more).unwrap();
    assert!(sum(&more, "touched_bytes") > touched + (100 << 10), "{more}");
    let missed = |of: &Value| sum(of, "touched_bytes") - sum(of, "expected_bytes");
    assert!(missed(&more) > missed(&first), "{more}");
    let table = ok(&["record", BASE]);
    assert!(table.starts_with("COLOUR") && table.contains("kernel code"), "{table}");

    refused(&["record", "e2e-none"], &["no snapshot named e2e-none"]);
    refused(&["record", BASE, "--cmd", "exit 7"], &["recording", "expected exit code 0"]);
    world.clean();
}
