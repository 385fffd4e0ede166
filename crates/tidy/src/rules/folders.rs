//! Folders inside of a crate import downwards only, by a table under "Folders of CRATE" in
//! ARCHITECTURE.md.
//!
//! The rows are floors, the upper floor first. The second column lists the files and folders of
//! each floor in code spans, relative to `src/`; folders end with `/`. Files of one floor may
//! import each other. A crate without such a table has no floors.

use crate::finding::{Finding, Rule};
use crate::markdown::Document;
use crate::rust::arrows::Arrows;
use crate::rust::modules::Modules;
use crate::tree::Tree;

const MAP: &str = "ARCHITECTURE.md";

struct Floors {
    /// A file, or a folder with `/` at its end; its row from above; and the name of the row.
    places: Vec<(String, usize, String)>,
}

impl Floors {
    fn of(document: &Document, name: &str) -> Self {
        let mut places = Vec::new();
        for (row, cells) in document.rows_under(&format!("Folders of {name}")).enumerate() {
            let floor = cells.cells.first().cloned().unwrap_or_default();
            for place in cells.codes.get(1).into_iter().flatten() {
                places.push((place.clone(), row, floor.clone()));
            }
        }
        Self { places }
    }

    /// The floor of a file; of several places that cover the file, the longest counts.
    fn floor(&self, file: &str) -> Option<(usize, &str)> {
        let covers = |place: &str| match place.strip_suffix('/') {
            Some(_) => file.starts_with(place),
            None => file == place,
        };
        let covering = self.places.iter().filter(|(place, ..)| covers(place));
        let place = covering.max_by_key(|(place, ..)| place.len())?;
        Some((place.1, &place.2))
    }
}

/// Checks the arrows of one crate.
#[must_use]
pub fn check(tree: &Tree, name: &str, modules: &Modules, arrows: &Arrows) -> Vec<Finding> {
    let floors = Floors::of(&Document::parse(tree.text(MAP).unwrap_or_default()), name);
    if floors.places.is_empty() {
        return Vec::new();
    }
    let folder = format!("crates/{name}/src/");
    let mut findings = Vec::new();
    let mut files: Vec<&str> = modules
        .iter()
        .filter(|(_, module)| !module.test_only)
        .map(|(_, module)| module.file)
        .collect();
    files.sort_unstable();
    files.dedup();
    for path in files {
        let missing = path.strip_prefix(&folder).is_some_and(|file| floors.floor(file).is_none());
        if missing {
            let text = format!(
                "is in no row of the table under \"Folders of {name}\" of {MAP}; \
                 move it to the folder of its floor, or add it to the row"
            );
            findings.push(Finding { rule: Rule::NoFloor, path: path.to_owned(), line: 1, text });
        }
    }
    for ((from, to), arrow) in arrows {
        let floor = |path: &str| floors.floor(path.strip_prefix(&folder)?);
        let (Some((own, own_name)), Some((other, other_name))) = (floor(from), floor(to)) else {
            continue;
        };
        if other < own {
            let names: Vec<&str> = arrow.names.iter().map(String::as_str).collect();
            let text = format!(
                "{own_name} imports {} of {to} in {other_name}, expected only imports \
                 downwards; move the names down, or pass them in",
                names.join(", "),
            );
            findings.push(Finding {
                rule: Rule::FolderImport,
                path: from.clone(),
                line: arrow.line,
                text,
            });
        }
    }
    findings
}

#[cfg(test)]
mod tests {
    use super::check;
    use crate::rust::arrows;
    use crate::rust::modules::{Modules, Sources};
    use crate::tree::Tree;

    fn found(low: &str, extra: &str) -> Vec<String> {
        let map = "### Folders of `a`\n\n| floor | what |\n|---|---|\n| top | `lib.rs` |\n\
                   | high | `high.rs`, `low/odd.rs` |\n| low | `low/` |\n";
        let lib = format!("mod high; mod low; {extra}");
        let tree = Tree::of(&[
            ("ARCHITECTURE.md", map),
            ("crates/a/src/lib.rs", lib.as_str()),
            ("crates/a/src/high.rs", "use crate::low::L; pub struct H;"),
            ("crates/a/src/low/mod.rs", low),
            ("crates/a/src/low/odd.rs", ""),
            ("crates/a/src/other.rs", ""),
        ]);
        let sources = Sources::parse(&tree).unwrap();
        let modules = Modules::of_crate(&tree, &sources, "a");
        let arrows = arrows::of_modules(&modules);
        let findings = check(&tree, "a", &modules, &arrows);
        findings.iter().map(ToString::to_string).collect()
    }

    #[test]
    fn downwards_is_allowed() {
        assert!(found("pub struct L;", "").is_empty());
    }

    #[test]
    fn upwards_is_found_with_its_line() {
        let findings = found("pub struct L;\nuse crate::high::H;", "");
        assert_eq!(findings.len(), 1, "{findings:?}");
        let expected = "crates/a/src/low/mod.rs:2: folder-import: low imports H of \
                        crates/a/src/high.rs in high";
        assert!(findings[0].starts_with(expected), "{findings:?}");
    }

    #[test]
    fn a_file_without_a_floor_is_found_and_one_for_tests_is_not() {
        let findings = found("pub struct L;", "mod other;");
        assert!(findings[0].starts_with("crates/a/src/other.rs:1: no-floor:"), "{findings:?}");
        assert!(found("pub struct L;", "#[cfg(test)] mod other;").is_empty());
    }
}
