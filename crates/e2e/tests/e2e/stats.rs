//! The memory that VMs use, by colour.

use crate::harness::{BASE, ok, refused, sh, world};
use serde_json::Value;

fn sum(footprint: &Value, kind: &str) -> u64 {
    footprint["colours"].as_array().unwrap().iter().map(|of| of[kind].as_u64().unwrap()).sum()
}

#[test]
fn a_clone_uses_the_memory_that_it_has_touched() {
    let world = world();
    ok(&["create", "--name", "held", BASE]);
    let of = |vm: &str| -> Value {
        serde_json::from_str(&ok(&["stats", vm, "--format", "json"])).unwrap()
    };
    let before = of("held");
    let (own, shared) = (sum(&before, "own_bytes"), sum(&before, "shared_bytes"));
    let memory_bytes = before["memory_bytes"].as_u64().unwrap();
    assert!(own > 0 && shared > 0, "{before}");
    assert!(
        own + shared + sum(&before, "zero_bytes") < memory_bytes / 2,
        "not what it never touched: {before}"
    );
    let colour = |name: &str| {
        let all = before["colours"].as_array().unwrap();
        all.iter().find(|of| of["colour"] == name).unwrap_or_else(|| panic!("{name}: {before}"))
    };
    assert!(colour("kernel code")["shared_bytes"].as_u64().unwrap() > 0, "{before}");
    assert_eq!(colour("unknown")["own_bytes"], 0, "{before}");

    sh("held", "mount -t tmpfs none /mnt && head -c 16777216 /dev/urandom >/mnt/new");
    let after = of("held");
    let grown = sum(&after, "own_bytes").saturating_sub(own);
    assert!((16 << 20..48 << 20).contains(&grown), "{grown} bytes more: {after}");

    ok(&["create", "--name", "other", BASE]);
    let all: Vec<Value> = serde_json::from_str(&ok(&["stats", "--format", "json"])).unwrap();
    let names: Vec<&str> = all.iter().map(|of| of["name"].as_str().unwrap()).collect();
    assert!(names.contains(&"held") && names.contains(&"other"), "{names:?}");
    let table = ok(&["stats"]);
    assert!(table.contains("held") && table.contains("OWN"), "{table}");
    let table = ok(&["stats", "held"]);
    assert!(
        table.contains("page cache") && table.lines().last().unwrap().starts_with("all"),
        "{table}"
    );
    ok(&["kill", "other"]);
    refused(&["stats", "other"], &["other"]);
    world.clean();
}
