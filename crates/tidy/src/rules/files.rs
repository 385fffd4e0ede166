//! No file of more than 500 lines without a reason in `lists.toml`, none of more than 800.

use crate::finding::{Finding, Rule};
use crate::lists::{self, Lists};
use crate::tree::Tree;

/// Most lines without a reason.
const LONG: usize = 500;
/// Most lines at all.
const MOST: usize = 800;

/// Checks every file that people write, and that the list has no entry without need.
#[must_use]
pub fn check(tree: &Tree, lists: &Lists) -> Vec<Finding> {
    let mut findings = Vec::new();
    for (path, text) in tree.files().filter(|(path, _)| !lists.is_generated(path)) {
        let lines = text.lines().count();
        let (rule, most, next) = if lines > MOST {
            let next = "split it by concern, or move its tests to a sibling file".to_owned();
            (Rule::HugeFile, MOST, next)
        } else if lines > LONG && !lists.long_files.contains_key(path) {
            let next = format!("split it by concern, or write the reason in {}", lists::PATH);
            (Rule::File, LONG, next)
        } else {
            continue;
        };
        let text = format!("has {lines} lines, expected at most {most}; {next}");
        findings.push(Finding { rule, path: path.to_owned(), line: most + 1, text });
    }
    for path in lists.long_files.keys() {
        let lines = tree.text(path).map_or(0, |text| text.lines().count());
        if lines <= LONG {
            let text = format!("{path} has {lines} lines and needs no reason; remove its entry");
            let path = lists::PATH.to_owned();
            findings.push(Finding { rule: Rule::File, path, line: 1, text });
        }
    }
    findings
}

#[cfg(test)]
mod tests {
    use super::check;
    use crate::finding::Rule;
    use crate::lists::Lists;
    use crate::tree::Tree;

    fn count(lines: usize, lists: &str) -> usize {
        let text = "\n".repeat(lines);
        let tree = Tree::of(&[("docs/a.md", text.as_str())]);
        check(&tree, &Lists::parse(lists).unwrap()).len()
    }

    #[test]
    fn length_needs_a_reason_and_has_an_end() {
        let reason = "[long_files]\n\"docs/a.md\" = \"one table\"\n";
        assert_eq!(count(500, ""), 0);
        assert_eq!(count(501, ""), 1);
        assert_eq!(count(501, reason), 0);
        assert_eq!(count(800, reason), 0);
        assert_eq!(count(801, reason), 1);
        assert_eq!(count(500, reason), 1);
        assert_eq!(count(900, "[generated]\n\"docs/\" = \"by a program\"\n"), 0);
    }

    /// A count of long files in the baseline must not cover a file that grows further.
    #[test]
    fn the_end_is_a_rule_apart() {
        let text = "\n".repeat(801);
        let tree = Tree::of(&[("docs/a.md", text.as_str())]);
        assert_eq!(check(&tree, &Lists::default())[0].rule, Rule::HugeFile);
    }

    #[test]
    fn a_reason_is_written() {
        assert!(Lists::parse("[long_files]\n\"docs/a.md\" = \" \"\n").is_err());
    }
}
