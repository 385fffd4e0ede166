//! What the packer's process may do: its user, its limits and its system calls.
//!
//! A packer reads what a guest has written. If the guest takes it over, it must harm that guest's
//! snapshot only. It has RAM and disks of its VM, open for reading, and packs that nothing needs
//! yet. All packers have one user; the filter separates them, because it has no call that names
//! another process.

use crate::filter;
use rustix::process::{DumpableBehavior, Gid, Resource, Rlimit, Uid, chroot, geteuid};
use rustix::process::{Signal, set_parent_process_death_signal};
use rustix::process::{getrlimit, set_dumpable_behavior, setrlimit};
use rustix::thread::{
    CapabilitySet, CapabilitySets, set_capabilities, set_no_new_privs, set_thread_groups,
    set_thread_res_gid, set_thread_res_uid,
};
use std::io;

/// The user and group of all packers: the id behind that of pagers.
pub const USER: u32 = 2_130_706_433;
/// The most threads that write packs.
pub const MAX_THREADS: usize = 8;
/// Memory of the host that a packer takes with [`MAX_THREADS`] threads.
const MEMORY_BYTES: u64 = 48 << 20;
/// The limit on descriptors: a few for each file of the disks.
const MAX_OPEN_FDS: u64 = 4096;
/// The longest file that is written: a pack of 64 MiB that does not compress, or the log.
const MAX_FILE_BYTES: u64 = 80 << 20;
/// Address space: block indexes, buffers, stacks and the allocator's arenas.
const MAX_ADDRESS_BYTES: u64 = 16 << 30;
/// Order of the kernel's OOM killer: a packer ends before its VM, because a snapshot can be taken
/// again.
const OOM_SCORE: &str = "1000";

/// Memory of the host that a packer takes beside RAM of this size. Not counted is what depends on
/// the guest: block indexes take 12 bytes for each block of the disks that is not all zero, and up
/// to 36 while they are read; a frame of which the VMM knows the block takes about 110 bytes.
#[must_use]
pub const fn memory_bytes(ram_bytes: u64) -> u64 {
    // A byte for each frame, which says whether it is free.
    MEMORY_BYTES + ram_bytes / 4096
}

/// Drops the rights that the packer does not need. Only the calling thread may exist. A process
/// that root did not start keeps its user. From then on the kernel kills the process when the
/// thread that started it ends, and so when its daemon is killed (PR_SET_PDEATHSIG of prctl(2)).
///
/// # Errors
/// The kernel refuses, or /proc is not mounted.
pub fn enter() -> io::Result<()> {
    // Before it has another user. A process may always raise its score.
    std::fs::write("/proc/self/oom_score_adj", OOM_SCORE)?;
    for (resource, most) in [
        (Resource::Nofile, MAX_OPEN_FDS),
        (Resource::Core, 0),
        (Resource::Memlock, 0),
        (Resource::Fsize, MAX_FILE_BYTES),
        (Resource::As, MAX_ADDRESS_BYTES),
    ] {
        let most = getrlimit(resource).maximum.map_or(most, |hard| hard.min(most));
        setrlimit(resource, Rlimit { current: Some(most), maximum: Some(most) })?;
    }
    // A write beyond the limit fails instead of killing.
    // SAFETY: sets a disposition; no handler is installed.
    unsafe { libc::signal(libc::SIGXFSZ, libc::SIG_IGN) };
    if geteuid().is_root() {
        // A folder whose only entries are descriptor numbers.
        chroot("/proc/self/fdinfo")?;
        rustix::process::chdir("/")?;
        let (user, group) = (Uid::from_raw(USER), Gid::from_raw(USER));
        set_thread_groups(&[])?;
        set_thread_res_gid(group, group, group)?;
        set_thread_res_uid(user, user, user)?;
    }
    let none = CapabilitySet::empty();
    set_capabilities(None, CapabilitySets { effective: none, permitted: none, inheritable: none })?;
    set_dumpable_behavior(DumpableBehavior::NotDumpable)?;
    set_no_new_privs(true)?;
    dayfly_sys::landlock::forbid_all_but(None)?;
    // A packer that was taken over does not end because its socket is closed, and can hide its
    // command line from a search. After all changes of the user, which would reset this. If the
    // thread that started the packer has ended before, the socket is closed and nothing was read.
    set_parent_process_death_signal(Some(Signal::KILL))?;
    filter::install()
}
