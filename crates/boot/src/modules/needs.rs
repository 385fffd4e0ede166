//! Which modules a module needs, from `modules.dep` or from the module itself.

use super::names::{list, name_of};
use crate::error::{BootError, on};
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::Path;

/// Upper limit for the module files of a package without `modules.dep`.
const MAX_FILES: usize = 1 << 16;

/// The content of `modules.dep`: each module's path with the paths of its dependencies, relative to
/// the modules' folder.
pub(crate) type Listed = BTreeMap<String, Vec<String>>;

/// The modules of a folder, and their dependencies.
pub(super) struct Needs {
    /// Paths relative to the folder, by the modules' names.
    paths: BTreeMap<String, String>,
    /// The folder's `modules.dep`, if it exists.
    listed: Option<Listed>,
}

impl Needs {
    pub(super) fn of(folder: &Path) -> Result<Self, BootError> {
        let by_name = |path: &String| (name_of(path), path.clone());
        if folder.join("modules.dep").exists() {
            let listed = parse(&list(folder, "modules.dep")?);
            return Ok(Self { paths: listed.keys().map(by_name).collect(), listed: Some(listed) });
        }
        let mut files = BTreeSet::new();
        walk(folder, "kernel", &mut files)?;
        Ok(Self { paths: files.iter().map(by_name).collect(), listed: None })
    }

    /// Path of the module `name`, relative to the folder.
    pub(super) fn path_of(&self, name: &str) -> Option<&str> {
        self.paths.get(&name_of(name)).map(String::as_str)
    }

    /// The paths of the modules that must be loaded before the module at `path`, in load order.
    /// `bytes` is its content. Fails with the name of a module that is neither a file nor built in.
    pub(super) fn paths_for(
        &self,
        path: &str,
        bytes: &[u8],
        built_in: &BTreeSet<String>,
    ) -> Result<Vec<String>, String> {
        if let Some(listed) = &self.listed {
            // modules.dep lists the dependencies in reverse load order.
            return Ok(listed.get(path).into_iter().flatten().rev().cloned().collect());
        }
        let mut paths = Vec::new();
        for name in stated(bytes).into_iter().filter(|name| !built_in.contains(name)) {
            paths.push(self.path_of(&name).ok_or_else(|| name.clone())?.to_owned());
        }
        Ok(paths)
    }
}

pub(crate) fn parse(text: &str) -> Listed {
    let lines = text.lines().map_while(|line| line.split_once(':'));
    lines
        .map(|(path, needs)| {
            (path.to_owned(), needs.split_whitespace().map(str::to_owned).collect())
        })
        .collect()
}

/// Adds the module files below `folder`/`path` to `files`. Symbolic links are not followed.
pub(super) fn walk(
    folder: &Path,
    path: &str,
    files: &mut BTreeSet<String>,
) -> Result<(), BootError> {
    let at = folder.join(path);
    let fail = on("read", &at);
    let entries = match std::fs::read_dir(&at) {
        // A kernel without modules.
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(()),
        entries => entries.map_err(&fail)?,
    };
    for entry in entries {
        let entry = entry.map_err(&fail)?;
        let name = entry.file_name().to_string_lossy().into_owned();
        let below = format!("{path}/{name}");
        if entry.file_type().map_err(&fail)?.is_dir() {
            walk(folder, &below, files)?;
        } else if name.contains(".ko") {
            files.insert(below);
        }
        if files.len() > MAX_FILES {
            let expected = format!("at most {MAX_FILES} modules");
            return Err(BootError::Tree { path: at.clone(), expected, got: "more".to_owned() });
        }
    }
    Ok(())
}

/// The dependencies in the `depends=` line of a module's `.modinfo`, which depmod also uses.
pub(crate) fn stated(body: &[u8]) -> Vec<String> {
    const KEY: &[u8] = b"\0depends=";
    let Some(at) = body.windows(KEY.len()).position(|w| w == KEY) else { return Vec::new() };
    let list = body[at + KEY.len()..].split(|b| *b == 0).next().unwrap_or_default();
    String::from_utf8_lossy(list)
        .split(',')
        .filter(|n| !n.is_empty())
        .map(|n| n.replace('-', "_"))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dependencies_are_read_from_modinfo() {
        assert_eq!(stated(b"x\0license=GPL\0depends=kvm,ccp-x\0intree=Y\0"), ["kvm", "ccp_x"]);
        assert!(stated(b"x\0depends=\0intree=Y\0").is_empty());
        assert!(stated(b"").is_empty());
    }

    #[test]
    fn lists_end_at_the_first_line_without_a_colon() {
        let listed = parse("k/a.ko: k/b.ko k/c.ko\nk/b.ko:\n# more\nk/d.ko:\n");
        assert_eq!(listed.keys().collect::<Vec<_>>(), ["k/a.ko", "k/b.ko"]);
        assert_eq!(listed["k/a.ko"], ["k/b.ko", "k/c.ko"]);
    }
}
