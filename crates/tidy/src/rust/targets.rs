//! Which files of a crate are roots of a program, a library or a test.

use serde::Deserialize;

use crate::tree::Tree;

#[derive(Debug, Default, Deserialize)]
struct Manifest {
    #[serde(default)]
    lib: Option<Entry>,
    #[serde(default)]
    bin: Vec<Entry>,
    #[serde(default)]
    test: Vec<Entry>,
    #[serde(default)]
    bench: Vec<Entry>,
    #[serde(default)]
    example: Vec<Entry>,
}

#[derive(Debug, Deserialize)]
struct Entry {
    path: Option<String>,
}

/// Paths of the root files of the crate in `crates/<name>`, each once, as Cargo finds them.
#[must_use]
pub fn roots(tree: &Tree, name: &str) -> Vec<String> {
    let folder = format!("crates/{name}");
    let manifest = tree.text(&format!("{folder}/Cargo.toml")).unwrap_or_default();
    let manifest: Manifest = toml::from_str(manifest).unwrap_or_default();
    let named = [manifest.lib.into_iter().collect(), manifest.bin, manifest.test, manifest.bench];
    let named = named.into_iter().flatten().chain(manifest.example);
    let mut roots: Vec<String> =
        named.filter_map(|entry| entry.path).map(|path| format!("{folder}/{path}")).collect();
    let found = tree.files().map(|(path, _)| path).filter(|path| {
        path.strip_prefix(&folder).and_then(|path| path.strip_prefix('/')).is_some_and(is_root)
    });
    roots.extend(found.map(ToOwned::to_owned));
    roots.retain(|path| tree.text(path).is_some());
    roots.sort();
    roots.dedup();
    roots
}

/// Whether Cargo takes the file at `path`, relative to the crate, for a root without being asked.
fn is_root(path: &str) -> bool {
    if matches!(path, "src/lib.rs" | "src/main.rs" | "build.rs") {
        return true;
    }
    ["src/bin/", "tests/", "benches/", "examples/"].iter().any(|folder| {
        path.strip_prefix(folder).is_some_and(|rest| match rest.split_once('/') {
            None => rest.ends_with(".rs"),
            Some((_, file)) => file == "main.rs",
        })
    })
}

#[cfg(test)]
mod tests {
    use super::roots;
    use crate::tree::Tree;

    #[test]
    fn roots_are_found_by_place_and_by_manifest() {
        let tree = Tree::of(&[
            ("crates/a/Cargo.toml", "[[test]]\nname = \"t\"\npath = \"tests/t/entry.rs\"\n"),
            ("crates/a/src/lib.rs", ""),
            ("crates/a/src/part.rs", ""),
            ("crates/a/src/bin/one.rs", ""),
            ("crates/a/src/bin/two/main.rs", ""),
            ("crates/a/src/bin/two/part.rs", ""),
            ("crates/a/tests/t/entry.rs", ""),
            ("crates/a/tests/common/mod.rs", ""),
            ("crates/ab/src/lib.rs", ""),
        ]);
        let expected = ["src/bin/one.rs", "src/bin/two/main.rs", "src/lib.rs", "tests/t/entry.rs"];
        assert_eq!(roots(&tree, "a"), expected.map(|path| format!("crates/a/{path}")));
    }
}
