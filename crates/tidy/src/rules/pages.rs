//! Every page of `docs/` is reached from README.md, and no relative link leads nowhere.

use std::collections::{BTreeMap, BTreeSet};

use crate::finding::{Finding, Rule};
use crate::markdown::{Document, Link};
use crate::tree::{Kind, Tree};

/// Where a reader begins.
const START: &str = "README.md";

/// Checks all Markdown files.
#[must_use]
pub fn check(tree: &Tree) -> Vec<Finding> {
    let documents: BTreeMap<&str, Document> =
        tree.of_kind(Kind::Markdown).map(|(path, text)| (path, Document::parse(text))).collect();
    let mut findings = Vec::new();
    for (path, document) in &documents {
        for link in &document.links {
            if let Some(text) = problem(tree, &documents, path, link) {
                let path = (*path).to_owned();
                findings.push(Finding { rule: Rule::Link, path, line: link.line, text });
            }
        }
    }
    let reached = reached(&documents);
    for path in
        documents.keys().filter(|path| path.starts_with("docs/") && !reached.contains(**path))
    {
        let text = format!("no page that {START} leads to links it; link it where it belongs");
        findings.push(Finding { rule: Rule::Page, path: (*path).to_owned(), line: 1, text });
    }
    findings
}

/// File and anchor that a relative link leads to; `None` for links that leave the tree.
fn destination(from: &str, target: &str) -> Option<(String, Option<String>)> {
    if target.contains("://") || target.starts_with("mailto:") {
        return None;
    }
    let (file, anchor) = match target.split_once('#') {
        Some((file, anchor)) => (file, Some(anchor.to_owned())),
        None => (target, None),
    };
    if file.is_empty() {
        return Some((from.to_owned(), anchor));
    }
    let mut parts: Vec<&str> = from.split('/').collect();
    parts.pop();
    for part in file.split('/') {
        match part {
            "" | "." => {}
            ".." => drop(parts.pop()),
            name => parts.push(name),
        }
    }
    Some((parts.join("/"), anchor))
}

fn problem(
    tree: &Tree,
    documents: &BTreeMap<&str, Document>,
    from: &str,
    link: &Link,
) -> Option<String> {
    let (file, anchor) = destination(from, &link.target)?;
    if !file.is_empty() && !tree.contains(&file) {
        return Some(format!("link to {}: no file {file}; correct the link", link.target));
    }
    let anchor = anchor?;
    let document = documents.get(file.as_str())?;
    if document.anchors.contains(&anchor) {
        return None;
    }
    let target = &link.target;
    Some(format!("link to {target}: {file} has no heading #{anchor}; correct the link"))
}

fn reached<'a>(documents: &'a BTreeMap<&str, Document>) -> BTreeSet<&'a str> {
    let mut reached = BTreeSet::new();
    let mut open = vec![START.to_owned()];
    while let Some(path) = open.pop() {
        let Some((path, document)) = documents.get_key_value(path.as_str()) else { continue };
        if reached.insert(*path) {
            let targets = document.links.iter().filter_map(|link| destination(path, &link.target));
            open.extend(targets.map(|(file, _)| file));
        }
    }
    reached
}

#[cfg(test)]
mod tests {
    use super::check;
    use crate::tree::Tree;

    fn found(readme: &str, page: &str) -> Vec<String> {
        let tree = Tree::of(&[
            ("README.md", readme),
            ("docs/a.md", page),
            ("docs/deep/b.md", "# The B!\n"),
            ("LICENSE", ""),
        ]);
        check(&tree).iter().map(ToString::to_string).collect()
    }

    #[test]
    fn pages_are_reached_along_links() {
        let page = "[b](deep/b.md#the-b) [l](../LICENSE) [w](https://w/#x) [own](#own)\n# Own\n";
        assert!(found("[a](docs/a.md)", page).is_empty());
        let lost = found("[a](docs/a.md)", "");
        assert_eq!(lost.len(), 1);
        assert!(lost[0].starts_with("docs/deep/b.md:1: page:"), "{lost:?}");
        assert_eq!(found("", page).len(), 2);
    }

    #[test]
    fn dead_links_and_anchors_are_found_with_their_line() {
        let page = "[b](deep/b.md)\n\n[c](c.md)\n[d](deep/b.md#c)\n[e](#e)\n";
        let dead = found("[a](docs/a.md)", page);
        assert_eq!(dead.len(), 3, "{dead:?}");
        assert!(dead[0].starts_with("docs/a.md:3: link: link to c.md: no file docs/c.md"));
        assert!(dead[1].contains("docs/deep/b.md has no heading #c"));
        assert!(dead[2].contains("docs/a.md has no heading #e"));
    }
}
