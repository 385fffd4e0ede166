//! Paths that the code of one module names, in expressions, types, patterns, macros, attributes.

use proc_macro2::{TokenStream, TokenTree};
use syn::spanned::Spanned;
use syn::visit::{self, Visit};
use syn::{Attribute, ImplItem, Item, ItemUse, Macro, Path, Stmt, TraitItem};

use super::attributes as attrs;
use super::names::{Import, imports_of};

/// What kind of place a path stands in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// Code; the path may be a name of one segment.
    Code,
    /// The name of a macro that is called.
    Macro,
    /// A string in an attribute, such as `#[serde(with = "a::b")]`.
    Attribute,
}

/// One path and where it is.
#[derive(Debug, PartialEq, Eq)]
pub struct Named {
    /// Its segments, without generic arguments.
    pub segments: Vec<String>,
    /// Line of the first segment.
    pub line: usize,
    /// Where it stands.
    pub place: Place,
}

/// All that a module names.
#[derive(Debug, Default)]
pub struct Uses {
    /// `use` declarations, those inside of functions among them.
    pub imports: Vec<Import>,
    /// Paths.
    pub paths: Vec<Named>,
}

/// What `items` name. Code for tests only and modules inside are left out.
#[must_use]
pub fn of_items(items: &[Item]) -> Uses {
    let mut uses = Uses::default();
    for item in items {
        uses.visit_item(item);
    }
    uses
}

impl Uses {
    fn put(&mut self, segments: Vec<String>, line: usize, place: Place) {
        self.paths.push(Named { segments, line, place });
    }

    /// Tokens of a macro are not parsed, so every `a::b::c` in them counts as a path.
    fn scan(&mut self, tokens: &TokenStream) {
        let trees: Vec<TokenTree> = tokens.clone().into_iter().collect();
        let mut at = 0;
        while at < trees.len() {
            match &trees[at] {
                TokenTree::Group(group) => self.scan(&group.stream()),
                TokenTree::Ident(first) => {
                    let line = first.span().start().line;
                    let mut segments = vec![first.to_string()];
                    while let Some(next) = segment_after(&trees, at) {
                        segments.push(next);
                        at += 3;
                    }
                    let call = is_mark(trees.get(at + 1), '!');
                    self.put(segments, line, if call { Place::Macro } else { Place::Code });
                }
                TokenTree::Punct(_) | TokenTree::Literal(_) => {}
            }
            at += 1;
        }
    }

    /// Strings in an attribute that can be read as a path.
    fn scan_strings(&mut self, tokens: &TokenStream) {
        for tree in tokens.clone() {
            match tree {
                TokenTree::Group(group) => self.scan_strings(&group.stream()),
                TokenTree::Literal(literal) => {
                    let text = literal.to_string();
                    let Ok(path) = syn::parse_str::<Path>(text.trim_matches('"')) else { continue };
                    self.put(segments_of(&path), literal.span().start().line, Place::Attribute);
                }
                TokenTree::Ident(_) | TokenTree::Punct(_) => {}
            }
        }
    }
}

fn is_mark(tree: Option<&TokenTree>, mark: char) -> bool {
    matches!(tree, Some(TokenTree::Punct(punct)) if punct.as_char() == mark)
}

/// The identifier after `::`, if that follows the tree at `at`.
fn segment_after(trees: &[TokenTree], at: usize) -> Option<String> {
    let colons = is_mark(trees.get(at + 1), ':') && is_mark(trees.get(at + 2), ':');
    match trees.get(at + 3) {
        Some(TokenTree::Ident(ident)) if colons => Some(ident.to_string()),
        _ => None,
    }
}

fn segments_of(path: &Path) -> Vec<String> {
    path.segments.iter().map(|segment| segment.ident.to_string()).collect()
}

impl<'ast> Visit<'ast> for Uses {
    fn visit_item(&mut self, item: &'ast Item) {
        if !matches!(item, Item::Mod(_)) && !attrs::is_test_only(attrs::of_item(item)) {
            visit::visit_item(self, item);
        }
    }

    fn visit_impl_item(&mut self, item: &'ast ImplItem) {
        if !attrs::is_test_only(attrs::of_impl_item(item)) {
            visit::visit_impl_item(self, item);
        }
    }

    fn visit_trait_item(&mut self, item: &'ast TraitItem) {
        if !attrs::is_test_only(attrs::of_trait_item(item)) {
            visit::visit_trait_item(self, item);
        }
    }

    fn visit_stmt(&mut self, statement: &'ast Stmt) {
        if !attrs::is_test_only(attrs::of_statement(statement)) {
            visit::visit_stmt(self, statement);
        }
    }

    fn visit_field(&mut self, field: &'ast syn::Field) {
        if !attrs::is_test_only(&field.attrs) {
            visit::visit_field(self, field);
        }
    }

    fn visit_field_value(&mut self, field: &'ast syn::FieldValue) {
        if !attrs::is_test_only(&field.attrs) {
            visit::visit_field_value(self, field);
        }
    }

    fn visit_variant(&mut self, variant: &'ast syn::Variant) {
        if !attrs::is_test_only(&variant.attrs) {
            visit::visit_variant(self, variant);
        }
    }

    fn visit_arm(&mut self, arm: &'ast syn::Arm) {
        if !attrs::is_test_only(&arm.attrs) {
            visit::visit_arm(self, arm);
        }
    }

    fn visit_item_use(&mut self, declaration: &'ast ItemUse) {
        imports_of(declaration, &mut self.imports);
    }

    fn visit_visibility(&mut self, _: &'ast syn::Visibility) {}

    fn visit_path(&mut self, path: &'ast Path) {
        if path.leading_colon.is_none() {
            self.put(segments_of(path), path.span().start().line, Place::Code);
        }
        visit::visit_path(self, path);
    }

    fn visit_macro(&mut self, call: &'ast Macro) {
        self.put(segments_of(&call.path), call.path.span().start().line, Place::Macro);
        self.scan(&call.tokens);
    }

    fn visit_attribute(&mut self, attribute: &'ast Attribute) {
        if let syn::Meta::List(list) = &attribute.meta
            && !list.path.is_ident("cfg")
            && !list.path.is_ident("doc")
        {
            self.scan_strings(&list.tokens);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{Place, of_items};

    fn paths(text: &str) -> Vec<(String, usize, Place)> {
        let uses = of_items(&syn::parse_file(text).unwrap().items);
        uses.paths
            .into_iter()
            .map(|named| (named.segments.join("::"), named.line, named.place))
            .collect()
    }

    #[test]
    fn paths_in_macros_and_attributes_are_found() {
        let text = "fn f() {\n  print!(\"{}\", crate::a::b(c::D));\n}\n\
                    #[serde(with = \"e::f\")]\nstruct S;";
        let found = paths(text);
        for expected in [
            ("print", 2, Place::Macro),
            ("crate::a::b", 2, Place::Code),
            ("c::D", 2, Place::Code),
            ("e::f", 4, Place::Attribute),
        ] {
            assert!(found.contains(&(expected.0.to_owned(), expected.1, expected.2)), "{found:?}");
        }
    }

    #[test]
    fn code_for_tests_is_left_out() {
        let text = "#[cfg(test)] fn f() { a::b() }\nmod m { fn f() { c::d() } }\n\
                    fn g() { #[cfg(test)] e::f(); #[cfg(test)] let x = g::h(); i::j() }\n\
                    impl T { #[cfg(test)] fn k() { l::m() } }";
        let found: Vec<String> = paths(text).into_iter().map(|(path, ..)| path).collect();
        assert_eq!(found, ["i::j", "T"]);
    }
}
