//! Where a VMM lives: a root folder of its own, a user of its own, no capabilities, only the descriptors it was given.
//!
//! Once, in the zygote ([`crate::zygote`]), which has a mount and a network namespace of its own with nothing in them:
//! [`see_only`] the folder of VMs' folders, [`narrow`] what any child may ever have. Then for each VM, in a child in new PID, IPC and
//! UTS namespaces: [`enter`] its own root, group and user. Each step needs what a later one gives up.
//!
//! Why VMMs share two namespaces: an empty network namespace costs 0.4 ms to make and more to take apart, and detaching a mount waits for
//! a grace period. What is shared holds nothing: no interface but a loopback that is down, no file but the sockets in
//! the root of each, out of which a process without capabilities and without descriptors of folders cannot get. Sockets that
//! are names in the network namespace need bind(2) and listen(2), which the filters forbid ([`crate::seccomp`]).

use crate::config::{FdNumber, JailConfig};
use rustix::fs::CWD;
use rustix::mount::{
    MountFlags, MountPropagationFlags, UnmountFlags, mount_bind, mount_change, mount_remount, unmount,
};
use rustix::process::{
    DumpableBehavior, Resource, Rlimit, chdir, chroot, fchdir, pivot_root, set_dumpable_behavior, setrlimit,
};
use std::collections::BTreeSet;
use std::io;
use std::path::Path;

/// Most descriptors a VMM may have open: disks' layers, and a socket for each vsock connection.
const MAX_OPEN_FDS: u64 = 4096;
/// The last capability's number is not known at compile time; the kernel refuses numbers past it.
const CAPABILITIES: std::ops::Range<libc::c_ulong> = 0..64;

/// Why the jail could not be entered.
#[derive(Debug, thiserror::Error)]
pub enum JailError {
    /// Root is no user for a VMM.
    #[error("jail: {what}: expected a number above 0, got 0")]
    Root {
        /// Which id.
        what: &'static str,
    },
    /// A system call failed.
    #[error("jail: {what}")]
    Step {
        /// What was tried.
        what: String,
        /// Why it failed.
        #[source]
        source: io::Error,
    },
}

fn step<E: Into<io::Error>>(what: impl Into<String>) -> impl FnOnce(E) -> JailError {
    move |error| JailError::Step { what: what.into(), source: error.into() }
}

/// Closes every descriptor but 0 to 2 and `keep`.
///
/// # Errors
/// When close_range(2) fails.
pub fn close_all_but(keep: &BTreeSet<FdNumber>) -> Result<(), JailError> {
    let mut from: u32 = 3;
    let close = |first: u32, last: u32| {
        if first > last {
            return Ok(());
        }
        // SAFETY: closes descriptors that nothing in this process owns: it has just started and its configuration,
        // whose descriptors are kept, names all that it will use.
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

/// Makes `folder` all that this process and its children see of the host's files. In a mount namespace of its own.
///
/// # Errors
/// Naming the step that failed; the process is then of no use.
pub fn see_only(folder: &Path) -> Result<(), JailError> {
    let shown = folder.display();
    mount_change("/", MountPropagationFlags::REC | MountPropagationFlags::PRIVATE)
        .map_err(step("making mounts private"))?;
    mount_bind(folder, folder).map_err(step(format!("binding {shown}")))?;
    let flags = MountFlags::BIND | MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOEXEC;
    mount_remount(folder, flags, c"").map_err(step(format!("remounting {shown} nosuid, nodev, noexec")))?;
    let new = rustix::fs::openat(
        CWD,
        folder,
        rustix::fs::OFlags::DIRECTORY | rustix::fs::OFlags::PATH | rustix::fs::OFlags::CLOEXEC,
        rustix::fs::Mode::empty(),
    )
    .map_err(step(format!("opening {shown}")))?;
    fchdir(&new).map_err(step(format!("changing to {shown}")))?;
    // The old root comes to lie over the new one and is then taken away (pivot_root(2), "pivot_root(".", ".")").
    pivot_root(".", ".").map_err(step(format!("pivoting the root to {shown}")))?;
    unmount(".", UnmountFlags::DETACH).map_err(step("detaching the old root"))?;
    chdir("/").map_err(step("changing to the new root"))
}

/// Gives up what neither this process nor any child of it may have again, whoever they become. The limit of priorities is kept as wide as
/// the way back from a lower one; says whether there is such a way.
///
/// # Errors
/// Naming the step that failed; the process is then of no use.
pub fn narrow() -> Result<bool, JailError> {
    // A VMM may be started at a lower priority, and comes back to the normal one when somebody waits for its guest: 20 - 20 = nice 0.
    // Needs CAP_SYS_RESOURCE.
    let may_return = setrlimit(Resource::Nice, Rlimit { current: Some(20), maximum: Some(20) }).is_ok();
    for capability in CAPABILITIES {
        // SAFETY: prctl(2) with integer arguments.
        let result = unsafe { libc::prctl(libc::PR_CAPBSET_DROP, capability, 0, 0, 0) };
        if result != 0 {
            let error = io::Error::last_os_error();
            if error.raw_os_error() == Some(libc::EINVAL) {
                break; // past the last one
            }
            return Err(step(format!("dropping capability {capability}"))(error));
        }
    }
    // SAFETY: prctl(2) with integer arguments.
    let result = unsafe { libc::prctl(libc::PR_CAP_AMBIENT, libc::PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0) };
    if result != 0 {
        return Err(step("clearing ambient capabilities")(io::Error::last_os_error()));
    }
    no_new_privileges()?;
    let limit = |what, resource, n| {
        setrlimit(resource, Rlimit { current: Some(n), maximum: Some(n) }).map_err(step(what))
    };
    limit("limiting core files", Resource::Core, 0)?;
    limit("limiting descriptors", Resource::Nofile, MAX_OPEN_FDS)?;
    Ok(may_return)
}

/// Enters the jail, for ever, after [`see_only`] and [`narrow`]. Other threads come along to the new root, and become its user by
/// themselves ([`become_user`]).
///
/// # Errors
/// Naming the step that failed; the process is then of no use.
pub fn enter(jail: &JailConfig) -> Result<(), JailError> {
    let root = jail.root.as_path();
    chroot(root).map_err(step(format!("changing the root to {}", root.display())))?;
    chdir("/").map_err(step("changing to the new root"))?;
    become_user(jail)?;
    set_dumpable_behavior(DumpableBehavior::NotDumpable).map_err(step("becoming non-dumpable"))
}

/// No execve(2) may give privileges again; seccomp filters need this too.
///
/// # Errors
/// When prctl(2) fails.
pub fn no_new_privileges() -> Result<(), JailError> {
    rustix::thread::set_no_new_privs(true).map_err(step("setting no_new_privs"))
}

/// Gives this thread, and those it starts, a lower priority; each calls [`normal_priority`] before somebody waits for it.
pub fn low_priority() {
    // SAFETY: setpriority(2) with integers; 0 is the calling thread.
    unsafe { libc::setpriority(libc::PRIO_PROCESS, 0, 10) };
}

/// Gives this thread the normal priority. A shell is made at a lower one, with which it would be behind every guest that runs. Allowed by [`narrow`].
pub fn normal_priority() {
    // SAFETY: setpriority(2) with integers; 0 is the calling thread. Where it is not allowed the thread stays as it is.
    unsafe { libc::setpriority(libc::PRIO_PROCESS, 0, 0) };
}

/// Makes this thread the user of `jail`, who has no capabilities.
///
/// # Errors
/// Naming the step that failed; the process is then of no use.
pub fn become_user(jail: &JailConfig) -> Result<(), JailError> {
    let (uid, gid) = (jail.uid, jail.gid);
    for (what, id) in [("uid", uid), ("gid", gid)] {
        if id == 0 {
            return Err(JailError::Root { what });
        }
    }
    // The bare calls change one thread; glibc's would stop every other one to have it do the same.
    let none: *const libc::gid_t = std::ptr::null();
    // SAFETY: setgroups(2) of no group reads nothing; the others take integers.
    let (groups, group, user) = unsafe {
        (
            libc::syscall(libc::SYS_setgroups, 0, none),
            libc::syscall(libc::SYS_setresgid, gid, gid, gid),
            libc::syscall(libc::SYS_setresuid, uid, uid, uid),
        )
    };
    for (what, result) in [("clearing groups", groups), ("changing group", group), ("changing user", user)] {
        if result != 0 {
            return Err(step(what)(io::Error::last_os_error()));
        }
    }
    // Leaving uid 0 cleared the permitted and effective sets; inheritable ones may be left.
    let none = rustix::thread::CapabilitySet::empty();
    let sets = rustix::thread::CapabilitySets { effective: none, permitted: none, inheritable: none };
    rustix::thread::set_capabilities(None, sets).map_err(step("clearing capabilities"))
}
