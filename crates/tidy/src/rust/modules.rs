//! The modules of a crate, as the compiler mounts them: from each root along `mod name;`.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::{Result, anyhow};
use syn::{Item, ItemMod};

use super::names::{self, Import};
use super::{attributes, targets};
use crate::tree::{Kind, Tree};

/// Every Rust file of the tree, parsed once.
#[derive(Default)]
pub struct Sources {
    files: BTreeMap<String, syn::File>,
}

impl Sources {
    /// Parses all Rust files of `tree`.
    ///
    /// # Errors
    /// A file is no Rust; the error has its path and line.
    pub fn parse(tree: &Tree) -> Result<Self> {
        let parse = |(path, text): (&str, &str)| {
            let file = syn::parse_file(text)
                .map_err(|error| anyhow!("{path}:{}: {error}", error.span().start().line))?;
            Ok((path.to_owned(), file))
        };
        Ok(Self { files: tree.of_kind(Kind::Rust).map(parse).collect::<Result<_>>()? })
    }

    /// All files, in the order of their paths.
    pub fn files(&self) -> impl Iterator<Item = (&str, &syn::File)> {
        self.files.iter().map(|(path, file)| (path.as_str(), file))
    }
}

/// Place of a module in [`Modules`].
pub type ModuleId = usize;

/// One module: a file, or a `mod name { … }` inside of one.
pub struct Module<'a> {
    /// The root module of the same target.
    pub root: ModuleId,
    /// `None` for a root.
    pub parent: Option<ModuleId>,
    /// File that holds its text.
    pub file: &'a str,
    /// Whether it, or a module around it, is compiled for tests only.
    pub test_only: bool,
    /// Its items, without those of modules inside of it.
    pub items: &'a [Item],
    /// Modules declared in it.
    pub children: BTreeMap<String, ModuleId>,
    /// Names of items defined in it, macros among them.
    pub defined: BTreeSet<String>,
    /// Identifiers in macro calls at module level, which may define items of those names.
    pub maybe_defined: BTreeSet<String>,
    /// Files of macros with `#[macro_export]` in modules below; of a root only.
    pub exported: BTreeMap<String, &'a str>,
    /// `use` declarations at module level.
    pub imports: Vec<Import>,
    /// `use` declarations inside of functions.
    pub inner_imports: Vec<Import>,
}

/// All modules of all targets of one crate.
#[derive(Default)]
pub struct Modules<'a> {
    modules: Vec<Module<'a>>,
}

impl<'a> Modules<'a> {
    /// Mounts the modules of the crate in `crates/<name>`.
    #[must_use]
    pub fn of_crate(tree: &Tree, sources: &'a Sources, name: &str) -> Self {
        let mut modules = Self::default();
        for root in targets::roots(tree, name) {
            if let Some((path, file)) = sources.files.get_key_value(&root) {
                modules.mount(sources, Place::root(path), &file.items);
            }
        }
        modules
    }

    /// The module with this id.
    #[must_use]
    pub fn get(&self, id: ModuleId) -> &Module<'a> {
        &self.modules[id]
    }

    /// All modules.
    pub fn iter(&self) -> impl Iterator<Item = (ModuleId, &Module<'a>)> {
        self.modules.iter().enumerate()
    }

    /// Files that no build but that of tests compiles.
    #[must_use]
    pub fn test_only_files(&self) -> BTreeSet<&'a str> {
        let files = |test_only| {
            let chosen = self.modules.iter().filter(move |module| module.test_only == test_only);
            chosen.map(|module| module.file).collect::<BTreeSet<_>>()
        };
        &files(true) - &files(false)
    }

    fn mount(&mut self, sources: &'a Sources, place: Place<'a>, items: &'a [Item]) -> ModuleId {
        let id = self.modules.len();
        let names = names::of_items(items);
        self.modules.push(Module {
            root: place.root.unwrap_or(id),
            parent: place.parent,
            file: place.file,
            test_only: place.test_only,
            items,
            children: BTreeMap::new(),
            defined: names.defined,
            maybe_defined: names.maybe_defined,
            exported: BTreeMap::new(),
            imports: names.imports,
            inner_imports: names.inner_imports,
        });
        for item in items {
            match item {
                Item::Mod(declared) => {
                    if let Some(child) = self.mount_child(sources, &place, id, declared) {
                        self.modules[id].children.insert(declared.ident.to_string(), child);
                    }
                }
                Item::Macro(syn::ItemMacro { ident: Some(name), attrs, .. })
                    if attrs.iter().any(|attribute| attribute.path().is_ident("macro_export")) =>
                {
                    let root = self.modules[id].root;
                    self.modules[root].exported.insert(name.to_string(), place.file);
                }
                _ => {}
            }
        }
        id
    }

    fn mount_child(
        &mut self,
        sources: &'a Sources,
        around: &Place<'a>,
        parent: ModuleId,
        declared: &'a ItemMod,
    ) -> Option<ModuleId> {
        let name = declared.ident.to_string();
        let mut place = Place {
            file: around.file,
            folder: format!("{}/{name}", around.folder),
            root: Some(self.modules[parent].root),
            parent: Some(parent),
            test_only: around.test_only || attributes::is_test_only(&declared.attrs),
        };
        if let Some((_, items)) = &declared.content {
            return Some(self.mount(sources, place, items));
        }
        let beside = around.file.rsplit_once('/').map_or("", |(folder, _)| folder);
        let candidates = match attributes::path_attribute(&declared.attrs) {
            Some(path) => vec![format!("{beside}/{path}")],
            None => vec![
                format!("{}/{name}.rs", around.folder),
                format!("{}/{name}/mod.rs", around.folder),
            ],
        };
        let (path, file) = candidates.iter().find_map(|path| sources.files.get_key_value(path))?;
        place.file = path;
        if path.ends_with("/mod.rs") || attributes::path_attribute(&declared.attrs).is_some() {
            path.rsplit_once('/')?.0.clone_into(&mut place.folder);
        }
        Some(self.mount(sources, place, &file.items))
    }
}

/// Where a module is mounted.
struct Place<'a> {
    file: &'a str,
    /// Folder in which files of its child modules lie.
    folder: String,
    root: Option<ModuleId>,
    parent: Option<ModuleId>,
    test_only: bool,
}

impl<'a> Place<'a> {
    fn root(file: &'a str) -> Self {
        let folder = file.rsplit_once('/').map_or("", |(folder, _)| folder).to_owned();
        Self { file, folder, root: None, parent: None, test_only: false }
    }
}

#[cfg(test)]
mod tests {
    use super::{Modules, Sources};
    use crate::tree::Tree;

    #[test]
    fn files_are_mounted_along_declarations() {
        let tree = Tree::of(&[
            ("crates/a/Cargo.toml", ""),
            ("crates/a/src/lib.rs", "mod b; mod c; #[cfg(test)] mod tests; mod inline { mod d; }"),
            ("crates/a/src/b.rs", "mod e; #[cfg(test)] #[path = \"b_tests.rs\"] mod tests;"),
            ("crates/a/src/b/e.rs", ""),
            ("crates/a/src/b_tests.rs", ""),
            ("crates/a/src/c/mod.rs", "mod f;"),
            ("crates/a/src/c/f.rs", ""),
            ("crates/a/src/inline/d.rs", ""),
            ("crates/a/src/tests.rs", "mod more;"),
            ("crates/a/src/tests/more.rs", ""),
            ("crates/a/src/nowhere.rs", ""),
        ]);
        let sources = Sources::parse(&tree).unwrap();
        let modules = Modules::of_crate(&tree, &sources, "a");
        let mut files: Vec<&str> = modules.iter().map(|(_, module)| module.file).collect();
        files.dedup();
        let all = ["lib.rs", "b.rs", "b/e.rs", "b_tests.rs", "c/mod.rs", "c/f.rs", "tests.rs"];
        let mut all = all.to_vec();
        all.extend(["tests/more.rs", "lib.rs", "inline/d.rs"]);
        let all: Vec<String> = all.iter().map(|file| format!("crates/a/src/{file}")).collect();
        assert_eq!(files, all);
        let test_only: Vec<&str> = modules.test_only_files().into_iter().collect();
        let expected = ["b_tests.rs", "tests.rs", "tests/more.rs"];
        assert_eq!(test_only, expected.map(|file| format!("crates/a/src/{file}")));
    }
}
