//! The source tree as it is checked out keeps the rules, but for what the baseline counts.

use dayfly_tidy::baseline::{self, Baseline};
use dayfly_tidy::check;
use dayfly_tidy::rust::modules::Sources;
use dayfly_tidy::tree::Tree;

#[test]
fn the_tree_keeps_the_rules() {
    let root = dayfly_tidy::root();
    let tree = Tree::read(&root).unwrap();
    let sources = Sources::parse(&tree).unwrap();
    let report = check::all(&tree, &sources).unwrap();
    let text = tree.text(baseline::PATH).unwrap_or_default();
    let mut baseline = Baseline::parse(text).unwrap();
    let now = Baseline::of(&report);
    match std::env::var("DAYFLY_UPDATE").as_deref() {
        Ok("raise") => baseline = now,
        Ok("1") => baseline = baseline.lowered(&now),
        Ok(other) => panic!("DAYFLY_UPDATE is {other:?}, expected 1 or raise"),
        Err(_) => {}
    }
    if std::env::var_os("DAYFLY_UPDATE").is_some() {
        std::fs::write(root.join(baseline::PATH), baseline.to_text()).unwrap();
    }
    let differences = baseline.compare(&report);
    assert!(
        differences.is_empty(),
        "{} differences\n{}",
        differences.len(),
        differences.join("\n")
    );
}
