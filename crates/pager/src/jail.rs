//! What the pager's process may do: its user, its capability, its limits and its system calls.
//!
//! A pager reads packs and disks of a store, and answers page faults of VMMs that may be hostile.
//! If one of them takes it over, it must harm the clones of its template only. It opens nothing by
//! path, and signals only the processes for which the daemon gave it a pidfd.
//!
//! All pagers have one user. The filter separates them from each other: it has no call that names
//! another process. CAP_KILL remains, because VMMs have other users and a pager outlives its
//! daemon; the filter reduces it to SIGKILL through a pidfd.

use crate::filter;
use dayfly_sys::uffd::Descriptors;
use rustix::fs::FileType;
use rustix::process::{DumpableBehavior, Resource, Rlimit, Uid, chroot};
use rustix::process::{getrlimit, set_dumpable_behavior, setrlimit};
use rustix::stdio::stderr;
use rustix::thread::{
    CapabilitySet, CapabilitySets, set_capabilities, set_keep_capabilities, set_no_new_privs,
    set_thread_groups, set_thread_res_gid, set_thread_res_uid,
};
use std::io;

/// The user and group of all pagers. Container managers, systemd and /etc/subuid use no ids between
/// 1,879,048,192 and 2,147,483,647 (systemd, "Users, Groups, UIDs and GIDs").
pub const USER: u32 = 2_130_706_432;
/// The limit on descriptors: enough for all packs, and three for each of some thousand clones.
const MAX_OPEN_FDS: u64 = 65_536;
/// The longest file that a pager writes: an exit record.
const MAX_FILE_BYTES: u64 = 1 << 20;
/// The most bytes by which a log file may grow, if stderr is one.
const MAX_LOG_BYTES: u64 = 64 << 20;
/// Address space beside the template and its bookkeeping: stacks and the allocator's arenas, which
/// are mostly reserved and not used.
const MAX_OTHER_BYTES: u64 = 16 << 30;
/// Bookkeeping takes less than this part of the template.
const BOOKKEEPING_SHARE: u64 = 8;

/// Drops the rights that the pager does not need. Only the calling thread may exist.
///
/// # Errors
/// The process is not root, or /proc is not mounted.
pub fn enter() -> io::Result<Descriptors> {
    let descriptors = Descriptors::open()?;
    limit(Resource::Nofile, MAX_OPEN_FDS)?;
    limit(Resource::Core, 0)?;
    limit(Resource::Fsize, file_limit()?)?;
    // A write beyond the limit fails instead of killing.
    // SAFETY: sets a disposition; no handler is installed.
    unsafe { libc::signal(libc::SIGXFSZ, libc::SIG_IGN) };
    // A folder whose only entries are descriptor numbers.
    chroot("/proc/self/fdinfo")?;
    rustix::process::chdir("/")?;
    become_user()?;
    set_dumpable_behavior(DumpableBehavior::NotDumpable)?;
    set_no_new_privs(true)?;
    filter::install()?;
    Ok(descriptors)
}

/// Changes to [`USER`], and keeps CAP_KILL alone.
fn become_user() -> io::Result<()> {
    let (user, group) = (Uid::from_raw(USER), rustix::process::Gid::from_raw(USER));
    set_keep_capabilities(true)?;
    set_thread_groups(&[])?;
    set_thread_res_gid(group, group, group)?;
    set_thread_res_uid(user, user, user)?;
    let kill = CapabilitySet::KILL;
    let sets =
        CapabilitySets { effective: kill, permitted: kill, inheritable: CapabilitySet::empty() };
    Ok(set_capabilities(None, sets)?)
}

/// Limits the address space to what a template of these bytes needs.
///
/// # Errors
/// The kernel refuses.
pub fn limit_memory(template_bytes: u64) -> io::Result<()> {
    let bookkeeping = template_bytes / BOOKKEEPING_SHARE;
    let most = template_bytes.saturating_add(bookkeeping).saturating_add(MAX_OTHER_BYTES);
    limit(Resource::As, most)
}

/// The longest file. If stderr is a file, messages are still written, for a while.
fn file_limit() -> io::Result<u64> {
    let log = rustix::fs::fstat(stderr())?;
    let is_file = FileType::from_raw_mode(log.st_mode) == FileType::RegularFile;
    let bytes = u64::try_from(log.st_size).unwrap_or(0);
    Ok(if is_file { bytes.saturating_add(MAX_LOG_BYTES) } else { MAX_FILE_BYTES })
}

/// Sets a limit, or keeps the hard limit if that is lower.
fn limit(resource: Resource, most: u64) -> io::Result<()> {
    let most = getrlimit(resource).maximum.map_or(most, |hard| hard.min(most));
    Ok(setrlimit(resource, Rlimit { current: Some(most), maximum: Some(most) })?)
}
