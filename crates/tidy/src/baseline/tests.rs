use std::collections::BTreeSet;

use super::Baseline;
use crate::check::Report;
use crate::finding::{Finding, Rule};
use crate::rules::circles::{Circle, Tie};
use crate::rust::arrows::Arrow;

/// A report with `wide` wide lines in file `a`, and circles of these files of crate `c`.
fn report(wide: usize, circles: &[&[&str]]) -> Report {
    let finding = |line| Finding {
        rule: Rule::Columns,
        path: "a".to_owned(),
        line,
        text: "too wide".to_owned(),
    };
    let circle = |files: &&[&str]| {
        let files: Vec<String> = files.iter().map(|file| format!("crates/c/{file}")).collect();
        let arrow =
            Arrow { line: 7, names: BTreeSet::from(["N".to_owned()]), reexport_only: false };
        let tie = Tie { from: files[0].clone(), to: files[1].clone(), arrow };
        Circle { files, cut: vec![tie] }
    };
    Report {
        findings: (1..=wide).map(finding).collect(),
        circles: [("c".to_owned(), circles.iter().map(circle).collect())].into(),
    }
}

#[test]
fn the_text_reads_back() {
    let baseline = Baseline::of(&report(2, &[&["x", "y"]]));
    let text = baseline.to_text();
    assert_eq!(Baseline::parse(&text).unwrap(), baseline);
    assert!(
        text.contains("a = { columns = 2 }") || text.contains("\"a\" = { columns = 2 }"),
        "{text}"
    );
}

#[test]
fn more_and_fewer_both_differ() {
    let baseline = Baseline::of(&report(2, &[]));
    assert!(baseline.compare(&report(2, &[])).is_empty());
    let more = baseline.compare(&report(3, &[]));
    assert_eq!(more.len(), 3);
    assert_eq!(more[2], "a:3: columns: too wide (3 in this file, 2 are allowed)");
    let fewer = baseline.compare(&report(1, &[]));
    assert!(fewer[0].contains("1 findings, expected the 2") && fewer.len() == 1, "{fewer:?}");
    assert_eq!(baseline.compare(&report(0, &[])).len(), 1);
}

#[test]
fn at_most_twenty_of_a_rule_are_shown() {
    let lines = Baseline::default().compare(&report(30, &[]));
    assert_eq!(lines.len(), 21);
    assert!(lines[20].starts_with("columns: 10 more;"), "{lines:?}");
}

#[test]
fn circles_may_only_shrink() {
    let baseline = Baseline::of(&report(0, &[&["x", "y", "z"]]));
    assert!(baseline.compare(&report(0, &[&["x", "y", "z"]])).is_empty());
    let two: [&[&str]; 2] = [&["p", "q"], &["a", "b"]];
    let baseline_of_two = Baseline::parse(&Baseline::of(&report(0, &two)).to_text()).unwrap();
    assert!(
        baseline_of_two.compare(&report(0, &[two[1], two[0]])).is_empty(),
        "the order does not matter"
    );
    let other = baseline.compare(&report(0, &[&["w", "x", "y", "z"]]));
    assert!(other[0].contains("crates/c/w:7 imports N of crates/c/x"), "{other:?}");
    let fewer = baseline.compare(&report(0, &[&["x", "y"]]));
    assert!(fewer[0].contains("fewer files are in circles"), "{fewer:?}");
    assert!(!baseline.compare(&report(0, &[])).is_empty());
}

#[test]
fn lowering_never_raises() {
    let baseline = Baseline::of(&report(2, &[&["x", "y", "z"]]));
    let lowered =
        |wide, circles: &[&[&str]]| baseline.lowered(&Baseline::of(&report(wide, circles)));
    assert_eq!(lowered(1, &[&["x", "y"]]), Baseline::of(&report(1, &[&["x", "y"]])));
    assert_eq!(lowered(9, &[&["x", "y", "z", "w"]]), baseline);
    assert_eq!(lowered(9, &[&["x", "y", "z"], &["v", "w"]]), baseline);
    assert_eq!(lowered(0, &[]), Baseline::default());
}
