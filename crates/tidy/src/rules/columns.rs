//! At most 100 columns in code, comments, Markdown and scripts. A tab counts four.
//!
//! Exempt: tables in Markdown, lines whose URL alone is too wide, files that programs write, and
//! code blocks of documents that `lists.toml` names.

use std::ops::Range;

use crate::finding::{Finding, Rule};
use crate::lists::Lists;
use crate::markdown::Document;
use crate::tree::{Kind, Tree, kind_of};

/// Most columns of a line.
const MOST: usize = 100;
/// Columns of a tab.
const TAB: usize = 4;

/// Checks every file that people write.
#[must_use]
pub fn check(tree: &Tree, lists: &Lists) -> Vec<Finding> {
    let mut findings = Vec::new();
    for (path, text) in tree.files().filter(|(path, _)| !lists.is_generated(path)) {
        let exempt = exempt_lines(path, text, lists);
        for (index, line) in text.lines().enumerate() {
            let columns = columns(line);
            let number = index + 1;
            let is_exempt = exempt.iter().any(|lines| lines.contains(&number));
            if columns > MOST && !is_exempt && !is_one_url(line) {
                let text = format!("has {columns} columns, expected at most {MOST}; break it");
                findings.push(Finding {
                    rule: Rule::Columns,
                    path: path.to_owned(),
                    line: number,
                    text,
                });
            }
        }
    }
    findings
}

fn exempt_lines(path: &str, text: &str, lists: &Lists) -> Vec<Range<usize>> {
    if kind_of(path) != Some(Kind::Markdown) {
        return Vec::new();
    }
    let document = Document::parse(text);
    let mut exempt = document.tables;
    if lists.wide_blocks.contains_key(path) {
        exempt.extend(document.blocks);
    }
    exempt
}

fn columns(line: &str) -> usize {
    line.chars().map(|letter| if letter == '\t' { TAB } else { 1 }).sum()
}

/// Whether the line would be too wide if its URL, with the indentation, were all it had.
fn is_one_url(line: &str) -> bool {
    let indentation = columns(line) - columns(line.trim_start());
    let marks = ["//", "///", "//!", "#", "-", "*"];
    let mark = line.split_whitespace().next().filter(|word| marks.contains(word));
    let before = indentation + mark.map_or(0, |mark| mark.len() + 1);
    let urls = line.split_whitespace().filter(|word| word.contains("://"));
    urls.into_iter().any(|word| before + columns(word) > MOST)
}

#[cfg(test)]
mod tests {
    use super::check;
    use crate::lists::Lists;
    use crate::tree::Tree;

    fn lines(path: &str, text: &str, lists: &str) -> Vec<usize> {
        let tree = Tree::of(&[(path, text)]);
        check(&tree, &Lists::parse(lists).unwrap()).iter().map(|finding| finding.line).collect()
    }

    #[test]
    fn the_101st_column_is_one_too_many() {
        for path in ["crates/a/src/lib.rs", "docs/a.md", "Makefile", "scripts/setup", "a.sh"] {
            let text = format!("{}\n{}\n", "é".repeat(100), "é".repeat(101));
            assert_eq!(lines(path, &text, ""), [2], "{path}");
        }
        assert_eq!(lines("Makefile", &format!("\t{}\n", "x".repeat(97)), ""), [1]);
    }

    #[test]
    fn what_cannot_be_broken_is_exempt() {
        let wide = "x".repeat(101);
        let table = format!("| a |\n|---|\n| {wide} |\n\n{wide}\n");
        assert_eq!(lines("docs/a.md", &table, ""), [5]);
        let block = format!("```\n{wide}\n```\n\n{wide}\n");
        assert_eq!(lines("docs/a.md", &block, ""), [2, 5]);
        assert_eq!(lines("docs/a.md", &block, "[wide_blocks]\n\"docs/a.md\" = \"map\"\n"), [5]);
        let url = format!("https://a/{}", "x".repeat(88));
        assert_eq!(lines("a.rs", &format!("/// {url}\n// see there: {url}\n"), ""), [0; 0]);
        let short = format!("// {} https://a/b\n", "word ".repeat(20));
        assert_eq!(lines("a.rs", &short, ""), [1]);
        assert_eq!(
            lines("docs/a.md", &wide, "[generated]\n\"docs/\" = \"by a program\"\n"),
            [0; 0]
        );
    }
}
