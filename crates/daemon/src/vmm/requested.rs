//! The snapshots that were cloned last, in a file for the next daemon, which makes a warm clone of
//! each before the first request.
//!
//! `<state>/requested` has one name in each line, the one that was cloned last first. The file is
//! only a hint: it is not synced, and a line that names no snapshot is passed over.

use dayfly_units::Name;
use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

/// The most snapshots that are named.
const MOST: usize = 4;
/// The longest file that is read, in bytes.
const MAX_BYTES: u64 = 4096;

/// The names, and their file.
#[derive(Debug, Clone, Default)]
pub struct Requested {
    path: PathBuf,
    names: Vec<Name>,
}

impl Requested {
    /// The names that an earlier daemon wrote; none if there is no such file, or if it cannot be
    /// read.
    #[must_use]
    pub fn read(path: PathBuf) -> Self {
        let names = read(&path).unwrap_or_else(|e| {
            tracing::warn!("which snapshots were cloned last: {}: {e}", path.display());
            Vec::new()
        });
        Self { path, names }
    }

    /// The names, the one that was cloned last first.
    #[must_use]
    pub fn names(&self) -> &[Name] {
        &self.names
    }

    /// Takes the snapshots that were cloned since, the last one first. The earlier ones follow
    /// them. Returns whether the names changed.
    pub fn note(&mut self, newest_first: Vec<Name>) -> bool {
        let mut names: Vec<Name> = Vec::new();
        for name in newest_first.into_iter().chain(self.names.iter().cloned()) {
            if names.len() < MOST && !names.contains(&name) {
                names.push(name);
            }
        }
        let changed = names != self.names;
        self.names = names;
        changed
    }

    /// Writes the names, all of them or none: the file before stays if this fails.
    ///
    /// # Errors
    /// The file system's error.
    pub fn write(&self) -> io::Result<()> {
        let beside = self.path.with_extension("new");
        let lines: String = self.names.iter().map(|name| format!("{name}\n")).collect();
        let written = std::fs::write(&beside, lines);
        let written = written.and_then(|()| std::fs::rename(&beside, &self.path));
        written.map_err(|e| {
            let _ = std::fs::remove_file(&beside);
            io::Error::new(e.kind(), format!("{}: {e}", self.path.display()))
        })
    }
}

fn read(path: &Path) -> io::Result<Vec<Name>> {
    let file = match File::open(path) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        file => file?,
    };
    let mut bytes = Vec::new();
    file.take(MAX_BYTES).read_to_end(&mut bytes)?;
    let text = String::from_utf8_lossy(&bytes);
    Ok(text.lines().filter_map(|line| line.parse().ok()).take(MOST).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(names: &[&str]) -> Vec<Name> {
        names.iter().map(|name| name.parse().unwrap()).collect()
    }

    #[test]
    fn the_last_ones_are_read_as_written() {
        let folder = tempfile::tempdir().unwrap();
        let read = || Requested::read(folder.path().join("requested"));
        let mut requested = read();
        assert_eq!(requested.names(), []);
        for (cloned, expected) in [
            (names(&["web", "db"]), names(&["web", "db"])),
            (names(&["ci"]), names(&["ci", "web", "db"])),
            (names(&["db", "ci", "a", "b", "c"]), names(&["db", "ci", "a", "b"])),
        ] {
            assert!(requested.note(cloned.clone()));
            requested.write().unwrap();
            assert!(!requested.note(cloned) && !requested.note(Vec::new()));
            assert_eq!((requested.names(), read().names()), (&*expected, &*expected));
            assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1, "a file is left");
        }
    }

    #[test]
    fn lines_that_are_no_names_are_passed_over() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("requested");
        let read = || Requested::read(path.clone());
        std::fs::write(&path, "a\n../b\n\n\u{1b}[2J\nc\r\nd\ne\nf\ng").unwrap();
        assert_eq!(read().names(), names(&["a", "c", "d", "e"]));
        std::fs::write(&path, [0xff; 9000]).unwrap();
        assert_eq!(read().names(), []);
        std::fs::remove_file(&path).unwrap();
        std::fs::create_dir_all(path.join("taken")).unwrap();
        let mut folder_instead = read();
        assert!(folder_instead.names().is_empty() && folder_instead.note(names(&["a"])));
        let error = folder_instead.write().unwrap_err().to_string();
        assert!(error.starts_with(path.to_str().unwrap()), "{error}");
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1);
    }
}
