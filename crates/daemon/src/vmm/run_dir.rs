//! Prepared run directories: the folder, sockets and files that every VMM has, made before their VM
//! is known.
//!
//! A prepared run directory is renamed when a VMM is started in it. Its sockets stay valid, because
//! a unix socket is found by its inode and not by the name at bind(2). One waits; a caller that
//! finds none makes one. If a daemon is killed, the next one removes what it left.

use crate::base::config::{Config, VmDir};
use crate::vmm::link::Link;
use dayfly_units::sync::lock;
use dayfly_vmm::meter;
use std::fs::{File, Permissions};
use std::io;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt, PermissionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

/// Why no run directory was made.
#[derive(Debug, thiserror::Error)]
#[error("{what} {}: {source}", path.display())]
pub struct RunDirError {
    what: &'static str,
    path: PathBuf,
    /// The error of the file system.
    #[source]
    pub source: io::Error,
}

pub(super) fn failed(what: &'static str, path: &Path) -> impl FnOnce(io::Error) -> RunDirError {
    move |source| RunDirError { what, path: path.to_owned(), source }
}

/// A run directory with the open files of the VMM that will use it.
#[derive(Debug)]
pub struct PreparedRunDir {
    /// The VMM's control socket.
    pub control: UnixListener,
    /// The socket of the guest's vsock.
    pub vsock: UnixListener,
    /// The guest's console, in two files that the VMM fills in turn.
    pub console: [File; 2],
    /// The exit record.
    pub exit: File,
    /// The daemon's end of the connection to the VMM.
    pub link: Link,
    /// The VMM's end of the connection.
    pub theirs: UnixStream,
    folder: Folder,
}

/// A folder that is removed when this is dropped, unless it has become a VM's.
#[derive(Debug)]
struct Folder(Option<VmDir>);

impl Drop for Folder {
    fn drop(&mut self) {
        if let Some(dir) = self.0.take()
            && let Err(e) = std::fs::remove_dir_all(dir.path())
        {
            // The next daemon's sweep removes it.
            tracing::warn!("removing {}: {e}", dir.path().display());
        }
    }
}

impl PreparedRunDir {
    fn new(dir: VmDir) -> Result<Self, RunDirError> {
        folder(dir.path(), 0o700)?;
        let made = Folder(Some(dir.clone()));
        Self::fill(&dir, made)
    }

    /// Makes what belongs into the empty folder `dir`, which `made` removes after an error.
    fn fill(dir: &VmDir, made: Folder) -> Result<Self, RunDirError> {
        folder(&dir.root(), 0o755)?;
        let [first, second] = dir.console();
        let console = [console(&first)?, console(&second)?];
        let (link, theirs) = Link::new().map_err(failed("connecting to", &dir.control()))?;
        Ok(Self {
            control: listener(&dir.control())?,
            vsock: listener(&dir.vsock())?,
            console,
            exit: exit_file(&dir.exit())?,
            link,
            theirs,
            folder: made,
        })
    }

    /// Makes the run directory `dir` of a VM that has ended anew. Its record stays; all else is
    /// replaced, the console too.
    ///
    /// # Errors
    /// A file cannot be removed or made. The call may be repeated.
    pub(super) fn again(dir: &VmDir) -> Result<Self, RunDirError> {
        let reading = || failed("emptying", dir.path());
        for entry in std::fs::read_dir(dir.path()).map_err(reading())? {
            let path = entry.map_err(reading())?.path();
            if path == dir.record() {
                continue;
            }
            let removed = if path.symlink_metadata().is_ok_and(|found| found.is_dir()) {
                std::fs::remove_dir_all(&path)
            } else {
                std::fs::remove_file(&path)
            };
            removed.map_err(failed("removing", &path))?;
        }
        Self::fill(dir, Folder(None))
    }

    /// Renames the folder to `dir`. From then on the owner of `dir` must remove it.
    pub(super) fn become_vm(&mut self, dir: &VmDir) -> Result<(), RunDirError> {
        if let Some(own) = &self.folder.0 {
            std::fs::rename(own.path(), dir.path()).map_err(failed("making folder", dir.path()))?;
            self.folder.0 = None;
        }
        Ok(())
    }
}

fn folder_or_there(path: &Path) -> Result<(), RunDirError> {
    match folder(path, 0o700) {
        Err(e) if e.source.kind() == io::ErrorKind::AlreadyExists => Ok(()),
        made => made,
    }
}

fn folder(path: &Path, mode: u32) -> Result<(), RunDirError> {
    std::fs::DirBuilder::new().mode(mode).create(path).map_err(failed("making folder", path))?;
    // Independent of the daemon's umask.
    std::fs::set_permissions(path, Permissions::from_mode(mode))
        .map_err(failed("making folder", path))
}

pub(super) fn listener(path: &Path) -> Result<UnixListener, RunDirError> {
    UnixListener::bind(path).map_err(failed("listening on", path))
}

fn console(path: &Path) -> Result<File, RunDirError> {
    let mut options = File::options();
    options.create_new(true).mode(0o600).append(true);
    options.open(path).map_err(failed("making", path))
}

/// The exit file, with the page in which the VMM counts for the bill. The exit record is appended.
fn exit_file(path: &Path) -> Result<File, RunDirError> {
    let mut options = File::options();
    options.create_new(true).mode(0o600).read(true).append(true);
    let file = options.open(path).map_err(failed("making", path))?;
    meter::prepare(&file).map_err(failed("making", path))?;
    Ok(file)
}

/// The run directory that waits, and the folder in which run directories are made.
#[derive(Debug)]
pub struct PreparedRunDirs {
    folder: PathBuf,
    number: AtomicU64,
    waiting: Mutex<Option<PreparedRunDir>>,
}

impl PreparedRunDirs {
    /// No run directory waits yet.
    #[must_use]
    pub fn new(config: &Config) -> Self {
        Self { folder: config.run_dirs(), number: AtomicU64::new(0), waiting: Mutex::default() }
    }

    /// Removes the run directories that an earlier daemon left.
    ///
    /// # Errors
    /// They cannot be removed.
    pub fn sweep(&self) -> Result<(), RunDirError> {
        match std::fs::remove_dir_all(&self.folder) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => {
                Err(failed("removing", &self.folder)(e))
            }
            _ => Ok(()),
        }
    }

    /// Makes a run directory that waits, unless one does. Must be called in a Tokio runtime;
    /// blocks.
    ///
    /// # Errors
    /// The run directory cannot be made.
    pub fn prepare(&self) -> Result<(), RunDirError> {
        if lock(&self.waiting).is_none() {
            let run_dir = self.make()?;
            *lock(&self.waiting) = Some(run_dir);
        }
        Ok(())
    }

    /// Takes the run directory that waits, or makes one. Must be called in a Tokio runtime; blocks.
    ///
    /// # Errors
    /// The run directory cannot be made.
    pub fn take(&self) -> Result<PreparedRunDir, RunDirError> {
        let waiting = lock(&self.waiting).take();
        waiting.map_or_else(|| self.make(), Ok)
    }

    /// Removes the run directory that waits.
    pub fn end(&self) {
        drop(lock(&self.waiting).take());
    }

    fn make(&self) -> Result<PreparedRunDir, RunDirError> {
        folder_or_there(&self.folder)?;
        let number = self.number.fetch_add(1, Ordering::Relaxed);
        PreparedRunDir::new(VmDir::at(self.folder.join(number.to_string())))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Write};

    #[tokio::test]
    async fn a_prepared_run_directory_becomes_a_vm_s_folder_or_is_removed() {
        let run = tempfile::tempdir().unwrap();
        let run_dirs = PreparedRunDirs {
            folder: run.path().join("prepared run directories"),
            number: AtomicU64::new(0),
            waiting: Mutex::default(),
        };
        let count = || std::fs::read_dir(&run_dirs.folder).unwrap().count();
        run_dirs.prepare().unwrap();
        run_dirs.prepare().unwrap();
        assert_eq!(count(), 1);
        let mut run_dir = run_dirs.take().unwrap();
        drop(run_dirs.take().unwrap());
        let dir = VmDir::at(run.path().join("vm"));
        run_dir.become_vm(&dir).unwrap();
        assert_eq!(count(), 0);
        for (path, listener) in [(dir.control(), &run_dir.control), (dir.vsock(), &run_dir.vsock)] {
            UnixStream::connect(path).unwrap().write_all(b"x").unwrap();
            let mut byte = [0];
            listener.accept().unwrap().0.read_exact(&mut byte).unwrap();
            assert_eq!(byte, *b"x");
        }
        drop(run_dir);
        assert!(dir.console().iter().all(|path| path.exists()) && dir.exit().exists());
        run_dirs.prepare().unwrap();
        run_dirs.end();
        assert_eq!(count(), 0);
        std::fs::create_dir(run_dirs.folder.join("7")).unwrap();
        run_dirs.sweep().unwrap();
        run_dirs.sweep().unwrap();
        assert!(!run_dirs.folder.exists());
    }
}
