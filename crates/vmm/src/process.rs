//! The VMM process from its first instruction to its last: configuration, jail, VM, control.
//!
//! It comes to life as a fork of a zygote ([`crate::zygote`]), or alone, as `dayfly-vmm --config-fd N`: for whoever wants one VM.

use crate::config::{FdNumber, JailConfig, MAX_CONFIG_BYTES, Start, VmmConfig};
use crate::control::server::Hosted;
use crate::crew::Crew;
use crate::fds::{self, Descriptors, FdError, FdTable};
use crate::jail::{self, JailError};
use crate::memory::lazy;
use crate::platform::Console;
use crate::seccomp::{FilterError, Filters};
use crate::timeline::Timeline;
use crate::vm::{Bare, BuildError, Host, Shell};
use crate::zygote::{self, ZygoteError};
use crate::{control, exit, seccomp};
use kvm_ioctls::Kvm;
use std::convert::Infallible;
use std::fs::File;
use std::io::{self, Read};
use std::os::fd::{FromRawFd, IntoRawFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};

/// Why a VMM process could not do its work.
#[derive(Debug, thiserror::Error)]
pub enum ProcessError {
    /// A wrong command line.
    #[error("usage: dayfly-vmm (--config-fd | --zygote-fd) N [--id ID]; got {0:?}")]
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
    /// A thread could not be made.
    #[error("its threads")]
    Crew(#[source] io::Error),
    /// The zygote.
    #[error(transparent)]
    Zygote(#[from] ZygoteError),
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

/// Runs a VM, or many as a zygote, as the command line says, and never returns.
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

fn run(timeline: Timeline) -> Result<Infallible, ProcessError> {
    match arguments()? {
        ("--zygote-fd", number) => {
            // Goes on in a child.
            let child = zygote::run(FdTable::default().take("the daemon's connection", number)?)?;
            let zygote::Child { json, fds, kvm, bare, crew, filters, pagemap, may_return, name, began_us } =
                child;
            let config: VmmConfig = serde_json::from_slice(&json).map_err(ProcessError::Config)?;
            let mut fds = fds::Received::new(fds);
            exit::set_file(fds.take("the exit record", config.exit_fd)?.into_raw_fd());
            name.write(config.id);
            let inside = Inside::new((kvm, bare), filters, pagemap, &config)?;
            if config.background && may_return {
                jail::low_priority();
            }
            if let Some(jail) = &config.jail {
                jail::enter(jail)?;
            }
            live(config, fds, inside, crew, Timeline::since(began_us))
        }
        (_, number) => {
            let config = read_config(number)?;
            let mut fds = FdTable::default();
            exit::set_file(fds.claim("the exit record", config.exit_fd)?);
            jail::close_all_but(&fds::all(&config))?;
            let kvm = fds.take("/dev/kvm", config.kvm_fd.unwrap_or(-1))?;
            // SAFETY: the descriptor is owned and given up here; who wrote the configuration says that it is /dev/kvm, else every
            // ioctl fails.
            let kvm = unsafe { Kvm::from_raw_fd(kvm.into_raw_fd()) };
            let bare = Bare::new(&kvm)?;
            let pagemap = File::open("/proc/self/pagemap").ok();
            let inside = Inside::new((kvm, bare), Filters::new()?, pagemap, &config)?;
            if let Some(jail) = &config.jail {
                jail::see_only(&jail.root)?;
                jail::narrow()?;
            }
            jail::no_new_privileges()?;
            let crew = Crew::new(&inside.filters, config.start.shape().vcpus).map_err(ProcessError::Crew)?;
            if let Some(jail) = &config.jail {
                jail::enter(&JailConfig { root: "/".into(), ..jail.clone() })?;
            }
            live(config, fds, inside, crew, timeline)
        }
    }
}

/// What a VMM has from outside its jail.
struct Inside {
    kvm: (Kvm, Bare),
    filters: Filters,
    /// The one file opened by path, while there is a path to it: which of our own pages were written.
    pagemap: Option<File>,
    /// Another thing that only the privileged may make: a userfaultfd, for a guest whose memory is given page by page.
    uffd: Option<OwnedFd>,
}

impl Inside {
    fn new(
        kvm: (Kvm, Bare),
        filters: Filters,
        pagemap: Option<File>,
        config: &VmmConfig,
    ) -> Result<Self, ProcessError> {
        let uffd = match config.start {
            Start::Shell { record: true, .. } => Some(lazy::open().map_err(ProcessError::Userfaultfd)?),
            // Where there is none, RAM has to be whole.
            Start::Shell { .. } => lazy::open().ok(),
            Start::Boot(_) => None,
        };
        Ok(Self { kvm, filters, pagemap, uffd })
    }
}

fn live(
    config: VmmConfig,
    mut fds: impl Descriptors,
    inside: Inside,
    crew: Crew,
    mut timeline: Timeline,
) -> Result<Infallible, ProcessError> {
    let Inside { kvm: (kvm, bare), filters, pagemap, uffd } = inside;
    timeline.done("jail");
    let crew = crew.enlist(&filters, config.start.shape().vcpus, config.jail.as_ref());
    let crew = crew.map_err(ProcessError::Crew)?;
    let control = UnixListener::from(fds.take("the control socket", config.control_fd)?);
    let link = config.link_fd.map(|number| fds.take("the connection to the daemon", number)).transpose()?;
    let console = File::from(fds.take("the console", config.console_fd)?);
    let host = Host {
        kvm,
        bare,
        console: Console::new(console, config.console_max_bytes),
        vsock_listener: fds.take("the vsock socket", config.vsock_fd)?,
        vsock_path: config.vsock_path,
        pagemap,
        uffd,
        record: matches!(config.start, Start::Shell { record: true, .. }),
        crew,
        timeline,
    };
    let shell = Shell::new(host, config.start.shape(), &filters)?;
    let mut hosted = match config.start {
        Start::Shell { .. } => Hosted::Shell(Box::new(shell)),
        Start::Boot(boot) => {
            let disks = boot.disks.iter().map(|disk| fds.take_disk(disk)).collect::<Result<_, _>>()?;
            let kernel = File::from(fds.take("the kernel", boot.kernel_fd)?);
            let initrd = boot.initrd_fd.map(|number| fds.take("the initramfs", number)).transpose()?;
            Hosted::Vm(Box::new(shell.boot(&boot, disks, kernel, initrd.map(File::from))?))
        }
    };
    seccomp::apply(filters.main.as_deref());
    control::server::serve(&control, link.map(UnixStream::from), &mut hosted)
        .map_err(ProcessError::Control)?;
    Err(ProcessError::Control(io::Error::from(io::ErrorKind::UnexpectedEof)))
}

/// Which of the two, and the descriptor's number.
fn arguments() -> Result<(&'static str, FdNumber), ProcessError> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let usage = || ProcessError::Usage(arguments.clone());
    let mut found = None;
    let mut words = arguments.iter();
    while let Some(word) = words.next() {
        let kind = match word.as_str() {
            "--config-fd" => "--config-fd",
            "--zygote-fd" => "--zygote-fd",
            "--id" if words.next().is_some() => continue, // for whoever reads the process list
            _ => return Err(usage()),
        };
        found = words.next().and_then(|value| value.parse().ok()).map(|number| (kind, number));
    }
    found.ok_or_else(usage)
}

fn read_config(number: FdNumber) -> Result<VmmConfig, ProcessError> {
    let fd: OwnedFd = FdTable::default().take("the configuration", number)?;
    let mut json = Vec::new();
    let limit = MAX_CONFIG_BYTES as u64 + 1;
    File::from(fd).take(limit).read_to_end(&mut json).map_err(ProcessError::ConfigRead)?;
    if json.len() > MAX_CONFIG_BYTES {
        return Err(ProcessError::ConfigLength);
    }
    serde_json::from_slice(&json).map_err(ProcessError::Config)
}
