//! Blobs on disk: verified ones for later pulls, and partial ones that a later pull goes on with.
//!
//! ```text
//! absent ──claim──▶ partial/HEX (locked by its process) ──verified, rename──▶ blobs/HEX
//!                       │ its process ends: the lock is free, the next claim goes on
//!                       └ a day old and free, or the bound is passed: swept
//! ```
//!
//! A partial file belongs to the process that holds its lock (flock). A verified blob never
//! changes, and users link it, so that a sweep can remove it at any time.

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

    /// Bytes that the file system can still take.
    ///
    /// # Errors
    /// The folder cannot be made or looked at.
    pub fn free(&self) -> Result<Bytes, RegistryError> {
        fs::create_dir_all(&self.folder).map_err(io("create", &self.folder))?;
        let stat = rustix::fs::statvfs(&self.folder)
            .map_err(|e| io("look at", &self.folder)(io::Error::from(e)))?;
        Ok(Bytes(stat.f_bavail.saturating_mul(stat.f_frsize)))
    }

    /// Finds the blob, or waits until no other process fetches it and takes it over. Blocks.
    pub(crate) fn claim(&self, blob: &Blob) -> Result<Claim, RegistryError> {
        let (target, folder) = (self.blob(&blob.digest), self.folder.join("partial"));
        for folder in [&folder, &self.folder.join("blobs")] {
            fs::create_dir_all(folder).map_err(io("create", folder))?;
        }
        let path = folder.join(blob.digest.hex());
        loop {
            if self.is_there(&target, blob) {
                return Ok(Claim::There);
            }
            let mut options = File::options();
            let opened = options.read(true).write(true).create(true).truncate(false).open(&path);
            let mut file = opened.map_err(io("open", &path))?;
            flock(&file, FlockOperation::LockExclusive)
                .map_err(|e| io("lock", &path)(io::Error::from(e)))?;
            // While this process waited, another one may have completed or removed the file.
            let own = file.metadata().map_err(io("look at", &path))?;
            let same = |now: fs::Metadata| (now.dev(), now.ino()) == (own.dev(), own.ino());
            if !fs::metadata(&path).is_ok_and(same) {
                continue;
            }
            let (hasher, have) = hashed(&mut file, blob.size).map_err(io("read", &path))?;
            return Ok(Claim::Mine(Partial { file, path, target, hasher, have }));
        }
    }

    /// Whether a blob of the right size is there. Notes its use, for [`Self::sweep`].
    fn is_there(&self, target: &Path, blob: &Blob) -> bool {
        let Ok(file) = File::open(target) else { return false };
        if file.metadata().is_ok_and(|now| now.len() == blob.size) {
            let _ = file.set_modified(SystemTime::now());
            return true;
        }
        let _ = fs::remove_file(target);
        false
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
    let Ok(file) = File::open(path) else { return false };
    let free = flock(&file, FlockOperation::NonBlockingLockExclusive).is_ok();
    free && fs::remove_file(path).is_ok()
}

/// Hashes what is there, and leaves the file's position at its end. More than `size` bytes are no
/// beginning of the blob, and are dropped.
fn hashed(file: &mut File, size: u64) -> io::Result<(Sha256, u64)> {
    if file.metadata()?.len() > size {
        file.set_len(0)?;
    }
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
mod tests {
    use super::*;

    fn cache(most: u64) -> (tempfile::TempDir, BlobCache) {
        let folder = tempfile::tempdir().unwrap();
        let cache = BlobCache::new(folder.path().join("registry"), Bytes(most));
        (folder, cache)
    }

    fn blob(bytes: &[u8]) -> Blob {
        Blob { digest: BlobDigest::of(bytes), size: bytes.len() as u64 }
    }

    fn mine(claim: Claim) -> Partial {
        match claim {
            Claim::Mine(partial) => partial,
            Claim::There => panic!("expected a partial file, got a blob"),
        }
    }

    fn stored(cache: &BlobCache, bytes: &[u8]) -> Blob {
        let blob = blob(bytes);
        let mut partial = mine(cache.claim(&blob).unwrap());
        partial.write(bytes).unwrap();
        assert_eq!(partial.digest(), blob.digest);
        partial.finish().unwrap();
        blob
    }

    #[test]
    fn a_claim_goes_on_where_a_killed_process_stopped() {
        let (folder, cache) = cache(1 << 20);
        let blob = blob(b"0123456789");
        let mut partial = mine(cache.claim(&blob).unwrap());
        partial.write(b"0123").unwrap();
        // As after SIGKILL: the lock is free, the file stays.
        drop(partial);
        cache.sweep();
        let mut partial = mine(cache.claim(&blob).unwrap());
        assert_eq!(partial.have, 4);
        partial.write(b"456789").unwrap();
        assert_eq!(partial.digest(), blob.digest);
        partial.finish().unwrap();
        assert!(matches!(cache.claim(&blob).unwrap(), Claim::There));
        let target = folder.path().join("x");
        assert!(cache.link(&blob.digest, &target).unwrap());
        cache.forget(&blob.digest);
        assert_eq!(fs::read(&target).unwrap(), b"0123456789");
        assert!(!cache.link(&blob.digest, &folder.path().join("y")).unwrap());
    }

    #[test]
    fn a_second_process_waits_and_then_has_the_blob() {
        let (_folder, cache) = cache(1 << 20);
        let wanted = blob(b"content");
        let mut partial = mine(cache.claim(&wanted).unwrap());
        std::thread::scope(|scope| {
            let second = scope.spawn(|| cache.claim(&wanted).unwrap());
            partial.write(b"content").unwrap();
            partial.finish().unwrap();
            assert!(matches!(second.join().unwrap(), Claim::There));
        });
        let wanted = blob(b"wrong");
        let partial = mine(cache.claim(&wanted).unwrap());
        std::thread::scope(|scope| {
            let second = scope.spawn(|| cache.claim(&wanted).unwrap());
            partial.discard();
            assert_eq!(mine(second.join().unwrap()).have, 0);
        });
    }

    #[test]
    fn a_sweep_keeps_the_bound_and_what_was_used_last() {
        let (_folder, cache) = cache(25);
        let old = stored(&cache, &[1; 10]);
        let used = stored(&cache, &[2; 10]);
        let hours_ago = SystemTime::now() - Duration::from_secs(7200);
        for blob in [&old, &used] {
            File::open(cache.blob(&blob.digest)).unwrap().set_modified(hours_ago).unwrap();
        }
        assert!(matches!(cache.claim(&used).unwrap(), Claim::There));
        let new = stored(&cache, &[3; 10]);
        cache.sweep();
        let there = |blob: &Blob| cache.blob(&blob.digest).exists();
        assert!(!there(&old) && there(&used) && there(&new));
    }

    #[test]
    fn a_partial_file_is_swept_after_a_day_or_if_there_is_no_room_unless_it_is_written() {
        let (_folder, cache) = cache(100);
        let path = |blob: &Blob| cache.folder.join("partial").join(blob.digest.hex());
        let days_ago = SystemTime::now() - 2 * STALE;
        let (stale, locked, large) = (blob(&[1; 50]), blob(&[2; 50]), blob(&[3; 500]));
        for blob in [&stale, &locked] {
            mine(cache.claim(blob).unwrap()).write(b"x").unwrap();
            File::open(path(blob)).unwrap().set_modified(days_ago).unwrap();
        }
        let held = mine(cache.claim(&locked).unwrap());
        cache.sweep();
        assert!(!path(&stale).exists() && path(&locked).exists());
        drop(held);
        mine(cache.claim(&large).unwrap()).write(&[0; 200]).unwrap();
        cache.sweep();
        assert!(!path(&large).exists());
    }

    #[test]
    fn a_blob_of_another_size_is_fetched_again() {
        let (_folder, cache) = cache(1 << 20);
        let blob = stored(&cache, b"content");
        fs::remove_file(cache.blob(&blob.digest)).unwrap();
        fs::write(cache.blob(&blob.digest), "cont").unwrap();
        assert_eq!(mine(cache.claim(&blob).unwrap()).have, 0);
    }
}
