//! Starts a VMM: its run directory, its descriptors, its process. Blocks.

use crate::base::config::{CONSOLE_MAX_BYTES, Config};
use crate::base::error::ApiError;
use crate::base::groups::{GroupLease, GroupStock};
use crate::model::vm_slot::Placement;
use crate::vmm::link::Link;
use crate::vmm::run_dir::{PreparedRunDir, PreparedRunDirs, RunDirError, failed, listener};
use crate::vmm::zygotes::{ZygoteError, Zygotes};
use dayfly_api::types::ErrorCode;
use dayfly_host::numa::Node;
use dayfly_host::process::Process;
use dayfly_host::spawn::Child;
use dayfly_store::Store;
use dayfly_units::error::chain;
use dayfly_units::failpoint;
use dayfly_vmm::config::{FdNumber, JailConfig, Start, VmmConfig};
use dayfly_vmm::zygote::client::Forked;
use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::chown;
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::sync::Arc;

/// Why no VMM was started.
#[derive(Debug, thiserror::Error)]
pub enum LaunchError {
    /// The run directory or a descriptor.
    #[error("starting a VMM: {0}")]
    PreparedRunDir(#[from] RunDirError),
    /// Another process killed the VMM before its pidfd was opened.
    #[error("starting a VMM: its process {0} was killed from outside")]
    Killed(u32),
    /// The zygote.
    #[error("{}", chain(.0))]
    Zygote(#[from] ZygoteError),
}

impl From<LaunchError> for ApiError {
    fn from(e: LaunchError) -> Self {
        use std::io::ErrorKind::{OutOfMemory, StorageFull};
        let code = match &e {
            LaunchError::PreparedRunDir(e)
                if matches!(e.source.kind(), StorageFull | OutOfMemory) =>
            {
                ErrorCode::Exhausted
            }
            LaunchError::Killed(_) => ErrorCode::Guest,
            _ => ErrorCode::Internal,
        };
        Self::new(code, e)
    }
}

/// Collects the descriptors of a message; the number of each is its index.
#[derive(Debug, Default)]
pub struct Fds(pub Vec<OwnedFd>);

impl Fds {
    /// Adds `fd` and returns its number.
    pub fn add(&mut self, fd: impl Into<OwnedFd>) -> FdNumber {
        self.0.push(fd.into());
        FdNumber::try_from(self.0.len() - 1).unwrap_or(FdNumber::MAX)
    }
}

/// A VMM that has been started.
#[derive(Debug)]
pub struct Launched {
    /// The VMM's process.
    pub process: Arc<Process>,
    /// The connection for the commands that start the guest.
    pub link: Link,
    /// Its control group; `None` if it is in the daemon's.
    pub group: Option<GroupLease>,
    /// The socket on which the agent reports after a cold boot.
    pub ready: Option<UnixListener>,
    /// Microseconds of CPU time that the zygote took to fork it.
    pub zygote_us: u64,
}

/// Starts VMMs.
#[derive(Debug)]
pub struct Launcher {
    config: Config,
    store: Store,
    /// Zygotes, from which VMMs are forked.
    pub zygotes: Zygotes,
    /// Prepared run directories.
    pub run_dirs: PreparedRunDirs,
}

impl Launcher {
    /// A launcher for VMs of this daemon, whose layers are in `store`.
    #[must_use]
    pub fn new(config: &Config, store: Store, nodes: &[Node], groups: GroupStock) -> Self {
        let zygotes = Zygotes::new(config, nodes, groups);
        let run_dirs = PreparedRunDirs::new(config);
        Self { config: config.clone(), store, zygotes, run_dirs }
    }

    /// Prepares a VM's run directory and starts its VMM in `place` with `start`, whose descriptors
    /// are in `fds`. With `background`, the VMM has a lower priority until a client waits for its
    /// guest. With `another`, the zygote makes the next pre-forked VMM at once; otherwise
    /// [`Self::prepare`] must be called once the guest runs. Must be called in a Tokio runtime.
    ///
    /// # Errors
    /// [`LaunchError`]; no VMM process exists then. The caller removes what is in the folder.
    pub fn launch(
        &self,
        place: impl Into<Placement>,
        start: Start,
        fds: Fds,
        background: bool,
        another: bool,
    ) -> Result<Launched, LaunchError> {
        let (mut run_dir, place) = (self.run_dirs.take()?, place.into());
        run_dir.become_vm(&self.config.vm(place.vm_slot.id))?;
        self.launch_in(run_dir, place, start, fds, background, another)
    }

    /// As [`Self::launch`] of a VM that has ended, in its run directory, which keeps its record.
    ///
    /// # Errors
    /// [`LaunchError`]; no VMM process exists then.
    pub fn launch_again(
        &self,
        place: Placement,
        start: Start,
        fds: Fds,
    ) -> Result<Launched, LaunchError> {
        let run_dir = PreparedRunDir::again(&self.config.vm(place.vm_slot.id))?;
        failpoint::reached("daemon.start.emptied");
        self.launch_in(run_dir, place, start, fds, false, false)
    }

    fn launch_in(
        &self,
        run_dir: PreparedRunDir,
        place: Placement,
        start: Start,
        mut fds: Fds,
        background: bool,
        another: bool,
    ) -> Result<Launched, LaunchError> {
        let Placement { vm_slot, cpus } = place;
        let dir = self.config.vm(vm_slot.id);
        let uid = vm_slot.uid;
        let boots = matches!(start, Start::Boot(_));
        let PreparedRunDir { control, vsock, console, exit, link, theirs, .. } = run_dir;
        let ready = boots.then(|| listener(&dir.ready())).transpose()?;
        if ready.is_some() {
            // The VMM connects to the socket as its own user.
            chown(dir.ready(), Some(uid), Some(uid))
                .map_err(failed("giving away", &dir.ready()))?;
        }
        // Without it the VM's disks could take all space of the host.
        let limits = self.config.limits();
        let limits = File::open(&limits).map_err(failed("opening", &limits))?;
        let vmm = VmmConfig {
            id: vm_slot.id,
            jail: Some(JailConfig { root: dir.root_in_jail(), uid, gid: uid }),
            kvm_fd: None,
            control_fd: fds.add(control),
            link_fd: Some(fds.add(theirs)),
            background,
            vsock_fd: fds.add(vsock),
            vsock_path: "/vsock.sock".into(),
            console_fds: console.map(|file| fds.add(file)),
            console_max_bytes: CONSOLE_MAX_BYTES,
            exit_fd: fds.add(exit),
            metered: true,
            limits_fd: Some(fds.add(limits)),
            start,
        };
        let Forked { pid, pidfd, group, cpu_us: zygote_us } =
            self.zygotes.fork(vm_slot.node, &vmm, &fds.0, cpus.as_ref())?;
        let child = Child { pid, pidfd };
        if background || another {
            self.zygotes.prepare(vm_slot.node);
        }
        let process = Arc::new(found(child, dir.path())?);
        Ok(Launched { process, link, group, ready, zygote_us })
    }

    /// Has a pre-forked VMM, a run directory and a layer made for the next VM on this node. Does
    /// not wait for them.
    pub fn prepare(self: &Arc<Self>, node: usize) {
        self.zygotes.prepare(node);
        let launcher = self.clone();
        tokio::task::spawn_blocking(move || {
            if let Err(e) = launcher.run_dirs.prepare() {
                tracing::warn!("for the next VMM: {e}");
            }
            if let Err(e) = launcher.store.prepare_vm_layers(1) {
                tracing::warn!("for the next VM: {}", chain(&e));
            }
        });
    }
}

/// Opens the new VMM's process. The VMM is not a child of the daemon, so a killed one needs no
/// reaping and is gone at once.
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

    #[test]
    fn a_vmm_that_is_killed_at_once_is_not_an_internal_error() {
        let mut child = std::process::Command::new("true").spawn().unwrap();
        let pid = rustix::process::Pid::from_child(&child);
        let pidfd = rustix::process::pidfd_open(pid, rustix::process::PidfdFlags::empty()).unwrap();
        child.wait().unwrap();
        let error = found(Child { pid: child.id(), pidfd }, Path::new("/")).unwrap_err();
        let error = ApiError::from(error);
        assert_eq!(error.0.code, ErrorCode::Guest, "{error}");
    }
}
