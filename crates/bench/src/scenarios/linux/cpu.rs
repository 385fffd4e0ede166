//! CPU time of the host that has the VMs, by its kernel's own count (`/proc/stat`): everything that
//! is not idle and does not wait for a disk. What the guests run is in it, as time of their VMMs. A
//! count is of 10 ms, so only sums over many VMs are worth something.

use crate::prelude::*;
use crate::proc::{self, Stat};

/// A count in `/proc/stat` (`USER_HZ` is 100 on x86).
const JIFFY: Duration = Duration::from_millis(10);
/// How long the host is looked at to see whether it is quiet.
const LOOK: Duration = Duration::from_millis(200);
/// Busy at most so long within that: a tenth of one CPU …
const QUIET: Duration = Duration::from_millis(20);
/// … and so long for each guest that idles beside it: under emulation its timers take about half a
/// percent.
const QUIET_EACH: Duration = Duration::from_millis(1);
/// A host that is not quiet by then has something else to do.
const TIMEOUT: Duration = Duration::from_secs(20);

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
    let jiffies =
        busy_jiffies(&proc::read("/proc/stat")?).context("the first line of /proc/stat")?;
    Ok(Reading { busy: JIFFY * jiffies, at: Instant::now() })
}

/// user, nice, system, irq and softirq of all CPUs; time of guests is in user.
fn busy_jiffies(stat: &str) -> Option<u32> {
    let line = stat.lines().next()?.strip_prefix("cpu ")?;
    let fields: Vec<u32> =
        line.split_ascii_whitespace().map_while(|field| field.parse().ok()).collect();
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

/// Waits until the host has nothing to do any more, the pool's work included, but to let `guests`
/// idle.
pub async fn quiet(guests: usize) -> Result<()> {
    let begun = Instant::now();
    let busy = QUIET + QUIET_EACH * u32::try_from(guests).unwrap_or(u32::MAX);
    while background(LOOK).await?.busy > busy && begun.elapsed() < TIMEOUT {}
    Ok(())
}

/// CPU time of processes so far; one that is gone counts nothing.
pub fn of_processes(pids: impl IntoIterator<Item = i32>) -> Duration {
    JIFFY * pids.into_iter().filter_map(|pid| Stat::of(pid)?.ticks(14)).sum()
}

/// CPU time of one clone: the host's, in a series of single clones (see `measure`).
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub struct Cpu {
    /// Of one clone, without the background: the median of the series.
    pub per_clone_ms: f64,
    /// The background that was subtracted for each clone.
    pub background_ms: f64,
    /// CPUs busy with nothing asked for, before a series and after it.
    idle_cpus: [f64; 2],
    /// The largest series divided by the smallest.
    pub spread: f64,
}

impl Cpu {
    /// Of a series of `count` clones that took `spent`.
    pub fn new(count: usize, spent: Spent, before: Spent, after: Spent) -> Self {
        let idle = f64::midpoint(before.cpus(), after.cpus());
        let each = |cpus: f64| rounded(cpus * spent.wall.as_secs_f64() * 1e3 / float(count as u64));
        Self {
            per_clone_ms: each(spent.cpus() - idle),
            background_ms: each(idle),
            idle_cpus: [before, after].map(|spent| rounded(spent.cpus())),
            spread: 1.0,
        }
    }

    /// The series of the median.
    pub fn of(series: &[Self]) -> Option<Self> {
        let times = || series.iter().map(|series| series.per_clone_ms);
        let (least, most) = (times().reduce(f64::min)?, times().reduce(f64::max)?);
        let middle = middle(series, |series| series.per_clone_ms)?;
        Some(Self { spread: rounded(most / least), ..middle })
    }
}

/// The one in the middle, by a number.
pub fn middle<T: Copy>(values: &[T], key: impl Fn(&T) -> f64) -> Option<T> {
    let mut sorted = values.to_vec();
    sorted.sort_by(|a, b| key(a).total_cmp(&key(b)));
    sorted.get(sorted.len().saturating_sub(1) / 2).copied()
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

    const fn spent(busy_ms: u64, wall_ms: u64) -> Spent {
        Spent { busy: Duration::from_millis(busy_ms), wall: Duration::from_millis(wall_ms) }
    }

    #[test]
    fn the_background_of_the_same_time_is_subtracted() {
        // 10 clones in 20 s; 5 % of one CPU were busy before, 15 % after.
        let cpu = Cpu::new(10, spent(5000, 20_000), spent(250, 5000), spent(750, 5000));
        assert_eq!((cpu.per_clone_ms, cpu.background_ms), (300.0, 200.0));
        let other = Cpu { per_clone_ms: 330.0, ..cpu };
        let median = Cpu::of(&[other, cpu]).expect("a series");
        assert_eq!((median.per_clone_ms, median.spread), (300.0, 1.1));
    }

    #[test]
    fn a_process_that_is_gone_counts_nothing() {
        let own = i32::try_from(std::process::id()).unwrap();
        assert!(of_processes([own, -1]) < Duration::from_secs(3600));
    }
}
