//! Starting a VMM: a berth for it, its descriptors, its process. Blocks.

use super::berth::{Berth, BerthError, failed, listener};
use super::link::Link;
use super::registry::{FIRST_UID, Seat};
use super::zygotes::ZygoteError;
use crate::config::CONSOLE_MAX_BYTES;
use crate::daemon::Daemon;
use dayfly_host::process::Process;
use dayfly_host::spawn::Child;
use dayfly_vmm::config::{FdNumber, JailConfig, Start, VmmConfig};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::chown;
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::sync::Arc;

/// Why no VMM was started.
#[derive(Debug, thiserror::Error)]
pub enum LaunchError {
    /// Something of its folder, or a descriptor.
    #[error("starting a VMM: {0}")]
    Berth(#[from] BerthError),
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

/// Gives a VM its folder and starts its VMM with `start`, whose descriptors are in `fds`; with `background`, at a lower priority until
/// somebody waits for its guest. Within a runtime.
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
    let mut berth = daemon.berths.take()?;
    berth.become_vm(&dir)?;
    let Berth { control, vsock, console, exit, link, theirs, .. } = berth;
    let ready = boots.then(|| listener(&dir.ready())).transpose()?;
    if ready.is_some() {
        // The VMM connects to it as its own user.
        chown(dir.ready(), Some(uid), Some(uid)).map_err(failed("giving away", &dir.ready()))?;
    }
    let vmm = VmmConfig {
        id: seat.id,
        jail: Some(JailConfig { root: dir.root_in_jail(), uid, gid: uid }),
        kvm_fd: None,
        control_fd: fds.add(control),
        link_fd: Some(fds.add(theirs)),
        background,
        vsock_fd: fds.add(vsock),
        vsock_path: "/vsock.sock".into(),
        console_fd: fds.add(console),
        console_max_bytes: CONSOLE_MAX_BYTES,
        exit_fd: fds.add(exit),
        start,
    };
    let child = daemon.zygotes.fork(seat.node, &vmm, &fds.0)?;
    if background || daemon.pool.busy() {
        // Another is wanted at once. Else the next one is made when this one's guest runs.
        daemon.zygotes.prepare(seat.node);
    }
    Ok(Launched { process: Arc::new(found(child, dir.path())?), link, ready })
}

/// Has a process and a berth made for the next VMM on this node, and does not wait for them.
pub fn prepare(daemon: &Arc<Daemon>, node: usize) {
    daemon.zygotes.prepare(node);
    let daemon = daemon.clone();
    tokio::task::spawn_blocking(move || {
        if let Err(e) = daemon.berths.prepare() {
            tracing::warn!("for the next VMM: {e}");
        }
        if let Err(e) = daemon.depot.store().prepare_vm_layers(1) {
            tracing::warn!("for the next VM: {}", crate::error::chain(&e));
        }
    });
}

/// The process of a new VMM. It is nobody's who would have to reap it: killed, it is gone at once.
fn found(child: Child, dir: &Path) -> Result<Process, LaunchError> {
    let pid = child.pid;
    Process::from_child(child).map_err(|e| match e.kind() {
        io::ErrorKind::NotFound => LaunchError::Killed(pid),
        _ => failed("finding the process of", dir)(e).into(),
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
