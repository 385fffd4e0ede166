//! Mounts at and after the switch to the image's root.

use super::error::BootError;
use super::mount::{NEW_ROOT, PSEUDO, mount_new};
use super::root::Mounted;
use crate::exec::cage::CGROUP_ROOT;
use crate::small_file;
use rustix::fs::{AtFlags, CWD, Dir, FileType, Mode, OFlags, openat, statat, unlinkat};
use rustix::mount::{MountFlags, mount_move};
use std::os::fd::{AsFd, BorrowedFd};
use std::path::Path;

/// Makes the mounted root `/`, frees the initramfs, and mounts the usual file systems.
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
    mount_new(
        "tmpfs",
        "/dev/shm",
        "tmpfs",
        MountFlags::NOSUID.union(MountFlags::NODEV),
        c"mode=1777",
    )?;
    mount_run(mounted.read_only)?;
    device_links();
    tmp(mounted.read_only);
    // Without cgroup2 the agent finds processes by the process tree.
    let groups = mount_new("cgroup2", CGROUP_ROOT, "cgroup2", PSEUDO, c"nsdelegate");
    if let Err(error) =
        groups.or_else(|_| mount_new("cgroup2", CGROUP_ROOT, "cgroup2", PSEUDO, c""))
    {
        crate::say!("{error}");
    }
    // Each of the agent's threads has up to eight descriptors; programs inherit the limits and may
    // raise their own.
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

/// Removes all files of the initramfs, because they occupy memory. Other file systems are left
/// alone. Errors are ignored, because a remaining file only costs memory.
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

/// /run is a tmpfs, unless the image has something in it: then it stays on the disk, as in a
/// container, and only the agent's folder is a tmpfs.
fn mount_run(read_only: bool) -> Result<(), BootError> {
    let of_image = || {
        let list = Dir::new(rustix::fs::open("/run", OFlags::RDONLY, Mode::empty()).ok()?).ok()?;
        list.flatten().find(|entry| ![c".", c".."].contains(&entry.file_name()))
    };
    let at = if !read_only && of_image().is_some() { "/run/dayfly" } else { "/run" };
    mount_new("tmpfs", at, "tmpfs", MountFlags::NOSUID.union(MountFlags::NODEV), c"mode=755")
}

/// Creates links in /dev that programs expect and devtmpfs does not create.
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

/// /tmp stays on the disk, which clones share until they write. On a read-only disk /tmp is a
/// tmpfs.
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

/// Lets every user listen on every port, and ping, as docker does for containers: this machine has
/// one owner, from whom no port can be taken.
pub(super) fn ports_and_ping_for_all() {
    for (name, value) in [("ip_unprivileged_port_start", "0"), ("ping_group_range", "0 2147483647")]
    {
        let path = format!("/proc/sys/net/ipv4/{name}");
        if let Err(error) = std::fs::write(&path, value) {
            crate::say!("{path}: {error}");
        }
    }
}

/// Brings the loopback interface up, as an init does.
pub(super) fn loopback_up() {
    use rustix::net::{AddressFamily, SocketFlags, SocketType, socket_with};
    use std::os::fd::AsRawFd;
    let done = socket_with(AddressFamily::INET, SocketType::DGRAM, SocketFlags::CLOEXEC, None)
        .and_then(|fd| {
            // SAFETY: ifreq is plain data; all-zero is a valid value.
            let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
            for (to, from) in request.ifr_name.iter_mut().zip(b"lo") {
                *to = libc::c_char::from_ne_bytes([*from]);
            }
            let up = libc::c_short::try_from(libc::IFF_UP | libc::IFF_RUNNING).unwrap_or(0);
            request.ifr_ifru.ifru_flags = up;
            // SAFETY: SIOCSIFFLAGS reads one ifreq, which `request` is.
            let result =
                unsafe { libc::ioctl(fd.as_raw_fd(), libc::SIOCSIFFLAGS, &raw const request) };
            if result == 0 { Ok(()) } else { Err(crate::kernel::last_errno()) }
        });
    if let Err(errno) = done {
        crate::say!("interface lo: up: {errno}");
    }
}

/// Maximum bytes of /etc/hostname.
const HOSTNAME_FILE: usize = 4096;

/// Sets the name in /etc/hostname, until an identity sets another one.
pub(super) fn hostname() {
    let text = match small_file::read(Path::new("/etc/hostname"), HOSTNAME_FILE) {
        Ok(text) => String::from_utf8_lossy(&text.unwrap_or_default()).into_owned(),
        Err(error) => {
            crate::say!("hostname: {error}");
            String::new()
        }
    };
    let name = text.trim();
    let name = if name.is_empty() || name.len() > 64 { "dayfly" } else { name };
    if let Err(errno) = rustix::system::sethostname(name.as_bytes()) {
        crate::say!("hostname {name:?}: {errno}");
    }
}
