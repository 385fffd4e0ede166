//! The snapshots that were cloned last, in a file for the next daemon, which makes a warm clone of
//! each before the first request.
//!
//! `<state>/requested` has one name in each line. The file is only a hint: it is not synced, and a
//! line that names no snapshot is passed over.

use dayfly_units::Name;
use std::collections::BTreeSet;
use std::fs::File;
use std::io::{self, Read};
use std::path::Path;

/// The most snapshots that are named.
pub const MOST: usize = 4;
/// The longest file that is read, in bytes.
const MAX_BYTES: u64 = 4096;

/// Writes the names, all of them or none: a file that is there stays if this fails.
///
/// # Errors
/// The file system's error.
pub fn write(path: &Path, names: &BTreeSet<Name>) -> io::Result<()> {
    let beside = path.with_extension("new");
    let lines: String = names.iter().map(|name| format!("{name}\n")).collect();
    let written = std::fs::write(&beside, lines).and_then(|()| std::fs::rename(&beside, path));
    written.inspect_err(|_| {
        let _ = std::fs::remove_file(&beside);
    })
}

/// The names that an earlier daemon wrote; none if there is no such file.
///
/// # Errors
/// The file system's error.
pub fn read(path: &Path) -> io::Result<BTreeSet<Name>> {
    let file = match File::open(path) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(BTreeSet::new()),
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

    #[test]
    fn names_are_read_as_written_and_other_lines_are_passed_over() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("requested");
        assert!(read(&path).unwrap().is_empty());
        let names = |names: &[&str]| names.iter().map(|name| name.parse().unwrap()).collect();
        for written in [names(&["web", "db"]), names(&["ci"])] {
            write(&path, &written).unwrap();
            assert_eq!(read(&path).unwrap(), written);
            let beside = std::fs::read_dir(folder.path()).unwrap().count();
            assert_eq!(beside, 1, "a file beside it is left");
        }
        std::fs::write(&path, "a\n../b\n\n\u{1b}[2J\nc\r\nd\ne\nf\ng").unwrap();
        assert_eq!(read(&path).unwrap(), names(&["a", "c", "d", "e"]));
        std::fs::write(&path, [0xff; 9000]).unwrap();
        assert!(read(&path).unwrap().is_empty());
        assert!(read(folder.path()).is_err(), "a folder was read");
        std::fs::remove_file(&path).unwrap();
        std::fs::create_dir_all(path.join("taken")).unwrap();
        assert!(write(&path, &names(&["a"])).is_err());
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1);
    }
}
