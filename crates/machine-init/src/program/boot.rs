//! Mounts file systems, loads modules, and mounts the machine's disk and shares.

use dayfly_machine_init::GuestConfig;
use rustix::mount::{MountFlags, mount, mount_move};
use std::ffi::CString;
use std::fs;
use std::io::{self, Write};
use std::os::fd::AsRawFd;
use std::time::{Duration, Instant};

/// The boot step that failed, and the cause.
#[derive(Debug, thiserror::Error)]
#[error("{step}: {source}")]
pub(crate) struct BootError {
    step: String,
    source: io::Error,
}

impl BootError {
    pub(crate) fn new(step: impl Into<String>, source: impl Into<io::Error>) -> Self {
        Self { step: step.into(), source: source.into() }
    }
}

/// Writes one line to the console, which the host keeps in console.log.
pub(crate) fn say(text: &str) {
    if let Ok(mut console) = fs::OpenOptions::new().write(true).open("/dev/console") {
        drop(writeln!(console, "dayfly-machine: {text}"));
    }
}

/// Ends the machine with `RB_POWER_OFF` or `RB_AUTOBOOT`. QEMU's command line makes a reboot an end
/// too.
pub(crate) fn end(how: libc::c_int) {
    rustix::fs::sync();
    // SAFETY: reboot(2) takes no pointers.
    unsafe { libc::reboot(how) };
}

fn mount_at(
    what: &str,
    at: &str,
    kind: &str,
    flags: MountFlags,
    data: &str,
) -> Result<(), BootError> {
    let step = || format!("mounting {what} ({kind}) at {at}");
    fs::create_dir_all(at).map_err(|e| BootError::new(step(), e))?;
    let data = CString::new(data).map_err(|e| BootError::new(step(), io::Error::from(e)))?;
    mount(what, at, kind, flags, data.as_c_str()).map_err(|e| BootError::new(step(), e))
}

fn bind(what: &str, at: &str) -> Result<(), BootError> {
    fs::create_dir_all(at).map_err(|e| BootError::new(at, e))?;
    rustix::mount::mount_bind_recursive(what, at)
        .map_err(|e| BootError::new(format!("binding {what} at {at}"), e))
}

/// Mounts the file systems that every Linux userland expects, and a root that `pivot_root` accepts.
pub(crate) fn file_systems() -> Result<(), BootError> {
    // The initramfs's own mount can neither be moved nor pivoted away from (pivot_root(2), EINVAL),
    // and the VMM's jail pivots. A bind mount of the initramfs over itself can.
    let step = |e: rustix::io::Errno| BootError::new("moving the root off the initramfs mount", e);
    fs::create_dir_all("/newroot").map_err(|e| BootError::new("/newroot", e))?;
    rustix::mount::mount_bind("/", "/newroot").map_err(step)?;
    rustix::process::chdir("/newroot").map_err(step)?;
    mount_move(".", "/").map_err(step)?;
    rustix::process::chroot(".").map_err(step)?;
    rustix::process::chdir("/").map_err(step)?;

    let safe = MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOEXEC;
    let none = MountFlags::empty();
    mount_at("proc", "/proc", "proc", safe, "")?;
    mount_at("sysfs", "/sys", "sysfs", safe, "")?;
    mount_at("devtmpfs", "/dev", "devtmpfs", MountFlags::NOSUID, "mode=0755")?;
    mount_at("devpts", "/dev/pts", "devpts", MountFlags::NOSUID, "mode=0620,ptmxmode=0666")?;
    mount_at("tmpfs", "/dev/shm", "tmpfs", MountFlags::NOSUID | MountFlags::NODEV, "mode=1777")?;
    mount_at("tmpfs", "/run", "tmpfs", MountFlags::NOSUID | MountFlags::NODEV, "mode=0755")?;
    mount_at("tmpfs", "/tmp", "tmpfs", none, "mode=1777")?;
    mount_at("cgroup2", "/sys/fs/cgroup", "cgroup2", safe, "")?;
    for (kind, at) in [
        ("debugfs", "/sys/kernel/debug"),
        ("tracefs", "/sys/kernel/tracing"),
        ("securityfs", "/sys/kernel/security"),
        ("bpf", "/sys/fs/bpf"),
    ] {
        // File systems for measurements; a kernel may lack them.
        drop(mount_at(kind, at, kind, safe, ""));
    }
    for (link, target) in [
        ("/dev/fd", "/proc/self/fd"),
        ("/dev/stdin", "/proc/self/fd/0"),
        ("/dev/stdout", "/proc/self/fd/1"),
        ("/dev/stderr", "/proc/self/fd/2"),
    ] {
        drop(std::os::unix::fs::symlink(target, link));
    }
    Ok(())
}

/// Raises the limit of open files for hundreds of VMs; the kernel's limit for init is 1024.
pub(crate) fn limits() -> Result<(), BootError> {
    use rustix::process::{Resource, Rlimit, setrlimit};
    let limit = Rlimit { current: Some(65_536), maximum: Some(1 << 20) };
    setrlimit(Resource::Nofile, limit).map_err(|e| BootError::new("limit of open files", e))
}

/// Makes a process that the host started the first victim when memory runs out. The process would
/// otherwise inherit the server's protection.
pub(crate) fn expendable(pid: u32) {
    drop(fs::write(format!("/proc/{pid}/oom_score_adj"), "0"));
}

/// Loads the modules in the given order. A module that is already loaded is no error.
pub(crate) fn modules(config: &GuestConfig) -> Result<(), BootError> {
    let root = format!("/lib/modules/{}", rustix::system::uname().release().to_string_lossy());
    for name in &config.modules {
        let path = format!("{root}/{name}.ko");
        let file = fs::File::open(&path).map_err(|e| BootError::new(path.clone(), e))?;
        // SAFETY: finit_module(fd, parameters, flags): the file is open, and the string is a
        // NUL-terminated literal.
        let result =
            unsafe { libc::syscall(libc::SYS_finit_module, file.as_raw_fd(), c"".as_ptr(), 0) };
        let error = io::Error::last_os_error();
        if result != 0 && error.raw_os_error() != Some(libc::EEXIST) {
            return Err(BootError::new(format!("loading module {name}"), error));
        }
    }
    Ok(())
}

/// Waits at most two seconds until `test` succeeds.
pub(crate) fn wait_for<T>(
    step: &str,
    mut test: impl FnMut() -> io::Result<T>,
) -> Result<T, BootError> {
    let deadline = Instant::now() + Duration::from_secs(2);
    loop {
        match test() {
            Ok(found) => return Ok(found),
            Err(e) if Instant::now() > deadline => return Err(BootError::new(step, e)),
            Err(_) => std::thread::sleep(Duration::from_millis(5)),
        }
    }
}

/// Mounts the disk that holds the daemon's state. Mounting replays ext4's journal after an unclean
/// end.
pub(crate) fn disk() -> Result<(), BootError> {
    wait_for("/dev/vda", || fs::metadata("/dev/vda"))?;
    mount_at("/dev/vda", "/var/lib/dayfly", "ext4", MountFlags::NOATIME, "discard,noinit_itable")
}

/// Mounts each share at /shares/NAME, and again at its path on the host below /host. /host also
/// gets the folders that a program needs (/proc, /dev and others).
pub(crate) fn shares(config: &GuestConfig) -> Result<(), BootError> {
    if config.shares.is_empty() {
        return Ok(());
    }
    mount_at("tmpfs", "/host", "tmpfs", MountFlags::empty(), "mode=0755")?;
    for share in &config.shares {
        let access = if share.writable { MountFlags::empty() } else { MountFlags::RDONLY };
        let safe = MountFlags::NODEV | MountFlags::NOSUID;
        let at = format!("/shares/{}", share.name);
        mount_at(&share.tag, &at, "virtiofs", access | safe, "")?;
        bind(&at, &format!("/host{}", share.path))?;
    }
    for folder in ["/proc", "/sys", "/dev", "/run", "/tmp", "/var/lib/dayfly"] {
        bind(folder, &format!("/host{folder}"))?;
    }
    for (name, target) in &config.links {
        let at = format!("/host/{name}");
        std::os::unix::fs::symlink(target, &at).map_err(|e| BootError::new(at, e))?;
    }
    Ok(())
}
