//! Names that a module defines and names that it imports.

use std::collections::BTreeSet;

use proc_macro2::{TokenStream, TokenTree};
use syn::spanned::Spanned;
use syn::visit::{self, Visit};
use syn::{Item, ItemUse, UseTree};

use super::attributes;

/// One name, or all names, that a `use` declaration brings into a module.
#[derive(Clone, Debug)]
pub struct Import {
    /// Name in this module; `None` for `*`.
    pub name: Option<String>,
    /// Segments of the full path; for `*`, of the path before it.
    pub path: Vec<String>,
    /// Whether the declaration has a visibility, so that others may import through this module.
    pub reexport: bool,
    /// Whether the declaration is compiled for tests only.
    pub test_only: bool,
    /// Line of the name.
    pub line: usize,
}

/// What stands at the level of one module.
#[derive(Debug, Default)]
pub struct Names {
    /// See [`super::modules::Module::defined`].
    pub defined: BTreeSet<String>,
    /// See [`super::modules::Module::maybe_defined`].
    pub maybe_defined: BTreeSet<String>,
    /// See [`super::modules::Module::imports`].
    pub imports: Vec<Import>,
    /// See [`super::modules::Module::inner_imports`].
    pub inner_imports: Vec<Import>,
}

/// Names of a module with these items.
#[must_use]
pub fn of_items(items: &[Item]) -> Names {
    let mut names = Names::default();
    for item in items {
        match item {
            Item::Use(declaration) => imports_of(declaration, &mut names.imports),
            Item::Mod(_) => {}
            Item::Macro(call) => match &call.ident {
                Some(name) => drop(names.defined.insert(name.to_string())),
                None => identifiers(&call.mac.tokens, &mut names.maybe_defined),
            },
            _ => {
                names.defined.extend(name_of(item));
                let mut inner = Inner { imports: &mut names.inner_imports };
                inner.visit_item(item);
            }
        }
    }
    names
}

/// Name of an item, for kinds of items that have one.
fn name_of(item: &Item) -> Option<String> {
    let name = match item {
        Item::Const(item) => &item.ident,
        Item::Enum(item) => &item.ident,
        Item::Fn(item) => &item.sig.ident,
        Item::Static(item) => &item.ident,
        Item::Struct(item) => &item.ident,
        Item::Trait(item) => &item.ident,
        Item::TraitAlias(item) => &item.ident,
        Item::Type(item) => &item.ident,
        Item::Union(item) => &item.ident,
        _ => return None,
    };
    Some(name.to_string())
}

fn identifiers(tokens: &TokenStream, found: &mut BTreeSet<String>) {
    for tree in tokens.clone() {
        match tree {
            TokenTree::Ident(ident) => drop(found.insert(ident.to_string())),
            TokenTree::Group(group) => identifiers(&group.stream(), found),
            TokenTree::Punct(_) | TokenTree::Literal(_) => {}
        }
    }
}

/// Collects `use` declarations inside of functions.
struct Inner<'a> {
    imports: &'a mut Vec<Import>,
}

impl<'ast> Visit<'ast> for Inner<'_> {
    fn visit_item_use(&mut self, declaration: &'ast ItemUse) {
        imports_of(declaration, self.imports);
    }

    fn visit_item(&mut self, item: &'ast Item) {
        if !attributes::is_test_only(attributes::of_item(item)) {
            visit::visit_item(self, item);
        }
    }
}

/// Adds what `declaration` imports.
pub fn imports_of(declaration: &ItemUse, imports: &mut Vec<Import>) {
    let first = Import {
        name: None,
        path: Vec::new(),
        reexport: !matches!(declaration.vis, syn::Visibility::Inherited),
        test_only: attributes::is_test_only(&declaration.attrs),
        line: 0,
    };
    // `use ::name::…` is a path of another crate.
    if declaration.leading_colon.is_none() {
        leaves(&declaration.tree, &first, imports);
    }
}

fn leaves(tree: &UseTree, before: &Import, imports: &mut Vec<Import>) {
    let mut here = before.clone();
    here.line = tree.span().start().line;
    let mut finish = |mut here: Import, last: Option<String>, name: Option<String>| {
        // `use a::{self}` imports `a` under its own name.
        let is_self = last.as_deref() == Some("self") && !here.path.is_empty();
        let own = here.path.last().cloned();
        here.name = match name {
            Some(name) if name == "self" && is_self => own,
            name => name,
        };
        if !is_self {
            here.path.extend(last);
        }
        imports.push(here);
    };
    match tree {
        UseTree::Path(path) => {
            here.path.push(path.ident.to_string());
            leaves(&path.tree, &here, imports);
        }
        UseTree::Group(group) => {
            for inner in &group.items {
                leaves(inner, &here, imports);
            }
        }
        UseTree::Name(name) => {
            finish(here, Some(name.ident.to_string()), Some(name.ident.to_string()));
        }
        UseTree::Rename(rename) => {
            finish(here, Some(rename.ident.to_string()), Some(rename.rename.to_string()));
        }
        UseTree::Glob(_) => finish(here, None, None),
    }
}

#[cfg(test)]
mod tests {
    use super::of_items;

    #[test]
    fn imports_are_taken_apart() {
        let text = "use a::{self, b::C as D, e::*};\npub(crate) use f;\nfn g() { use h::i; }\n\
                    use ::j::k;\nmake!(Made);";
        let names = of_items(&syn::parse_file(text).unwrap().items);
        let shown: Vec<_> = names
            .imports
            .iter()
            .map(|import| {
                (import.name.as_deref().unwrap_or("*"), import.path.join("::"), import.line)
            })
            .collect();
        let expected = [("a", "a", 1), ("D", "a::b::C", 1), ("*", "a::e", 1), ("f", "f", 2)];
        assert_eq!(shown, expected.map(|(name, path, line)| (name, path.to_owned(), line)));
        assert!(names.imports[3].reexport);
        assert_eq!(names.inner_imports[0].path, ["h", "i"]);
        assert!(names.defined.contains("g") && names.maybe_defined.contains("Made"));
    }
}
