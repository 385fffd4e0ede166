//! No function of more than 80 lines.

use std::collections::BTreeMap;

use proc_macro2::{Delimiter, Span, TokenStream, TokenTree};
use syn::visit::{self, Visit};

use crate::finding::{Finding, Rule};
use crate::rust::modules::Sources;

/// Most lines that a function may have, from `fn` to its closing brace.
pub const MOST_LINES: usize = 80;

/// One function.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Function {
    /// Its name.
    pub name: String,
    /// Line of `fn`.
    pub line: usize,
    /// Lines from `fn` to the closing brace.
    pub lines: usize,
}

/// Functions of all files that are too long.
#[must_use]
pub fn check(sources: &Sources) -> Vec<Finding> {
    let mut findings = Vec::new();
    for (path, file) in sources.files() {
        for function in functions(file).into_iter().filter(|function| function.lines > MOST_LINES) {
            let Function { name, line, lines } = function;
            let text = format!(
                "{name} has {lines} lines, expected at most {MOST_LINES}; \
                 give its steps functions with names"
            );
            findings.push(Finding { rule: Rule::Function, path: path.to_owned(), line, text });
        }
    }
    findings
}

/// All functions of a file: free ones, methods, functions in functions and in macro calls.
#[must_use]
pub fn functions(file: &syn::File) -> Vec<Function> {
    let mut found = Found::default();
    found.visit_file(file);
    found.by_line.into_values().collect()
}

/// By line and column, so that none counts twice.
#[derive(Default)]
struct Found {
    by_line: BTreeMap<(usize, usize), Function>,
}

impl Found {
    fn put(&mut self, name: &str, start: Span, end: Span) {
        let (start, end) = (start.start(), end.end());
        let lines = end.line.saturating_sub(start.line) + 1;
        let function = Function { name: name.to_owned(), line: start.line, lines };
        self.by_line.insert((start.line, start.column), function);
    }

    /// `fn name … { … }` in the tokens of a macro call.
    fn scan(&mut self, tokens: &TokenStream) {
        let mut open: Option<(Span, Option<String>)> = None;
        for tree in tokens.clone() {
            match tree {
                TokenTree::Ident(ident) if ident == "fn" => open = Some((ident.span(), None)),
                TokenTree::Ident(ident) => {
                    if let Some((_, name)) = &mut open {
                        name.get_or_insert_with(|| ident.to_string());
                    }
                }
                TokenTree::Punct(punct) if punct.as_char() == ';' => open = None,
                TokenTree::Group(group) => {
                    if group.delimiter() == Delimiter::Brace
                        && let Some((start, Some(name))) = open.take()
                    {
                        self.put(&name, start, group.span_close());
                    }
                    self.scan(&group.stream());
                }
                TokenTree::Punct(_) | TokenTree::Literal(_) => {}
            }
        }
    }
}

impl<'ast> Visit<'ast> for Found {
    fn visit_item_fn(&mut self, item: &'ast syn::ItemFn) {
        let name = item.sig.ident.to_string();
        self.put(&name, item.sig.fn_token.span, item.block.brace_token.span.close());
        visit::visit_item_fn(self, item);
    }

    fn visit_impl_item_fn(&mut self, item: &'ast syn::ImplItemFn) {
        let name = item.sig.ident.to_string();
        self.put(&name, item.sig.fn_token.span, item.block.brace_token.span.close());
        visit::visit_impl_item_fn(self, item);
    }

    fn visit_trait_item_fn(&mut self, item: &'ast syn::TraitItemFn) {
        if let Some(block) = &item.default {
            let name = item.sig.ident.to_string();
            self.put(&name, item.sig.fn_token.span, block.brace_token.span.close());
        }
        visit::visit_trait_item_fn(self, item);
    }

    fn visit_macro(&mut self, call: &'ast syn::Macro) {
        self.scan(&call.tokens);
    }
}

#[cfg(test)]
mod tests {
    use super::{MOST_LINES, check, functions};
    use crate::rust::modules::Sources;
    use crate::tree::Tree;

    #[test]
    fn the_81st_line_is_one_too_many() {
        for (lines, expected) in [(MOST_LINES, 0), (MOST_LINES + 1, 1)] {
            let text = format!("\nfn long(\n) {{{}}}\n", "\n".repeat(lines - 2));
            let tree = Tree::of(&[("crates/a/src/lib.rs", text.as_str())]);
            let findings = check(&Sources::parse(&tree).unwrap());
            assert_eq!(findings.len(), expected, "{lines} lines");
            for finding in findings {
                let shown = finding.to_string();
                let start = "crates/a/src/lib.rs:2: function: long has 81 lines";
                assert!(shown.starts_with(start), "{shown}");
            }
        }
    }

    #[test]
    fn functions_of_every_kind_are_found() {
        let text = "fn a() { fn b() {} }\nimpl S { fn c() {\n} }\ntrait T { fn d(); fn e() {} }\n\
                    proptest! { #[test] fn f(x in 0..1) {\n\n} }\n";
        let found = functions(&syn::parse_file(text).unwrap());
        let shown: Vec<_> =
            found.iter().map(|function| (function.name.as_str(), function.lines)).collect();
        assert_eq!(shown, [("a", 1), ("b", 1), ("c", 2), ("e", 1), ("f", 3)]);
    }
}
