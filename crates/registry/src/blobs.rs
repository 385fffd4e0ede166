//! Blobs on disk: verified ones for later pulls, and partial ones that a later pull goes on with.
//!
//! ```text
//! absent ──claim──▶ partial/HEX.SIZE (locked by its process) ──verified, rename──▶ blobs/HEX
//!                       │ its process ends: the lock is free, the next claim goes on
//!                       └ a day old and free, or the bound is passed: swept
//! ```
//!
//! A partial file belongs to the process that holds its lock (flock). A verified blob never
//! changes, and users link it, so that a sweep can remove it at any time.
//!
//! SIZE is the size in a descriptor. A hostile manifest can name the blob of another image with a
//! wrong size. Therefore each size has its own partial file, and a claim removes a verified blob
//! only if its digest is wrong.

use crate::digest::{Blob, BlobDigest};
use crate::error::{RegistryError, io};
use dayfly_units::Bytes;
use rustix::fs::{FlockOperation, flock};
use sha2::{Digest as _, Sha256};
use std::fs::{self, File, Permissions};
use std::io::{self, Read, Seek, Write};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

/// A partial file that nothing has written for this long is swept.
const STALE: Duration = Duration::from_secs(24 * 3600);

/// Bytes of the disk that a pull leaves free, because other programs need them.
const RESERVE: u64 = 1 << 30;

/// A pull leaves no more of a disk free than its bytes divided by this number, because
/// [`RESERVE`] would be much of a small disk.
const RESERVE_PART: u64 = 32;

/// A folder of blobs.
#[derive(Debug, Clone)]
pub struct BlobCache {
    folder: PathBuf,
    most: Bytes,
}

/// A blob that is there, or that this process is to fetch.
pub(crate) enum Claim {
    There,
    Mine(Partial),
}

/// The beginning of a blob, which this process alone writes.
pub(crate) struct Partial {
    file: File,
    path: PathBuf,
    target: PathBuf,
    hasher: Sha256,
    /// Bytes that are in the file.
    pub have: u64,
}

impl BlobCache {
    /// The cache in `folder`, which keeps at most `most` bytes after a sweep.
    #[must_use]
    pub const fn new(folder: PathBuf, most: Bytes) -> Self {
        Self { folder, most }
    }

    fn blob(&self, digest: &BlobDigest) -> PathBuf {
        self.folder.join("blobs").join(digest.hex())
    }

    fn partial(&self, blob: &Blob) -> PathBuf {
        self.folder.join("partial").join(format!("{}.{}", blob.digest.hex(), blob.size))
    }

    /// Makes `target` a link to the blob. `false`: the blob is not there.
    ///
    /// # Errors
    /// The file system refuses it.
    pub fn link(&self, digest: &BlobDigest, target: &Path) -> io::Result<bool> {
        match fs::hard_link(self.blob(digest), target) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(false),
            other => other.map(|()| true),
        }
    }

    /// Removes a blob that turned out to be damaged.
    pub fn forget(&self, digest: &BlobDigest) {
        // A blob that stays is refused again at its next use.
        let _ = fs::remove_file(self.blob(digest));
    }

    /// Bytes that a pull may still add to the file system: its free bytes without a reserve of
    /// 1 GiB, or of a 32nd of a disk under 32 GiB.
    ///
    /// # Errors
    /// The folder cannot be made or looked at.
    pub fn free(&self) -> Result<Bytes, RegistryError> {
        fs::create_dir_all(&self.folder).map_err(io("create", &self.folder))?;
        let stat = rustix::fs::statvfs(&self.folder)
            .map_err(|e| io("look at", &self.folder)(io::Error::from(e)))?;
        let bytes = |blocks: u64| blocks.saturating_mul(stat.f_frsize);
        Ok(Bytes(without_reserve(bytes(stat.f_bavail), bytes(stat.f_blocks))))
    }

    /// Finds the blob, or waits until no other process fetches it and takes it over. Blocks.
    pub(crate) fn claim(&self, blob: &Blob) -> Result<Claim, RegistryError> {
        let (target, path) = (self.blob(&blob.digest), self.partial(blob));
        for folder in [self.folder.join("partial"), self.folder.join("blobs")] {
            fs::create_dir_all(&folder).map_err(io("create", &folder))?;
        }
        loop {
            if is_there(&target, blob)? {
                return Ok(Claim::There);
            }
            let mut options = File::options();
            let opened = options.read(true).write(true).create(true).truncate(false).open(&path);
            let mut file = opened.map_err(io("open", &path))?;
            flock(&file, FlockOperation::LockExclusive)
                .map_err(|e| io("lock", &path)(io::Error::from(e)))?;
            // While this process waited, another one may have completed or removed the file.
            if !is_named(&file, &path).map_err(io("look at", &path))? {
                continue;
            }
            let (hasher, have) = beginning(&mut file, blob.size).map_err(io("read", &path))?;
            return Ok(Claim::Mine(Partial { file, path, target, hasher, have }));
        }
    }

    /// Removes partial files that no process has written for a day; then, as long as all files have
    /// more bytes than the bound, free partial files and the blobs whose use is longest ago.
    pub fn sweep(&self) {
        let mut partial = listed(&self.folder.join("partial"));
        partial.retain(|(used, path, _)| {
            let stale = used.elapsed().is_ok_and(|age| age > STALE);
            !(stale && removed_if_free(path))
        });
        let mut blobs = listed(&self.folder.join("blobs"));
        let all = partial.iter().chain(&blobs);
        let mut bytes: u64 = all.map(|(_, _, bytes)| *bytes).sum();
        for (_, path, size) in partial {
            if bytes > self.most.0 && removed_if_free(&path) {
                bytes = bytes.saturating_sub(size);
            }
        }
        blobs.sort();
        for (_, path, size) in blobs {
            if bytes <= self.most.0 {
                return;
            }
            if fs::remove_file(path).is_ok() {
                bytes = bytes.saturating_sub(size);
            }
        }
    }
}

/// Of `free` bytes of a disk of `all` bytes, those above the reserve.
fn without_reserve(free: u64, all: u64) -> u64 {
    free.saturating_sub(RESERVE.min(all / RESERVE_PART))
}

/// Whether the blob is there. Notes its use, for [`BlobCache::sweep`]. If a file has another size
/// than `blob`, its digest decides whether the file is damaged or the descriptor is wrong.
fn is_there(target: &Path, blob: &Blob) -> Result<bool, RegistryError> {
    let Ok(mut file) = File::open(target) else { return Ok(false) };
    let found = file.metadata().map_err(io("look at", target))?.len();
    if found == blob.size {
        let _ = file.set_modified(SystemTime::now());
        return Ok(true);
    }
    let (hasher, _) = hashed(&mut file).map_err(io("read", target))?;
    if BlobDigest::from_hasher(hasher) == blob.digest {
        return Err(RegistryError::Document {
            url: format!("blob {}", blob.digest),
            place: "size in its descriptor",
            expected: format!("{found} bytes, as the verified blob has"),
            got: blob.size.to_string(),
        });
    }
    let _ = fs::remove_file(target);
    Ok(false)
}

/// The files of a folder: time of their last use, path, bytes.
fn listed(folder: &Path) -> Vec<(SystemTime, PathBuf, u64)> {
    let all = fs::read_dir(folder).into_iter().flatten().flatten();
    let one = |entry: fs::DirEntry| {
        let now = entry.metadata().ok()?;
        Some((now.modified().ok()?, entry.path(), now.len()))
    };
    all.filter_map(one).collect()
}

/// Removes a partial file unless a process holds its lock.
fn removed_if_free(path: &Path) -> bool {
    File::open(path).is_ok_and(|file| removed_if_locked(&file, path))
}

/// Removes `path` if `file` can be locked and still has this name. Before the lock, another process
/// may have removed `file`, and a third one may write a new file of this name.
fn removed_if_locked(file: &File, path: &Path) -> bool {
    let free = flock(file, FlockOperation::NonBlockingLockExclusive).is_ok();
    free && is_named(file, path).unwrap_or(false) && fs::remove_file(path).is_ok()
}

/// Whether `path` is a name of the open `file`.
fn is_named(file: &File, path: &Path) -> io::Result<bool> {
    let own = file.metadata()?;
    let same = |now: fs::Metadata| (now.dev(), now.ino()) == (own.dev(), own.ino());
    Ok(fs::metadata(path).is_ok_and(same))
}

/// Hashes a partial file of a blob of `size` bytes. A longer file is no beginning of this blob, and
/// is emptied: no other blob has a partial file of this name.
fn beginning(file: &mut File, size: u64) -> io::Result<(Sha256, u64)> {
    if file.metadata()?.len() > size {
        file.set_len(0)?;
    }
    hashed(file)
}

/// Hashes what is there, and leaves the file's position at its end.
fn hashed(file: &mut File) -> io::Result<(Sha256, u64)> {
    let (mut hasher, mut have) = (Sha256::new(), 0);
    let mut buffer = vec![0; 256 << 10];
    loop {
        match file.read(&mut buffer)? {
            0 => return Ok((hasher, have)),
            got => {
                hasher.update(&buffer[..got]);
                have += got as u64;
            }
        }
    }
}

impl Partial {
    /// Adds bytes at the end.
    pub fn write(&mut self, bytes: &[u8]) -> Result<(), RegistryError> {
        self.file.write_all(bytes).map_err(io("write", &self.path))?;
        self.hasher.update(bytes);
        self.have += bytes.len() as u64;
        Ok(())
    }

    /// Drops all bytes.
    pub fn reset(&mut self) -> Result<(), RegistryError> {
        self.file.set_len(0).and_then(|()| self.file.rewind()).map_err(io("write", &self.path))?;
        (self.hasher, self.have) = (Sha256::new(), 0);
        Ok(())
    }

    /// The digest of the bytes.
    pub fn digest(&self) -> BlobDigest {
        BlobDigest::from_hasher(self.hasher.clone())
    }

    /// Makes the file, whose digest is right, a blob of the cache. Blocks until it is on disk,
    /// because a blob is not verified again before its use.
    pub fn finish(self) -> Result<(), RegistryError> {
        self.file.sync_data().map_err(io("write", &self.path))?;
        self.file
            .set_permissions(Permissions::from_mode(0o444))
            .map_err(io("write", &self.path))?;
        fs::rename(&self.path, &self.target).map_err(io("rename", &self.path))
    }

    /// Removes the file, whose bytes are wrong.
    pub fn discard(self) {
        // A file that stays is of no use, but does no harm: it is verified and swept.
        let _ = self.file.set_len(0);
        let _ = fs::remove_file(&self.path);
    }
}

#[cfg(test)]
#[path = "blobs_tests.rs"]
mod tests;
