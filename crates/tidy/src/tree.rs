//! The checked-out source tree: every file's path, and the text of those that rules read.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use anyhow::{Context, Result};
use walkdir::{DirEntry, WalkDir};

/// Folders that hold nothing written by people.
const SKIPPED_FOLDERS: [&str; 3] = [".git", "target", "node_modules"];

/// What a file is written in. Decided by its name alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Rust source.
    Rust,
    /// A document.
    Markdown,
    /// Shell scripts, Makefile, TOML, C, assembly, linker scripts, Python.
    Other,
}

/// Kind of the file at `path`, or `None` if no rule reads such files.
#[must_use]
pub fn kind_of(path: &str) -> Option<Kind> {
    let name = path.rsplit('/').next().unwrap_or(path);
    let other = ["sh", "toml", "c", "h", "S", "ld", "py"];
    match name.rsplit_once('.') {
        Some((_, "rs")) => Some(Kind::Rust),
        Some((_, "md")) => Some(Kind::Markdown),
        Some((_, ending)) if other.contains(&ending) => Some(Kind::Other),
        None if name == "Makefile" => Some(Kind::Other),
        None if path.starts_with("scripts/") || path.starts_with(".ci/") => Some(Kind::Other),
        _ => None,
    }
}

/// Paths are relative to the root of the workspace and use `/`.
#[derive(Debug, Default)]
pub struct Tree {
    texts: BTreeMap<String, String>,
    names: BTreeSet<String>,
}

impl Tree {
    /// Reads the tree below `root`. Files that git does not track yet are read too.
    ///
    /// # Errors
    /// A folder or file cannot be read, or a file that rules read is not UTF-8.
    pub fn read(root: &Path) -> Result<Self> {
        let mut tree = Self::default();
        let kept = |entry: &DirEntry| {
            let name = entry.file_name().to_string_lossy();
            !(entry.file_type().is_dir() && SKIPPED_FOLDERS.contains(&name.as_ref()))
        };
        for entry in WalkDir::new(root).into_iter().filter_entry(kept) {
            let entry = entry?;
            let relative = entry.path().strip_prefix(root)?.to_string_lossy().into_owned();
            if relative.is_empty() {
                continue;
            }
            if entry.file_type().is_file() && kind_of(&relative).is_some() {
                let text = std::fs::read_to_string(entry.path())
                    .with_context(|| format!("{relative}: cannot be read as UTF-8"))?;
                tree.texts.insert(relative.clone(), text);
            }
            tree.names.insert(relative);
        }
        Ok(tree)
    }

    /// A tree in memory, for tests.
    #[must_use]
    pub fn of(files: &[(&str, &str)]) -> Self {
        let mut tree = Self::default();
        for (path, text) in files {
            tree.texts.insert((*path).to_owned(), (*text).to_owned());
            let mut name = *path;
            tree.names.insert(name.to_owned());
            while let Some((folder, _)) = name.rsplit_once('/') {
                tree.names.insert(folder.to_owned());
                name = folder;
            }
        }
        tree
    }

    /// Text of one file.
    #[must_use]
    pub fn text(&self, path: &str) -> Option<&str> {
        self.texts.get(path).map(String::as_str)
    }

    /// Whether there is a file or a folder of this name.
    #[must_use]
    pub fn contains(&self, path: &str) -> bool {
        self.names.contains(path)
    }

    /// All files that have text, in the order of their paths.
    pub fn files(&self) -> impl Iterator<Item = (&str, &str)> {
        self.texts.iter().map(|(path, text)| (path.as_str(), text.as_str()))
    }

    /// Files of one kind, in the order of their paths.
    pub fn of_kind(&self, kind: Kind) -> impl Iterator<Item = (&str, &str)> {
        self.files().filter(move |(path, _)| kind_of(path) == Some(kind))
    }

    /// Names of the folders below `crates/` that have a `Cargo.toml`.
    #[must_use]
    pub fn crates(&self) -> Vec<String> {
        let manifest = |path: &str| {
            path.strip_prefix("crates/")?.strip_suffix("/Cargo.toml").map(ToOwned::to_owned)
        };
        self.texts
            .keys()
            .filter_map(|path| manifest(path))
            .filter(|name| !name.contains('/'))
            .collect()
    }
}
