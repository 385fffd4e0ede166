//! Staging folders, and the functions that put a finished file into place.
//!
//! A staging folder lives under `<cache>/staging/`. Its owner holds a lock (flock) on it while the
//! owner lives. So [`sweep`] can distinguish leftovers of a killed process: it removes every folder
//! whose lock it gets. Folders are created, locked and swept under the lock of `staging/` itself.
//! So no process sees a folder between its creation and its locking.

use dayfly_units::sparse;
use rustix::fs::{FlockOperation, Mode, OFlags, flock};
use rustix::io::Errno;
use std::fs::{self, File};
use std::io::{self, Write};
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

/// Name prefix of the temporary file that [`deliver`] renames.
const PARTIAL: &str = ".dayfly-partial-";

/// A folder for work in progress. Dropping the value removes the folder.
#[derive(Debug)]
pub struct Staging {
    dir: tempfile::TempDir,
    _lock: OwnedFd,
}

fn open_dir(path: &Path) -> io::Result<OwnedFd> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC | OFlags::NOFOLLOW;
    Ok(rustix::fs::open(path, flags, Mode::empty())?)
}

impl Staging {
    /// Makes a folder under `<cache>/staging`, after a [`sweep`] of the leftovers of killed
    /// processes.
    pub fn new(cache: &Path) -> io::Result<Self> {
        let parent = cache.join("staging");
        fs::create_dir_all(&parent)?;
        let gate = open_dir(&parent)?;
        flock(&gate, FlockOperation::LockExclusive)?;
        sweep_locked(&parent);
        let dir = tempfile::Builder::new().prefix("work-").tempdir_in(&parent)?;
        let lock = open_dir(dir.path())?;
        flock(&lock, FlockOperation::LockExclusive)?;
        Ok(Self { dir, _lock: lock })
    }

    /// Path of the folder.
    pub fn path(&self) -> &Path {
        self.dir.path()
    }
}

/// Takes the lock of the cache entry `entry`, so that two processes do not build one entry at the
/// same time. Calls `waiting` if another process holds the lock. Closing the file releases the
/// lock.
pub fn lock_entry(entry: &Path, mut waiting: impl FnMut()) -> io::Result<OwnedFd> {
    let path = entry.with_extension("lock");
    if let Some(parent) = path.parent() {
        fs::create_dir_all(parent)?;
    }
    let flags = OFlags::RDWR | OFlags::CREATE | OFlags::CLOEXEC | OFlags::NOFOLLOW;
    let lock = rustix::fs::open(&path, flags, Mode::from_raw_mode(0o600))?;
    if flock(&lock, FlockOperation::NonBlockingLockExclusive).is_err() {
        waiting();
        flock(&lock, FlockOperation::LockExclusive)?;
    }
    Ok(lock)
}

/// Removes every staging folder under `<cache>/staging` whose owner has ended. Returns the number
/// of removed folders.
///
/// # Errors
/// If `<cache>/staging` cannot be opened or locked. A folder that cannot be removed stays for the
/// next sweep.
pub fn sweep(cache: &Path) -> io::Result<usize> {
    let parent = cache.join("staging");
    let gate = match open_dir(&parent) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(0),
        other => other?,
    };
    flock(&gate, FlockOperation::LockExclusive)?;
    Ok(sweep_locked(&parent))
}

fn sweep_locked(parent: &Path) -> usize {
    let mut removed = 0;
    let mounts = mount_points();
    for entry in fs::read_dir(parent).into_iter().flatten().flatten() {
        let path = entry.path();
        let free = open_dir(&path).and_then(|dir| {
            Ok(flock(&dir, FlockOperation::NonBlockingLockExclusive).map(|()| dir)?)
        });
        let Ok(_lock) = free else { continue };
        // A killed bootstrap may leave the host's /dev or /sys mounted in the folder. Deleting
        // through such a mount would delete files of the host.
        if mounts.iter().any(|mount| mount.starts_with(&path)) {
            tracing::warn!(
                path = %path.display(),
                "left alone: something is mounted in this staging folder"
            );
            continue;
        }
        match fs::remove_dir_all(&path) {
            Ok(()) => removed += 1,
            Err(error) => {
                tracing::warn!(
                    path = %path.display(), %error,
                    "cannot remove a stale staging folder"
                )
            }
        }
    }
    removed
}

/// All mount points that this process sees (proc_pid_mountinfo(5), field 5, octal escapes decoded).
fn mount_points() -> Vec<PathBuf> {
    let text = fs::read("/proc/self/mountinfo").unwrap_or_default();
    let fields = text.split(|b| *b == b'\n').filter_map(|line| line.split(|b| *b == b' ').nth(4));
    fields.map(|field| PathBuf::from(std::ffi::OsStr::from_bytes(&unescape(field)))).collect()
}

fn unescape(field: &[u8]) -> Vec<u8> {
    let mut out = Vec::with_capacity(field.len());
    let mut rest = field;
    while let Some((first, tail)) = rest.split_first() {
        let octal = (*first == b'\\' && tail.len() >= 3)
            .then(|| {
                std::str::from_utf8(&tail[..3]).ok().and_then(|d| u8::from_str_radix(d, 8).ok())
            })
            .flatten();
        out.push(octal.unwrap_or(*first));
        rest = if octal.is_some() { &tail[3..] } else { tail };
    }
    out
}

/// Puts the finished `file` to `folder/name`, atomically, as a read-only file. An existing file of
/// that name is replaced.
///
/// If `keep` is set, `file` stays in its place. The two are then hard links of one file, or copies
/// if the folders are on different file systems. A moved file is on disk when this function
/// returns. A kept file can be built again, so the function does not wait for the disk.
pub fn deliver(file: &Path, folder: &Path, name: &str, keep: bool) -> io::Result<PathBuf> {
    fs::create_dir_all(folder)?;
    for entry in fs::read_dir(folder)?.flatten() {
        // An earlier process leaves such a file if it is killed between writing and renaming. Both
        // together take less than an hour.
        let stale = entry.file_name().to_string_lossy().starts_with(PARTIAL)
            && entry
                .metadata()
                .and_then(|m| m.modified())
                .is_ok_and(|m| m.elapsed().is_ok_and(|e| e.as_secs() > 3600));
        if stale {
            let _ = fs::remove_dir_all(entry.path());
        }
    }
    fs::set_permissions(file, fs::Permissions::from_mode(0o444))?;
    let target = folder.join(name);
    let holder = tempfile::Builder::new().prefix(PARTIAL).tempdir_in(folder)?;
    let partial = holder.path().join(name);
    let moved = if keep { fs::hard_link(file, &partial) } else { fs::rename(file, &partial) };
    match moved {
        Ok(()) if keep => {}
        Ok(()) => File::open(&partial)?.sync_all()?,
        Err(error)
            if matches!(
                Errno::from_io_error(&error),
                Some(Errno::XDEV | Errno::MLINK | Errno::PERM)
            ) =>
        {
            let to = File::create_new(&partial)?;
            copy_sparse(&File::open(file)?, &to)?;
            to.set_permissions(fs::Permissions::from_mode(0o444))?;
            if !keep {
                to.sync_all()?;
                fs::remove_file(file)?;
            }
        }
        Err(error) => return Err(error),
    }
    fs::rename(&partial, &target)?;
    if !keep {
        File::open(folder)?.sync_all()?;
    }
    Ok(target)
}

/// Writes `bytes` to `folder/name`, atomically and durably, as a read-only file.
pub fn deliver_bytes(
    bytes: &[u8],
    staging: &Path,
    folder: &Path,
    name: &str,
) -> io::Result<PathBuf> {
    let mut file = tempfile::NamedTempFile::new_in(staging)?;
    file.write_all(bytes)?;
    let path = file.into_temp_path();
    let done = deliver(&path, folder, name, false);
    // On success the file was renamed. On failure the staging folder's owner removes the file.
    let _ = path.keep();
    done
}

/// Copies `from` to the empty file `to`, without pages that are all zero.
pub fn copy_sparse(from: &File, to: &File) -> io::Result<()> {
    let size = from.metadata()?.size();
    to.set_len(size)?;
    sparse::for_each_data(from, |at, bytes| sparse::write_data(to, at, bytes)).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_living_owner_keeps_its_folder_and_a_dead_ones_is_swept() {
        let cache = tempfile::tempdir().unwrap();
        let alive = Staging::new(cache.path()).unwrap();
        fs::write(alive.path().join("x"), "x").unwrap();
        let dead = cache.path().join("staging/work-dead");
        fs::create_dir_all(dead.join("a/b")).unwrap();
        assert_eq!(sweep(cache.path()).unwrap(), 1);
        assert!(!dead.exists());
        assert!(alive.path().join("x").exists());
        let place = alive.path().to_owned();
        drop(alive);
        assert!(!place.exists());
    }

    #[test]
    fn delivery_replaces_and_leaves_no_partial_file() {
        let dir = tempfile::tempdir().unwrap();
        let (from, out) = (dir.path().join("from"), dir.path().join("out"));
        for (text, keep) in [("one", true), ("two", false)] {
            let _ = fs::remove_file(&from);
            fs::write(&from, text).unwrap();
            let path = deliver(&from, &out, "file", keep).unwrap();
            assert_eq!(fs::read_to_string(path).unwrap(), text);
            assert_eq!(from.exists(), keep);
        }
        assert_eq!(fs::read_dir(&out).unwrap().count(), 1);
    }

    #[test]
    fn one_builder_of_an_entry_at_a_time() {
        let cache = tempfile::tempdir().unwrap();
        let entry = cache.path().join("images/abc");
        let first = lock_entry(&entry, || panic!("no other process is there")).unwrap();
        let (said, heard) = std::sync::mpsc::channel();
        std::thread::scope(|scope| {
            let second = scope.spawn(|| lock_entry(&entry, || said.send(()).unwrap()).map(|_| ()));
            heard.recv().unwrap();
            assert!(!second.is_finished());
            drop(first);
            second.join().unwrap().unwrap();
        });
    }

    #[test]
    fn a_partial_file_of_a_killed_process_goes_after_an_hour() {
        let dir = tempfile::tempdir().unwrap();
        let (old, new) =
            (dir.path().join(".dayfly-partial-old"), dir.path().join(".dayfly-partial-new"));
        for folder in [&old, &new] {
            fs::create_dir(folder).unwrap();
            fs::write(folder.join("root.ext4"), "x").unwrap();
        }
        let hours_ago = std::time::SystemTime::now() - std::time::Duration::from_secs(7200);
        File::open(&old).unwrap().set_modified(hours_ago).unwrap();
        let from = dir.path().join("from");
        fs::write(&from, "x").unwrap();
        deliver(&from, dir.path(), "file", false).unwrap();
        assert!(!old.exists() && new.exists());
    }

    #[test]
    fn mount_points_with_spaces_are_read_back() {
        assert_eq!(unescape(b"/a\\040b\\134c"), b"/a b\\c");
        assert!(mount_points().iter().any(|m| m == Path::new("/proc")));
    }
}
