//! Ending the machine: ask all processes to stop, kill them, settle the disks, then power off or
//! reboot.

use rustix::event::{PollFd, PollFlags, poll};
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use rustix::system::RebootCommand;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::time::{Duration, Instant};

/// Time limit between SIGTERM and SIGKILL.
const TERM_GRACE: Duration = Duration::from_secs(2);
/// Time limit for killed processes to disappear.
const KILL_GRACE: Duration = Duration::from_secs(2);
/// Time limit for the image's own init.
const INIT_GRACE: Duration = Duration::from_secs(30);

/// Ends the machine. Returns only if the kernel refuses.
pub fn end(reboot: bool) {
    let what = if reboot { "reboot" } else { "power off" };
    crate::say!("{what}");
    if !rustix::process::getpid().is_init() && ask_systemd(reboot) {
        std::thread::sleep(INIT_GRACE);
        crate::say!("{what}: systemd did not in {INIT_GRACE:?}: now without it");
    }
    // SAFETY: kill(2) of every process except this one and init has no memory effects.
    unsafe { libc::kill(-1, libc::SIGTERM) };
    wait_for_others(TERM_GRACE);
    // SAFETY: as above.
    unsafe { libc::kill(-1, libc::SIGKILL) };
    wait_for_others(KILL_GRACE);
    settle_disks();
    let command = if reboot { RebootCommand::Restart } else { RebootCommand::PowerOff };
    if let Err(errno) = rustix::system::reboot(command) {
        crate::say!("{what}: {errno}");
    }
}

/// Sends systemd's SIGRTMIN+4 (power off) or SIGRTMIN+5 (reboot), see systemd(1).
fn ask_systemd(reboot: bool) -> bool {
    // SAFETY: kill(2) of PID 1 has no memory effects.
    Path::new("/run/systemd/system").exists()
        && unsafe { libc::kill(1, libc::SIGRTMIN() + if reboot { 5 } else { 4 }) } == 0
}

/// User processes other than this one and init.
fn others() -> Vec<OwnedFd> {
    let own = rustix::process::getpid();
    let Ok(folder) = std::fs::read_dir("/proc") else { return Vec::new() };
    folder
        .filter_map(|entry| {
            let pid: i32 = entry.ok()?.file_name().to_str()?.parse().ok()?;
            let pid = Pid::from_raw(pid).filter(|p| *p != own && !p.is_init())?;
            // Skips kernel threads, which have no program.
            std::fs::read_link(format!("/proc/{pid}/exe", pid = pid.as_raw_nonzero())).ok()?;
            pidfd_open(pid, PidfdFlags::empty()).ok()
        })
        .collect()
}

fn wait_for_others(grace: Duration) {
    let until = Instant::now() + grace;
    for pidfd in others() {
        let left = until.saturating_duration_since(Instant::now());
        let mut fds = [PollFd::new(&pidfd, PollFlags::IN)];
        let _ = poll(&mut fds, Some(&crate::wire::timespec(left)));
    }
}

/// Syncs, and unmounts every file system on a disk or makes it read-only.
fn settle_disks() {
    rustix::fs::sync();
    let mounts = std::fs::read_to_string("/proc/self/mounts").unwrap_or_default();
    for line in mounts.lines().rev() {
        let mut fields = line.split(' ');
        let (Some(device), Some(at)) = (fields.next(), fields.next()) else { continue };
        if !device.starts_with("/dev/") || at.contains('\\') {
            continue;
        }
        if at != "/" && rustix::mount::unmount(at, rustix::mount::UnmountFlags::empty()).is_ok() {
            continue;
        }
        let flags = rustix::mount::MountFlags::RDONLY;
        if let Err(errno) = rustix::mount::mount_remount(at, flags, c"") {
            crate::say!("{at}: remount read-only: {errno}");
        }
    }
    rustix::fs::sync();
}
