//! A berth: the folder, sockets and files that every VMM has, made before anybody knows for which VM.
//!
//! It lies in a folder of its own and is renamed when it gets its VM; sockets are found by what they are, not by what they were
//! called when they were bound. One waits; who finds none makes one. What a daemon leaves that is killed, the next one removes.

use super::link::Link;
use super::registry::lock;
use crate::config::{Config, VmDir};
use std::fs::{File, Permissions};
use std::io;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt, PermissionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

/// Why there is no berth.
#[derive(Debug, thiserror::Error)]
#[error("{what} {}: {source}", path.display())]
pub struct BerthError {
    what: &'static str,
    path: PathBuf,
    /// Why not.
    #[source]
    pub source: io::Error,
}

pub(super) fn failed(what: &'static str, path: &Path) -> impl FnOnce(io::Error) -> BerthError {
    move |source| BerthError { what, path: path.to_owned(), source }
}

/// What a VMM will have.
#[derive(Debug)]
pub struct Berth {
    /// Its control socket.
    pub control: UnixListener,
    /// Its guest's vsock.
    pub vsock: UnixListener,
    /// What its guest says.
    pub console: File,
    /// Why it ended.
    pub exit: File,
    /// The connection to it.
    pub link: Link,
    /// Its end of that.
    pub theirs: UnixStream,
    folder: Folder,
}

/// Removed when it is dropped and has not become a VM's.
#[derive(Debug)]
struct Folder(Option<VmDir>);

impl Drop for Folder {
    fn drop(&mut self) {
        if let Some(dir) = self.0.take()
            && let Err(e) = std::fs::remove_dir_all(dir.path())
        {
            // The next daemon removes it.
            tracing::warn!("removing {}: {e}", dir.path().display());
        }
    }
}

impl Berth {
    fn new(dir: VmDir) -> Result<Self, BerthError> {
        folder(dir.path(), 0o700)?;
        let made = Folder(Some(dir.clone()));
        folder(&dir.root(), 0o755)?;
        let (link, theirs) = Link::new().map_err(failed("connecting to", &dir.control()))?;
        Ok(Self {
            control: listener(&dir.control())?,
            vsock: listener(&dir.vsock())?,
            console: file(&dir.console(), true)?,
            exit: file(&dir.exit(), false)?,
            link,
            theirs,
            folder: made,
        })
    }

    /// Makes it the folder `dir` of a VM, which is whose who has that.
    pub(super) fn become_vm(&mut self, dir: &VmDir) -> Result<(), BerthError> {
        if let Some(own) = &self.folder.0 {
            std::fs::rename(own.path(), dir.path()).map_err(failed("making folder", dir.path()))?;
            self.folder.0 = None;
        }
        Ok(())
    }
}

fn folder_or_there(path: &Path) -> Result<(), BerthError> {
    match folder(path, 0o700) {
        Err(e) if e.source.kind() == io::ErrorKind::AlreadyExists => Ok(()),
        made => made,
    }
}

fn folder(path: &Path, mode: u32) -> Result<(), BerthError> {
    std::fs::DirBuilder::new().mode(mode).create(path).map_err(failed("making folder", path))?;
    // Whatever the daemon's umask is.
    std::fs::set_permissions(path, Permissions::from_mode(mode)).map_err(failed("making folder", path))
}

pub(super) fn listener(path: &Path) -> Result<UnixListener, BerthError> {
    UnixListener::bind(path).map_err(failed("listening on", path))
}

fn file(path: &Path, append: bool) -> Result<File, BerthError> {
    let mut options = File::options();
    options.create_new(true).mode(0o600);
    if append {
        options.append(true)
    } else {
        options.write(true)
    };
    options.open(path).map_err(failed("making", path))
}

/// The one that waits, and the place of those that are being made.
#[derive(Debug)]
pub struct Berths {
    folder: PathBuf,
    number: AtomicU64,
    waiting: Mutex<Option<Berth>>,
}

impl Berths {
    /// None waits yet.
    #[must_use]
    pub fn new(config: &Config) -> Self {
        Self { folder: config.berths(), number: AtomicU64::new(0), waiting: Mutex::default() }
    }

    /// Removes what a daemon before left.
    ///
    /// # Errors
    /// It cannot be removed.
    pub fn sweep(&self) -> Result<(), BerthError> {
        match std::fs::remove_dir_all(&self.folder) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => Err(failed("removing", &self.folder)(e)),
            _ => Ok(()),
        }
    }

    /// Has one wait. Within a runtime; blocks.
    ///
    /// # Errors
    /// It cannot be made.
    pub fn prepare(&self) -> Result<(), BerthError> {
        if lock(&self.waiting).is_none() {
            let berth = self.make()?;
            *lock(&self.waiting) = Some(berth);
        }
        Ok(())
    }

    /// The one that waits, or a new one. Within a runtime; blocks.
    ///
    /// # Errors
    /// It cannot be made.
    pub fn take(&self) -> Result<Berth, BerthError> {
        let waiting = lock(&self.waiting).take();
        waiting.map_or_else(|| self.make(), Ok)
    }

    /// Removes the one that waits.
    pub fn end(&self) {
        drop(lock(&self.waiting).take());
    }

    fn make(&self) -> Result<Berth, BerthError> {
        folder_or_there(&self.folder)?;
        let number = self.number.fetch_add(1, Ordering::Relaxed);
        Berth::new(VmDir::at(self.folder.join(number.to_string())))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Write};

    #[tokio::test]
    async fn a_berth_becomes_a_vm_s_folder_or_goes() {
        let run = tempfile::tempdir().unwrap();
        let berths = Berths {
            folder: run.path().join("berths"),
            number: AtomicU64::new(0),
            waiting: Mutex::default(),
        };
        let count = || std::fs::read_dir(&berths.folder).unwrap().count();
        berths.prepare().unwrap();
        berths.prepare().unwrap();
        assert_eq!(count(), 1);
        let mut berth = berths.take().unwrap();
        drop(berths.take().unwrap());
        let dir = VmDir::at(run.path().join("vm"));
        berth.become_vm(&dir).unwrap();
        assert_eq!(count(), 0);
        for (path, listener) in [(dir.control(), &berth.control), (dir.vsock(), &berth.vsock)] {
            UnixStream::connect(path).unwrap().write_all(b"x").unwrap();
            let mut byte = [0];
            listener.accept().unwrap().0.read_exact(&mut byte).unwrap();
            assert_eq!(byte, *b"x");
        }
        drop(berth);
        assert!(dir.console().exists() && dir.exit().exists());
        berths.prepare().unwrap();
        berths.end();
        assert_eq!(count(), 0);
        std::fs::create_dir(berths.folder.join("7")).unwrap();
        berths.sweep().unwrap();
        berths.sweep().unwrap();
        assert!(!berths.folder.exists());
    }
}
