//! The zygote's side of its protocol: it prepares itself, and forks a pre-forked VMM for each
//! request.

use super::error::{ZygoteError, step};
use super::fork;
use super::layout;
use super::message::{Command, Report};
use super::name::Name;
use super::placement::{only, stay_on};
use crate::arch::cpuid;
use crate::config::{MAX_VCPUS, Shape, ZygoteConfig};
use crate::control::wire::{Received, Receiver, WireError, send};
use crate::jail;
use crate::limits;
use crate::seccomp::Filters;
use crate::timeline::now_us;
use crate::vcpu;
use crate::vm::Bare;
use crate::workers::Workers;
use dayfly_sys::populate::Mapped;
use kvm_ioctls::Kvm;
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, FromRawFd, IntoRawFd, OwnedFd};
use std::os::unix::net::UnixStream;

/// A pre-forked VMM that has received its configuration.
pub struct Child {
    /// The JSON of its [`VmmConfig`](crate::config::VmmConfig).
    pub json: Vec<u8>,
    /// The descriptors that came with the configuration.
    pub fds: Vec<OwnedFd>,
    /// `/dev/kvm`.
    pub kvm: Kvm,
    /// What KVM supports of this host's CPU.
    pub supported: cpuid::Supported,
    /// A KVM VM; [`Bare::likely`] may have filled it for the right shape.
    pub bare: Bare,
    /// Its worker threads, which wait for work.
    pub workers: Workers,
    /// The seccomp filters of its threads.
    pub filters: Filters,
    /// Its `/proc/self/pagemap`, if it could be opened.
    pub pagemap: Option<File>,
    /// Whether it can return from a lower priority to the normal one.
    pub may_return: bool,
    /// The size of its address space before it had a VM, in bytes.
    pub base_bytes: u64,
    /// The MSRs that KVM saves.
    pub msrs: Vec<u32>,
    /// The place of its id in its command line.
    pub name: Name,
    /// When it received its configuration, in microseconds of CLOCK_MONOTONIC.
    pub began_us: u64,
}

/// Serves the daemon at the other end of `connection`. Returns `Ok` only in a pre-forked VMM
/// that has received its configuration. The zygote itself exits when the connection ends.
///
/// # Errors
/// When the preparation or the connection fails; in a pre-forked VMM, when its own preparation
/// fails.
pub fn run(connection: OwnedFd) -> Result<Child, ZygoteError> {
    serve(&UnixStream::from(connection))
}

/// The first message: the configuration, with /dev/kvm.
fn first(stream: &UnixStream) -> Result<(ZygoteConfig, Kvm), ZygoteError> {
    let (json, fds) = next(stream)?;
    let config: ZygoteConfig = serde_json::from_slice(&json).map_err(ZygoteError::Config)?;
    let kvm = fds
        .into_iter()
        .next()
        .ok_or_else(|| step("its first message is without /dev/kvm")(Errno::BADF))?;
    // SAFETY: the descriptor is owned and given up here. The daemon states that it is /dev/kvm; if
    // it is not, every ioctl fails.
    let kvm = unsafe { Kvm::from_raw_fd(kvm.into_raw_fd()) };
    Ok((config, kvm))
}

fn serve(stream: &UnixStream) -> Result<Child, ZygoteError> {
    let (config, kvm) = first(stream)?;
    let name = Name::find()?;
    let mapped = Mapped::find();
    let base_bytes = limits::space_now();
    limits::prefer_for_oom();
    ignore_children();
    let procfs = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let procfs = rustix::fs::open("/proc", procfs, Mode::empty()).map_err(step("opening /proc"))?;
    stay_on(&config)?;
    jail::see_only(&config.folder)?;
    let may_return = jail::narrow()?;
    // A pre-forked VMM opens its own pagemap there.
    jail::open_nothing_but(Some(procfs.as_fd()))?;
    // The zygote may inherit a low priority from the thread that started it.
    jail::normal_priority();
    let filters = Filters::new()?;
    let supported = cpuid::Supported::new(&kvm).map_err(step("KVM_GET_SUPPORTED_CPUID"))?;
    let msrs = vcpu::state::msrs(&kvm).map_err(ZygoteError::Msrs)?;
    // What came until here is not for one VM.
    let mut reported_us = cpu_us();
    loop {
        let (json, fds) = next(stream)?;
        let Command::Fork { likely, group, cpus } =
            serde_json::from_slice(&json).map_err(ZygoteError::Config)?;
        let group = group.and_then(|enter| enter.with(fds));
        let (ours, theirs) = UnixStream::pair().map_err(step("a socket for a pre-forked VMM"))?;
        let forked = fork::fork(group.as_ref()).map_err(step("a fork into its control group"))?;
        if let Some((pid, preforked)) = forked {
            let now_us = cpu_us();
            let cpu_us = now_us.saturating_sub(std::mem::replace(&mut reported_us, now_us));
            report(stream, &Report::Forked { pid, cpu_us }, &[preforked.as_fd(), ours.as_fd()])?;
            continue;
        }
        drop((ours, group));
        // An affinity that was inherited from the zygote does not keep a VMM off the CPUs of its
        // group. The kernel refuses CPUs of which the group has none, and those of the group stay.
        let _ = only(if cpus.is_empty() { &config.vmm_cpus } else { &cpus });
        let base_bytes = base_bytes.saturating_add(layout::vary());
        jail::drop_admin()?;
        let flags = OFlags::RDONLY | OFlags::CLOEXEC;
        let pagemap = rustix::fs::openat(&procfs, "self/pagemap", flags, Mode::empty());
        let pagemap = pagemap.ok().map(File::from);
        // If KVM refuses the expected shape, the guess is dropped. KVM reports the refusal again if
        // a VM of that shape is requested.
        let bare = match likely.map(|shape| Bare::likely(&kvm, shape, &supported)) {
            Some(Ok(bare)) => bare,
            _ => Bare::new(&kvm)?,
        };
        mapped.touch();
        let workers = workers(&filters, likely).map_err(step("threads"))?;
        let (json, fds) = next(&theirs)?;
        let began_us = now_us();
        // The zygote's standard error is the daemon's log, which a VMM must neither write nor make
        // non-blocking. Standard input is /dev/null.
        // SAFETY: dup2(2) of standard streams, which no Rust object owns.
        if unsafe { libc::dup2(libc::STDIN_FILENO, libc::STDERR_FILENO) } < 0 {
            return Err(step("closing its standard error")(io::Error::last_os_error()));
        }
        return Ok(Child {
            json,
            fds,
            kvm,
            supported,
            bare,
            workers,
            filters,
            pagemap,
            may_return,
            base_bytes,
            msrs,
            name,
            began_us,
        });
    }
}

/// The threads for a VM of the expected shape.
fn workers(filters: &Filters, likely: Option<Shape>) -> io::Result<Workers> {
    let vcpus = likely.map_or(1, |shape| shape.vcpus.min(MAX_VCPUS));
    Workers::new(filters, vcpus, likely.is_none_or(|shape| shape.disks > 0))
}

/// The next message. The process exits when the connection ends.
fn next(stream: &UnixStream) -> Result<(Vec<u8>, Vec<OwnedFd>), ZygoteError> {
    let mut receiver = Receiver::default();
    loop {
        match receiver.receive(stream) {
            Ok(Received::Part) => {}
            Ok(Received::Message(json, fds)) => return Ok((json, fds)),
            Ok(Received::End) => std::process::exit(0),
            // The daemon closed the connection without reading all of the zygote's messages.
            Err(WireError::Io(_, e)) if e.kind() == io::ErrorKind::ConnectionReset => {
                std::process::exit(0)
            }
            Err(e) => return Err(e.into()),
        }
    }
}

fn report(stream: &UnixStream, report: &Report, fds: &[BorrowedFd<'_>]) -> Result<(), ZygoteError> {
    let json = serde_json::to_vec(report).map_err(WireError::Json)?;
    Ok(send(stream, &json, fds)?)
}

/// Microseconds of CPU time of this thread, which is all of the zygote.
fn cpu_us() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    u64::try_from(now.tv_sec).unwrap_or(0) * 1_000_000
        + u64::try_from(now.tv_nsec).unwrap_or(0) / 1000
}

/// Makes the kernel reap VMMs that end.
fn ignore_children() {
    // SAFETY: a disposition of this process; there is no handler.
    unsafe { libc::signal(libc::SIGCHLD, libc::SIG_IGN) };
}
