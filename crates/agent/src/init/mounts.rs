//! What is mounted where, before and after the switch to the image's root.

use super::BootError;
use super::cmdline::{self, Options};
use super::root::Mounted;
use crate::exec::cage::CGROUP_ROOT;
use rustix::fs::{AtFlags, CWD, Dir, FileType, Mode, OFlags, openat, statat, unlinkat};
use rustix::io::Errno;
use rustix::mount::{MountFlags, mount, mount_move};
use std::ffi::CStr;
use std::os::fd::{AsFd, BorrowedFd};
use std::path::Path;

/// Where the image's root is mounted until it becomes `/`.
pub(super) const NEW_ROOT: &str = "/sysroot";

/// /proc, /sys and /dev are there.
pub(super) struct Early(());

const PSEUDO: MountFlags = MountFlags::NOSUID.union(MountFlags::NODEV).union(MountFlags::NOEXEC);

/// Makes the folder and mounts on it; what is mounted there already stays.
pub(super) fn mount_new(
    source: &str,
    at: &str,
    kind: &str,
    flags: MountFlags,
    data: &CStr,
) -> Result<(), BootError> {
    let failed = |errno| BootError::Mount { kind: kind.to_owned(), at: at.into(), errno };
    // On a read-only root a missing folder shows when it is mounted on.
    let _ = rustix::fs::mkdir(at, Mode::from_raw_mode(0o755));
    match mount(source, at, kind, flags, data) {
        Ok(()) | Err(Errno::BUSY) => Ok(()),
        Err(errno) => Err(failed(errno)),
    }
}

/// The first three, in the initramfs.
pub(super) fn early() -> Result<Early, BootError> {
    mount_new("proc", "/proc", "proc", PSEUDO, c"")?;
    mount_new("sysfs", "/sys", "sysfs", PSEUDO, c"")?;
    mount_new("devtmpfs", "/dev", "devtmpfs", MountFlags::NOSUID, c"mode=0755")?;
    Ok(Early(()))
}

impl Early {
    /// The kernel command line's options.
    #[expect(clippy::unused_self, reason = "/proc is there only in this stage")]
    pub(super) fn options(&self) -> Result<Options, BootError> {
        let path = "/proc/cmdline";
        let line = std::fs::read_to_string(path).map_err(|error| BootError::File {
            path: path.into(),
            what: "read",
            errno: Errno::from_io_error(&error).unwrap_or(Errno::IO),
        })?;
        Ok(cmdline::parse(&line)?)
    }
}

/// Makes the mounted root `/`, frees the initramfs, and mounts what a machine has.
pub(super) fn enter(mounted: Mounted) -> Result<(), BootError> {
    for name in ["proc", "sys", "dev"] {
        let (from, to) = (format!("/{name}"), format!("{NEW_ROOT}/{name}"));
        let _ = rustix::fs::mkdir(&to, Mode::from_raw_mode(0o755));
        mount_move(&from, &to).map_err(|errno| BootError::Mount {
            kind: name.to_owned(),
            at: to.into(),
            errno,
        })?;
    }
    switch()?;
    mount_new(
        "devpts",
        "/dev/pts",
        "devpts",
        MountFlags::NOSUID.union(MountFlags::NOEXEC),
        c"gid=5,mode=620,ptmxmode=666",
    )?;
    mount_new("tmpfs", "/dev/shm", "tmpfs", MountFlags::NOSUID.union(MountFlags::NODEV), c"mode=1777")?;
    mount_new("tmpfs", "/run", "tmpfs", MountFlags::NOSUID.union(MountFlags::NODEV), c"mode=755")?;
    device_links();
    tmp(mounted.read_only);
    // A kernel without it is a kernel in which programs are found by their process tree.
    let groups = mount_new("cgroup2", CGROUP_ROOT, "cgroup2", PSEUDO, c"nsdelegate");
    if let Err(error) = groups.or_else(|_| mount_new("cgroup2", CGROUP_ROOT, "cgroup2", PSEUDO, c"")) {
        crate::say!("{error}");
    }
    // The agent's threads hold up to eight descriptors each; programs inherit the limits and may raise theirs.
    let files = rustix::process::Rlimit { current: Some(8192), maximum: Some(524_288) };
    let _ = rustix::process::setrlimit(rustix::process::Resource::Nofile, files);
    Ok(())
}

fn switch() -> Result<(), BootError> {
    let failed = |what| move |errno| BootError::File { path: NEW_ROOT.into(), what, errno };
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let old = rustix::fs::open("/", flags, Mode::empty()).map_err(failed("open the initramfs"))?;
    rustix::process::chdir(NEW_ROOT).map_err(failed("enter"))?;
    mount_move(".", "/").map_err(failed("move to /"))?;
    rustix::process::chroot(".").map_err(failed("make the root"))?;
    rustix::process::chdir("/").map_err(failed("enter"))?;
    if let Ok(stat) = rustix::fs::fstat(&old) {
        empty(old.as_fd(), stat.st_dev, 0);
    }
    Ok(())
}

/// Removes everything of the initramfs, whose files are memory. Other file systems are left alone, and what cannot be
/// removed stays: that costs memory, no more.
fn empty(folder: BorrowedFd<'_>, device: u64, depth: usize) {
    let Ok(list) = Dir::read_from(folder) else { return };
    for entry in list.flatten() {
        let name = entry.file_name();
        if name == c"." || name == c".." {
            continue;
        }
        let Ok(stat) = statat(folder, name, AtFlags::SYMLINK_NOFOLLOW) else { continue };
        if stat.st_dev != device {
            continue;
        }
        if FileType::from_raw_mode(stat.st_mode) != FileType::Directory {
            let _ = unlinkat(folder, name, AtFlags::empty());
            continue;
        }
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        if let Ok(below) = openat(folder, name, flags, Mode::empty())
            && depth < 64
        {
            empty(below.as_fd(), device, depth + 1);
        }
        let _ = unlinkat(folder, name, AtFlags::REMOVEDIR);
    }
}

/// The names that programs expect in /dev and devtmpfs does not make.
fn device_links() {
    for (name, target) in [
        ("/dev/fd", "/proc/self/fd"),
        ("/dev/stdin", "/proc/self/fd/0"),
        ("/dev/stdout", "/proc/self/fd/1"),
        ("/dev/stderr", "/proc/self/fd/2"),
    ] {
        let _ = rustix::fs::symlinkat(target, CWD, name);
    }
}

/// /tmp stays on the disk, which a clone shares until it writes; on a read-only disk it is memory.
fn tmp(read_only: bool) {
    if read_only {
        let flags = MountFlags::NOSUID.union(MountFlags::NODEV);
        if let Err(error) = mount_new("tmpfs", "/tmp", "tmpfs", flags, c"mode=1777") {
            crate::say!("{error}");
        }
    } else if rustix::fs::mkdir("/tmp", Mode::from_raw_mode(0o1777)).is_ok() {
        let _ = rustix::fs::chmod("/tmp", Mode::from_raw_mode(0o1777));
    }
}

/// Brings the loopback interface up, as an init does.
pub(super) fn loopback_up() {
    use rustix::net::{AddressFamily, SocketFlags, SocketType, socket_with};
    use std::os::fd::AsRawFd;
    let done =
        socket_with(AddressFamily::INET, SocketType::DGRAM, SocketFlags::CLOEXEC, None).and_then(|fd| {
            // SAFETY: ifreq is plain data, for which zero bytes are a value.
            let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
            for (to, from) in request.ifr_name.iter_mut().zip(b"lo") {
                *to = libc::c_char::from_ne_bytes([*from]);
            }
            let up = libc::c_short::try_from(libc::IFF_UP | libc::IFF_RUNNING).unwrap_or(0);
            request.ifr_ifru.ifru_flags = up;
            // SAFETY: SIOCSIFFLAGS reads an ifreq, which `request` is.
            let result = unsafe { libc::ioctl(fd.as_raw_fd(), libc::SIOCSIFFLAGS, &raw const request) };
            if result == 0 { Ok(()) } else { Err(crate::kernel::last_errno()) }
        });
    if let Err(errno) = done {
        crate::say!("interface lo: up: {errno}");
    }
}

/// The name in /etc/hostname, until an identity gives another one.
pub(super) fn hostname() {
    let text = std::fs::read_to_string(Path::new("/etc/hostname")).unwrap_or_default();
    let name = text.trim();
    let name = if name.is_empty() || name.len() > 64 { "dayfly" } else { name };
    if let Err(errno) = rustix::system::sethostname(name.as_bytes()) {
        crate::say!("hostname {name:?}: {errno}");
    }
}
