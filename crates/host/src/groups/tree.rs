//! The folders of a tree, which are the same in both versions.
//!
//! A tree belongs to the daemon with one run folder. Its daemon has its lock, and its extended
//! attribute names the run folder. So a later daemon with another run folder can remove a tree that
//! no daemon will use again.

use super::files::named;
use super::name::PARENTS;
use super::place::NoGroups;
use rustix::fs::{FlockOperation, Mode, OFlags, XattrFlags, flock, getxattr, setxattr};
use rustix::io::Errno;
use std::ffi::OsStr;
use std::fs::File;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

/// The start of the name of each tree.
const PREFIX: &str = "dayfly-";
/// The attribute of a tree that has its run folder. The file systems of both versions have
/// attributes of this kind, which only root can change.
const RUN: &str = "trusted.dayfly.run";
/// The longest path of a run folder that is read.
const MOST_BYTES: usize = 4096;

/// The number by which trees of daemons differ: a digest of the run folder (FNV-1a), because names
/// of groups are short. The lock keeps two daemons apart whose run folders have one digest.
fn tag(run: &Path) -> u64 {
    let mix = |hash: u64, byte: &u8| (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3);
    run.as_os_str().as_bytes().iter().fold(0xcbf2_9ce4_8422_2325, mix)
}

/// The name of the tree of the daemon with this run folder.
pub(super) fn name(run: &Path) -> String {
    format!("{PREFIX}{:016x}", tag(run))
}

fn open(folder: &Path) -> io::Result<File> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    Ok(rustix::fs::open(folder, flags, Mode::empty()).map_err(io::Error::from)?.into())
}

/// Locks a folder of a tree; `None` if another process has the lock.
fn lock(folder: &Path) -> io::Result<Option<File>> {
    let file = open(folder)?;
    match flock(&file, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => Ok(Some(file)),
        Err(Errno::AGAIN) => Ok(None),
        Err(e) => Err(e.into()),
    }
}

/// Makes the folders of a tree, and locks them.
pub(super) fn make(folders: &[PathBuf], run: &Path) -> Result<Vec<File>, NoGroups> {
    let mut locks = Vec::new();
    for folder in folders {
        match std::fs::create_dir(folder) {
            Err(e) if e.kind() != io::ErrorKind::AlreadyExists => {
                return Err(NoGroups::making(named(folder)(e)));
            }
            _ => {}
        }
    }
    for folder in folders {
        let locked = lock(folder).map_err(|e| NoGroups::making(named(folder)(e)))?;
        locks.push(locked.ok_or_else(|| NoGroups::Taken(folder.clone()))?);
        // Without it, no other daemon removes the tree.
        let _ = setxattr(folder, RUN, run.as_os_str().as_bytes(), XattrFlags::empty());
    }
    Ok(locks)
}

/// Removes the trees in `bases` whose daemons do not run and whose run folders are gone, if no
/// process is in them. Whatever fails is left.
pub(super) fn sweep(bases: &[PathBuf]) {
    for base in bases {
        for entry in std::fs::read_dir(base).into_iter().flatten().flatten() {
            let path = entry.path();
            if !entry.file_name().as_bytes().starts_with(PREFIX.as_bytes()) || !is_left(&path) {
                continue;
            }
            // A daemon with the tree may see another run folder under its path, in another mount
            // namespace. The lock is held until the tree is removed.
            if let Ok(Some(_lock)) = lock(&path) {
                let _ = remove_all(&path);
            }
        }
    }
}

/// Whether the run folder of this tree is gone, so that no daemon will take the tree over.
fn is_left(folder: &Path) -> bool {
    let mut run = [0; MOST_BYTES];
    let Ok(length) = getxattr(folder, RUN, &mut run) else { return false };
    let run = Path::new(OsStr::from_bytes(&run[..length]));
    run.is_absolute() && matches!(run.try_exists(), Ok(false))
}

/// Whether a process is in this group.
pub(super) fn has_processes(folder: &Path) -> io::Result<bool> {
    let path = folder.join("cgroup.procs");
    Ok(!std::fs::read_to_string(&path).map_err(named(&path))?.is_empty())
}

/// Removes the folder of one group. `false`: a process is in it.
pub(super) fn remove(folder: &Path) -> io::Result<bool> {
    match std::fs::remove_dir(folder) {
        Ok(()) => Ok(true),
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(true),
        Err(e) if e.kind() == io::ErrorKind::ResourceBusy => Ok(false),
        Err(e) => Err(named(folder)(e)),
    }
}

/// Removes a tree from the leaves on. Folders with a process in them stay, and those around them.
pub(super) fn remove_all(folder: &Path) -> io::Result<()> {
    for parent in PARENTS.map(|parent| folder.join(parent)) {
        for entry in std::fs::read_dir(&parent).into_iter().flatten().flatten() {
            if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                remove(&entry.path())?;
            }
        }
        remove(&parent)?;
    }
    remove(&folder.join("main"))?;
    remove(folder).map(drop)
}
