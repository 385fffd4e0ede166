//! The jail of the server: the shared folder is its root folder, and its user is the caller.
//!
//! | step | as root | as another user |
//! |---|---|---|
//! | the folder is opened by path | with the caller's user and groups, no capabilities | as it is |
//! | namespaces: mount, network, IPC, UTS | yes | in a user namespace, if the host allows it |
//! | root folder is the shared folder (nosuid, nodev, read-only if asked) | yes | likewise |
//! | user, groups; no capabilities; no_new_privs | the caller's | unchanged |
//! | limits: descriptors, address space, no core file | yes | yes |
//! | Landlock, if the kernel has version 2 of it: only the folder | yes | yes |
//! | filter of system calls ([`crate::filter`]) | yes | yes |
//!
//! Without a user namespace, an ordinary user's server sees the host's files as before; Landlock
//! and openat2(2) then keep it in the folder. It says so on stderr. Without Landlock too, only its
//! own code would keep a guest out of the user's other files, so it does not start.

use crate::arguments::{Caller, Folder};
use crate::options::{MAX_HANDLES, MAX_OPEN_NODES};
use crate::own::OwnFds;
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::fs::{CWD, Gid, Mode, OFlags, Uid, open, readlink};
use rustix::io::Errno;
use rustix::mount::{MountPropagationFlags, MoveMountFlags, OpenTreeFlags, UnmountFlags};
use rustix::mount::{mount_change, move_mount, open_tree, unmount};
use rustix::process::{DumpableBehavior, Resource, Rlimit, fchdir, getrlimit, pivot_root};
use rustix::process::{geteuid, set_dumpable_behavior, setrlimit};
use rustix::thread::{CapabilitySet, CapabilitySets, UnshareFlags};
use std::io;
use std::os::fd::AsRawFd;

/// Address space: buffers of all threads, tables, and the allocator's arenas, which are mostly
/// reserved and not used.
const MAX_ADDRESS_BYTES: u64 = 4 << 30;
/// Descriptors beside nodes and handles: streams, and what operations have open for a moment.
const OTHER_FDS: usize = 128;
/// The least descriptors with which a volume is of any use.
const LEAST_FDS: usize = 512;

/// A step of the jail that failed.
#[derive(Debug, thiserror::Error)]
#[error("jail: {what}")]
pub struct JailError {
    what: String,
    source: io::Error,
}

impl JailError {
    /// Whether the host does not let this user do it.
    fn is_forbidden(&self) -> bool {
        matches!(self.source.raw_os_error(), Some(libc::EPERM | libc::EACCES))
    }
}

fn step<E: Into<io::Error>>(what: impl Into<String>) -> impl FnOnce(E) -> JailError {
    move |error| JailError { what: what.into(), source: error.into() }
}

/// What is served from within the jail.
#[derive(Debug)]
pub struct Jailed {
    /// The folder.
    pub folder: OwnedFd,
    /// The server's descriptors by name.
    pub own: OwnFds,
    /// What could not be had, in a few words.
    pub lacking: Vec<&'static str>,
}

/// Bounds of nodes with descriptors, and of handles, that the limit of descriptors allows.
///
/// # Errors
/// The limit is too low.
pub fn limits() -> Result<(usize, usize), JailError> {
    let wanted = MAX_OPEN_NODES + MAX_HANDLES + OTHER_FDS;
    let set = |most: u64| {
        setrlimit(Resource::Nofile, Rlimit { current: Some(most), maximum: Some(most) })
    };
    let hard = getrlimit(Resource::Nofile).maximum;
    // Raising the hard limit needs root, and is bounded by fs.nr_open.
    if set(wanted as u64).is_err() {
        set(hard.unwrap_or(wanted as u64).min(wanted as u64))
            .map_err(step("limiting descriptors"))?;
    }
    let got = getrlimit(Resource::Nofile).current.unwrap_or(wanted as u64);
    let got = usize::try_from(got).unwrap_or(wanted);
    if got < LEAST_FDS {
        let why = format!("expected at least {LEAST_FDS} descriptors, got {got}: raise ulimit -n");
        return Err(step("limiting descriptors")(io::Error::other(why)));
    }
    let limit = |what, resource, most| {
        let most = getrlimit(resource).maximum.map_or(most, |hard: u64| hard.min(most));
        setrlimit(resource, Rlimit { current: Some(most), maximum: Some(most) }).map_err(step(what))
    };
    limit("limiting core files", Resource::Core, 0)?;
    limit("limiting memory", Resource::As, MAX_ADDRESS_BYTES)?;
    limit("limiting locked memory", Resource::Memlock, 0)?;
    // A write beyond a limit of the host fails instead of killing.
    // SAFETY: sets a disposition; no handler is installed.
    unsafe { libc::signal(libc::SIGXFSZ, libc::SIG_IGN) };
    let handles = MAX_HANDLES.min(got / 8);
    Ok((MAX_OPEN_NODES.min(got - handles - OTHER_FDS), handles))
}

/// Closes every descriptor except 0 to 2 and those in `keep`.
///
/// # Errors
/// When close_range(2) fails.
pub fn close_all_but(mut keep: Vec<i32>) -> Result<(), JailError> {
    keep.sort_unstable();
    let mut from: u32 = 3;
    let ends = keep.iter().map(|fd| fd.unsigned_abs()).chain([u32::MAX]);
    for end in ends {
        let last = if end == u32::MAX { end } else { end.saturating_sub(1) };
        if from <= last {
            // SAFETY: nothing in this process owns the closed descriptors: it has just started, and
            // its command line, whose descriptors are kept, names all that it uses.
            let result = unsafe { libc::syscall(libc::SYS_close_range, from, last, 0) };
            if result != 0 {
                return Err(step("closing descriptors")(io::Error::last_os_error()));
            }
        }
        from = end.saturating_add(1);
    }
    Ok(())
}

const FOLDER: OFlags = OFlags::PATH.union(OFlags::DIRECTORY).union(OFlags::CLOEXEC);

/// Opens the folder; a path is opened with the caller's rights.
///
/// # Errors
/// [`JailError`].
pub fn folder(folder: Folder, caller: Option<&Caller>) -> Result<OwnedFd, JailError> {
    let path = match folder {
        Folder::Open(fd) => return Ok(fd),
        Folder::Path(path) => path,
    };
    if let Some(caller) = caller {
        become_for_a_while(caller)?;
    }
    let opened = open(&path, FOLDER, Mode::empty());
    if caller.is_some() {
        let root = Some(Uid::ROOT);
        rustix::thread::set_thread_res_uid(None, root, None).map_err(step("returning to root"))?;
    }
    opened.map_err(step(format!("opening the shared folder {} as the caller", path.display())))
}

/// Takes the caller's groups and group, and its user as effective user. Capabilities are not
/// effective until the user is root again.
fn become_for_a_while(caller: &Caller) -> Result<(), JailError> {
    groups(caller)?;
    let (user, group) = (Uid::from_raw(caller.user.0), Gid::from_raw(caller.group.0));
    rustix::thread::set_thread_res_gid(group, group, group).map_err(step("changing the group"))?;
    rustix::thread::set_thread_res_uid(None, user, None).map_err(step("changing the user"))
}

fn groups(caller: &Caller) -> Result<(), JailError> {
    let groups: Vec<Gid> = caller.groups.iter().map(|id| Gid::from_raw(*id)).collect();
    rustix::thread::set_thread_groups(&groups).map_err(step("changing the groups"))
}

/// Enters the jail for good. Only the calling thread may exist. What remains is the filter of
/// system calls.
///
/// # Errors
/// [`JailError`] names the step that failed; the process is then unusable.
pub fn enter(
    folder: OwnedFd,
    caller: Option<&Caller>,
    read_only: bool,
) -> Result<Jailed, JailError> {
    let mut lacking = Vec::new();
    rustix::process::umask(Mode::empty());
    let is_root = geteuid().is_root();
    let (folder, own) = if is_root {
        let trees = Trees::clone_of(folder.as_fd(), read_only)?;
        unshare(SPACES).map_err(step("making namespaces"))?;
        trees.pivot()?
    } else if can_make_namespaces(folder.as_fd(), read_only)? {
        own_namespaces(folder.as_fd(), read_only)?
    } else {
        lacking.push("a user namespace");
        let own = open("/proc/self/fd", FOLDER, Mode::empty());
        let own = own.map_err(step("opening /proc/self/fd"))?;
        (folder, own)
    };
    fchdir(&own).map_err(step("changing to /proc/self/fd"))?;
    drop_capabilities()?;
    if is_root && let Some(caller) = caller {
        become_caller(caller)?;
    }
    let none = CapabilitySet::empty();
    let none = CapabilitySets { effective: none, permitted: none, inheritable: none };
    rustix::thread::set_capabilities(None, none).map_err(step("clearing capabilities"))?;
    set_dumpable_behavior(DumpableBehavior::NotDumpable).map_err(step("becoming undumpable"))?;
    rustix::thread::set_no_new_privs(true).map_err(step("setting no_new_privs"))?;
    // The first version forbids every move between folders.
    if dayfly_sys::landlock::version().is_some_and(|version| version > 1) {
        dayfly_sys::landlock::forbid_outside(folder.as_fd()).map_err(step("Landlock"))?;
    } else {
        lacking.push("Landlock");
    }
    if lacking.len() > 1 {
        return Err(step("keeping the server in the folder")(io::Error::other(NOTHING)));
    }
    Ok(Jailed { folder, own: OwnFds::in_working_folder(own), lacking })
}

/// What is expected of a host, and what to do.
const NOTHING: &str = "expected user namespaces for ordinary users, or Landlock (Linux 5.19), got \
                       neither; allow the first with `sysctl kernel.unprivileged_userns_clone=1`, \
                       or on Ubuntu with `sysctl kernel.apparmor_restrict_unprivileged_userns=0`";

const SPACES: UnshareFlags = UnshareFlags::NEWNS
    .union(UnshareFlags::NEWNET)
    .union(UnshareFlags::NEWIPC)
    .union(UnshareFlags::NEWUTS);

fn unshare(flags: UnshareFlags) -> Result<(), Errno> {
    // SAFETY: CLONE_FILES is not among the flags, and only this thread exists.
    unsafe { rustix::thread::unshare_unsafe(flags) }
}

/// Whether this user can have namespaces in which the folder is the root. A child tries it: on a
/// host that makes a user namespace without rights in it (AppArmor's restriction, as on Ubuntu
/// 24.04) a process that has one cannot go back.
fn can_make_namespaces(folder: BorrowedFd<'_>, read_only: bool) -> Result<bool, JailError> {
    const FORBIDDEN: libc::c_int = 1;
    // SAFETY: only this thread exists, so the child may do all that this process may. It leaves
    // through _exit.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let forbidden = own_namespaces(folder, read_only).is_err_and(|e| e.is_forbidden());
        // SAFETY: ends the child. Any other error comes again in this process, where it is shown.
        unsafe { libc::_exit(if forbidden { FORBIDDEN } else { 0 }) }
    }
    let what = "trying user namespaces";
    let pid = rustix::process::Pid::from_raw(child).filter(|_| child > 0);
    let pid = pid.ok_or_else(io::Error::last_os_error).map_err(step(what))?;
    let options = rustix::process::WaitOptions::empty();
    let ended = rustix::io::retry_on_intr(|| rustix::process::waitpid(Some(pid), options));
    let ended = ended.map_err(step(what))?.and_then(|(_, status)| status.exit_status());
    Ok(ended != Some(FORBIDDEN))
}

/// Makes namespaces in which the folder is the root folder. Returns it, and `/proc/self/fd`.
fn own_namespaces(
    folder: BorrowedFd<'_>,
    read_only: bool,
) -> Result<(OwnedFd, OwnedFd), JailError> {
    let inside = user_namespace(folder)?;
    Trees::clone_of(inside.as_fd(), read_only)?.pivot()
}

/// Makes a user namespace in which this process has all capabilities, and opens the folder again in
/// its mount namespace.
fn user_namespace(folder: BorrowedFd<'_>) -> Result<OwnedFd, JailError> {
    let number = folder.as_raw_fd();
    let path = readlink(format!("/proc/self/fd/{number}"), Vec::new());
    let path = path.map_err(step("the path of the folder"))?;
    let (user, group) = (geteuid().as_raw(), rustix::process::getegid().as_raw());
    match unshare(SPACES | UnshareFlags::NEWUSER) {
        Ok(()) => {}
        // None may be made: by the limit user.max_user_namespaces, or by the kernel's build.
        Err(Errno::NOSPC | Errno::USERS | Errno::INVAL) => {
            return Err(step("making a user namespace")(Errno::PERM));
        }
        Err(errno) => return Err(step("making a user namespace")(errno)),
    }
    let write = |name: &str, text: String| {
        let path = format!("/proc/self/{name}");
        std::fs::write(&path, text).map_err(step(format!("writing {path}")))
    };
    write("setgroups", "deny".to_owned())?;
    write("uid_map", format!("{user} {user} 1"))?;
    write("gid_map", format!("{group} {group} 1"))?;
    let inside = open(&*path, FOLDER | OFlags::NOFOLLOW, Mode::empty());
    let inside = inside.map_err(step("opening the folder again"))?;
    let inode = |fd: BorrowedFd<'_>| {
        let found = rustix::fs::fstat(fd).map_err(step("looking at the folder"))?;
        Ok((found.st_dev, found.st_ino))
    };
    if inode(folder)? != inode(inside.as_fd())? {
        let why = io::Error::other("expected the folder that was passed, got another one");
        return Err(step("opening the folder again")(why));
    }
    Ok(inside)
}

/// Mounts of the folder and of `/proc/self/fd` that are nowhere in the tree yet.
struct Trees {
    folder: OwnedFd,
    own: OwnedFd,
}

impl Trees {
    fn clone_of(folder: BorrowedFd<'_>, read_only: bool) -> Result<Self, JailError> {
        let flags = OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC;
        // With all that is mounted below: else the guest would see what these mounts hide. The
        // server enters none of them.
        let all = flags | OpenTreeFlags::AT_EMPTY_PATH | OpenTreeFlags::AT_RECURSIVE;
        let cloned = open_tree(folder, "", all);
        let folder = cloned.map_err(step("mounting the folder"))?;
        attributes(&folder, read_only)?;
        let own = open_tree(CWD, "/proc/self/fd", flags);
        Ok(Self { folder, own: own.map_err(step("mounting /proc/self/fd"))? })
    }

    /// Makes the folder the root, in the mount namespace that was just made.
    fn pivot(self) -> Result<(OwnedFd, OwnedFd), JailError> {
        mount_change("/", MountPropagationFlags::REC | MountPropagationFlags::PRIVATE)
            .map_err(step("making mounts private"))?;
        // Any folder will do that exists everywhere: nothing sees it afterwards.
        let from_fd = MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH;
        move_mount(&self.folder, "", CWD, "/proc", from_fd)
            .map_err(step("mounting the folder in the new namespace"))?;
        fchdir(&self.folder).map_err(step("changing to the folder"))?;
        // pivot_root(2), "pivot_root(".", ".")": the old root is stacked on the new root, then
        // detached.
        pivot_root(".", ".").map_err(step("pivoting the root"))?;
        unmount(".", UnmountFlags::DETACH).map_err(step("detaching the old root"))?;
        Ok((self.folder, self.own))
    }
}

/// struct mount_attr of linux/mount.h.
#[repr(C)]
struct MountAttr {
    set: u64,
    clear: u64,
    propagation: u64,
    user_namespace: u64,
}

/// Sets nosuid, nodev, private, and read-only if asked, on a mount and all below it.
fn attributes(mount: &OwnedFd, read_only: bool) -> Result<(), JailError> {
    const READ_ONLY: u64 = 1;
    const NO_SUID_NO_DEV: u64 = 2 | 4;
    let set = NO_SUID_NO_DEV | if read_only { READ_ONLY } else { 0 };
    // pivot_root(2) refuses a mount whose changes others see.
    let propagation = libc::MS_PRIVATE;
    let attr = MountAttr { set, clear: 0, propagation, user_namespace: 0 };
    let flags = libc::AT_EMPTY_PATH | libc::AT_RECURSIVE;
    // SAFETY: the path is a NUL-terminated text, and the kernel reads a whole `MountAttr`.
    let result = unsafe {
        libc::syscall(
            libc::SYS_mount_setattr,
            mount.as_raw_fd(),
            c"".as_ptr(),
            flags,
            &raw const attr,
            size_of::<MountAttr>(),
        )
    };
    if result == 0 {
        Ok(())
    } else {
        Err(step("setting the mount's attributes")(io::Error::last_os_error()))
    }
}

/// Gives up what execve(2) could give: the bounding set, as far as this process may.
fn drop_capabilities() -> Result<(), JailError> {
    for capability in 0_i32..64 {
        // SAFETY: prctl(2) with integer arguments.
        let result =
            unsafe { libc::prctl(libc::PR_CAPBSET_DROP, libc::c_long::from(capability), 0, 0, 0) };
        let error = io::Error::last_os_error().raw_os_error();
        // Past the last capability; not permitted to an ordinary user, who has none to lose.
        if result != 0 && !matches!(error, Some(libc::EINVAL | libc::EPERM)) {
            return Err(step("dropping capabilities")(io::Error::last_os_error()));
        }
    }
    rustix::thread::clear_ambient_capability_set().map_err(step("clearing ambient capabilities"))
}

/// Becomes the caller for good.
fn become_caller(caller: &Caller) -> Result<(), JailError> {
    groups(caller)?;
    let (user, group) = (Uid::from_raw(caller.user.0), Gid::from_raw(caller.group.0));
    rustix::thread::set_thread_res_gid(group, group, group).map_err(step("changing the group"))?;
    rustix::thread::set_thread_res_uid(user, user, user).map_err(step("changing the user"))
}
