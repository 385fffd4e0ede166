//! Crates import downwards only, by the table under "Crates" in ARCHITECTURE.md.
//!
//! The first column of the table names crates, the second their floor. A crate imports only
//! crates of lower floors. Dev-dependencies are another rule, because a test may use what
//! the crate itself must not.

use std::collections::BTreeMap;

use anyhow::{Context, Result};
use toml::{Table, Value};

use crate::finding::{Finding, Rule};
use crate::markdown::Document;
use crate::tree::Tree;

const MAP: &str = "ARCHITECTURE.md";
const HEADING: &str = "Crates";

struct Floor {
    number: u32,
    line: usize,
}

/// Checks every `crates/*/Cargo.toml`.
///
/// # Errors
/// A manifest is no TOML.
pub fn check(tree: &Tree) -> Result<Vec<Finding>> {
    let mut findings = Vec::new();
    let floors = floors(tree, &mut findings);
    let names = tree.crates();
    for name in &names {
        let path = format!("crates/{name}/Cargo.toml");
        let text = tree.text(&path).unwrap_or_default();
        let Some(own) = floors.get(name) else {
            let text = format!(
                "crate {name} is missing in the table under \"{HEADING}\" of {MAP}; \
                 add a row with its floor"
            );
            findings.push(Finding { rule: Rule::CrateImport, path, line: 1, text });
            continue;
        };
        let manifest: Table = text.parse().with_context(|| path.clone())?;
        for (kind, dependency) in dependencies(&manifest) {
            let Some(other) = floors.get(&dependency) else { continue };
            if other.number < own.number || dependency == *name {
                continue;
            }
            let text = format!(
                "{name} (floor {}) depends on {dependency} (floor {}), expected only crates of \
                 lower floors; move what is used down, or correct the table in {MAP}",
                own.number, other.number,
            );
            let line = line_of(tree.text(&path).unwrap_or_default(), kind, &dependency);
            let rule = if kind == "dev-dependencies" { Rule::DevImport } else { Rule::CrateImport };
            findings.push(Finding { rule, path: path.clone(), line, text });
        }
    }
    for (name, floor) in &floors {
        if !names.contains(name) {
            let text = format!(
                "the table has a crate {name}, but crates/{name} is not there; \
                                remove its row"
            );
            let path = MAP.to_owned();
            findings.push(Finding { rule: Rule::CrateImport, path, line: floor.line, text });
        }
    }
    Ok(findings)
}

fn floors(tree: &Tree, findings: &mut Vec<Finding>) -> BTreeMap<String, Floor> {
    let document = Document::parse(tree.text(MAP).unwrap_or_default());
    let mut floors = BTreeMap::new();
    for row in document.rows_under(HEADING) {
        let number = row.cells.get(1).and_then(|cell| cell.trim().parse().ok());
        let name = row.codes.first().and_then(|codes| codes.first());
        if let (Some(number), Some(name)) = (number, name) {
            floors.insert(name.clone(), Floor { number, line: row.line });
        } else {
            let text = format!(
                "row {:?} has no crate or no floor, expected | `crate` | number | …; \
                 write both",
                row.cells.join(" | "),
            );
            let path = MAP.to_owned();
            findings.push(Finding { rule: Rule::CrateImport, path, line: row.line, text });
        }
    }
    floors
}

/// Names of our crates among the dependencies, with the table that names each.
fn dependencies(manifest: &Table) -> Vec<(&'static str, String)> {
    let targets = manifest.get("target").and_then(Value::as_table);
    let tables: Vec<&Table> = targets
        .into_iter()
        .flat_map(|targets| targets.values().filter_map(Value::as_table))
        .chain([manifest])
        .collect();
    let mut found = Vec::new();
    for kind in ["dependencies", "build-dependencies", "dev-dependencies"] {
        for table in tables.iter().filter_map(|table| table.get(kind)?.as_table()) {
            let ours = table.iter().filter_map(|(name, value)| {
                let package = value.get("package").and_then(Value::as_str).unwrap_or(name);
                package.strip_prefix("dayfly-")
            });
            found.extend(ours.map(|name| (kind, name.to_owned())));
        }
    }
    found
}

/// Line of a dependency: the first that names it after the head of its table.
fn line_of(manifest: &str, kind: &str, dependency: &str) -> usize {
    let name = format!("dayfly-{dependency}");
    let head = format!("{kind}]");
    let mut inside = false;
    for (index, line) in manifest.lines().enumerate() {
        if line.starts_with('[') {
            let exactly = line.trim_start_matches('[').rsplit('.').next() == Some(head.as_str());
            inside = exactly || line.contains(&name);
        }
        if inside && line.trim_start_matches('"').starts_with(&name) {
            return index + 1;
        }
    }
    1
}

#[cfg(test)]
mod tests {
    use super::check;
    use crate::tree::Tree;

    const TABLE: &str = "## Crates\n\n| crate | floor |\n|---|---|\n| `top` | 1 |\n| `low` | 0 |\n";

    fn found(map: &str, low: &str) -> Vec<String> {
        let top = "[dependencies]\ndayfly-low.workspace = true\n";
        let tree = Tree::of(&[
            ("ARCHITECTURE.md", map),
            ("crates/top/Cargo.toml", top),
            ("crates/low/Cargo.toml", low),
        ]);
        check(&tree).unwrap().iter().map(ToString::to_string).collect()
    }

    #[test]
    fn downwards_is_allowed() {
        assert!(found(TABLE, "[dependencies]\nserde = \"1\"\n").is_empty());
    }

    #[test]
    fn upwards_is_found_with_its_line() {
        let findings =
            found(TABLE, "[dependencies]\nserde = \"1\"\ndayfly-top = { path = \"\" }\n");
        assert_eq!(findings.len(), 1);
        let expected =
            "crates/low/Cargo.toml:3: crate-import: low (floor 0) depends on top (floor 1)";
        assert!(findings[0].starts_with(expected), "{findings:?}");
        let target = "[target.'cfg(unix)'.dependencies]\nother = { package = \"dayfly-top\" }\n";
        assert_eq!(found(TABLE, target).len(), 1);
    }

    #[test]
    fn dev_dependencies_are_another_rule() {
        let findings = found(TABLE, "[dev-dependencies]\ndayfly-top.workspace = true\n");
        assert!(findings[0].starts_with("crates/low/Cargo.toml:2: dev-import:"), "{findings:?}");
    }

    #[test]
    fn the_table_has_exactly_the_crates_there_are() {
        let missing = found(&TABLE.replace("| `low` | 0 |\n", ""), "");
        assert!(
            missing.iter().any(|finding| finding.contains("crate low is missing")),
            "{missing:?}"
        );
        let gone = found(&format!("{TABLE}| `gone` | 3 |\n"), "");
        assert!(gone[0].starts_with("ARCHITECTURE.md:7:"), "{gone:?}");
        let odd = found(&format!("{TABLE}| `odd` | high |\n"), "");
        assert!(odd[0].contains("no crate or no floor"), "{odd:?}");
        assert_eq!(found("", "").len(), 2);
    }
}
