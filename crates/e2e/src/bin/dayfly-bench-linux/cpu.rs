//! CPU time of the host that has the VMs, by its kernel's own count (`/proc/stat`): everything that is not idle and does not wait for
//! a disk. What the guests run is in it, as time of their VMMs. A count is of 10 ms, so only sums over many VMs are worth something.

use anyhow::{Context, Result};
use std::time::{Duration, Instant};

/// A count in `/proc/stat` (`USER_HZ` is 100 on x86).
const JIFFY: Duration = Duration::from_millis(10);
/// How long the host is looked at to see whether it is quiet.
const LOOK: Duration = Duration::from_millis(200);
/// Busy at most so long within that: a tenth of one CPU …
const QUIET: Duration = Duration::from_millis(20);
/// … and so long for each guest that idles beside it: under emulation its timers take about half a percent.
const QUIET_EACH: Duration = Duration::from_millis(1);
/// A host that is not quiet by then has something else to do.
const PATIENCE: Duration = Duration::from_secs(20);

/// What the host's CPUs have done so far.
#[derive(Debug, Clone, Copy)]
pub struct Reading {
    busy: Duration,
    at: Instant,
}

/// What they did between two readings.
#[derive(Debug, Clone, Copy)]
pub struct Spent {
    /// All CPUs together.
    pub busy: Duration,
    /// By the clock.
    pub wall: Duration,
}

impl Spent {
    /// CPUs that were busy on average.
    pub fn cpus(&self) -> f64 {
        self.busy.as_secs_f64() / self.wall.as_secs_f64().max(1e-9)
    }
}

/// Reads the counts.
pub fn read() -> Result<Reading> {
    let text = std::fs::read_to_string("/proc/stat").context("/proc/stat")?;
    let jiffies = busy_jiffies(&text).context("the first line of /proc/stat")?;
    Ok(Reading { busy: JIFFY * jiffies, at: Instant::now() })
}

/// user, nice, system, irq and softirq of all CPUs; time of guests is in user.
fn busy_jiffies(stat: &str) -> Option<u32> {
    let line = stat.lines().next()?.strip_prefix("cpu ")?;
    let fields: Vec<u32> = line.split_ascii_whitespace().map_while(|field| field.parse().ok()).collect();
    [0, 1, 2, 5, 6].iter().map(|at| fields.get(*at)).sum()
}

impl Reading {
    /// What was spent since then.
    pub fn spent(&self) -> Result<Spent> {
        let now = read()?;
        Ok(Spent { busy: now.busy.saturating_sub(self.busy), wall: now.at - self.at })
    }
}

/// What is spent in `time` while nothing is asked for.
pub async fn background(time: Duration) -> Result<Spent> {
    let begun = read()?;
    tokio::time::sleep(time).await;
    begun.spent()
}

/// Waits until the host has nothing to do any more, the pool's work included, but to let `guests` idle.
pub async fn quiet(guests: usize) -> Result<()> {
    let begun = Instant::now();
    let busy = QUIET + QUIET_EACH * u32::try_from(guests).unwrap_or(u32::MAX);
    while background(LOOK).await?.busy > busy && begun.elapsed() < PATIENCE {}
    Ok(())
}

/// CPU time of processes so far; one that is gone counts nothing.
pub fn of_processes(pids: impl IntoIterator<Item = i32>) -> Duration {
    let jiffies = |pid| process_jiffies(&std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?);
    JIFFY * pids.into_iter().filter_map(jiffies).sum()
}

/// utime and stime of a `/proc/<pid>/stat`; the name in it may hold anything, so fields count from its end.
fn process_jiffies(stat: &str) -> Option<u32> {
    let (_, fields) = stat.rsplit_once(") ")?;
    let mut times = fields.split_ascii_whitespace().skip(11).map(|field| field.parse::<u32>().ok());
    times.next()??.checked_add(times.next()??)
}

/// CPUs of this host.
pub fn cpus() -> usize {
    std::thread::available_parallelism().map_or(1, std::num::NonZero::get)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn busy_is_what_is_neither_idle_nor_waiting_nor_stolen() {
        let stat = "cpu  1 20 300 9000 9000 4000 50000 9000 7 0\ncpu0 9 9 9 9 9 9 9 9 9 9\n";
        assert_eq!(busy_jiffies(stat), Some(54321));
        assert_eq!(busy_jiffies("cpu  1 2 3"), None);
        assert_eq!(busy_jiffies(""), None);
    }

    #[test]
    fn a_process_may_be_called_anything() {
        let stat = "42 (a) b (c) S 1 2 3 4 5 6 7 8 9 10 120 30 0 0 20 0";
        assert_eq!(process_jiffies(stat), Some(150));
        assert_eq!(process_jiffies("42 (a) S 1 2"), None);
        assert!(of_processes([i32::try_from(std::process::id()).unwrap(), -1]) < Duration::from_secs(3600));
    }
}
