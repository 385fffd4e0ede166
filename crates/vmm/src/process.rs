//! The VMM process from its first instruction to its last: configuration, jail, VM, control.

use crate::config::{MAX_CONFIG_BYTES, Start, VmmConfig};
use crate::control::server::Hosted;
use crate::fds::{self, Descriptors as _, FdError, FdTable};
use crate::jail::{self, JailError};
use crate::memory::recorder;
use crate::platform::Console;
use crate::seccomp::{FilterError, Filters};
use crate::timeline::Timeline;
use crate::vm::{BuildError, Host, Shell};
use crate::{control, exit, seccomp};
use kvm_ioctls::Kvm;
use std::fs::File;
use std::io::{self, Read};
use std::os::fd::{FromRawFd, IntoRawFd, OwnedFd};
use std::os::unix::net::UnixListener;

/// Why a VMM process could not do its work.
#[derive(Debug, thiserror::Error)]
pub enum ProcessError {
    /// A wrong command line.
    #[error("usage: dayfly-vmm --config-fd N [--id ID]; got {0:?}")]
    Usage(Vec<String>),
    /// The configuration could not be read.
    #[error("configuration")]
    ConfigRead(#[source] io::Error),
    /// The configuration is too long.
    #[error("configuration: at most {MAX_CONFIG_BYTES} bytes")]
    ConfigLength,
    /// The configuration is not one.
    #[error("configuration")]
    Config(#[source] serde_json::Error),
    /// A descriptor in it is not usable.
    #[error("configuration")]
    Fd(#[from] FdError),
    /// No userfaultfd.
    #[error("userfaultfd for a rehearsal")]
    Userfaultfd(#[source] io::Error),
    /// The jail.
    #[error(transparent)]
    Jail(#[from] JailError),
    /// A filter.
    #[error(transparent)]
    Filter(#[from] FilterError),
    /// The VM could not be made.
    #[error(transparent)]
    Build(#[from] BuildError),
    /// The control socket failed.
    #[error("control socket")]
    Control(#[source] io::Error),
}

/// Runs a VM as the configuration behind `--config-fd` says, and never returns.
pub fn main() -> ! {
    let timeline = Timeline::start();
    // One arena for all threads: shrinking a thread's own arena makes glibc open /proc/sys/vm/overcommit_memory, which the
    // filters forbid. No thread allocates on a path where the shared lock would count.
    // SAFETY: mallopt only sets a parameter of the allocator; there is one thread yet.
    unsafe { libc::mallopt(libc::M_ARENA_MAX, 1) };
    exit::install_handlers();
    match run(timeline) {
        Ok(never) => match never {},
        Err(error) => exit::fail(&error),
    }
}

fn run(mut timeline: Timeline) -> Result<std::convert::Infallible, ProcessError> {
    let config = read_config()?;
    exit::set_file(config.exit_fd);
    timeline.done("config");
    let mut table = FdTable::default();
    table.claim("the exit record", config.exit_fd)?;
    jail::close_all_but(&fds::all(&config))?;
    // The one file opened by path, while there is a path to it: which of our own pages were written.
    let pagemap = File::open("/proc/self/pagemap").ok();
    // Another thing that only the privileged may make.
    let uffd = match config.start {
        Start::Shell { record: true, .. } => Some(recorder::open().map_err(ProcessError::Userfaultfd)?),
        _ => None,
    };
    match &config.jail {
        Some(jail) => jail::enter(jail)?,
        None => jail::no_new_privileges()?,
    }
    let filters = Filters::new()?;
    timeline.done("jail");

    let kvm = table.take("/dev/kvm", config.kvm_fd)?;
    // SAFETY: the descriptor is owned and given up here; the daemon says it is /dev/kvm, else every ioctl fails.
    let kvm = unsafe { Kvm::from_raw_fd(kvm.into_raw_fd()) };
    let control = UnixListener::from(table.take("the control socket", config.control_fd)?);
    let console = File::from(table.take("the console", config.console_fd)?);
    let host = Host {
        kvm,
        console: Console::new(console, config.console_max_bytes),
        vsock_listener: table.take("the vsock socket", config.vsock_fd)?,
        vsock_path: config.vsock_path,
        pagemap,
        recorder: uffd,
        timeline,
    };
    let shell = Shell::new(host, config.start.shape(), &filters)?;
    let mut hosted = match config.start {
        Start::Shell { .. } => Hosted::Shell(Box::new(shell)),
        Start::Boot(boot) => {
            let disks = boot.disks.iter().map(|disk| table.take_disk(disk)).collect::<Result<_, _>>()?;
            let kernel = File::from(table.take("the kernel", boot.kernel_fd)?);
            let initrd = boot.initrd_fd.map(|number| table.take("the initramfs", number)).transpose()?;
            Hosted::Vm(Box::new(shell.boot(&boot, disks, kernel, initrd.map(File::from))?))
        }
    };
    seccomp::apply(filters.main.as_deref());
    control::server::serve(&control, &mut hosted).map_err(ProcessError::Control)?;
    Err(ProcessError::Control(io::Error::from(io::ErrorKind::UnexpectedEof)))
}

fn read_config() -> Result<VmmConfig, ProcessError> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let usage = || ProcessError::Usage(arguments.clone());
    let mut number = None;
    let mut words = arguments.iter();
    while let Some(word) = words.next() {
        match (word.as_str(), words.next()) {
            ("--config-fd", Some(value)) => number = value.parse::<i32>().ok(),
            ("--id", Some(_)) => {} // for people who read the process list
            _ => return Err(usage()),
        }
    }
    let fd: OwnedFd = FdTable::default().take("the configuration", number.ok_or_else(usage)?)?;
    let mut json = Vec::new();
    let limit = MAX_CONFIG_BYTES as u64 + 1;
    File::from(fd).take(limit).read_to_end(&mut json).map_err(ProcessError::ConfigRead)?;
    if json.len() > MAX_CONFIG_BYTES {
        return Err(ProcessError::ConfigLength);
    }
    serde_json::from_slice(&json).map_err(ProcessError::Config)
}
