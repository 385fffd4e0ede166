//! Counts Rust lines that are neither blank nor comment.
//!
//! Test code is what lies below `tests/` or `benches/` of a crate, files named `*_tests.rs`,
//! files mounted by a module for tests only, and items under `#[cfg(test)]`.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use anyhow::{Context, Result};
use syn::spanned::Spanned;
use syn::visit::{self, Visit};

use crate::rust::attributes as attrs;
use crate::rust::lex::{Lines, lex};
use crate::rust::modules::{Modules, Sources};
use crate::tree::Tree;

/// Lines of one crate.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Count {
    /// Lines of code that is no test.
    pub code: usize,
    /// Lines of test code.
    pub tests: usize,
}

/// Counts each crate.
///
/// # Errors
/// A file is no Rust.
pub fn count(tree: &Tree, sources: &Sources) -> Result<BTreeMap<String, Count>> {
    let mut counts = BTreeMap::new();
    for name in tree.crates() {
        let modules = Modules::of_crate(tree, sources, &name);
        let for_tests = modules.test_only_files();
        let folder = format!("crates/{name}/");
        let count: &mut Count = counts.entry(name).or_default();
        for (path, file) in sources.files().filter(|(path, _)| path.starts_with(&folder)) {
            let text = tree.text(path).unwrap_or_default();
            let below = path.strip_prefix(&folder).unwrap_or(path);
            let is_test = ["tests/", "benches/"].iter().any(|folder| below.starts_with(folder))
                || below.ends_with("_tests.rs")
                || for_tests.contains(path);
            let test_ranges = if is_test { whole(text) } else { test_ranges(text, file) };
            let of_file = of_file(text, &test_ranges).with_context(|| path.to_owned())?;
            count.code += of_file.code;
            count.tests += of_file.tests;
        }
    }
    Ok(counts)
}

fn whole(text: &str) -> Vec<Range<usize>> {
    std::iter::once(0..text.len()).collect()
}

/// A line with code of both kinds counts as code.
fn of_file(text: &str, test_ranges: &[Range<usize>]) -> Result<Count> {
    let lines = Lines::of(text);
    let (mut code, mut tests) = (BTreeSet::new(), BTreeSet::new());
    for token in lex(text)?.tokens {
        let is_test = test_ranges.iter().any(|range| range.contains(&token.bytes.start));
        let last = lines.line(token.bytes.end.saturating_sub(1));
        let covered = lines.line(token.bytes.start)..=last;
        if is_test { tests.extend(covered) } else { code.extend(covered) }
    }
    // A literal may have blank lines.
    let blank = text.lines().enumerate().filter(|(_, line)| line.trim().is_empty());
    for (index, _) in blank {
        code.remove(&(index + 1));
        tests.remove(&(index + 1));
    }
    Ok(Count { code: code.len(), tests: tests.difference(&code).count() })
}

fn test_ranges(text: &str, file: &syn::File) -> Vec<Range<usize>> {
    let mut found = TestCode::default();
    found.visit_file(file);
    // The comma after a field or an arm is no part of it.
    for range in &mut found.ranges {
        let rest = &text[range.end.min(text.len())..];
        let comma = rest.trim_start();
        if comma.starts_with(',') {
            range.end += rest.len() - comma.len() + 1;
        }
    }
    found.ranges
}

/// Collects what is compiled for tests only.
#[derive(Default)]
struct TestCode {
    ranges: Vec<Range<usize>>,
}

impl TestCode {
    /// Notes the code if it is for tests only; says whether it is.
    fn note(&mut self, attributes: &[syn::Attribute], code: &impl Spanned) -> bool {
        let is_test = attrs::is_test_only(attributes);
        if is_test {
            self.ranges.push(code.span().byte_range());
        }
        is_test
    }
}

impl<'ast> Visit<'ast> for TestCode {
    fn visit_item(&mut self, item: &'ast syn::Item) {
        if !self.note(attrs::of_item(item), item) {
            visit::visit_item(self, item);
        }
    }

    fn visit_impl_item(&mut self, item: &'ast syn::ImplItem) {
        if !self.note(attrs::of_impl_item(item), item) {
            visit::visit_impl_item(self, item);
        }
    }

    fn visit_trait_item(&mut self, item: &'ast syn::TraitItem) {
        if !self.note(attrs::of_trait_item(item), item) {
            visit::visit_trait_item(self, item);
        }
    }

    fn visit_stmt(&mut self, statement: &'ast syn::Stmt) {
        if !self.note(attrs::of_statement(statement), statement) {
            visit::visit_stmt(self, statement);
        }
    }

    fn visit_field(&mut self, field: &'ast syn::Field) {
        if !self.note(&field.attrs, field) {
            visit::visit_field(self, field);
        }
    }

    fn visit_field_value(&mut self, field: &'ast syn::FieldValue) {
        if !self.note(&field.attrs, field) {
            visit::visit_field_value(self, field);
        }
    }

    fn visit_variant(&mut self, variant: &'ast syn::Variant) {
        if !self.note(&variant.attrs, variant) {
            visit::visit_variant(self, variant);
        }
    }

    fn visit_arm(&mut self, arm: &'ast syn::Arm) {
        if !self.note(&arm.attrs, arm) {
            visit::visit_arm(self, arm);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{Count, count};
    use crate::rust::modules::Sources;
    use crate::tree::Tree;

    fn of(files: &[(&str, &str)]) -> Count {
        let mut all = vec![("crates/a/Cargo.toml", "")];
        all.extend(files);
        let tree = Tree::of(&all);
        count(&tree, &Sources::parse(&tree).unwrap()).unwrap()["a"]
    }

    #[test]
    fn blank_lines_and_comments_do_not_count() {
        let text = "//! Doc.\n\n/* one\ntwo */ fn f() {\n    // no\n    \
                    let s = \"// yes\n\n// yes\n\";\n}\n";
        assert_eq!(of(&[("crates/a/src/lib.rs", text)]), Count { code: 5, tests: 0 });
    }

    #[test]
    fn test_code_is_counted_apart() {
        let lib = "mod b;\n#[cfg(test)]\nmod tests;\n\
                   #[cfg(test)]\n/// Doc.\nmod more {\n  fn f() {}\n}\n\
                   struct S {\n  #[cfg(test)]\n  a: u8,\n  b: u8,\n}\n\
                   fn g() {\n  #[cfg(test)]\n  h();\n}\n";
        let found = of(&[
            ("crates/a/src/lib.rs", lib),
            ("crates/a/src/b.rs", "#[cfg(test)]\n#[path = \"b_tests.rs\"]\nmod tests;\n"),
            ("crates/a/src/b_tests.rs", "fn f() {}\n"),
            ("crates/a/src/tests.rs", "fn f() {}\nmod deep;\n"),
            ("crates/a/src/tests/deep.rs", "fn f() {}\n"),
            ("crates/a/tests/t.rs", "fn f() {}\n"),
            ("crates/a/benches/t.rs", "fn f() {}\n"),
            ("crates/a/examples/t.rs", "fn f() {}\n"),
        ]);
        assert_eq!(found, Count { code: 7, tests: 19 });
    }
}
