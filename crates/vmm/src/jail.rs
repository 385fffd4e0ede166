//! The jail of a VMM: a private root folder, user and group, no capabilities, and only the
//! descriptors that it was given.
//!
//! The zygote ([`crate::zygote`]) has a mount and a network namespace with nothing in them. It does
//! the first steps once: [`see_only`] hides all but the folder of the VMs' folders, and [`narrow`]
//! gives up what no child may have. Each VMM, a child in new PID, IPC and UTS namespaces, then does
//! [`enter`]: root, group, user. Each step needs privileges that a later step gives up.
//!
//! VMMs share two namespaces, because an empty network namespace costs 0.4 ms to make and more to
//! remove, and detaching a mount waits for a grace period. The shared network namespace has only a
//! loopback that is down. The shared mount namespace has only the sockets in the VMs' roots; a
//! process without capabilities and without descriptors of folders cannot leave its root. Abstract
//! sockets need bind(2) and listen(2), which the filters forbid ([`crate::seccomp`]).

use crate::config::{FdNumber, JailConfig};
use crate::limits::{MAX_OPEN_FDS, MAX_THREADS};
use rustix::fs::CWD;
use rustix::mount::{
    MountFlags, MountPropagationFlags, UnmountFlags, mount_bind, mount_change, mount_remount,
    unmount,
};
use rustix::process::{
    DumpableBehavior, Resource, Rlimit, chdir, chroot, fchdir, pivot_root, set_dumpable_behavior,
    setrlimit,
};
use std::collections::BTreeSet;
use std::fs::File;
use std::io;
use std::os::fd::BorrowedFd;
use std::path::Path;

/// A range of numbers, because the last capability is not known at compile time. The kernel refuses
/// numbers past it.
const CAPABILITIES: std::ops::Range<libc::c_ulong> = 0..64;

/// Why the jail could not be entered.
#[derive(Debug, thiserror::Error)]
pub enum JailError {
    /// The configuration gives a VMM the user or group root.
    #[error("jail: {what}: expected a number above 0, got 0")]
    Root {
        /// Which id: `uid` or `gid`.
        what: &'static str,
    },
    /// A system call failed.
    #[error("jail: {what}")]
    Step {
        /// The step that failed.
        what: String,
        /// The error of the system call.
        #[source]
        source: io::Error,
    },
}

fn step<E: Into<io::Error>>(what: impl Into<String>) -> impl FnOnce(E) -> JailError {
    move |error| JailError::Step { what: what.into(), source: error.into() }
}

/// Closes every descriptor except 0 to 2 and those in `keep`.
///
/// # Errors
/// When close_range(2) fails.
pub fn close_all_but(keep: &BTreeSet<FdNumber>) -> Result<(), JailError> {
    let mut from: u32 = 3;
    let close = |first: u32, last: u32| {
        if first > last {
            return Ok(());
        }
        // SAFETY: nothing in this process owns the closed descriptors: the process has just
        // started, and its configuration, whose descriptors are kept, names all that it uses.
        let result = unsafe { libc::syscall(libc::SYS_close_range, first, last, 0) };
        if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
    };
    for &number in keep {
        let Ok(number) = u32::try_from(number) else { continue };
        if number < from {
            continue;
        }
        close(from, number - 1).map_err(step("closing descriptors"))?;
        from = number + 1;
    }
    close(from, u32::MAX).map_err(step("closing descriptors"))
}

/// Makes `folder` the root of this process and its children, which then see no other file of the
/// host. The caller has a private mount namespace.
///
/// # Errors
/// [`JailError`] names the step that failed; the process is then unusable.
pub fn see_only(folder: &Path) -> Result<(), JailError> {
    let shown = folder.display();
    mount_change("/", MountPropagationFlags::REC | MountPropagationFlags::PRIVATE)
        .map_err(step("making mounts private"))?;
    mount_bind(folder, folder).map_err(step(format!("binding {shown}")))?;
    let flags = MountFlags::BIND | MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOEXEC;
    mount_remount(folder, flags, c"")
        .map_err(step(format!("remounting {shown} nosuid, nodev, noexec")))?;
    let new = rustix::fs::openat(
        CWD,
        folder,
        rustix::fs::OFlags::DIRECTORY | rustix::fs::OFlags::PATH | rustix::fs::OFlags::CLOEXEC,
        rustix::fs::Mode::empty(),
    )
    .map_err(step(format!("opening {shown}")))?;
    fchdir(&new).map_err(step(format!("changing to {shown}")))?;
    // pivot_root(2), "pivot_root(".", ".")": the old root is stacked on the new root, then
    // detached.
    pivot_root(".", ".").map_err(step(format!("pivoting the root to {shown}")))?;
    unmount(".", UnmountFlags::DETACH).map_err(step("detaching the old root"))?;
    chdir("/").map_err(step("changing to the new root"))
}

/// Gives up what neither this process nor any child may have again, as any user: capabilities, core
/// files, most descriptors. The limit on priorities still allows a return from a lower priority to
/// the normal one; the result is whether that limit could be set.
///
/// # Errors
/// [`JailError`] names the step that failed; the process is then unusable.
pub fn narrow() -> Result<bool, JailError> {
    // A warm VMM may start at a lower priority and returns to the normal one when its guest starts.
    // The limit of 20 allows nice 20 - 20 = 0. Setting it needs CAP_SYS_RESOURCE.
    let may_return =
        setrlimit(Resource::Nice, Rlimit { current: Some(20), maximum: Some(20) }).is_ok();
    for capability in CAPABILITIES {
        // SAFETY: prctl(2) with integer arguments.
        let result = unsafe { libc::prctl(libc::PR_CAPBSET_DROP, capability, 0, 0, 0) };
        if result != 0 {
            let error = io::Error::last_os_error();
            if error.raw_os_error() == Some(libc::EINVAL) {
                break; // past the last capability
            }
            return Err(step(format!("dropping capability {capability}"))(error));
        }
    }
    // SAFETY: prctl(2) with integer arguments.
    let result =
        unsafe { libc::prctl(libc::PR_CAP_AMBIENT, libc::PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0) };
    if result != 0 {
        return Err(step("clearing ambient capabilities")(io::Error::last_os_error()));
    }
    no_new_privileges()?;
    let limit = |what, resource, n| {
        setrlimit(resource, Rlimit { current: Some(n), maximum: Some(n) }).map_err(step(what))
    };
    limit("limiting core files", Resource::Core, 0)?;
    limit("limiting descriptors", Resource::Nofile, MAX_OPEN_FDS)?;
    limit("limiting threads", Resource::Nproc, MAX_THREADS)?;
    Ok(may_return)
}

/// Enters the jail for good, after [`see_only`] and [`narrow`]. The new root applies to all
/// threads; the user applies only to the calling thread, so the others call [`become_user`].
///
/// # Errors
/// [`JailError`] names the step that failed; the process is then unusable.
pub fn enter(jail: &JailConfig) -> Result<(), JailError> {
    let root = jail.root.as_path();
    chroot(root).map_err(step(format!("changing the root to {}", root.display())))?;
    chdir("/").map_err(step("changing to the new root"))?;
    become_user(jail)?;
    set_dumpable_behavior(DumpableBehavior::NotDumpable).map_err(step("becoming non-dumpable"))
}

/// Sets no_new_privs: execve(2) can no longer raise privileges. seccomp filters require it.
///
/// # Errors
/// When prctl(2) fails.
pub fn no_new_privileges() -> Result<(), JailError> {
    rustix::thread::set_no_new_privs(true).map_err(step("setting no_new_privs"))
}

/// Gives up CAP_SYS_ADMIN in this thread. After that, `/proc/self/pagemap` has no numbers of
/// page frames if this thread opened it. They would help attacks on the host's memory.
///
/// # Errors
/// [`JailError`] names the step that failed.
pub fn drop_admin() -> Result<(), JailError> {
    let mut sets = rustix::thread::capabilities(None).map_err(step("reading capabilities"))?;
    let admin = rustix::thread::CapabilitySet::SYS_ADMIN;
    sets.effective.remove(admin);
    sets.permitted.remove(admin);
    sets.inheritable.remove(admin);
    rustix::thread::set_capabilities(None, sets).map_err(step("dropping CAP_SYS_ADMIN"))
}

/// Opens a file as [`drop_admin`] would have it opened; this thread keeps CAP_SYS_ADMIN.
///
/// # Errors
/// [`JailError`] names the step that failed.
pub fn open_without_admin(path: &Path) -> Result<File, JailError> {
    let before = rustix::thread::capabilities(None).map_err(step("reading capabilities"))?;
    let mut sets = before;
    sets.effective.remove(rustix::thread::CapabilitySet::SYS_ADMIN);
    let set = |sets| rustix::thread::set_capabilities(None, sets);
    set(sets).map_err(step("suspending CAP_SYS_ADMIN"))?;
    let opened = File::open(path);
    set(before).map_err(step("restoring CAP_SYS_ADMIN"))?;
    opened.map_err(step(format!("opening {}", path.display())))
}

/// Forbids this process and its children to open any file by path but those in `readable`, to use
/// TCP, and to signal processes that are not its children (Landlock). Before Linux 5.13, or if the
/// kernel was started without Landlock, this does nothing: the root folder is empty anyway.
///
/// # Errors
/// [`JailError`] if the kernel has Landlock and refuses.
pub fn open_nothing_but(readable: Option<BorrowedFd<'_>>) -> Result<(), JailError> {
    dayfly_sys::landlock::forbid_all_but(readable).map(|_| ()).map_err(step("Landlock"))
}

/// Lowers the priority of this thread, and of the threads that it starts, to nice 10. A thread
/// calls [`normal_priority`] before its guest starts.
pub fn low_priority() {
    // SAFETY: setpriority(2) with integers; 0 is the calling thread.
    unsafe { libc::setpriority(libc::PRIO_PROCESS, 0, 10) };
}

/// Gives this thread nice 0. A warm VMM is made at a lower priority, at which its guest would wait
/// for every other running guest. [`narrow`] keeps this call allowed.
pub fn normal_priority() {
    // SAFETY: setpriority(2) with integers; 0 is the calling thread. If the call is not allowed,
    // the priority stays as it is.
    unsafe { libc::setpriority(libc::PRIO_PROCESS, 0, 0) };
}

/// Makes the calling thread the user and group of `jail`, without capabilities.
///
/// # Errors
/// [`JailError`] names the step that failed; the process is then unusable.
pub fn become_user(jail: &JailConfig) -> Result<(), JailError> {
    let (uid, gid) = (jail.uid, jail.gid);
    for (what, id) in [("uid", uid), ("gid", gid)] {
        if id == 0 {
            return Err(JailError::Root { what });
        }
    }
    // The raw system calls change one thread; glibc's wrappers interrupt every other thread to
    // change it too.
    let none: *const libc::gid_t = std::ptr::null();
    // SAFETY: setgroups(2) of no group reads nothing; the others take integers.
    let (groups, group, user) = unsafe {
        (
            libc::syscall(libc::SYS_setgroups, 0, none),
            libc::syscall(libc::SYS_setresgid, gid, gid, gid),
            libc::syscall(libc::SYS_setresuid, uid, uid, uid),
        )
    };
    for (what, result) in
        [("clearing groups", groups), ("changing group", group), ("changing user", user)]
    {
        if result != 0 {
            return Err(step(what)(io::Error::last_os_error()));
        }
    }
    // The change from uid 0 clears the permitted and effective sets, but not the inheritable set.
    let none = rustix::thread::CapabilitySet::empty();
    let sets =
        rustix::thread::CapabilitySets { effective: none, permitted: none, inheritable: none };
    rustix::thread::set_capabilities(None, sets).map_err(step("clearing capabilities"))
}
