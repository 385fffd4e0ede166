//! The machine's status, and its clock.

use dayfly_machine_init::{DaemonStatus, GuestShare, GuestStatus};
use std::fs;
use std::io;
use std::path::Path;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// A larger difference sets the clock, a smaller one slews it (adjtimex(2): at most half a second).
const STEP: Duration = Duration::from_millis(400);

/// Sets the clock to the host's time, given as nanoseconds since 1970. At boot the machine reads
/// the time from a clock of whole seconds, and an emulated CPU's clock drifts.
pub(crate) fn set_time(text: &str) -> io::Result<()> {
    let wanted: u64 = text.parse().map_err(|_| io::Error::from(io::ErrorKind::InvalidInput))?;
    let wanted = Duration::from_nanos(wanted);
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let (ahead, by) = if wanted >= now { (1, wanted - now) } else { (-1, now - wanted) };
    if by > STEP {
        let time = rustix::time::Timespec {
            tv_sec: i64::try_from(wanted.as_secs()).unwrap_or(i64::MAX),
            tv_nsec: wanted.subsec_nanos().into(),
        };
        return Ok(rustix::time::clock_settime(rustix::time::ClockId::Realtime, time)?);
    }
    // SAFETY: struct timex is plain data, for which all zeroes is a valid value.
    let mut change: libc::timex = unsafe { std::mem::zeroed() };
    change.modes = libc::ADJ_OFFSET_SINGLESHOT;
    change.offset = ahead * i64::try_from(by.as_micros()).unwrap_or(0);
    // SAFETY: `change` is a valid struct timex that the call may write.
    if unsafe { libc::adjtimex(&raw mut change) } < 0 {
        Err(io::Error::last_os_error())
    } else {
        Ok(())
    }
}

pub(crate) fn read(shares: &[GuestShare], daemon: Option<DaemonStatus>) -> GuestStatus {
    let cpu = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let flags = cpu.lines().find(|l| l.starts_with("flags")).unwrap_or_default();
    let has = |flag: &str| flags.split_whitespace().any(|f| f == flag);
    let memory = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let bytes = |name: &str| -> u64 {
        let line = memory.lines().find_map(|l| l.strip_prefix(name)).unwrap_or_default();
        line.split_whitespace()
            .next()
            .and_then(|n| n.parse::<u64>().ok())
            .unwrap_or(0)
            .saturating_mul(1024)
    };
    let uptime = fs::read_to_string("/proc/uptime").unwrap_or_default();
    let (seconds, hundredths) = uptime
        .split_once(' ')
        .map_or(("0", "0"), |(first, _)| first.split_once('.').unwrap_or((first, "0")));
    let disk = rustix::fs::statvfs("/var/lib/dayfly").ok();
    GuestStatus {
        kernel: rustix::system::uname().release().to_string_lossy().into_owned(),
        uptime_ms: seconds.parse::<u64>().unwrap_or(0) * 1000
            + hundredths.parse::<u64>().unwrap_or(0) * 10,
        cpus: std::thread::available_parallelism()
            .map_or(1, |n| u32::try_from(n.get()).unwrap_or(u32::MAX)),
        kvm: Path::new("/dev/kvm").exists(),
        svm: has("svm"),
        npt: has("npt"),
        memory_total_bytes: bytes("MemTotal:"),
        memory_available_bytes: bytes("MemAvailable:"),
        disk_total_bytes: disk.as_ref().map_or(0, |d| d.f_blocks.saturating_mul(d.f_frsize)),
        disk_free_bytes: disk.as_ref().map_or(0, |d| d.f_bavail.saturating_mul(d.f_frsize)),
        shares: shares.iter().map(|share| share.name.clone()).collect(),
        daemon,
    }
}
