//! The folders of a tree, which are the same in both versions.
//!
//! A tree belongs to the daemon with one run folder. Its daemon has its lock, and its extended
//! attribute names the run folder. So a later daemon with another run folder can remove a tree that
//! no daemon will use again.

use super::files::{keyed, named, read};
use super::name::PARENTS;
use super::place::NoGroups;
use rustix::fs::{FlockOperation, Mode, OFlags, XattrFlags, flock, getxattr, setxattr};
use rustix::io::Errno;
use std::ffi::OsStr;
use std::fs::{DirBuilder, File, Permissions};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{DirBuilderExt, PermissionsExt};
use std::path::{Path, PathBuf};

/// The start of the name of each tree.
const PREFIX: &str = "dayfly-";
/// The attribute of a tree that has its run folder. The file systems of both versions have
/// attributes of this kind, which only root can change.
const RUN: &str = "trusted.dayfly.run";
/// The attribute of a group above trees that a daemon made.
const MADE: &str = "trusted.dayfly.made";
/// The permissions of a tree. Another user who can open its folder can hold its lock.
const MODE: u32 = 0o700;
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

/// Makes the folders of a tree, and locks them. After an error, no new folder is left.
pub(super) fn make(folders: &[PathBuf], run: &Path) -> Result<Vec<File>, NoGroups> {
    let mut new = Vec::new();
    let made = make_and_lock(folders, run, &mut new);
    if made.is_err() {
        for folder in new {
            let _ = remove(folder);
        }
    }
    made
}

fn make_and_lock<'a>(
    folders: &'a [PathBuf],
    run: &Path,
    new: &mut Vec<&'a Path>,
) -> Result<Vec<File>, NoGroups> {
    let failed = |folder: &Path, e| NoGroups::making(named(folder)(e));
    for folder in folders {
        match DirBuilder::new().mode(MODE).create(folder) {
            Ok(()) => new.push(folder),
            Err(e) if e.kind() == io::ErrorKind::AlreadyExists => {}
            Err(e) => return Err(failed(folder, e)),
        }
    }
    let mut locks = Vec::new();
    for folder in folders {
        let permissions = Permissions::from_mode(MODE);
        std::fs::set_permissions(folder, permissions).map_err(|e| failed(folder, e))?;
        let locked = lock(folder).map_err(|e| failed(folder, e))?;
        locks.push(locked.ok_or_else(|| NoGroups::Taken(folder.clone()))?);
        // Without it, no other daemon removes the tree.
        let _ = setxattr(folder, RUN, run.as_os_str().as_bytes(), XattrFlags::empty());
    }
    Ok(locks)
}

/// Makes a group in which trees are made, with those above it, unless they exist.
pub(super) fn make_base(base: &Path) -> Result<(), NoGroups> {
    let missing: Vec<&Path> = base.ancestors().take_while(|folder| !folder.exists()).collect();
    for folder in missing.into_iter().rev() {
        match std::fs::create_dir(folder) {
            Ok(()) => {
                // Without the attribute, no daemon sets its weight.
                let _ = setxattr(folder, MADE, b"1", XattrFlags::empty());
            }
            Err(e) if e.kind() == io::ErrorKind::AlreadyExists => {}
            Err(e) => return Err(NoGroups::making(named(folder)(e))),
        }
    }
    Ok(())
}

/// Whether a daemon made this group above its tree.
pub(super) fn was_made(folder: &Path) -> bool {
    getxattr(folder, MADE, &mut [0_u8; 1]).is_ok()
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

/// Whether a process or thread is in this group. `cgroup.procs` may leave out a process whose first
/// thread has ended.
pub(super) fn has_processes(folder: &Path) -> io::Result<bool> {
    // v1 has no such file.
    if let Some(events) = read(&folder.join("cgroup.events"))? {
        return Ok(keyed(&events, "populated") != Some(0));
    }
    let path = folder.join("tasks");
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
    for name in ["main", "shared"] {
        remove(&folder.join(name))?;
    }
    remove(folder).map(drop)
}
