//! Starting a VMM: its folder, its sockets, its descriptors, its process. Blocks.

use super::registry::{FIRST_UID, Seat};
use crate::config::{CONSOLE_MAX_BYTES, Config};
use dayfly_host::process::Process;
use dayfly_host::spawn::{FIRST_FD, Namespaces, Program, Spawn, SpawnError};
use dayfly_vmm::config::{FdNumber, JailConfig, Start, VmmConfig};
use rustix::fs::{Mode, OFlags};
use std::fs::{File, Permissions};
use std::io::{self, Write};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt, PermissionsExt, chown};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};

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
    /// The process.
    #[error("{}", crate::error::chain(.0))]
    Spawn(#[from] SpawnError),
    /// Its configuration cannot be written as JSON.
    #[error("starting a VMM: its configuration: {0}")]
    Config(#[from] serde_json::Error),
}

/// Collects the descriptors that a process gets, and numbers them.
#[derive(Debug, Default)]
pub struct Fds(Vec<(OwnedFd, i32)>);

impl Fds {
    /// Gives `fd` the next number.
    pub fn add(&mut self, fd: impl Into<OwnedFd>) -> FdNumber {
        let number = FIRST_FD + i32::try_from(self.0.len()).unwrap_or(i32::MAX - FIRST_FD);
        self.0.push((fd.into(), number));
        number
    }
}

/// A VMM that has been started.
#[derive(Debug)]
pub struct Launched {
    /// Its process.
    pub process: Process,
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

/// Makes a VM's folder and starts its VMM with `start`, whose descriptors are in `fds`.
///
/// # Errors
/// [`LaunchError`]; there is no process then. What is in the folder is left for the caller to remove.
pub fn launch(config: &Config, seat: Seat, start: Start, mut fds: Fds) -> Result<Launched, LaunchError> {
    let dir = config.vm(seat.id);
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
    let kvm = Path::new("/dev/kvm");
    let kvm = File::options().read(true).write(true).open(kvm).map_err(io_error("opening", kvm))?;
    let vmm = VmmConfig {
        id: seat.id,
        jail: Some(JailConfig { root: dir.root(), uid, gid: uid }),
        kvm_fd: fds.add(kvm),
        control_fd: fds.add(control),
        vsock_fd: fds.add(vsock),
        vsock_path: "/vsock.sock".into(),
        console_fd: fds.add(file(&dir.console(), true)?),
        console_max_bytes: CONSOLE_MAX_BYTES,
        exit_fd: fds.add(file(&dir.exit(), false)?),
        start,
    };
    let config_fd = fds.add(sent(&serde_json::to_vec(&vmm)?)?);
    let mut spawn = Spawn::new(Program::Path(config.vmm.clone()), config.vmm_name());
    for argument in ["--config-fd", &config_fd.to_string(), "--id", &seat.id.to_string()] {
        spawn.argv.push(argument.into());
    }
    spawn.namespaces = Namespaces::ALL;
    spawn.fds = fds.0;
    spawn.stderr = dayfly_host::spawn::Stdio::Inherit;
    let child = spawn.run()?;
    let process = Process::from_child(child).map_err(io_error("finding the process of", &config.vmm))?;
    Ok(Launched { process, ready })
}

/// A descriptor from which `bytes` can be read, to the end, once: an unnamed file in memory.
fn sent(bytes: &[u8]) -> Result<File, LaunchError> {
    let name = Path::new("memfd:config");
    let fd = rustix::fs::memfd_create("config", rustix::fs::MemfdFlags::CLOEXEC)
        .map_err(|e| io_error("making", name)(e.into()))?;
    let mut file = File::from(fd);
    file.write_all(bytes).map_err(io_error("writing", name))?;
    // A read-only view from the start.
    let path = format!("/proc/self/fd/{}", file.as_raw_fd());
    rustix::fs::open(&path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())
        .map(File::from)
        .map_err(|e| io_error("opening", Path::new(&path))(e.into()))
}
