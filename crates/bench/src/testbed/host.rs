//! The host's free memory.

use crate::{figures::median, proc};
use anyhow::Result;
use dayfly_units::PAGE_SIZE;
pub use dayfly_vmm::timeline::now_us;
use std::time::{Duration, Instant};

/// Bytes of a MiB.
pub const MIB: u64 = 1 << 20;

/// `MemAvailable` in bytes, and the free pages on the lists of single CPUs. The kernel does not
/// count those lists, which hold up to a tenth of the memory for seconds after an munmap(2) of 2
/// GiB.
pub fn available() -> Result<u64> {
    let zones = proc::read("/proc/zoneinfo")?;
    let listed = zones
        .lines()
        .filter_map(|line| line.trim().strip_prefix("count:")?.trim().parse::<u64>().ok());
    Ok(proc::memory_bytes("MemAvailable")? + listed.sum::<u64>() * PAGE_SIZE)
}

/// [`available`] once it no longer changes: the median of nine readings.
pub fn settled_available() -> Result<u64> {
    std::thread::sleep(Duration::from_millis(200));
    let readings = (0..9).map(|_| {
        std::thread::sleep(Duration::from_millis(10));
        available()
    });
    Ok(median(&readings.collect::<Result<Vec<_>>>()?))
}

/// Waits until at least `bytes` are available. Returns the time in microseconds of [`now_us`], or
/// `None` after `within`.
pub fn wait_available(bytes: u64, within: Duration) -> Result<Option<u64>> {
    let begun = Instant::now();
    while begun.elapsed() < within {
        if available()? >= bytes {
            return Ok(Some(now_us()));
        }
        std::thread::sleep(Duration::from_micros(100));
    }
    Ok(None)
}
