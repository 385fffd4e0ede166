//! Hashes a file once, and trusts it until it changes: states, maps, kernels, RAM in a file, and
//! disk files without a hash tree ([`crate::objects::tree`]).
//!
//! A file counts as unchanged while its device, inode, size, mtime and ctime (both in ns) are the
//! same as before it was hashed. No VMM and no pager can write to a content file once it is
//! published ([`crate::vms::immutable`]), so this check is against damage and accidental edits. It
//! does not stop an attacker with the rights of the daemon.
//!
//! Before Linux 6.13 file times move with the kernel's clock tick. Two changes within a tick leave
//! the same times. So a file is trusted only if its ctime or its mtime was at least two ticks old
//! when its stamp was taken.
//!
//! The record is in memory only: after a restart these files are hashed again.

use crate::errors::{Damage, IoError};
use crate::objects::types::FileRef;
use crate::sparse::{self, Piece};
use dayfly_units::sync::lock;
use dayfly_units::tree::{Header, HeaderError, Layout, TOP_BYTES};
use dayfly_units::{Digest, sealed};
use rustix::time::ClockId;
use std::collections::HashMap;
use std::fs::{File, Metadata};
use std::io::{self, Read, Seek};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

/// How a file's digest is computed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    /// The sparse digest ([`crate::sparse`]).
    Sparse,
    /// BLAKE3 of all bytes.
    Plain,
}

/// The metadata by which a file counts as unchanged.
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

    /// Whether every later write to the file changes its stamp. A write sets both times, so it
    /// shows if one of them is old.
    pub(crate) fn is_settled(&self) -> bool {
        let tick = rustix::time::clock_getres(ClockId::RealtimeCoarse);
        let now = rustix::time::clock_gettime(ClockId::Realtime);
        let of = |time: rustix::time::Timespec| ns((time.tv_sec, time.tv_nsec));
        // A clock that was set back does not show the same time soon.
        let age = |time| of(now).abs_diff(ns(time));
        age(self.ctime).max(age(self.mtime)) >= 2 * of(tick)
    }

    /// Whether only names and mode may have changed since `before`: a link, a rename, an unlink and
    /// a chmod change only the ctime.
    pub(crate) fn same_content(&self, before: &Self) -> bool {
        Self { ctime: before.ctime, ..*self } == *before
    }

    /// The stamp of the file at `path`; a symbolic link is not followed.
    pub(crate) fn at(path: &Path) -> io::Result<Self> {
        Ok(Self::from(&std::fs::symlink_metadata(path)?))
    }
}

fn ns((seconds, nanoseconds): (i64, i64)) -> u128 {
    let seconds = u128::try_from(seconds).unwrap_or(0);
    seconds * 1_000_000_000 + u128::try_from(nanoseconds).unwrap_or(0)
}

/// A file with the digest of its content.
#[derive(Debug)]
pub(crate) struct Hashed {
    pub(crate) file: File,
    pub(crate) content: FileRef,
}

impl Hashed {
    /// Hashes a file that nothing changes. Calls `on` for each piece that is read.
    pub(crate) fn of(file: File, kind: Kind, on: Piece<'_>) -> io::Result<Self> {
        let stamp = Stamp::of(&file)?;
        let content = digest_with(&file, kind, on)?;
        // Another of its names may be removed meanwhile, with the VM that froze it.
        if !Stamp::of(&file)?.same_content(&stamp) {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "it changed while it was read"));
        }
        Ok(Self { file, content })
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

/// One file's last verified state. The mutex is locked while the file is hashed, so concurrent
/// callers wait for one hash.
type Slot = Arc<Mutex<Option<(Stamp, Digest)>>>;

/// The verified files, by path.
#[derive(Debug, Default)]
pub(crate) struct Verifier {
    slots: Mutex<HashMap<PathBuf, Slot>>,
}

/// Lets a test do something after a file was read and before its stamp is taken again.
#[cfg(test)]
pub(crate) mod after_reading {
    use std::cell::RefCell;

    type Action = Box<dyn FnMut()>;

    thread_local!(static ACTION: RefCell<Option<Action>> = const { RefCell::new(None) });

    /// Calls `action` after the next file was read on this thread.
    pub(crate) fn once(action: impl FnOnce() + 'static) {
        let mut action = Some(action);
        each(move || {
            if let Some(action) = action.take() {
                action();
            }
        });
    }

    /// Calls `action` after each file that is read on this thread, until [`stop`].
    pub(crate) fn each(action: impl FnMut() + 'static) {
        ACTION.set(Some(Box::new(action)));
    }

    pub(crate) fn stop() {
        ACTION.set(None);
    }

    pub(super) fn reached() {
        ACTION.with_borrow_mut(|action| action.as_mut().map(|action| action()));
    }
}

/// Why a file did not pass verification.
#[derive(Debug, thiserror::Error)]
pub(crate) enum VerifyError {
    #[error(transparent)]
    Io(#[from] IoError),
    #[error(transparent)]
    Damage(#[from] Damage),
}

impl Verifier {
    fn slot(&self, path: &Path) -> Slot {
        let mut slots = lock(&self.slots);
        Arc::clone(slots.entry(path.to_owned()).or_default())
    }

    /// Trusts a file without reading it.
    #[cfg(test)]
    pub(crate) fn trust(&self, path: &Path, file: &File, digest: Digest) {
        *lock(&self.slot(path)) = Some((Stamp::of(file).unwrap(), digest));
    }

    /// Forgets every file below `folder`.
    pub(crate) fn forget(&self, folder: &Path) {
        lock(&self.slots).retain(|path, _| !path.starts_with(folder));
    }

    /// Verifies `file`, open at `path`, against `expected`: first its size, then its content unless
    /// it is unchanged since the last verification.
    pub(crate) fn check(
        &self,
        path: &Path,
        file: &File,
        expected: &FileRef,
        kind: Kind,
    ) -> Result<(), VerifyError> {
        self.check_with(path, file, expected, kind, &mut |_, _| Ok(())).map(|_| ())
    }

    /// As [`Self::check`], for a sparse digest. Calls `on` for each piece that is read, and returns
    /// whether the file was read.
    pub(crate) fn check_pieces(
        &self,
        path: &Path,
        file: &File,
        expected: &FileRef,
        on: Piece<'_>,
    ) -> Result<bool, VerifyError> {
        self.check_with(path, file, expected, Kind::Sparse, on)
    }

    fn check_with(
        &self,
        path: &Path,
        file: &File,
        expected: &FileRef,
        kind: Kind,
        on: Piece<'_>,
    ) -> Result<bool, VerifyError> {
        let stamp = Stamp::of(file).map_err(IoError::new("looking at", path))?;
        same_length(path, expected, stamp.bytes)?;
        let slot = self.slot(path);
        let mut known = lock(&slot);
        if *known == Some((stamp, expected.digest)) {
            return Ok(false);
        }
        *known = None;
        let settled = stamp.is_settled();
        let got = digest_with(file, kind, on).map_err(IoError::new("reading", path))?;
        same(path, expected, &got)?;
        let after = Stamp::of(file).map_err(IoError::new("looking at", path))?;
        // Another of its names may be removed meanwhile, with the VM that froze it.
        if !after.same_content(&stamp) {
            let (expected, got) = ("no change while it is read".to_owned(), "a change".to_owned());
            return Err(differs(path, "modification time", expected, got).into());
        }
        *known = settled.then_some((after, got.digest));
        Ok(true)
    }

    /// Verifies length, header and highest node of a hash tree, open at `path`, of the disk file
    /// `of`. Returns the root. Reads 8 KiB, unless the tree is unchanged since then.
    pub(crate) fn tree(
        &self,
        path: &Path,
        file: &File,
        of: &FileRef,
    ) -> Result<Digest, VerifyError> {
        let stamp = Stamp::of(file).map_err(IoError::new("looking at", path))?;
        let (expected, got) = (Layout::of(of.bytes).tree_bytes(), stamp.bytes);
        if expected != got {
            let (expected, got) = (expected.to_string(), got.to_string());
            return Err(differs(path, "size in bytes", expected, got).into());
        }
        let slot = self.slot(path);
        let mut known = lock(&slot);
        if let Some((then, root)) = *known
            && then == stamp
        {
            return Ok(root);
        }
        *known = None;
        let settled = stamp.is_settled();
        let mut top = [0; TOP_BYTES];
        file.read_exact_at(&mut top, 0).map_err(IoError::new("reading", path))?;
        let header = Header::decode(&top).map_err(|error| of_header(path, error))?;
        if (header.bytes, header.digest) != (of.bytes, of.digest) {
            let expected = format!("{} of {} bytes", of.digest, of.bytes);
            let got = format!("{} of {} bytes", header.digest, header.bytes);
            return Err(differs(path, "digest of the disk file", expected, got).into());
        }
        *known = settled.then_some((stamp, header.root));
        Ok(header.root)
    }
}

impl Verifier {
    /// Verifies the seal of `file`, open at `path`, unless the file is unchanged since the last
    /// verification.
    pub(crate) fn check_sealed(
        &self,
        path: &Path,
        file: &File,
        cap: u64,
    ) -> Result<(), VerifyError> {
        let io = |e| IoError::new("reading", path)(e);
        let stamp = Stamp::of(file).map_err(io)?;
        let slot = self.slot(path);
        let mut known = lock(&slot);
        if known.is_some_and(|(then, _)| then == stamp) {
            return Ok(());
        }
        *known = None;
        let settled = stamp.is_settled();
        rewind(file).map_err(io)?;
        let mut bytes = Vec::new();
        file.take(cap + sealed::HEADER_BYTES as u64 + 1).read_to_end(&mut bytes).map_err(io)?;
        rewind(file).map_err(io)?;
        sealed::verify(cap, &bytes)
            .map_err(|error| Damage::Seal { file: path.to_owned(), error })?;
        *known = settled.then(|| (stamp, Digest::of(&bytes)));
        Ok(())
    }
}

fn differs(path: &Path, place: &str, expected: String, got: String) -> Damage {
    Damage::Content { file: path.to_owned(), place: place.to_owned(), expected, got }
}

/// The damage of the tree at `path`.
fn of_header(path: &Path, error: HeaderError) -> Damage {
    let (place, expected, got) = match error {
        HeaderError::Seal(error) => return Damage::Seal { file: path.to_owned(), error },
        HeaderError::Field { place, at, expected, got } => {
            (format!("{place} at payload byte {at}"), expected, got)
        }
        HeaderError::Padding => {
            ("padding of the header".to_owned(), "zeroes".to_owned(), "other bytes".to_owned())
        }
        HeaderError::Short(got) => {
            ("header".to_owned(), format!("{TOP_BYTES} bytes"), got.to_string())
        }
    };
    differs(path, &place, expected, got)
}

/// Checks that the file at `path`, of length `bytes`, has the expected length.
pub(crate) fn same_length(path: &Path, expected: &FileRef, bytes: u64) -> Result<(), Damage> {
    if bytes == expected.bytes {
        return Ok(());
    }
    Err(differs(path, "size in bytes", expected.bytes.to_string(), bytes.to_string()))
}

/// Checks that the file at `path` has the expected digest and bytes of data.
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

/// The digest and sizes of `file`.
pub(crate) fn digest(file: &File, kind: Kind) -> io::Result<FileRef> {
    digest_with(file, kind, &mut |_, _| Ok(()))
}

/// As [`digest`]; calls `on` with the offset and the bytes of each piece read, and stops with its
/// error.
pub(crate) fn digest_with(file: &File, kind: Kind, on: Piece<'_>) -> io::Result<FileRef> {
    let got = match kind {
        Kind::Sparse => {
            let sparse = sparse::digest_with(file, on)?;
            FileRef { digest: sparse.digest, bytes: sparse.bytes, data_bytes: sparse.data_bytes }
        }
        Kind::Plain => plain(file, on)?,
    };
    // The descriptor may be sent to a VMM, which may read from the file's current offset.
    rewind(file)?;
    #[cfg(test)]
    after_reading::reached();
    Ok(got)
}

fn rewind(mut file: &File) -> io::Result<()> {
    file.rewind()
}

fn plain(file: &File, on: Piece<'_>) -> io::Result<FileRef> {
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
                on(bytes, &buffer[..n])?;
                bytes += n as u64;
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
