//! Opening a folder of the host with a client's rights.
//!
//! A thread takes the client's user for file systems (setfsuid(2)), which drops its capabilities
//! over files, and opens the folder. The thread keeps its other ids, because those decide which
//! processes may signal this one. It ends right after that.
//!
//! A path may lead to a file system that does not answer, such as that of a host that is gone. So
//! no thread of the daemon waits for such a thread, and there are at most [`MOST`] of them.

use crate::base::caller::Caller;
use rustix::fs::{Mode, OFlags, ResolveFlags, mkdirat, openat2};
use rustix::io::Errno;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Component, Path, PathBuf};
use std::time::Duration;
use tokio::sync::{Semaphore, oneshot};
use tokio::time::{Instant, timeout_at};

/// Folders that are being opened at a time.
const MOST: usize = 16;

/// Why a folder cannot be shared.
#[derive(Debug, thiserror::Error)]
pub enum FolderError {
    /// A component of the path cannot be opened or made.
    #[error("{}: {what} as user {uid}: {errno}", path.display())]
    Refused {
        /// The component.
        path: PathBuf,
        /// Opening or making it.
        what: &'static str,
        /// The client.
        uid: u32,
        /// The kernel's error.
        errno: Errno,
    },
    /// The path has `..`.
    #[error("{}: expected a path without ..", .0.display())]
    Upwards(PathBuf),
    /// The path is one of a file.
    #[error(
        "{}: expected a folder, got a file; share the folder that it is in, or copy the file with \
         `dayfly cp`",
        .0.display()
    )]
    File(PathBuf),
    /// It was not opened in time.
    #[error(
        "{}: not opened within {} s: its file system, or that of another folder that is being \
         shared, does not answer",
        path.display(),
        within.as_secs()
    )]
    Late {
        /// The folder.
        path: PathBuf,
        /// The time limit.
        within: Duration,
    },
    /// No thread, or it could not take the client's user.
    #[error("taking the rights of user {uid}: {source}")]
    Rights {
        /// The client.
        uid: u32,
        /// The error.
        #[source]
        source: io::Error,
    },
}

/// Opens the folder at the absolute path `path` with the rights of `caller`, and makes the
/// components that are missing.
///
/// # Errors
/// [`FolderError`]. After [`FolderError::Late`] the folder may still be made.
pub async fn open(path: &Path, caller: &Caller, within: Duration) -> Result<OwnedFd, FolderError> {
    static OPENING: Semaphore = Semaphore::const_new(MOST);
    let deadline = Instant::now() + within;
    let late = || FolderError::Late { path: path.to_owned(), within };
    let uid = caller.uid;
    let rights = move |source| FolderError::Rights { uid, source };
    // An error means that the semaphore is closed, which it never is.
    let Ok(Ok(permit)) = timeout_at(deadline, OPENING.acquire()).await else { return Err(late()) };
    let (sender, opened) = oneshot::channel();
    let (owned, caller) = (path.to_owned(), caller.clone());
    let work = move || {
        let opened = become_caller(&caller).map_err(rights);
        // The receiver is gone if this took too long.
        let _ = sender.send(opened.and_then(|()| open_or_make(&owned, caller.uid)));
        drop(permit);
    };
    std::thread::Builder::new().name("folder".to_owned()).spawn(work).map_err(rights)?;
    match timeout_at(deadline, opened).await {
        Ok(Ok(opened)) => opened,
        Ok(Err(_)) => Err(rights(io::Error::other("its thread panicked"))),
        Err(_) => Err(late()),
    }
}

/// Gives this thread the client's user, group and groups for files. They last as long as the
/// thread.
fn become_caller(caller: &Caller) -> io::Result<()> {
    let Caller { uid, gid, groups } = caller;
    // SAFETY: a bare system call that changes credentials of this thread only (credentials(7)).
    // libc's setgroups would change those of all threads.
    let set = unsafe { libc::syscall(libc::SYS_setgroups, groups.len(), groups.as_ptr()) };
    if set != 0 {
        return Err(io::Error::last_os_error());
    }
    // The group first: without root's rights it could not be changed any more.
    for (call, id) in [(libc::SYS_setfsgid, *gid), (libc::SYS_setfsuid, *uid)] {
        // SAFETY: as above. Both calls return the id before, and no error. So a second call, with
        // an invalid id, returns what the first call has set.
        let now = unsafe {
            libc::syscall(call, id);
            libc::syscall(call, u32::MAX)
        };
        if now != libc::c_long::from(id) {
            return Err(io::Error::other(format!("expected the id {id}, got {now}")));
        }
    }
    Ok(())
}

/// Opens a folder, component by component if it is missing.
fn open_or_make(path: &Path, uid: u32) -> Result<OwnedFd, FolderError> {
    match open_folder(path) {
        Ok(folder) => return Ok(folder),
        Err(Errno::NOENT) => {}
        Err(Errno::NOTDIR) if path.is_file() => return Err(FolderError::File(path.to_owned())),
        Err(errno) => {
            let what = "opening it";
            return Err(FolderError::Refused { path: path.to_owned(), what, uid, errno });
        }
    }
    let mut at = PathBuf::from("/");
    let refused = |path: &Path, what, errno| {
        Err(FolderError::Refused { path: path.to_owned(), what, uid, errno })
    };
    let mut folder = match open_folder(&at) {
        Ok(root) => root,
        Err(errno) => return refused(&at, "opening it", errno),
    };
    for component in path.components() {
        let name = match component {
            Component::Normal(name) => name,
            Component::RootDir | Component::CurDir => continue,
            Component::ParentDir | Component::Prefix(_) => {
                return Err(FolderError::Upwards(path.to_owned()));
            }
        };
        at.push(name);
        folder = match open_at(&folder, Path::new(name)) {
            Err(Errno::NOENT) => {
                match mkdirat(&folder, name, Mode::from_raw_mode(0o755)) {
                    // Another request may have made it.
                    Ok(()) | Err(Errno::EXIST) => {}
                    Err(errno) => return refused(&at, "making the folder", errno),
                }
                open_at(&folder, Path::new(name))
            }
            opened => opened,
        }
        .or_else(|errno| refused(&at, "opening it", errno))?;
    }
    Ok(folder)
}

fn open_folder(path: &Path) -> Result<OwnedFd, Errno> {
    open_at(rustix::fs::CWD, path)
}

/// Opens a folder below `folder`. A link in /proc would lead to what this process has open.
fn open_at(folder: impl AsFd, path: &Path) -> Result<OwnedFd, Errno> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    openat2(folder, path, flags, Mode::empty(), ResolveFlags::NO_MAGICLINKS)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::Permissions;
    use std::os::unix::fs::{MetadataExt, PermissionsExt, chown, symlink};

    const USER: u32 = 12_345;
    const LONG: Duration = Duration::from_secs(120);

    fn caller() -> Caller {
        Caller { uid: USER, gid: 23_456, groups: vec![34_567] }
    }

    fn mode(path: &Path, mode: u32) {
        std::fs::set_permissions(path, Permissions::from_mode(mode)).unwrap();
    }

    #[tokio::test]
    async fn a_client_opens_and_makes_what_it_may_and_nothing_else() {
        assert!(rustix::process::geteuid().is_root(), "this test has to run as root");
        let outer = tempfile::tempdir().unwrap();
        mode(outer.path(), 0o711);
        let at = |name: &str| outer.path().join(name);
        for (name, owner, group, bits) in [
            ("own", USER, 0, 0o700),
            ("group", 0, 34_567, 0o070),
            ("root", 0, 0, 0o700),
            ("all", 0, 0, 0o755),
        ] {
            std::fs::create_dir(at(name)).unwrap();
            chown(at(name), Some(owner), Some(group)).unwrap();
            mode(&at(name), bits);
        }
        std::fs::create_dir(at("root/open")).unwrap();
        symlink("own", at("link")).unwrap();
        for name in ["own", "group", "all", "link", "own/new/newer"] {
            let opened = open(&at(name), &caller(), LONG).await;
            opened.unwrap_or_else(|e| panic!("{name}: {e}"));
        }
        let made = std::fs::metadata(at("own/new/newer")).unwrap();
        assert_eq!((made.uid(), made.gid(), made.mode() & 0o777), (USER, 23_456, 0o755));
        for (name, says) in [
            ("root/open", "opening it as user 12345: Permission denied"),
            ("root/new", "opening it as user 12345: Permission denied"),
            ("all/new", "making the folder as user 12345: Permission denied"),
        ] {
            let refused = open(&at(name), &caller(), LONG).await.unwrap_err().to_string();
            assert!(refused.contains(says), "{name}: {refused}");
        }
        open(&at("root/new"), &Caller::default(), LONG).await.unwrap();
        // The rights of this thread are as before.
        assert!(std::fs::read_dir(at("root")).is_ok());
    }

    #[tokio::test]
    async fn a_file_and_what_this_process_has_open_are_refused() {
        let outer = tempfile::tempdir().unwrap();
        let file = outer.path().join("file");
        std::fs::write(&file, "").unwrap();
        let refused = open(&file, &Caller::default(), LONG).await.unwrap_err().to_string();
        assert!(refused.contains("expected a folder, got a file"), "{refused}");
        for path in ["/proc/self/root", "/proc/self/cwd", "/proc/thread-self/root/etc"] {
            let refused = open(Path::new(path), &Caller::default(), LONG).await;
            assert!(
                matches!(refused, Err(FolderError::Refused { errno: Errno::LOOP, .. })),
                "{path}: {refused:?}"
            );
        }
        let upwards = outer.path().join("new/../x");
        let refused = open(&upwards, &Caller::default(), LONG).await;
        assert!(matches!(refused, Err(FolderError::Upwards(_))), "{refused:?}");
    }
}
