//! Landlock (landlock(7)): a process gives up access to files, ports and other processes, for
//! itself and its later children.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

// linux/landlock.h
const CREATE_RULESET_VERSION: u32 = 1;
const RULE_OF_FOLDER: u32 = 1;
const RULE_OF_PORT: u32 = 2;
const CONNECT_TCP: u64 = 1 << 1;
const EXECUTE: u64 = 1;
const READ_FILE: u64 = 1 << 2;
const MAKE_CHAR: u64 = 1 << 6;
const MAKE_BLOCK: u64 = 1 << 11;
const IOCTL_DEVICE: u64 = 1 << 15;

#[repr(C)]
struct RulesetAttr {
    handled_access_fs: u64,
    handled_access_net: u64,
    scoped: u64,
}

#[repr(C, packed)]
struct FolderAttr {
    allowed_access: u64,
    parent_fd: i32,
}

#[repr(C)]
struct PortAttr {
    allowed_access: u64,
    port: u64,
}

/// The version of Landlock that the kernel has; `None` without Landlock.
#[must_use]
pub fn version() -> Option<u32> {
    let none: *const RulesetAttr = std::ptr::null();
    // SAFETY: with this flag the kernel reads no attributes.
    let version = unsafe {
        libc::syscall(libc::SYS_landlock_create_ruleset, none, 0, CREATE_RULESET_VERSION)
    };
    u32::try_from(version).ok().filter(|version| *version > 0)
}

/// All that Landlock `version` can forbid, and the bytes of the attribute that it knows.
const fn everything(version: u32) -> (RulesetAttr, usize) {
    let fs_bits = match version {
        0 | 1 => 13,
        2 => 14,
        3 | 4 => 15,
        _ => 16,
    };
    let all = RulesetAttr {
        handled_access_fs: (1 << fs_bits) - 1,
        // TCP: bind and connect.
        handled_access_net: if version < 4 { 0 } else { 3 },
        // Abstract unix sockets and signals, to processes outside.
        scoped: if version < 6 { 0 } else { 3 },
    };
    let known = match version {
        0..=3 => 8,
        4 | 5 => 16,
        _ => 24,
    };
    (all, known)
}

/// Forbids all that the kernel's Landlock can, to this thread and to all that it makes later, but
/// reading files below `readable`. Descriptors that are open already keep working. Returns whether
/// the kernel has Landlock. The thread has no_new_privs set.
///
/// # Errors
/// The kernel refuses.
pub fn forbid_all_but(readable: Option<BorrowedFd<'_>>) -> io::Result<bool> {
    restrict(readable, |_| READ_FILE)
}

/// Forbids all that the kernel's Landlock can, to this thread and to all that it makes later, but
/// working with files below `folder`; devices and programs are none of them. Otherwise as
/// [`forbid_all_but`].
///
/// # Errors
/// The kernel refuses.
pub fn forbid_outside(folder: BorrowedFd<'_>) -> io::Result<bool> {
    restrict(Some(folder), |all| all & !(EXECUTE | MAKE_CHAR | MAKE_BLOCK | IOCTL_DEVICE))
}

/// Forbids all that the kernel's Landlock can, to this thread and to all that it makes later, but
/// connecting to these TCP ports, of whatever host. Otherwise as [`forbid_all_but`].
///
/// # Errors
/// The kernel refuses.
pub fn forbid_all_but_connecting(ports: &[u16]) -> io::Result<bool> {
    let Some((ruleset, all)) = ruleset()? else { return Ok(false) };
    for port in ports {
        // A version that does not know ports forbids none.
        if all.handled_access_net & CONNECT_TCP != 0 {
            let rule = PortAttr { allowed_access: CONNECT_TCP, port: u64::from(*port) };
            // SAFETY: `rule` is laid out as the attribute of a rule for a port.
            unsafe { add(&ruleset, RULE_OF_PORT, (&raw const rule).cast()) }?;
        }
    }
    enforce(&ruleset)
}

/// Allows only what `allowed` returns, of all that can be forbidden, below `folder`.
fn restrict(folder: Option<BorrowedFd<'_>>, allowed: impl FnOnce(u64) -> u64) -> io::Result<bool> {
    let Some((ruleset, all)) = ruleset()? else { return Ok(false) };
    if let Some(folder) = folder {
        let allowed_access = allowed(all.handled_access_fs);
        let rule = FolderAttr { allowed_access, parent_fd: folder.as_raw_fd() };
        // SAFETY: `rule` is laid out as the attribute of a rule for a folder.
        unsafe { add(&ruleset, RULE_OF_FOLDER, (&raw const rule).cast()) }?;
    }
    enforce(&ruleset)
}

fn check(result: libc::c_long) -> io::Result<libc::c_long> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}

/// A set of rules that forbids everything; `None` without Landlock.
fn ruleset() -> io::Result<Option<(OwnedFd, RulesetAttr)>> {
    let Some(version) = version() else { return Ok(None) };
    let (all, known) = everything(version);
    // SAFETY: the kernel reads `known` bytes of `all`, which has at least as many.
    let made = check(unsafe {
        libc::syscall(libc::SYS_landlock_create_ruleset, &raw const all, known, 0)
    })?;
    let made = i32::try_from(made).map_err(io::Error::other)?;
    // SAFETY: the kernel has just made the descriptor, and nothing else owns it.
    Ok(Some((unsafe { OwnedFd::from_raw_fd(made) }, all)))
}

/// Adds an exception.
///
/// # Safety
/// `rule` points to a whole attribute of a rule of this kind.
unsafe fn add(ruleset: &OwnedFd, kind: u32, rule: *const libc::c_void) -> io::Result<()> {
    let ruleset = ruleset.as_raw_fd();
    // SAFETY: the kernel reads one attribute of a rule of this kind, which the caller promises.
    check(unsafe { libc::syscall(libc::SYS_landlock_add_rule, ruleset, kind, rule, 0) }).map(drop)
}

fn enforce(ruleset: &OwnedFd) -> io::Result<bool> {
    // SAFETY: integers.
    check(unsafe { libc::syscall(libc::SYS_landlock_restrict_self, ruleset.as_raw_fd(), 0) })?;
    Ok(true)
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fs::{Mode, OFlags, open};
    use std::os::fd::AsFd;

    #[test]
    fn after_it_files_open_only_below_the_one_folder_and_open_files_still_read() {
        // Not `dayfly_units::needs`, which is on this crate's floor.
        if version().is_none() {
            let required = std::env::var("DAYFLY_REQUIRE").unwrap_or_default();
            assert!(!required.split(',').any(|need| need == "landlock"), "no Landlock here");
            println!("landlock: this kernel has none: nothing was tested");
            return;
        }
        let folder = |path: &str| {
            open(path, OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty()).unwrap()
        };
        let (proc, etc) = (folder("/proc"), folder("/etc"));
        // SAFETY: the child makes system calls, and leaves through _exit.
        let pid = unsafe { libc::fork() };
        if pid == 0 {
            let opens = |folder: &OwnedFd, path: &str| {
                rustix::fs::openat(folder, path, OFlags::RDONLY, Mode::empty()).is_ok()
            };
            let held = open("/etc/passwd", OFlags::RDONLY, Mode::empty());
            let before = opens(&etc, "passwd") && opens(&proc, "self/statm");
            // SAFETY: prctl(2) with integers.
            let done = unsafe { libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) } == 0
                && forbid_all_but(Some(proc.as_fd())).is_ok_and(|is_there| is_there);
            let reads = held.is_ok_and(|file| rustix::io::read(&file, &mut [0; 8]) == Ok(8));
            let after = [opens(&proc, "self/statm"), reads, !opens(&etc, "passwd")];
            let failed = [before, done].into_iter().chain(after).position(|holds| !holds);
            let code = failed.map_or(0, |n| i32::try_from(n).unwrap_or(99) + 1);
            // SAFETY: ends the child without running destructors.
            unsafe { libc::_exit(code) };
        }
        let mut status = 0;
        // SAFETY: waits for the child that was made above.
        unsafe { libc::waitpid(pid, &raw mut status, 0) };
        assert_eq!(status, 0, "the first step that failed, from 1, times 256");
    }

    #[test]
    fn old_versions_are_asked_only_for_what_they_know() {
        let bits = |version| {
            let (all, known) = everything(version);
            (all.handled_access_fs.count_ones(), all.handled_access_net, all.scoped, known)
        };
        assert_eq!(bits(1), (13, 0, 0, 8));
        assert_eq!(bits(3), (15, 0, 0, 8));
        assert_eq!(bits(4), (15, 3, 0, 16));
        assert_eq!(bits(5), (16, 3, 0, 16));
        assert_eq!(bits(9), (16, 3, 3, 24));
    }
}
