//! Hashing a file once, and remembering that it was right for as long as it has not been touched.
//!
//! A file is taken for unchanged while device, inode, size, mtime and ctime (both in ns) are those it had when it was hashed. Content
//! files are read-only from the moment they are published, so this is about damage and about people with an editor, not about an attacker
//! with the rights of the daemon. What is remembered lives and dies with the process: after a crash of the host
//! everything is hashed again.

use crate::digest::Digest;
use crate::errors::{Damage, IoError};
use crate::manifest::FileRef;
use crate::sparse;
use dayfly_units::sealed;
use std::collections::HashMap;
use std::fs::{File, Metadata};
use std::io::{self, Read, Seek};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

/// How a file's digest is made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    /// [`crate::sparse`].
    Sparse,
    /// BLAKE3 of its bytes.
    Plain,
}

/// What must stay the same.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Stamp {
    device: u64,
    inode: u64,
    bytes: u64,
    mtime: (i64, i64),
    ctime: (i64, i64),
}

impl Stamp {
    pub(crate) fn of(file: &File) -> io::Result<Self> {
        Ok(Self::from(&file.metadata()?))
    }

    /// Of the file that is at `path` now.
    pub(crate) fn at(path: &Path) -> io::Result<Self> {
        Ok(Self::from(&std::fs::symlink_metadata(path)?))
    }
}

impl From<&Metadata> for Stamp {
    fn from(m: &Metadata) -> Self {
        Self {
            device: m.dev(),
            inode: m.ino(),
            bytes: m.len(),
            mtime: (m.mtime(), m.mtime_nsec()),
            ctime: (m.ctime(), m.ctime_nsec()),
        }
    }
}

/// One file's last good state. Locked while it is hashed, so that many who ask at once wait for one hash.
type Slot = Arc<Mutex<Option<(Stamp, Digest)>>>;

/// Files that were found right, by path.
#[derive(Debug, Default)]
pub(crate) struct Verifier {
    slots: Mutex<HashMap<PathBuf, Slot>>,
}

/// Why a file was not found right.
#[derive(Debug, thiserror::Error)]
pub(crate) enum VerifyError {
    #[error(transparent)]
    Io(#[from] IoError),
    #[error(transparent)]
    Damage(#[from] Damage),
}

impl Verifier {
    fn slot(&self, path: &Path) -> Slot {
        let mut slots = self.slots.lock().unwrap_or_else(PoisonError::into_inner);
        Arc::clone(slots.entry(path.to_owned()).or_default())
    }

    /// Says that `file`, which is now at `path`, has been read in full and has `digest`. Call it last, after every change of its names
    /// and mode. If the file cannot be looked at, it is simply hashed again before its next use.
    pub(crate) fn remember(&self, path: &Path, file: &File, digest: Digest) {
        let stamp = Stamp::of(file).ok();
        *self.slot(path).lock().unwrap_or_else(PoisonError::into_inner) = stamp.map(|s| (s, digest));
    }

    /// Forgets every file below `folder`.
    pub(crate) fn forget(&self, folder: &Path) {
        self.slots.lock().unwrap_or_else(PoisonError::into_inner).retain(|path, _| !path.starts_with(folder));
    }

    /// Verifies `file`, open at `path`, against `expected`: its size first, then its content unless it is known to be right.
    pub(crate) fn check(
        &self,
        path: &Path,
        file: &File,
        expected: &FileRef,
        kind: Kind,
    ) -> Result<(), VerifyError> {
        let stamp = Stamp::of(file).map_err(IoError::new("looking at", path))?;
        same_length(path, expected, stamp.bytes)?;
        let slot = self.slot(path);
        let mut known = slot.lock().unwrap_or_else(PoisonError::into_inner);
        if *known == Some((stamp, expected.digest)) {
            return Ok(());
        }
        *known = None;
        let got = digest(file, kind).map_err(IoError::new("reading", path))?;
        same(path, expected, &got)?;
        if Stamp::of(file).map_err(IoError::new("looking at", path))? != stamp {
            let (expected, got) = ("no change while it is read".to_owned(), "a change".to_owned());
            return Err(differs(path, "modification time", expected, got).into());
        }
        *known = Some((stamp, got.digest));
        Ok(())
    }
}

impl Verifier {
    /// Verifies `file`, open at `path`, which carries its digest in its seal, unless it is known to be right.
    pub(crate) fn check_sealed(&self, path: &Path, file: &File, cap: u64) -> Result<(), VerifyError> {
        let io = |e| IoError::new("reading", path)(e);
        let stamp = Stamp::of(file).map_err(io)?;
        let slot = self.slot(path);
        let mut known = slot.lock().unwrap_or_else(PoisonError::into_inner);
        if known.is_some_and(|(then, _)| then == stamp) {
            return Ok(());
        }
        *known = None;
        rewind(file).map_err(io)?;
        let mut bytes = Vec::new();
        file.take(cap + sealed::HEADER_BYTES as u64 + 1).read_to_end(&mut bytes).map_err(io)?;
        rewind(file).map_err(io)?;
        sealed::verify(cap, &bytes).map_err(|error| Damage::Seal { file: path.to_owned(), error })?;
        *known = Some((stamp, Digest::of(&bytes)));
        Ok(())
    }
}

fn differs(path: &Path, place: &str, expected: String, got: String) -> Damage {
    Damage::Content { file: path.to_owned(), place: place.to_owned(), expected, got }
}

/// Whether the file at `path`, which has so many bytes, has the length that it must.
pub(crate) fn same_length(path: &Path, expected: &FileRef, bytes: u64) -> Result<(), Damage> {
    if bytes == expected.bytes {
        return Ok(());
    }
    Err(differs(path, "size in bytes", expected.bytes.to_string(), bytes.to_string()))
}

/// Whether the file at `path` is what it must be.
pub(crate) fn same(path: &Path, expected: &FileRef, got: &FileRef) -> Result<(), Damage> {
    if got.digest != expected.digest {
        let (expected, got) = (expected.digest.to_string(), got.digest.to_string());
        return Err(differs(path, "digest of the content", expected, got));
    }
    if got.data_bytes != expected.data_bytes {
        let (expected, got) = (expected.data_bytes.to_string(), got.data_bytes.to_string());
        return Err(differs(path, "bytes in pages that are not zero", expected, got));
    }
    Ok(())
}

/// What `file` is.
pub(crate) fn digest(file: &File, kind: Kind) -> io::Result<FileRef> {
    digest_with(file, kind, &|_| Ok(()))
}

/// As [`digest`]; calls `on` with the bytes of each piece that was read, and ends with its error.
pub(crate) fn digest_with(
    file: &File,
    kind: Kind,
    on: &dyn Fn(u64) -> io::Result<()>,
) -> io::Result<FileRef> {
    let got = match kind {
        Kind::Sparse => {
            let sparse = sparse::digest_with(file, on)?;
            FileRef { digest: sparse.digest, bytes: sparse.bytes, data_bytes: sparse.data_bytes }
        }
        Kind::Plain => plain(file, on)?,
    };
    // The descriptor goes to a VMM, which may read it from where it stands.
    rewind(file)?;
    Ok(got)
}

fn rewind(mut file: &File) -> io::Result<()> {
    file.rewind()
}

fn plain(file: &File, on: &dyn Fn(u64) -> io::Result<()>) -> io::Result<FileRef> {
    let mut reader = file;
    rewind(file)?;
    let mut hasher = blake3::Hasher::new();
    let mut buffer = vec![0; 1 << 20];
    let mut bytes = 0;
    loop {
        match reader.read(&mut buffer) {
            Ok(0) => break,
            Ok(n) => {
                hasher.update(&buffer[..n]);
                bytes += n as u64;
                on(n as u64)?;
            }
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) => return Err(e),
        }
    }
    Ok(FileRef { digest: hasher.finalize().into(), bytes, data_bytes: bytes })
}

#[cfg(test)]
#[path = "verify_tests.rs"]
mod tests;
