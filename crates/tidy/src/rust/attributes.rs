//! Which code is compiled for tests only.

use syn::punctuated::Punctuated;
use syn::{Attribute, ImplItem, Item, Meta, Stmt, Token, TraitItem};

/// Whether an attribute among these keeps the code out of every build but that of tests.
#[must_use]
pub fn is_test_only(attributes: &[Attribute]) -> bool {
    attributes.iter().any(|attribute| {
        let Meta::List(list) = &attribute.meta else {
            return attribute.path().is_ident("test");
        };
        list.path.is_ident("cfg") && list.parse_args::<Meta>().is_ok_and(|meta| implies_test(&meta))
    })
}

/// Whether a `cfg` predicate can hold only in a build of tests.
fn implies_test(predicate: &Meta) -> bool {
    match predicate {
        Meta::Path(path) => path.is_ident("test"),
        Meta::List(list) => {
            let inner = list.parse_args_with(Punctuated::<Meta, Token![,]>::parse_terminated);
            let Ok(inner) = inner else { return false };
            match list.path.get_ident().map(ToString::to_string).as_deref() {
                Some("all") => inner.iter().any(implies_test),
                Some("any") => !inner.is_empty() && inner.iter().all(implies_test),
                _ => false,
            }
        }
        Meta::NameValue(_) => false,
    }
}

/// The path of a `#[path = "…"]` attribute.
#[must_use]
pub fn path_attribute(attributes: &[Attribute]) -> Option<String> {
    attributes.iter().filter(|attribute| attribute.path().is_ident("path")).find_map(|attribute| {
        let Meta::NameValue(pair) = &attribute.meta else { return None };
        match &pair.value {
            syn::Expr::Lit(syn::ExprLit { lit: syn::Lit::Str(text), .. }) => Some(text.value()),
            _ => None,
        }
    })
}

/// Attributes of an item of any kind.
#[must_use]
pub fn of_item(item: &Item) -> &[Attribute] {
    match item {
        Item::Const(item) => &item.attrs,
        Item::Enum(item) => &item.attrs,
        Item::ExternCrate(item) => &item.attrs,
        Item::Fn(item) => &item.attrs,
        Item::ForeignMod(item) => &item.attrs,
        Item::Impl(item) => &item.attrs,
        Item::Macro(item) => &item.attrs,
        Item::Mod(item) => &item.attrs,
        Item::Static(item) => &item.attrs,
        Item::Struct(item) => &item.attrs,
        Item::Trait(item) => &item.attrs,
        Item::TraitAlias(item) => &item.attrs,
        Item::Type(item) => &item.attrs,
        Item::Union(item) => &item.attrs,
        Item::Use(item) => &item.attrs,
        _ => &[],
    }
}

/// Attributes of an item of an `impl` block.
#[must_use]
pub fn of_impl_item(item: &ImplItem) -> &[Attribute] {
    match item {
        ImplItem::Const(item) => &item.attrs,
        ImplItem::Fn(item) => &item.attrs,
        ImplItem::Type(item) => &item.attrs,
        ImplItem::Macro(item) => &item.attrs,
        _ => &[],
    }
}

/// Attributes of an item of a trait.
#[must_use]
pub fn of_trait_item(item: &TraitItem) -> &[Attribute] {
    match item {
        TraitItem::Const(item) => &item.attrs,
        TraitItem::Fn(item) => &item.attrs,
        TraitItem::Type(item) => &item.attrs,
        TraitItem::Macro(item) => &item.attrs,
        _ => &[],
    }
}

/// Attributes of a statement, as far as `cfg` is written on them: bindings, items, macros, blocks.
#[must_use]
pub fn of_statement(statement: &Stmt) -> &[Attribute] {
    match statement {
        Stmt::Local(local) => &local.attrs,
        Stmt::Item(item) => of_item(item),
        Stmt::Macro(call) => &call.attrs,
        Stmt::Expr(syn::Expr::Block(block), _) => &block.attrs,
        Stmt::Expr(syn::Expr::Call(call), _) => &call.attrs,
        Stmt::Expr(syn::Expr::MethodCall(call), _) => &call.attrs,
        Stmt::Expr(syn::Expr::If(branch), _) => &branch.attrs,
        Stmt::Expr(syn::Expr::Macro(call), _) => &call.attrs,
        Stmt::Expr(syn::Expr::Assign(assign), _) => &assign.attrs,
        Stmt::Expr(..) => &[],
    }
}

#[cfg(test)]
mod tests {
    use super::is_test_only;

    #[test]
    fn only_a_predicate_that_implies_test_counts() {
        let test_only = |attribute: &str| {
            let item: syn::Item = syn::parse_str(&format!("{attribute} fn f() {{}}")).unwrap();
            is_test_only(super::of_item(&item))
        };
        assert!(test_only("#[cfg(test)]"));
        assert!(test_only("#[test]"));
        assert!(test_only("#[cfg(all(test, unix))]"));
        assert!(test_only("#[cfg(any(test))]"));
        assert!(!test_only("#[cfg(not(test))]"));
        assert!(!test_only("#[cfg(any(test, unix))]"));
        assert!(!test_only("#[cfg(feature = \"test\")]"));
        assert!(!test_only("#[must_use]"));
    }
}
