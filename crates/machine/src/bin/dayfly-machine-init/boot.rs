//! Mounts, modules, network and disk of the machine.

use dayfly_machine::guest::GuestConfig;
use rustix::mount::{MountFlags, mount, mount_move};
use std::ffi::CString;
use std::fs;
use std::io::{self, Write};
use std::os::fd::AsRawFd;
use std::path::Path;
use std::time::{Duration, Instant};

/// Which step of the start failed, and why.
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

/// One line on the console, which the host keeps in console.log.
pub(crate) fn say(text: &str) {
    if let Ok(mut console) = fs::OpenOptions::new().write(true).open("/dev/console") {
        drop(writeln!(console, "dayfly-machine: {text}"));
    }
}

/// Ends the machine: `RB_POWER_OFF` or `RB_AUTOBOOT` (which QEMU is told to take as an end, too).
pub(crate) fn end(how: libc::c_int) {
    rustix::fs::sync();
    // SAFETY: reboot(2) takes no pointers.
    unsafe { libc::reboot(how) };
}

fn mount_at(what: &str, at: &str, kind: &str, flags: MountFlags, data: &str) -> Result<(), BootError> {
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

/// What every Linux userland expects, and a root that `pivot_root` accepts.
pub(crate) fn file_systems() -> Result<(), BootError> {
    // The initramfs' own mount can neither be moved nor pivoted away from (pivot_root(2), EINVAL), and the VMM's jail
    // pivots. A bind mount of it over itself can.
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
        // Helpers for measuring; a kernel may lack them.
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

/// Descriptors for hundreds of VMs; the kernel's own limit for init is 1024.
pub(crate) fn limits() -> Result<(), BootError> {
    use rustix::process::{Resource, Rlimit, setrlimit};
    let limit = Rlimit { current: Some(65_536), maximum: Some(1 << 20) };
    setrlimit(Resource::Nofile, limit).map_err(|e| BootError::new("limit of open files", e))
}

/// What the host starts is the first to go when memory runs out, unlike the server whose setting it inherited.
pub(crate) fn expendable(pid: u32) {
    drop(fs::write(format!("/proc/{pid}/oom_score_adj"), "0"));
}

/// Loads the modules in the order given; one that is loaded already is fine.
pub(crate) fn modules(config: &GuestConfig) -> Result<(), BootError> {
    let root = format!("/lib/modules/{}", rustix::system::uname().release().to_string_lossy());
    for name in &config.modules {
        let path = format!("{root}/{name}.ko");
        let file = fs::File::open(&path).map_err(|e| BootError::new(path.clone(), e))?;
        // SAFETY: finit_module(fd, parameters, flags): the file is open, the string is a NUL-terminated literal.
        let result = unsafe { libc::syscall(libc::SYS_finit_module, file.as_raw_fd(), c"".as_ptr(), 0) };
        let error = io::Error::last_os_error();
        if result != 0 && error.raw_os_error() != Some(libc::EEXIST) {
            return Err(BootError::new(format!("loading module {name}"), error));
        }
    }
    Ok(())
}

/// Waits until `test` gives something, at most two seconds.
fn wait_for<T>(step: &str, mut test: impl FnMut() -> io::Result<T>) -> Result<T, BootError> {
    let deadline = Instant::now() + Duration::from_secs(2);
    loop {
        match test() {
            Ok(found) => return Ok(found),
            Err(e) if Instant::now() > deadline => return Err(BootError::new(step, e)),
            Err(_) => std::thread::sleep(Duration::from_millis(5)),
        }
    }
}

/// The loopback and the one interface towards the supervisor.
pub(crate) fn network() -> Result<(), BootError> {
    use dayfly_machine::guest::{GUEST_ADDRESS, GUEST_MASK, set_address, set_up};
    set_up("lo").map_err(|e| BootError::new("interface lo", e))?;
    wait_for("interface eth0", || set_address("eth0", GUEST_ADDRESS, GUEST_MASK))?;
    set_up("eth0").map_err(|e| BootError::new("interface eth0", e))
}

/// The disk that holds the daemon's state. Mounting replays ext4's journal after an unclean end.
pub(crate) fn disk() -> Result<(), BootError> {
    wait_for("/dev/vda", || fs::metadata("/dev/vda"))?;
    mount_at("/dev/vda", "/var/lib/dayfly", "ext4", MountFlags::NOATIME, "discard,noinit_itable")
}

/// The host's files at /host, under a layer that takes writes.
pub(crate) fn host_files(config: &GuestConfig) -> Result<(), BootError> {
    let Some(root) = config.shares.first() else { return Ok(()) };
    mount_at(&root.tag, "/hostfs", "virtiofs", MountFlags::RDONLY, "")?;
    mount_at("tmpfs", "/run/host-layer", "tmpfs", MountFlags::empty(), "mode=0755")?;
    for folder in ["/run/host-layer/upper", "/run/host-layer/work"] {
        fs::create_dir_all(folder).map_err(|e| BootError::new(folder, e))?;
    }
    let layers = "lowerdir=/hostfs,upperdir=/run/host-layer/upper,workdir=/run/host-layer/work";
    mount_at("overlay", "/host", "overlay", MountFlags::empty(), layers)?;
    for folder in ["/proc", "/sys", "/dev", "/run", "/tmp", "/var/lib/dayfly"] {
        bind(folder, &format!("/host{folder}"))?;
    }
    // Overlayfs does not expect its lower layer to change, so folders that do change are shown past it.
    for folder in &config.live {
        let from = format!("/hostfs{folder}");
        if Path::new(&from).is_dir() {
            bind(&from, &format!("/host{folder}"))?;
        }
    }
    for share in config.shares.iter().skip(1) {
        mount_at(&share.tag, &format!("/host{}", share.path), "virtiofs", MountFlags::RDONLY, "")?;
    }
    Ok(())
}
