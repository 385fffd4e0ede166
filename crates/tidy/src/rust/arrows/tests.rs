use super::of_modules;
use crate::rust::modules::{Modules, Sources};
use crate::tree::Tree;

/// Arrows of a crate with these files below `src/`, as `from -> to`.
fn arrows(files: &[(&str, &str)]) -> Vec<String> {
    let paths: Vec<(String, &str)> =
        files.iter().map(|(path, text)| (format!("crates/a/src/{path}"), *text)).collect();
    let files: Vec<(&str, &str)> =
        paths.iter().map(|(path, text)| (path.as_str(), *text)).collect();
    let tree = Tree::of(&files);
    let sources = Sources::parse(&tree).unwrap();
    let short = |path: &str| path.trim_start_matches("crates/a/src/").to_owned();
    of_modules(&Modules::of_crate(&tree, &sources, "a"))
        .keys()
        .map(|(from, to)| format!("{} -> {}", short(from), short(to)))
        .collect()
}

#[test]
fn a_declaration_is_no_arrow_but_a_reexport_is() {
    assert!(arrows(&[("lib.rs", "mod b;"), ("b.rs", "pub struct B;")]).is_empty());
    let reexport = arrows(&[("lib.rs", "mod b; pub use b::B;"), ("b.rs", "pub struct B;")]);
    assert_eq!(reexport, ["lib.rs -> b.rs"]);
}

#[test]
fn a_name_is_followed_through_reexports_to_its_file() {
    let found = arrows(&[
        ("lib.rs", "mod f; mod g;"),
        ("f/mod.rs", "mod one; mod two; pub use one::One; pub use two::*;"),
        ("f/one.rs", "use super::Two; use crate::f::Three; pub struct One;"),
        ("f/two.rs", "pub struct Two; make!(Three);"),
        ("g.rs", "use crate::f; fn g() { f::One; }"),
    ]);
    let expected = [
        "f/mod.rs -> f/one.rs",
        "f/mod.rs -> f/two.rs",
        "f/one.rs -> f/two.rs",
        "g.rs -> f/one.rs",
    ];
    assert_eq!(found, expected);
}

#[test]
fn an_exported_macro_is_in_the_file_that_has_it() {
    let found = arrows(&[
        ("lib.rs", "mod b; mod c;"),
        ("b.rs", "#[macro_export] macro_rules! say { () => {} }"),
        ("c.rs", "use crate::say; fn f() { say!(); crate::say!(); }"),
    ]);
    assert_eq!(found, ["c.rs -> b.rs"]);
}

#[test]
fn names_of_a_parent_are_arrows_upwards() {
    let found = arrows(&[
        ("lib.rs", "mod b; macro_rules! m { () => {} } pub struct L; pub fn f() {}"),
        ("b.rs", "mod c; mod d; mod e;"),
        ("b/c.rs", "use super::super::L;"),
        ("b/d.rs", "m!();"),
        ("b/e.rs", "use crate::*; fn g() { f() }"),
    ]);
    assert_eq!(found, ["b/c.rs -> lib.rs", "b/d.rs -> lib.rs", "b/e.rs -> lib.rs"]);
}

#[test]
fn inline_paths_macros_and_attributes_are_arrows() {
    let found = arrows(&[
        ("lib.rs", "mod b; mod c; mod d; mod e;"),
        ("b.rs", "fn f() { crate::c::f(); println!(\"{}\", crate::d::X); }"),
        ("c.rs", "use crate::e; #[serde(with = \"e::hex\")] struct S; pub fn f() {}"),
        ("d.rs", "fn f() { use super::e::g; g() } pub const X: u8 = 1;"),
        ("e.rs", "pub mod hex {} pub fn g() {}"),
    ]);
    assert_eq!(found, ["b.rs -> c.rs", "b.rs -> d.rs", "c.rs -> e.rs", "d.rs -> e.rs"]);
}

#[test]
fn a_module_that_is_only_imported_is_an_arrow() {
    let files = [("lib.rs", "mod b; mod c;"), ("b.rs", "use crate::c;"), ("c.rs", "")];
    assert_eq!(arrows(&files), ["b.rs -> c.rs"]);
}

#[test]
fn modules_inside_of_a_file_are_that_file() {
    let text = "mod b; pub mod inner { use super::b::B; pub struct I; mod deep { use super::I; } }";
    let found = arrows(&[("lib.rs", text), ("b.rs", "use crate::inner::I; pub struct B;")]);
    assert_eq!(found, ["b.rs -> lib.rs", "lib.rs -> b.rs"]);
}

#[test]
fn code_for_tests_has_no_arrows() {
    let found = arrows(&[
        ("lib.rs", "mod b; #[cfg(test)] mod tests; #[cfg(test)] use b::B; pub struct L;"),
        ("b.rs", "pub struct B; #[cfg(test)] mod tests { use crate::L; }"),
        ("tests.rs", "use crate::L;"),
    ]);
    assert!(found.is_empty(), "{found:?}");
}

#[test]
fn reexports_that_go_round_end() {
    let found = arrows(&[
        ("lib.rs", "mod b; mod c;"),
        ("b.rs", "pub use crate::c::*; fn f() { crate::c::x() }"),
        ("c.rs", "pub use crate::b::*;"),
    ]);
    assert_eq!(found, ["b.rs -> c.rs", "c.rs -> b.rs"]);
}

#[test]
fn a_function_may_have_the_name_of_its_module() {
    let found = arrows(&[
        ("lib.rs", "mod a; mod b;"),
        ("a/mod.rs", "mod lock; pub use lock::lock;"),
        ("a/lock.rs", "pub fn lock() {}"),
        ("b.rs", "use crate::a::lock;"),
    ]);
    assert_eq!(found, ["a/mod.rs -> a/lock.rs", "b.rs -> a/lock.rs"]);
}

#[test]
fn names_of_other_crates_are_no_arrows() {
    let text = "use std::b::B; use ::c::b; use super::D; fn f() { serde::b::x(); Self::b(); }";
    let lib = "mod b; mod c; use other::D;";
    assert!(arrows(&[("lib.rs", lib), ("b.rs", ""), ("c.rs", text)]).is_empty());
}
