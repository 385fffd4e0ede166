//! The zygote: a process that has done all in which no VMM differs from another, and keeps one fork of itself ready to become the
//! next.
//!
//! ```text
//! daemon ──ZygoteConfig, /dev/kvm──▶ zygote: mount and network namespace with nothing in them, capabilities' bounds, limits,
//!                                            filters compiled, CPUs and memory node chosen
//!        ──Fork─────────────────────▶  │ clone3(new PID, IPC, UTS namespace)
//!        ◀──Forked { pid } ─────────────┤
//!           + pidfd, socket             ▼
//!        ──VmmConfig, descriptors───▶ spare: has a VM of KVM's of the shape of the last, and its threads. Becomes a VMM: its root, its user, its guest.
//! ```
//!
//! It saves what a program of its own costs a VMM: 0.5 ms to execute and link, 0.4 ms for a network namespace, the waits of mounts
//! (Swift Birth and Quick Death, section 4.1.2: what does not depend on the request is done before it comes). VMMs share
//! the zygote's pages until they write them. The spare reads the daemon's message itself, so nobody else has to run first.
//!
//! The price is that VMMs of one zygote have their code at the same addresses: who learns those of one VMM knows them of all. A
//! zygote forks [`client::MOST_FORKS`] and then makes room for another.
//!
//! It has one thread, so a fork of it is a whole process. VMMs that end leave no zombie: it ignores SIGCHLD; the daemon knows them
//! by their pidfds. It ends when the daemon closes the connection, as does the spare; VMMs live on.

pub mod client;
mod fork;
mod name;
mod warm;

pub use client::Client;
pub use name::NameError;

use crate::arch::cpuid;
use crate::config::{MAX_VCPUS, Shape, ZygoteConfig};
use crate::control::wire::{Received, Receiver, WireError, send};
use crate::crew::Crew;
use crate::jail::{self, JailError};
use crate::seccomp::{FilterError, Filters};
use crate::timeline::now_us;
use crate::vm::{Bare, BuildError};
use kvm_ioctls::Kvm;
use name::Name;
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use serde::{Deserialize, Serialize};
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, FromRawFd, IntoRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use warm::Mapped;

/// What a zygote is told after its configuration.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "command", rename_all = "snake_case")]
pub enum Command {
    /// Fork a spare.
    Fork {
        /// What the next VM will probably be.
        #[serde(default)]
        likely: Option<Shape>,
    },
}

/// What a zygote tells the daemon.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "told", rename_all = "snake_case")]
pub enum Told {
    /// There is a spare. Its pidfd comes along, and the socket from which it, and nobody else, reads what it is to become.
    Forked {
        /// Its process, as the zygote sees it.
        pid: u32,
    },
}

/// Why a zygote ended.
#[derive(Debug, thiserror::Error)]
pub enum ZygoteError {
    /// The conversation with the daemon.
    #[error("zygote")]
    Wire(#[from] WireError),
    /// A message is not what is expected.
    #[error("zygote: message")]
    Config(#[source] serde_json::Error),
    /// A system call failed.
    #[error("zygote: {0}")]
    Step(&'static str, #[source] io::Error),
    /// Its own arguments.
    #[error("zygote: its command line")]
    Name(#[from] NameError),
    /// What can be done of the jail ahead.
    #[error(transparent)]
    Jail(#[from] JailError),
    /// A filter.
    #[error(transparent)]
    Filter(#[from] FilterError),
    /// The VM of a spare.
    #[error("a spare")]
    Bare(#[from] BuildError),
}

/// A spare that has its message.
pub struct Child {
    /// The message it is for: a [`VmmConfig`](crate::config::VmmConfig).
    pub json: Vec<u8>,
    /// The descriptors in it.
    pub fds: Vec<OwnedFd>,
    /// `/dev/kvm`.
    pub kvm: Kvm,
    /// A VM of KVM's, perhaps of the right shape.
    pub bare: Bare,
    /// Its threads, which wait for their work.
    pub crew: Crew,
    /// What its threads may call.
    pub filters: Filters,
    /// Its own `/proc/self/pagemap`, if there is one.
    pub pagemap: Option<File>,
    /// Whether it can come back from a lower priority.
    pub may_return: bool,
    /// Its name in process listings.
    pub name: Name,
    /// When it had the message, CLOCK_MONOTONIC in microseconds.
    pub began_us: u64,
}

fn step<E: Into<io::Error>>(what: &'static str) -> impl FnOnce(E) -> ZygoteError {
    move |error| ZygoteError::Step(what, error.into())
}

/// Serves the daemon at the other end of `connection`. Returns in every spare that has its message; the zygote itself ends with the
/// connection.
///
/// # Errors
/// When it cannot get ready, or the connection breaks; in a spare, when it does not become one.
pub fn run(connection: OwnedFd) -> Result<Child, ZygoteError> {
    serve(&UnixStream::from(connection))
}

fn serve(stream: &UnixStream) -> Result<Child, ZygoteError> {
    let (json, fds) = next(stream)?;
    let config: ZygoteConfig = serde_json::from_slice(&json).map_err(ZygoteError::Config)?;
    let kvm =
        fds.into_iter().next().ok_or_else(|| step("its first message is without /dev/kvm")(Errno::BADF))?;
    // SAFETY: the descriptor is owned and given up here; the daemon says it is /dev/kvm, else every ioctl fails.
    let kvm = unsafe { Kvm::from_raw_fd(kvm.into_raw_fd()) };
    let name = Name::find()?;
    let mapped = Mapped::find();
    ignore_children();
    let procfs = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let procfs = rustix::fs::open("/proc", procfs, Mode::empty()).map_err(step("opening /proc"))?;
    stay_on(&config)?;
    jail::see_only(&config.folder)?;
    let may_return = jail::narrow()?;
    // Who wanted it may be at a low one.
    jail::normal_priority();
    let filters = Filters::new()?;
    let supported = cpuid::Supported::new(&kvm).map_err(step("KVM_GET_SUPPORTED_CPUID"))?;
    loop {
        let (json, _) = next(stream)?;
        let Command::Fork { likely } = serde_json::from_slice(&json).map_err(ZygoteError::Config)?;
        let (ours, theirs) = UnixStream::pair().map_err(step("a socket for a spare"))?;
        if let Some((pid, spare)) = fork::fork().map_err(step("clone3"))? {
            tell(stream, &Told::Forked { pid }, &[spare.as_fd(), ours.as_fd()])?;
            continue;
        }
        drop(ours);
        let flags = OFlags::RDONLY | OFlags::CLOEXEC;
        let pagemap = rustix::fs::openat(&procfs, "self/pagemap", flags, Mode::empty());
        let pagemap = pagemap.ok().map(File::from);
        // A guess that KVM refuses is dropped; where that VM is really asked for, the refusal is told.
        let bare = match likely.map(|shape| Bare::likely(&kvm, shape, &supported)) {
            Some(Ok(bare)) => bare,
            _ => Bare::new(&kvm)?,
        };
        mapped.touch();
        let vcpus = likely.map_or(1, |shape| shape.vcpus.min(MAX_VCPUS));
        let crew = Crew::new(&filters, vcpus).map_err(step("threads"))?;
        let (json, fds) = next(&theirs)?;
        let began_us = now_us();
        return Ok(Child { json, fds, kvm, bare, crew, filters, pagemap, may_return, name, began_us });
    }
}

/// The next message; the end of the connection is the end of the process.
fn next(stream: &UnixStream) -> Result<(Vec<u8>, Vec<OwnedFd>), ZygoteError> {
    let mut receiver = Receiver::default();
    loop {
        match receiver.receive(stream) {
            Ok(Received::Part) => {}
            Ok(Received::Message(json, fds)) => return Ok((json, fds)),
            Ok(Received::End) => std::process::exit(0),
            // The daemon went away without having read all that it was told.
            Err(WireError::Io(_, e)) if e.kind() == io::ErrorKind::ConnectionReset => std::process::exit(0),
            Err(e) => return Err(e.into()),
        }
    }
}

fn tell(stream: &UnixStream, told: &Told, fds: &[BorrowedFd<'_>]) -> Result<(), ZygoteError> {
    let json = serde_json::to_vec(told).map_err(WireError::Json)?;
    Ok(send(stream, &json, fds)?)
}

/// VMMs that end are reaped by the kernel.
fn ignore_children() {
    // SAFETY: a disposition of this process; there is no handler.
    unsafe { libc::signal(libc::SIGCHLD, libc::SIG_IGN) };
}

/// This process and its children run on the CPUs of their node, and take their memory from it first.
fn stay_on(config: &ZygoteConfig) -> Result<(), ZygoteError> {
    if !config.cpus.is_empty() {
        let mut set = rustix::thread::CpuSet::new();
        for cpu in &config.cpus {
            let cpu = usize::try_from(*cpu).unwrap_or(usize::MAX);
            if cpu < rustix::thread::CpuSet::MAX_CPU {
                set.set(cpu);
            }
        }
        rustix::thread::sched_setaffinity(None, &set).map_err(step("choosing CPUs"))?;
    }
    let Some(node) = config.node else { return Ok(()) };
    const BITS: u32 = u64::BITS * 16;
    if node >= BITS {
        return Err(step("choosing a memory node")(io::Error::from(io::ErrorKind::InvalidInput)));
    }
    let mut nodes = [0_u64; 16];
    nodes[(node / u64::BITS) as usize] = 1 << (node % u64::BITS);
    // Preferred, not bound: a node that is full makes VMs slower, not dead.
    // SAFETY: set_mempolicy(2) reads BITS bits from `nodes`, which has as many; one more, as the kernel counts them.
    let result = unsafe {
        libc::syscall(libc::SYS_set_mempolicy, libc::MPOL_PREFERRED, nodes.as_ptr(), u64::from(BITS) + 1)
    };
    if result == 0 { Ok(()) } else { Err(step("choosing a memory node")(io::Error::last_os_error())) }
}
