//! Small files; each write replaces the whole file or nothing.

use serde::Serialize;
use serde::de::DeserializeOwned;
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

/// A failed file operation.
#[derive(Debug, thiserror::Error)]
#[error("{what} {path}: {source}")]
pub struct FileError {
    /// The operation.
    pub what: &'static str,
    /// Path of the file.
    pub path: PathBuf,
    /// The system's error.
    pub source: io::Error,
}

impl FileError {
    pub(crate) fn new(what: &'static str, path: &Path, source: impl Into<io::Error>) -> Self {
        Self { what, path: path.to_owned(), source: source.into() }
    }
}

/// Writes a temporary file beside `path`, syncs it, and renames it to `path`.
pub(crate) fn write(path: &Path, body: &[u8]) -> Result<(), FileError> {
    let staged = path.with_extension(format!("new.{}", std::process::id()));
    let put = || -> io::Result<()> {
        let mut file = File::create(&staged)?;
        file.write_all(body)?;
        file.sync_data()?;
        fs::rename(&staged, path)
    };
    put().map_err(|e| {
        drop(fs::remove_file(&staged));
        FileError::new("writing", path, e)
    })
}

pub(crate) fn write_json(path: &Path, value: &impl Serialize) -> Result<(), FileError> {
    let mut text = serde_json::to_vec_pretty(value)
        .map_err(|e| FileError::new("encoding", path, io::Error::from(e)))?;
    text.push(b'\n');
    write(path, &text)
}

/// Decodes a file; `None` if it does not exist.
pub(crate) fn read_json<T: DeserializeOwned>(path: &Path) -> Result<Option<T>, FileError> {
    match fs::read(path) {
        Ok(text) => serde_json::from_slice(&text)
            .map(Some)
            .map_err(|e| FileError::new("decoding", path, io::Error::from(e))),
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(e) => Err(FileError::new("reading", path, e)),
    }
}

/// Removes a file; a missing file is no error.
pub(crate) fn remove(path: &Path) -> Result<(), FileError> {
    match fs::remove_file(path) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => Err(FileError::new("removing", path, e)),
        _ => Ok(()),
    }
}

/// The last `lines` lines of a log, without the carriage returns of a serial console.
pub(crate) fn tail(path: &Path, lines: usize) -> String {
    let text = fs::read(path).unwrap_or_default();
    let text = String::from_utf8_lossy(
        text.get(text.len().saturating_sub(32 << 10)..).unwrap_or_default(),
    )
    .replace('\r', "");
    let all: Vec<&str> = text.lines().filter(|l| !l.trim().is_empty()).collect();
    all.get(all.len().saturating_sub(lines)..).unwrap_or_default().join("\n")
}
