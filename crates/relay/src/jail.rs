//! What the relay's process may do: its user, its root folder and its limits. System calls are
//! bounded by [`crate::filter`].
//!
//! Its user is that of the VM, so that the kernel counts its pipes for this VM alone
//! (pipe-user-pages-soft, pipe(7)).

use crate::arguments::Limits;
use rustix::fd::{AsRawFd, IntoRawFd, OwnedFd};
use rustix::io::fcntl_dupfd_cloexec;
use rustix::process::{DumpableBehavior, Gid, Resource, Rlimit, Uid, chroot};
use rustix::process::{geteuid, getrlimit, set_dumpable_behavior, setrlimit};
use rustix::thread::{
    CapabilitySet, CapabilitySets, set_capabilities, set_no_new_privs, set_thread_groups,
    set_thread_res_gid, set_thread_res_uid,
};
use std::io;

/// Address space: far more than the tables and the buffer take.
const MAX_ADDRESS_BYTES: u64 = 1 << 30;
/// The longest file that is written: the log. A longer one ends the process.
const MAX_LOG_BYTES: u64 = 64 << 10;
/// Order of the kernel's OOM killer: a relay ends before its VM, because another one can be
/// started.
const OOM_SCORE: &str = "1000";
/// Descriptors of a connection: two sockets and two pipes.
const FDS_OF_CONNECTION: u64 = 6;
/// Descriptors of a flow, framed ones included.
const FDS_OF_FLOW: u64 = 2;
/// Descriptors beside those: streams, epoll, pipes that wait.
const OTHER_FDS: u64 = 128;

/// The descriptors that connections and flows take, at most.
#[must_use]
pub fn fds_of(limits: &Limits) -> u64 {
    let count = |number: usize| u64::try_from(number).unwrap_or(u64::MAX);
    count(limits.connections) * FDS_OF_CONNECTION + count(limits.flows) * FDS_OF_FLOW
}

/// Limits descriptors, memory and files. `last` is the highest inherited descriptor, and `served`
/// the number of those that what is served takes.
///
/// # Errors
/// The kernel refuses.
pub fn limit(served: u64, last: i32) -> io::Result<()> {
    let fds = u64::from(last.unsigned_abs()) + served + OTHER_FDS;
    // Raising the hard limit needs root. With fewer descriptors, clients wait for one.
    let set =
        |most| setrlimit(Resource::Nofile, Rlimit { current: Some(most), maximum: Some(most) });
    if set(fds).is_err() {
        set(getrlimit(Resource::Nofile).maximum.map_or(fds, |hard| hard.min(fds)))?;
    }
    for (resource, most) in [
        (Resource::Core, 0),
        (Resource::Memlock, 0),
        (Resource::Fsize, MAX_LOG_BYTES),
        (Resource::As, MAX_ADDRESS_BYTES),
    ] {
        let most = getrlimit(resource).maximum.map_or(most, |hard| hard.min(most));
        setrlimit(resource, Rlimit { current: Some(most), maximum: Some(most) })?;
    }
    Ok(())
}

/// Takes care that the heap is one area: the filter has no call for another one. Gives each number
/// up to `last` a descriptor, so that no socket of the process gets one of them, and closes all
/// above. Call it before the process opens any.
///
/// # Errors
/// The kernel refuses.
pub fn tidy(last: i32, filler: &OwnedFd) -> io::Result<()> {
    // SAFETY: sets a number; 1 is success.
    if unsafe { libc::mallopt(libc::M_MMAP_MAX, 0) } != 1 {
        return Err(io::Error::other("mallopt: M_MMAP_MAX was refused"));
    }
    // SAFETY: nothing in this process owns the closed descriptors: it has just started, and its
    // command line names all that it uses.
    let closed = unsafe {
        libc::syscall(libc::SYS_close_range, last.unsigned_abs() + 1, libc::c_uint::MAX, 0)
    };
    if closed != 0 {
        return Err(io::Error::last_os_error());
    }
    loop {
        let filled = fcntl_dupfd_cloexec(filler, 3)?;
        if filled.as_raw_fd() > last {
            return Ok(());
        }
        // Open as long as the process.
        let _ = filled.into_raw_fd();
    }
}

/// Drops the rights that the relay does not need. Only the calling thread may exist. `ports` are
/// those of the guest.
///
/// # Errors
/// The process is root and no other `user` is given, or /proc is not mounted.
pub fn enter(user: Option<u32>, ports: &[u16]) -> io::Result<()> {
    // Before it has another user. It may always be raised.
    std::fs::write("/proc/self/oom_score_adj", OOM_SCORE)?;
    if geteuid().is_root() {
        let Some(user) = user.filter(|user| *user != 0) else {
            return Err(io::Error::other("started as root: expected --user of the VM"));
        };
        // A folder whose only entries are descriptor numbers.
        chroot("/proc/self/fdinfo")?;
        rustix::process::chdir("/")?;
        let (user, group) = (Uid::from_raw(user), Gid::from_raw(user));
        set_thread_groups(&[])?;
        set_thread_res_gid(group, group, group)?;
        set_thread_res_uid(user, user, user)?;
    }
    let none = CapabilitySet::empty();
    set_capabilities(None, CapabilitySets { effective: none, permitted: none, inheritable: none })?;
    set_dumpable_behavior(DumpableBehavior::NotDumpable)?;
    set_no_new_privs(true)?;
    dayfly_sys::landlock::forbid_all_but_connecting(ports).map(drop)
}
