//! The VMM process from start to end: configuration, jail, VM, control socket.
//!
//! The process starts as a fork of a zygote ([`crate::zygote`]), or alone as `dayfly-vmm
//! --config-fd N` for a caller that wants one VM.

use crate::arch::cpuid::Supported;
use crate::config::{FdNumber, JailConfig, MAX_CONFIG_BYTES, Start, VmmConfig};
use crate::control::server::{Hosted, Server};
use crate::fds::{self, Descriptors, FdError, FdTable};
use crate::jail::{self, JailError};
use crate::meter::Meter;
use crate::platform::Console;
use crate::seccomp::{FilterError, Filters, Stage};
use crate::timeline::Timeline;
use crate::vcpu::state::StateError;
use crate::vm::{Bare, BuildError, Host, WarmVmm};
use crate::workers::Workers;
use crate::zygote::{self, ZygoteError};
use crate::{exit, limits, report, vcpu};
use dayfly_sys::uffd::Uffd;
use kvm_ioctls::Kvm;
use std::convert::Infallible;
use std::fs::File;
use std::io::{self, Read};
use std::os::fd::{AsFd, BorrowedFd, FromRawFd, IntoRawFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};

/// Why a VMM process failed.
#[derive(Debug, thiserror::Error)]
pub enum ProcessError {
    /// The command line is wrong.
    #[error("usage: dayfly-vmm (--config-fd | --zygote-fd) N [--id ID]; got {0:?}")]
    Usage(Vec<String>),
    /// Reading the configuration's descriptor failed.
    #[error("configuration")]
    ConfigRead(#[source] io::Error),
    /// The configuration exceeds [`MAX_CONFIG_BYTES`].
    #[error("configuration: at most {MAX_CONFIG_BYTES} bytes")]
    ConfigLength,
    /// The configuration is not the JSON of a [`VmmConfig`].
    #[error("configuration")]
    Config(#[source] serde_json::Error),
    /// The configuration names a descriptor that cannot be used.
    #[error("configuration")]
    Fd(#[from] FdError),
    /// No userfaultfd could be made for a recording.
    #[error("userfaultfd for a recording")]
    Userfaultfd(#[source] io::Error),
    /// A worker thread could not be made.
    #[error("its threads")]
    Workers(#[source] io::Error),
    /// KVM did not list its MSRs.
    #[error(transparent)]
    Msrs(#[from] StateError),
    /// KVM did not say what it supports of this host's CPU.
    #[error("KVM_GET_SUPPORTED_CPUID")]
    Cpuid(#[source] kvm_ioctls::Error),
    /// The zygote failed.
    #[error(transparent)]
    Zygote(#[from] ZygoteError),
    /// Entering the jail failed.
    #[error(transparent)]
    Jail(#[from] JailError),
    /// A seccomp filter could not be compiled.
    #[error(transparent)]
    Filter(#[from] FilterError),
    /// The VM could not be made.
    #[error(transparent)]
    Build(#[from] BuildError),
    /// The control socket failed.
    #[error("control socket")]
    Control(#[source] io::Error),
}

/// Runs a zygote or one VMM, depending on the command line, and never returns.
pub fn main() -> ! {
    let timeline = Timeline::start();
    // One arena for all threads: glibc opens /proc/sys/vm/overcommit_memory when it shrinks a
    // thread's arena, which the filters forbid. A request of a disk and a packet allocate little,
    // so that the two device threads rarely wait for the shared lock.
    // SAFETY: mallopt sets a parameter of the allocator; the process has one thread.
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
            // Returns in a child: in a pre-forked VMM that has received its message.
            let child = zygote::run(FdTable::default().take("the daemon's connection", number)?)?;
            let zygote::Child {
                json,
                fds,
                kvm,
                bare,
                workers,
                filters,
                pagemap,
                may_return,
                base_bytes,
                msrs,
                supported,
                name,
                began_us,
            } = child;
            let config: VmmConfig = serde_json::from_slice(&json).map_err(ProcessError::Config)?;
            let mut fds = fds::Received::new(fds);
            let exit_file = fds.take("the exit record", config.exit_fd)?;
            let meter = meter_of(&config, exit_file.as_fd());
            exit::set_file(exit_file.into_raw_fd());
            name.write(config.id);
            report::of_vm(config.id);
            let known = Known { kvm, supported, bare, msrs, filters, pagemap, base_bytes };
            let inside = Inside::new(known, meter, &config)?;
            if config.background && may_return {
                jail::low_priority();
            }
            if let Some(jail) = &config.jail {
                jail::enter(jail)?;
            }
            live(config, fds, inside, workers, Timeline::since(began_us))
        }
        (_, number) => {
            let config = read_config(number)?;
            let mut fds = FdTable::default();
            let exit_fd = fds.claim("the exit record", config.exit_fd)?;
            exit::set_file(exit_fd);
            // SAFETY: the descriptor was just claimed, and stays open until the process ends.
            let meter = meter_of(&config, unsafe { BorrowedFd::borrow_raw(exit_fd) });
            report::of_vm(config.id);
            jail::close_all_but(&fds::all(&config))?;
            let kvm = fds.take("/dev/kvm", config.kvm_fd.unwrap_or(-1))?;
            // SAFETY: the descriptor is owned and given up here. The writer of the configuration
            // states that it is /dev/kvm; if it is not, every ioctl fails.
            let kvm = unsafe { Kvm::from_raw_fd(kvm.into_raw_fd()) };
            let bare = Bare::new(&kvm)?;
            let supported = Supported::new(&kvm).map_err(ProcessError::Cpuid)?;
            let msrs = vcpu::state::msrs(&kvm).map_err(ProcessError::Msrs)?;
            let pagemap = jail::open_without_admin("/proc/self/pagemap".as_ref()).ok();
            let (filters, base_bytes) = (Filters::new()?, limits::space_now());
            let known = Known { kvm, supported, bare, msrs, filters, pagemap, base_bytes };
            let inside = Inside::new(known, meter, &config)?;
            if let Some(jail) = &config.jail {
                jail::see_only(&jail.root)?;
                jail::narrow()?;
                jail::open_nothing_but(None)?;
            }
            jail::no_new_privileges()?;
            let shape = config.start.shape();
            let workers = Workers::new(&inside.known.filters, shape.vcpus, shape.disks > 0)
                .map_err(ProcessError::Workers)?;
            if let Some(jail) = &config.jail {
                jail::enter(&JailConfig { root: "/".into(), ..jail.clone() })?;
            }
            live(config, fds, inside, workers, timeline)
        }
    }
}

/// What a VMM has before it has its configuration.
struct Known {
    /// `/dev/kvm`, which is closed before the guest runs.
    kvm: Kvm,
    /// What KVM supports of this host's CPU.
    supported: Supported,
    bare: Bare,
    /// The MSRs that KVM saves.
    msrs: Vec<u32>,
    filters: Filters,
    /// `/proc/self/pagemap`, which shows the pages that were written. It is the only file that is
    /// opened by path, before the jail hides the path, and without CAP_SYS_ADMIN.
    pagemap: Option<File>,
    /// The size of the address space before it had a VM, in bytes.
    base_bytes: u64,
}

/// What a VMM gets from outside its jail.
struct Inside {
    known: Known,
    /// A userfaultfd, for a guest whose memory arrives page by page. Only a privileged process may
    /// make one that sees the kernel's faults.
    uffd: Option<Uffd>,
    /// What is counted for the bill.
    meter: Meter,
}

/// The meter in the exit file, or one that no other process sees.
fn meter_of(config: &VmmConfig, exit_file: BorrowedFd<'_>) -> Meter {
    // The VM runs without a bill of its devices, rather than not at all.
    config.metered.then(|| Meter::map(exit_file).ok()).flatten().unwrap_or_default()
}

impl Inside {
    fn new(known: Known, meter: Meter, config: &VmmConfig) -> Result<Self, ProcessError> {
        let uffd = match config.start {
            Start::WarmVmm { record: true, .. } => {
                Some(Uffd::with_kernel_faults().map_err(ProcessError::Userfaultfd)?)
            }
            // Without a userfaultfd the warm VMM accepts only a template whose RAM is whole.
            Start::WarmVmm { .. } => Uffd::with_kernel_faults().ok(),
            Start::Boot(_) => None,
        };
        Ok(Self { known, uffd, meter })
    }
}

fn live(
    config: VmmConfig,
    mut fds: impl Descriptors,
    inside: Inside,
    workers: Workers,
    mut timeline: Timeline,
) -> Result<Infallible, ProcessError> {
    let Inside { known, uffd, meter } = inside;
    let Known { kvm, supported, bare, msrs, filters, pagemap, base_bytes } = known;
    timeline.done("jail");
    let workers = workers.prepare(&filters, config.start.shape(), config.jail.as_ref());
    let workers = workers.map_err(ProcessError::Workers)?;
    let control = UnixListener::from(fds.take("the control socket", config.control_fd)?);
    let link = config
        .link_fd
        .map(|number| fds.take("the connection to the daemon", number))
        .transpose()?;
    let limits =
        config.limits_fd.map(|number| fds.take("the limits of disks", number)).transpose()?;
    let [first, second] = config.console_fds;
    let console = [first, second].map(|number| fds.take("the console", number).map(File::from));
    let [first, second] = console;
    let host = Host {
        msrs,
        base_bytes,
        supported,
        bare,
        console: Console::new([first?, second?], config.console_max_bytes),
        vsock_listener: fds.take("the vsock socket", config.vsock_fd)?,
        vsock_path: config.vsock_path,
        limits: limits.map(File::from),
        pagemap,
        uffd,
        record: matches!(config.start, Start::WarmVmm { record: true, .. }),
        workers,
        timeline,
        meter: meter.clone(),
    };
    let warm = WarmVmm::new(host, &kvm, config.start.shape(), &filters)?;
    let server = Server::new(control, link.map(UnixStream::from), meter);
    let server = server.map_err(ProcessError::Control)?;
    let mut hosted = match config.start {
        Start::WarmVmm { .. } => {
            drop(kvm);
            filters.main.enter(Stage::SetUp);
            Hosted::WarmVmm(Box::new(warm))
        }
        Start::Boot(boot) => {
            let disks =
                boot.disks.iter().map(|disk| fds.take_disk(disk)).collect::<Result<_, _>>()?;
            let kernel = File::from(fds.take("the kernel", boot.kernel_fd)?);
            let initrd =
                boot.initrd_fd.map(|number| fds.take("the initramfs", number)).transpose()?;
            let disks_bytes: Vec<u64> = boot.disks.iter().map(|disk| disk.size_bytes).collect();
            let mut vm = warm.boot(&boot, disks, kernel, initrd.map(File::from))?;
            drop((fds, kvm));
            filters.main.enter(Stage::SetUp);
            vm.start(&disks_bytes)?;
            Hosted::Vm(Box::new(vm))
        }
    };
    server.run(&mut hosted).map_err(ProcessError::Control)?;
    Err(ProcessError::Control(io::Error::from(io::ErrorKind::UnexpectedEof)))
}

/// The mode, `--config-fd` or `--zygote-fd`, and the descriptor's number.
fn arguments() -> Result<(&'static str, FdNumber), ProcessError> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let usage = || ProcessError::Usage(arguments.clone());
    let mut found = None;
    let mut words = arguments.iter();
    while let Some(word) = words.next() {
        let kind = match word.as_str() {
            "--config-fd" => "--config-fd",
            "--zygote-fd" => "--zygote-fd",
            "--id" if words.next().is_some() => continue, // for readers of the process list
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
