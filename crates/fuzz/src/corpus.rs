//! Corpora in the repository: small files that reach every edge found so far.

use crate::target::Target;
use std::io;
use std::path::{Path, PathBuf};

/// The most bytes of all corpora together.
pub const MOST_BYTES: u64 = 2 << 20;

/// The folder of a target's corpus.
#[must_use]
pub fn folder(target: &Target) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus").join(target.name)
}

/// The files in a folder, by name; none if the folder does not exist.
///
/// # Errors
/// The folder cannot be read.
pub fn files(folder: &Path) -> io::Result<Vec<(PathBuf, Vec<u8>)>> {
    let entries = match std::fs::read_dir(folder) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries?,
    };
    let mut files = Vec::new();
    for entry in entries {
        let path = entry?.path();
        files.push((path.clone(), std::fs::read(path)?));
    }
    files.sort();
    Ok(files)
}
