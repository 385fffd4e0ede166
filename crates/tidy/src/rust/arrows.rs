//! Which file of a crate imports which, and for what names.
//!
//! An arrow goes to the file that *defines* a name. A name that is imported through a parent
//! which re-exports it leads to the child, so a `mod.rs` neither hides an arrow nor adds a false
//! one. A re-export is an arrow of the file that has it; `mod child;` alone is none.

use std::collections::{BTreeMap, BTreeSet};

use super::modules::{ModuleId, Modules};
use super::paths::{self, Named, Place, Uses};

/// One file imports another.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Arrow {
    /// First line that does so.
    pub line: usize,
    /// Names that are imported.
    pub names: BTreeSet<String>,
    /// Whether nothing but re-exports makes this arrow.
    pub reexport_only: bool,
}

/// Arrows by (importing file, imported file).
pub type Arrows = BTreeMap<(String, String), Arrow>;

/// What a path leads to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Target<'a> {
    File(&'a str),
    Module(ModuleId),
}

/// Arrows between files of one crate. Code that is compiled for tests only has none.
#[must_use]
pub fn of_modules(modules: &Modules) -> Arrows {
    let mut found = Arrows::new();
    for (id, module) in modules.iter().filter(|(_, module)| !module.test_only) {
        let uses = paths::of_items(module.items);
        Collector { resolver: Resolver { modules }, id, found: &mut found }.collect(&uses);
    }
    found
}

struct Collector<'m, 'a> {
    resolver: Resolver<'m, 'a>,
    id: ModuleId,
    found: &'m mut Arrows,
}

impl<'a> Collector<'_, 'a> {
    fn collect(&mut self, uses: &Uses) {
        let mut reached = BTreeSet::new();
        for named in &uses.paths {
            if let Some((Target::File(file), last)) = self.target(named) {
                reached.extend(named.segments.first().cloned());
                self.put(file, named.line, named.segments[last].clone(), false);
            }
        }
        for import in uses.imports.iter().filter(|import| !import.test_only) {
            let Some((target, last)) = self.resolver.resolve(self.id, &import.path) else {
                continue;
            };
            let last = import.path[last].clone();
            match (target, &import.name) {
                (Target::File(file), _) => self.put(file, import.line, last, import.reexport),
                // What is used of these names shows in the paths; others cannot be asked.
                (Target::Module(target), None) if import.reexport => {
                    let file = self.resolver.modules.get(target).file;
                    self.put(file, import.line, format!("{last}::*"), true);
                }
                (Target::Module(target), Some(name)) => {
                    // A module that no path goes through is used in a way that is not seen.
                    if !import.reexport && !reached.contains(name) {
                        let file = self.resolver.modules.get(target).file;
                        self.put(file, import.line, last, false);
                    }
                }
                (Target::Module(_), None) => {}
            }
        }
    }

    /// Where a path leads, and the last segment that was followed.
    fn target(&self, named: &Named) -> Option<(Target<'a>, usize)> {
        let one = |target: Option<Target<'a>>| Some((target?, 0));
        match (named.segments.as_slice(), named.place) {
            ([name], Place::Macro) => one(self.resolver.textual_macro(self.id, name)),
            ([name], Place::Code) => one(self.resolver.through_glob(self.id, name)),
            ([_], Place::Attribute) => None,
            (segments, _) => self.resolver.resolve(self.id, segments),
        }
    }

    fn put(&mut self, file: &str, line: usize, name: String, reexport: bool) {
        let own = self.resolver.modules.get(self.id).file;
        if file == own {
            return;
        }
        let first = Arrow { line, names: BTreeSet::new(), reexport_only: true };
        let arrow = self.found.entry((own.to_owned(), file.to_owned())).or_insert(first);
        arrow.line = arrow.line.min(line);
        arrow.names.insert(name);
        arrow.reexport_only &= reexport;
    }
}

#[derive(Clone, Copy)]
struct Resolver<'m, 'a> {
    modules: &'m Modules<'a>,
}

/// What was looked up on the way, so that re-exports in a circle end: the module, the name, and
/// whether the path goes on after it.
type Visited = BTreeSet<(ModuleId, String, bool)>;

impl<'a> Resolver<'_, 'a> {
    /// Where `path`, seen from module `from`, leads, and the last segment that was followed; what
    /// comes after names a part of an item. `None`: to another crate, or unknown.
    fn resolve(self, from: ModuleId, path: &[String]) -> Option<(Target<'a>, usize)> {
        self.walk(from, path, &mut Visited::new())
    }

    fn follow(self, from: ModuleId, path: &[String], visited: &mut Visited) -> Option<Target<'a>> {
        self.walk(from, path, visited).map(|(target, _)| target)
    }

    fn walk(
        self,
        from: ModuleId,
        path: &[String],
        visited: &mut Visited,
    ) -> Option<(Target<'a>, usize)> {
        let (first, rest) = path.split_first()?;
        let module = self.modules.get(from);
        let mut at = match first.as_str() {
            "crate" => Target::Module(module.root),
            "self" => Target::Module(from),
            "super" => Target::Module(module.parent?),
            "Self" => return None,
            name => self
                .lookup(from, name, !rest.is_empty(), visited)
                .or_else(|| self.inner(from, name, visited))?,
        };
        for (index, segment) in rest.iter().enumerate() {
            let Target::Module(here) = at else { return Some((at, index)) };
            at = if segment == "super" {
                Target::Module(self.modules.get(here).parent?)
            } else {
                let inside = index + 1 < rest.len();
                match self.lookup(here, segment, inside, visited) {
                    Some(next) => next,
                    // A name of another crate that the module imports.
                    None if self.imports(here, segment) => return None,
                    None => Target::File(self.modules.get(here).file),
                }
            };
        }
        Some((at, rest.len()))
    }

    /// The name in the scope of a module. A module of that name is preferred if the path goes on.
    fn lookup(
        self,
        id: ModuleId,
        name: &str,
        goes_on: bool,
        visited: &mut Visited,
    ) -> Option<Target<'a>> {
        if !visited.insert((id, name.to_owned(), goes_on)) {
            return None;
        }
        let module = self.modules.get(id);
        let child = module.children.get(name).map(|child| Target::Module(*child));
        let defined = module.defined.contains(name).then_some(Target::File(module.file));
        let found = if goes_on { child.or(defined) } else { defined };
        found
            .or_else(|| {
                let named =
                    module.imports.iter().filter(|import| import.name.as_deref() == Some(name));
                named.into_iter().find_map(|import| self.follow(id, &import.path, visited))
            })
            .or(child)
            .or_else(|| self.in_globs(id, name, goes_on, visited))
            .or_else(|| module.maybe_defined.contains(name).then_some(Target::File(module.file)))
            .or_else(|| module.exported.get(name).map(|file| Target::File(file)))
    }

    fn imports(self, id: ModuleId, name: &str) -> bool {
        self.modules.get(id).imports.iter().any(|import| import.name.as_deref() == Some(name))
    }

    fn in_globs(
        self,
        id: ModuleId,
        name: &str,
        goes_on: bool,
        visited: &mut Visited,
    ) -> Option<Target<'a>> {
        let globs = self.modules.get(id).imports.iter().filter(|import| import.name.is_none());
        globs.into_iter().find_map(|import| match self.follow(id, &import.path, visited)? {
            Target::Module(target) if target != id => self.lookup(target, name, goes_on, visited),
            _ => None,
        })
    }

    /// A name that a `use` inside of a function brings in.
    fn inner(self, id: ModuleId, name: &str, visited: &mut Visited) -> Option<Target<'a>> {
        let inner = self.modules.get(id).inner_imports.iter();
        inner
            .filter(|import| import.name.as_deref() == Some(name))
            .find_map(|import| self.follow(id, &import.path, visited))
    }

    /// A name of one segment counts only if `*` brings it in: other imports are arrows already.
    fn through_glob(self, id: ModuleId, name: &str) -> Option<Target<'a>> {
        let module = self.modules.get(id);
        let own = module.defined.contains(name)
            || module.children.contains_key(name)
            || self.imports(id, name);
        if own {
            return None;
        }
        self.in_globs(id, name, false, &mut Visited::new())
    }

    /// `macro_rules!` of a parent are visible in modules below it without an import.
    fn textual_macro(self, id: ModuleId, name: &str) -> Option<Target<'a>> {
        let mut at = Some(id);
        while let Some(here) = at {
            let module = self.modules.get(here);
            if has_macro(module.items, name) {
                return Some(Target::File(module.file));
            }
            at = module.parent;
        }
        None
    }
}

fn has_macro(items: &[syn::Item], name: &str) -> bool {
    items.iter().any(|item| match item {
        syn::Item::Macro(call) => call.ident.as_ref().is_some_and(|ident| ident == name),
        _ => false,
    })
}

#[cfg(test)]
mod tests;
