//! Starting a VMM: its folder, its sockets, its descriptors, its process. Blocks.

use super::link::Link;
use super::registry::{FIRST_UID, Seat};
use super::zygotes::ZygoteError;
use crate::config::CONSOLE_MAX_BYTES;
use crate::daemon::Daemon;
use dayfly_host::process::Process;
use dayfly_host::spawn::Child;
use dayfly_vmm::config::{FdNumber, JailConfig, Start, VmmConfig};
use std::fs::{File, Permissions};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt, PermissionsExt, chown};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Why no VMM was started.
#[derive(Debug, thiserror::Error)]
pub enum LaunchError {
    /// Something of its folder, or a descriptor.
    #[error("starting a VMM: {what} {}: {source}", path.display())]
    Io {
        /// What was being done.
        what: &'static str,
        /// To what.
        path: PathBuf,
        /// Why not.
        #[source]
        source: io::Error,
    },
    /// Somebody killed it before it was known.
    #[error("starting a VMM: its process {0} was killed from outside")]
    Killed(u32),
    /// The process.
    #[error("{}", crate::error::chain(.0))]
    Zygote(#[from] ZygoteError),
}

/// Collects descriptors that go with a message, and numbers them by their places.
#[derive(Debug, Default)]
pub struct Fds(pub Vec<OwnedFd>);

impl Fds {
    /// Gives `fd` the next number.
    pub fn add(&mut self, fd: impl Into<OwnedFd>) -> FdNumber {
        self.0.push(fd.into());
        FdNumber::try_from(self.0.len() - 1).unwrap_or(FdNumber::MAX)
    }
}

/// A VMM that has been started.
#[derive(Debug)]
pub struct Launched {
    /// Its process.
    pub process: Arc<Process>,
    /// The connection over which its guest is brought to life.
    pub link: Link,
    /// Where the agent reports after a cold boot.
    pub ready: Option<UnixListener>,
}

fn io_error(what: &'static str, path: &Path) -> impl FnOnce(io::Error) -> LaunchError {
    move |source| LaunchError::Io { what, path: path.to_owned(), source }
}

fn folder(path: &Path, mode: u32) -> Result<(), LaunchError> {
    std::fs::DirBuilder::new().mode(mode).create(path).map_err(io_error("making folder", path))?;
    // Whatever the daemon's umask is.
    std::fs::set_permissions(path, Permissions::from_mode(mode)).map_err(io_error("making folder", path))
}

fn listener(path: &Path) -> Result<UnixListener, LaunchError> {
    UnixListener::bind(path).map_err(io_error("listening on", path))
}

fn file(path: &Path, append: bool) -> Result<File, LaunchError> {
    let mut options = File::options();
    options.create_new(true).mode(0o600);
    if append {
        options.append(true)
    } else {
        options.write(true)
    };
    options.open(path).map_err(io_error("making", path))
}

/// Makes a VM's folder and starts its VMM with `start`, whose descriptors are in `fds`; with `background`, at a lower priority until its
/// guest runs. Within a runtime.
///
/// # Errors
/// [`LaunchError`]; there is no process then. What is in the folder is left for the caller to remove.
pub fn launch(
    daemon: &Daemon,
    seat: Seat,
    start: Start,
    mut fds: Fds,
    background: bool,
) -> Result<Launched, LaunchError> {
    let dir = daemon.config.vm(seat.id);
    let uid = FIRST_UID + seat.slot;
    let boots = matches!(start, Start::Boot(_));
    folder(dir.path(), 0o700)?;
    folder(&dir.root(), 0o755)?;
    let control = listener(&dir.control())?;
    let vsock = listener(&dir.vsock())?;
    let ready = boots.then(|| listener(&dir.ready())).transpose()?;
    if ready.is_some() {
        // The VMM connects to it as its own user.
        chown(dir.ready(), Some(uid), Some(uid)).map_err(io_error("giving away", &dir.ready()))?;
    }
    let (link, theirs) = Link::new().map_err(io_error("connecting to", &dir.control()))?;
    let vmm = VmmConfig {
        id: seat.id,
        jail: Some(JailConfig { root: dir.root_in_jail(), uid, gid: uid }),
        kvm_fd: None,
        control_fd: fds.add(control),
        link_fd: Some(fds.add(theirs)),
        background,
        vsock_fd: fds.add(vsock),
        vsock_path: "/vsock.sock".into(),
        console_fd: fds.add(file(&dir.console(), true)?),
        console_max_bytes: CONSOLE_MAX_BYTES,
        exit_fd: fds.add(file(&dir.exit(), false)?),
        start,
    };
    let child = daemon.zygotes.fork(seat.node, &vmm, &fds.0)?;
    if background || daemon.pool.busy() {
        // Another is wanted at once. Else the next one is made when this one's guest runs.
        daemon.zygotes.prepare(seat.node);
    }
    Ok(Launched { process: Arc::new(found(child, dir.path())?), link, ready })
}

/// The process of a new VMM. It is nobody's who would have to reap it: killed, it is gone at once.
fn found(child: Child, dir: &Path) -> Result<Process, LaunchError> {
    let pid = child.pid;
    Process::from_child(child).map_err(|e| match e.kind() {
        io::ErrorKind::NotFound => LaunchError::Killed(pid),
        _ => io_error("finding the process of", dir)(e),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Fault;
    use dayfly_api::types::ErrorCode;

    #[test]
    fn a_vmm_that_is_killed_at_once_is_no_fault_of_the_daemon_s() {
        let mut child = std::process::Command::new("true").spawn().unwrap();
        let pid = rustix::process::Pid::from_child(&child);
        let pidfd = rustix::process::pidfd_open(pid, rustix::process::PidfdFlags::empty()).unwrap();
        child.wait().unwrap();
        let error = found(Child { pid: child.id(), pidfd }, Path::new("/")).unwrap_err();
        let fault = Fault::from(error);
        assert_eq!(fault.0.code, ErrorCode::Guest, "{fault}");
    }
}
