//! Named volumes: folders below the state folder, for each user of the host.
//!
//! ```text
//! <state>/volumes/<uid>/<name>/files   what a guest sees; belongs to the user
//! <state>/volumes/<uid>/.new-…         being made
//! <state>/volumes/<uid>/.old-…         being removed
//! ```
//!
//! A volume appears and disappears by a rename, so that a daemon that is killed leaves it whole or
//! leaves a folder that the next daemon removes. A volume's time of creation is the time of the
//! last change of its folder, in which only `files` was made.

use crate::base::caller::Caller;
use crate::base::error::{ApiError, Outcome};
use crate::base::random::random;
use crate::volumes::remove;
use dayfly_api::types::ErrorCode;
use dayfly_units::Name;
use dayfly_units::sync::lock;
use rustix::fs::{Mode, OFlags};
use std::collections::BTreeMap;
use std::fs::{DirBuilder, Permissions};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{DirBuilderExt, PermissionsExt, chown};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::UNIX_EPOCH;

/// The folder of a volume's files.
const FILES: &str = "files";

/// The key of a named volume: its user, and its name.
pub type Key = (u32, Name);

/// A named volume that exists.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Found {
    /// The user to whom it belongs.
    pub uid: u32,
    /// Its name.
    pub name: Name,
    /// When it was made.
    pub created_unix_ms: u64,
}

/// All named volumes.
#[derive(Debug)]
pub struct Named {
    folder: PathBuf,
    /// Volumes of VMs that are being created, with the number of those.
    held: Arc<Mutex<BTreeMap<Key, usize>>>,
}

/// Keeps a volume from being removed until its VM is in the registry.
#[derive(Debug)]
pub struct Hold {
    held: Arc<Mutex<BTreeMap<Key, usize>>>,
    key: Key,
}

impl Drop for Hold {
    fn drop(&mut self) {
        let mut held = lock(&self.held);
        if let Some(count) = held.get_mut(&self.key) {
            *count -= 1;
            if *count == 0 {
                held.remove(&self.key);
            }
        }
    }
}

fn failed(what: impl std::fmt::Display) -> impl FnOnce(io::Error) -> ApiError {
    move |e| {
        let code = match e.raw_os_error() {
            Some(libc::ENOSPC | libc::EDQUOT) => ErrorCode::Exhausted,
            _ => ErrorCode::Internal,
        };
        ApiError::new(code, format_args!("volume: {what}: {e}"))
    }
}

/// Makes a folder that only root enters, unless it is there.
fn private(path: &Path) -> io::Result<()> {
    match DirBuilder::new().mode(0o700).create(path) {
        Err(e) if e.kind() == io::ErrorKind::AlreadyExists => Ok(()),
        made => made,
    }
}

impl Named {
    /// The named volumes of the daemon with the state folder `state`.
    #[must_use]
    pub fn new(state: &Path) -> Self {
        Self { folder: state.join("volumes"), held: Arc::default() }
    }

    fn of_user(&self, uid: u32) -> PathBuf {
        self.folder.join(uid.to_string())
    }

    fn at(&self, uid: u32, name: &Name) -> PathBuf {
        self.of_user(uid).join(name.as_str())
    }

    /// Makes a volume of `caller`, unless it is there. Blocks.
    ///
    /// # Errors
    /// The file system's error.
    pub fn ensure(&self, caller: &Caller, name: &Name) -> Outcome<Found> {
        let path = self.at(caller.uid, name);
        let _one = lock(&self.held);
        if !path.is_dir() {
            self.make(caller, &path).map_err(failed(format_args!("making {}", path.display())))?;
        }
        found(caller.uid, name, &path)
    }

    fn make(&self, caller: &Caller, path: &Path) -> io::Result<()> {
        private(&self.folder)?;
        let of_user = self.of_user(caller.uid);
        private(&of_user)?;
        let new = of_user.join(format!(".new-{}", hex::encode(random::<8>())));
        let made = || -> io::Result<()> {
            private(&new)?;
            let files = new.join(FILES);
            private(&files)?;
            std::fs::set_permissions(&files, Permissions::from_mode(0o755))?;
            chown(&files, Some(caller.uid), Some(caller.gid))?;
            std::fs::rename(&new, path)
        };
        made().inspect_err(|_| {
            let _ = std::fs::remove_dir_all(&new);
        })
    }

    /// Opens the files of a volume of `caller`, which is made if it is missing. It stays until the
    /// [`Hold`] is dropped. Blocks.
    ///
    /// # Errors
    /// The file system's error.
    pub fn open(&self, caller: &Caller, name: &Name) -> Outcome<(OwnedFd, Hold)> {
        let key = (caller.uid, name.clone());
        *lock(&self.held).entry(key.clone()).or_default() += 1;
        let hold = Hold { held: self.held.clone(), key };
        self.ensure(caller, name)?;
        let files = self.at(caller.uid, name).join(FILES);
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let folder = rustix::fs::open(&files, flags, Mode::empty());
        let what = format!("opening {}", files.display());
        Ok((folder.map_err(|e| failed(what)(e.into()))?, hold))
    }

    /// The volumes of a user, by name. Blocks.
    ///
    /// # Errors
    /// The file system's error.
    pub fn list(&self, uid: u32) -> Outcome<Vec<Found>> {
        let folder = self.of_user(uid);
        let listed = match std::fs::read_dir(&folder) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            listed => listed.map_err(failed(format_args!("listing {}", folder.display())))?,
        };
        let mut volumes = Vec::new();
        for entry in listed {
            let entry = entry.map_err(failed(format_args!("listing {}", folder.display())))?;
            // Those that are being made or removed have no valid name.
            let name = entry.file_name().to_str().and_then(|name| name.parse::<Name>().ok());
            let Some(name) = name else { continue };
            match found(uid, &name, &entry.path()) {
                Ok(volume) => volumes.push(volume),
                // Removed meanwhile.
                Err(error) if error.0.code == ErrorCode::NotFound => {}
                Err(error) => return Err(error),
            }
        }
        volumes.sort_by(|a, b| a.name.cmp(&b.name));
        Ok(volumes)
    }

    /// One volume of a user. Blocks.
    ///
    /// # Errors
    /// There is none, or the file system's error.
    pub fn find(&self, uid: u32, name: &Name) -> Outcome<Found> {
        found(uid, name, &self.at(uid, name))
    }

    /// Removes a volume of a user with its files. `used_by` names a VM that has it, if there is
    /// one. Blocks.
    ///
    /// # Errors
    /// There is none, a VM has it, or the file system's error.
    pub fn remove(
        &self,
        uid: u32,
        name: &Name,
        used_by: impl FnOnce() -> Option<String>,
    ) -> Outcome<()> {
        let (path, old) = (self.at(uid, name), hex::encode(random::<8>()));
        let old = self.of_user(uid).join(format!(".old-{old}"));
        {
            let held = lock(&self.held);
            found(uid, name, &path)?;
            let starting = || "a VM that is being created".to_owned();
            let user =
                if held.contains_key(&(uid, name.clone())) { Some(starting()) } else { used_by() };
            if let Some(user) = user {
                return Err(ApiError::conflict(format_args!(
                    "volume {name}: {user} has it; remove that one first"
                )));
            }
            std::fs::rename(&path, &old)
                .map_err(failed(format_args!("removing {}", path.display())))?;
        }
        remove::all(&old).map_err(failed(format_args!("removing {}", old.display())))
    }

    /// Removes what a daemon that was killed left of volumes that it made or removed. Returns at
    /// once: a thread removes the files, which may be many. Call it before clients are served,
    /// whose volumes would be taken for such ones.
    pub fn sweep(&self) -> Option<JoinHandle<()>> {
        let users = std::fs::read_dir(&self.folder).ok()?;
        let users = users.flatten().filter_map(|user| std::fs::read_dir(user.path()).ok());
        let unfinished = |entry: &std::fs::DirEntry| {
            let name = entry.file_name();
            [".new-", ".old-"]
                .iter()
                .any(|start| name.as_encoded_bytes().starts_with(start.as_bytes()))
        };
        let left: Vec<PathBuf> =
            users.flatten().flatten().filter(unfinished).map(|entry| entry.path()).collect();
        if left.is_empty() {
            return None;
        }
        let sweeps = move || {
            for path in left {
                match remove::all(&path) {
                    Ok(()) => tracing::info!("swept {}", path.display()),
                    Err(e) => tracing::error!("sweeping {}: {e}", path.display()),
                }
            }
        };
        let thread = std::thread::Builder::new().name("volumes".to_owned()).spawn(sweeps);
        thread.inspect_err(|e| tracing::error!("sweeping volumes: {e}")).ok()
    }
}

fn found(uid: u32, name: &Name, path: &Path) -> Outcome<Found> {
    let meta = match std::fs::symlink_metadata(path) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => {
            return Err(ApiError::not_found(format_args!(
                "volume {name}: there is none of user {uid}; `dayfly volume ls` lists them"
            )));
        }
        meta => meta.map_err(failed(path.display()))?,
    };
    let made = meta.modified().map_err(failed(path.display()))?;
    let since = made.duration_since(UNIX_EPOCH).unwrap_or_default();
    let created_unix_ms = u64::try_from(since.as_millis()).unwrap_or_default();
    Ok(Found { uid, name: name.clone(), created_unix_ms })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::MetadataExt;

    fn name(text: &str) -> Name {
        text.parse().unwrap()
    }

    fn user(uid: u32) -> Caller {
        Caller { uid, gid: uid + 1, groups: Vec::new() }
    }

    #[test]
    fn each_user_has_other_volumes_and_a_used_one_stays() {
        let state = tempfile::tempdir().unwrap();
        let named = Named::new(state.path());
        assert_eq!(named.list(5).unwrap(), []);
        let made = named.ensure(&user(5), &name("data")).unwrap();
        assert!(made.created_unix_ms > 1_600_000_000_000, "{made:?}");
        let files = state.path().join("volumes/5/data/files");
        let meta = std::fs::metadata(&files).unwrap();
        assert_eq!((meta.uid(), meta.gid(), meta.mode() & 0o777), (5, 6, 0o755));
        let closed = std::fs::metadata(state.path().join("volumes")).unwrap();
        assert_eq!(closed.mode() & 0o777, 0o700);
        std::fs::write(files.join("kept"), "").unwrap();
        assert_eq!(named.ensure(&user(5), &name("data")).unwrap(), made, "it is found again");
        assert!(files.join("kept").exists());
        named.ensure(&user(5), &name("a")).unwrap();
        let (_folder, hold) = named.open(&user(7), &name("data")).unwrap();
        let names = |uid| named.list(uid).unwrap().into_iter().map(|v| v.name.to_string());
        assert_eq!(names(5).collect::<Vec<_>>(), ["a", "data"]);
        assert_eq!(names(7).collect::<Vec<_>>(), ["data"]);

        let refused = |uid, by: Option<&str>| {
            let by = by.map(str::to_owned);
            named.remove(uid, &name("data"), || by).unwrap_err().0
        };
        assert_eq!(refused(5, Some("VM web")).code, ErrorCode::Conflict);
        assert!(refused(5, Some("VM web")).message.contains("VM web has it"));
        assert!(refused(7, None).message.contains("being created"));
        assert_eq!(refused(8, None).code, ErrorCode::NotFound);
        drop(hold);
        named.remove(7, &name("data"), || None).unwrap();
        named.remove(5, &name("data"), || None).unwrap();
        assert_eq!((names(5).count(), names(7).count()), (1, 0));
        assert!(named.find(5, &name("a")).is_ok() && named.find(5, &name("data")).is_err());
    }

    #[test]
    fn what_a_killed_daemon_left_is_swept_and_never_listed() {
        let state = tempfile::tempdir().unwrap();
        let named = Named::new(state.path());
        assert!(named.sweep().is_none());
        named.ensure(&user(5), &name("data")).unwrap();
        let of_user = state.path().join("volumes/5");
        for left in [".new-1/files", ".old-2/files/deep"] {
            std::fs::create_dir_all(of_user.join(left)).unwrap();
        }
        assert_eq!(named.list(5).unwrap().len(), 1);
        named.sweep().unwrap().join().unwrap();
        let left: Vec<_> = std::fs::read_dir(of_user).unwrap().flatten().collect();
        assert_eq!(left.len(), 1, "{left:?}");
    }
}
