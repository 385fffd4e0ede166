//! The hidden folder of a stage in its target: the folder's name, lock and mark, and the removal of
//! hidden folders that killed processes left.
//!
//! The process that unpacks holds a lock (`flock`) on its hidden folder. The kernel releases the
//! lock at every exit, so a hidden folder without a held lock belongs to no process.
//!
//! The owner of the target may rename any folder there, also one that belongs to the copying user,
//! to a hidden folder's name. A hidden folder therefore carries a mark that only its owner can set:
//! an extended attribute with this host's machine id. Only marked folders of this host are removed,
//! through the descriptor that was checked. The mark is set while the lock is held. A file system
//! without locks or attributes keeps the hidden folder of a killed process.

use crate::folder::open_folder;
use rustix::fs::{
    AtFlags, Dir, FlockOperation, Mode, ResolveFlags, XattrFlags, fgetxattr, flock, fsetxattr,
    fstat, mkdirat, unlinkat,
};
use rustix::io::Errno;
use std::ffi::{OsStr, OsString};
use std::io::Read;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

const PREFIX: &str = ".dayfly-cp-";
/// The mark's name; its value is [`machine_id`].
const MARK: &str = "user.dayfly.stage";
/// Upper limit in bytes for the mark's value; a machine id has 32 hexadecimal digits
/// (machine-id(5)).
const MARK_BYTES: usize = 64;
const INSIDE: ResolveFlags =
    ResolveFlags::BENEATH.union(ResolveFlags::NO_SYMLINKS).union(ResolveFlags::NO_XDEV);

/// Makes a hidden folder in `target`, locks and marks it. Returns its name and the open folder.
///
/// # Errors
/// The failing system call's error.
pub(crate) fn make(target: BorrowedFd<'_>) -> Result<(OsString, OwnedFd), Errno> {
    loop {
        let mut random = [0_u8; 8];
        rustix::rand::getrandom(&mut random, rustix::rand::GetRandomFlags::empty())?;
        let name = OsString::from(format!("{PREFIX}{:016x}", u64::from_le_bytes(random)));
        match mkdirat(target, &name, Mode::from_raw_mode(0o700)) {
            Ok(()) => {}
            Err(Errno::EXIST) => continue,
            Err(errno) => return Err(errno),
        }
        let folder = open_folder(target, Path::new(&name), INSIDE).inspect_err(|_| {
            let _ = unlinkat(target, &name, AtFlags::REMOVEDIR);
        })?;
        // Without lock or mark the folder is not removed by another process, which is safe.
        if flock(&folder, FlockOperation::NonBlockingLockExclusive).is_ok()
            && let Some(id) = machine_id()
        {
            let _ = fsetxattr(&folder, MARK, &id, XattrFlags::CREATE);
        }
        return Ok((name, folder));
    }
}

/// Removes the hidden folders in `target` that no process of this host holds. Hidden folders that
/// cannot be removed stay.
pub(crate) fn sweep(target: BorrowedFd<'_>) {
    let (Ok(entries), Some(id)) = (Dir::read_from(target), machine_id()) else {
        return;
    };
    for entry in entries.flatten() {
        let name = OsStr::from_bytes(entry.file_name().to_bytes());
        if has_hidden_name(name)
            && let Ok(folder) = open_folder(target, Path::new(name), INSIDE)
            && is_left(folder.as_fd(), &id)
        {
            // The content goes through the checked descriptor. The name may lead to another folder
            // by now; of that, only an empty one is removed, which the target's owner can do too.
            remove_content(folder.as_fd());
            let _ = unlinkat(target, name, AtFlags::REMOVEDIR);
        }
    }
}

/// Removes the hidden folder that this process made, and its content. Links are removed, not
/// followed.
pub(crate) fn remove(target: BorrowedFd<'_>, name: &OsStr, folder: BorrowedFd<'_>) {
    remove_content(folder);
    let _ = unlinkat(target, name, AtFlags::REMOVEDIR);
}

/// The depth is that of a stage, because the folder has mode 0700 and only this user's stages write
/// to it.
fn remove_content(folder: BorrowedFd<'_>) {
    let path = format!("/proc/self/fd/{}", folder.as_raw_fd());
    for entry in std::fs::read_dir(&path).into_iter().flatten().flatten() {
        let _ = match entry.file_type() {
            Ok(kind) if kind.is_dir() => std::fs::remove_dir_all(entry.path()),
            _ => std::fs::remove_file(entry.path()),
        };
    }
}

fn has_hidden_name(name: &OsStr) -> bool {
    let random = name.as_bytes().strip_prefix(PREFIX.as_bytes());
    random.is_some_and(|random| random.len() == 16 && random.iter().all(u8::is_ascii_hexdigit))
}

/// Whether the folder is this user's, marked by a stage of this host, and no process holds its
/// lock.
fn is_left(folder: BorrowedFd<'_>, id: &[u8]) -> bool {
    let user = rustix::process::geteuid().as_raw();
    let mut mark = [0_u8; MARK_BYTES];
    fstat(folder).is_ok_and(|stat| stat.st_uid == user && stat.st_mode & 0o7777 == 0o700)
        && fgetxattr(folder, MARK, &mut mark).is_ok_and(|length| &mark[..length] == id)
        && flock(folder, FlockOperation::NonBlockingLockExclusive).is_ok()
}

/// This host's machine id; `None` if the host has none.
fn machine_id() -> Option<Vec<u8>> {
    let mut id = Vec::new();
    let file = std::fs::File::open("/etc/machine-id").ok()?;
    file.take(MARK_BYTES as u64).read_to_end(&mut id).ok()?;
    let id = id.trim_ascii().to_vec();
    (id.len() == 32 && id.iter().all(u8::is_ascii_hexdigit)).then_some(id)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(folder: &Path) -> Vec<OsString> {
        let entries = std::fs::read_dir(folder).unwrap();
        let mut names: Vec<OsString> = entries.map(|entry| entry.unwrap().file_name()).collect();
        names.sort();
        names
    }

    /// A hidden folder with content whose process is gone.
    fn left(target: BorrowedFd<'_>, folder: &Path) -> OsString {
        let (name, lock) = make(target).unwrap();
        drop(lock);
        std::fs::create_dir(folder.join(&name).join("folder")).unwrap();
        std::fs::write(folder.join(&name).join("folder/file"), "half").unwrap();
        name
    }

    #[test]
    fn only_marked_folders_without_a_process_are_removed() {
        let temp = tempfile::tempdir().unwrap();
        let target = std::fs::File::open(temp.path()).unwrap();
        let target = target.as_fd();
        let (live, _lock) = make(target).unwrap();
        let gone = left(target, temp.path());
        // What the target's owner may rename to a hidden folder's name, and other things.
        let renamed = temp.path().join(".dayfly-cp-00000000000000aa");
        std::fs::create_dir(&renamed).unwrap();
        std::fs::set_permissions(&renamed, std::os::unix::fs::PermissionsExt::from_mode(0o700))
            .unwrap();
        std::fs::write(renamed.join("precious"), "").unwrap();
        std::fs::create_dir(temp.path().join(".dayfly-cp-mine")).unwrap();
        std::fs::write(temp.path().join(".dayfly-cp-0123456789abcdef"), "").unwrap();
        let link = temp.path().join(".dayfly-cp-fedcba9876543210");
        std::os::unix::fs::symlink(&live, link).unwrap();
        let all = names(temp.path());
        sweep(target);
        // A program that another test is about to execute has a copy of the lock until then.
        let begun = std::time::Instant::now();
        while temp.path().join(&gone).exists() && begun.elapsed().as_secs() < 120 {
            std::thread::sleep(std::time::Duration::from_millis(10));
            sweep(target);
        }
        let rest: Vec<OsString> = all.into_iter().filter(|name| *name != gone).collect();
        assert_eq!(names(temp.path()), rest);
        assert!(renamed.join("precious").exists());
    }

    #[test]
    fn a_folder_with_another_mark_mode_or_owner_stays() {
        let temp = tempfile::tempdir().unwrap();
        let target = std::fs::File::open(temp.path()).unwrap();
        let target = target.as_fd();
        let id = machine_id().unwrap();
        let open = |name: &OsStr| std::fs::File::open(temp.path().join(name)).unwrap();
        let other_host = left(target, temp.path());
        fsetxattr(open(&other_host), MARK, &[b'0'; 32], XattrFlags::REPLACE).unwrap();
        let open_to_all = left(target, temp.path());
        let mode = std::os::unix::fs::PermissionsExt::from_mode(0o755);
        std::fs::set_permissions(temp.path().join(&open_to_all), mode).unwrap();
        let foreign = left(target, temp.path());
        std::os::unix::fs::chown(temp.path().join(&foreign), Some(65_533), None).unwrap();
        for name in [&other_host, &open_to_all, &foreign] {
            assert!(!is_left(open(name).as_fd(), &id), "{name:?}");
        }
        sweep(target);
        assert_eq!(names(temp.path()).len(), 3);
    }

    #[test]
    fn the_content_of_a_folder_that_takes_the_name_is_not_removed() {
        let temp = tempfile::tempdir().unwrap();
        let target = std::fs::File::open(temp.path()).unwrap();
        let (name, folder) = make(target.as_fd()).unwrap();
        std::fs::rename(temp.path().join(&name), temp.path().join("aside")).unwrap();
        std::fs::create_dir(temp.path().join(&name)).unwrap();
        std::fs::write(temp.path().join(&name).join("precious"), "").unwrap();
        remove(target.as_fd(), &name, folder.as_fd());
        assert!(temp.path().join(&name).join("precious").exists());
    }
}
