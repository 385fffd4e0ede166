//! The clock, memory, and what figures are made of.

use anyhow::{Context, Result};
use serde::Serialize;
use std::collections::BTreeMap;
use std::path::Path;
use std::time::{Duration, Instant};

pub const MIB: u64 = 1 << 20;

/// CLOCK_MONOTONIC in microseconds, the clock of [`dayfly_vmm::timeline`].
pub fn now_us() -> u64 {
    dayfly_vmm::timeline::now_us()
}

/// The value that `part` (0 to 1) of `sorted` are not above: the nearest rank, so always one that was measured.
pub fn percentile(sorted: &[u64], part: f64) -> u64 {
    #[expect(
        clippy::cast_precision_loss,
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "small counts"
    )]
    let rank = (part * sorted.len() as f64).ceil() as usize;
    sorted.get(rank.clamp(1, sorted.len().max(1)) - 1).copied().unwrap_or(0)
}

/// The median of figures in any order.
pub fn median(values: &[u64]) -> u64 {
    let mut sorted = values.to_vec();
    sorted.sort_unstable();
    percentile(&sorted, 0.5)
}

/// A quotient, to three digits after the point.
#[expect(clippy::cast_precision_loss, reason = "a quotient for people")]
pub fn ratio(a: u64, b: u64) -> f64 {
    if b == 0 { 0.0 } else { (a as f64 / b as f64 * 1000.0).round() / 1000.0 }
}

/// What a set of times comes to.
#[derive(Debug, Clone, Serialize)]
pub struct Spread {
    pub p50_us: u64,
    pub p99_us: u64,
    pub min_us: u64,
    pub max_us: u64,
    pub n: usize,
    /// Against the floor's median; the floor itself has none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ratio_to_floor_p50: Option<f64>,
}

impl Spread {
    pub fn of(values: &[u64], floor: Option<&Spread>) -> Self {
        let mut sorted = values.to_vec();
        sorted.sort_unstable();
        let p50_us = percentile(&sorted, 0.5);
        Self {
            p50_us,
            p99_us: percentile(&sorted, 0.99),
            min_us: sorted.first().copied().unwrap_or(0),
            max_us: sorted.last().copied().unwrap_or(0),
            n: sorted.len(),
            ratio_to_floor_p50: floor.map(|floor| ratio(p50_us, floor.p50_us)),
        }
    }
}

/// Times by phase, and their medians.
#[derive(Debug, Default)]
pub struct Phases(BTreeMap<String, Vec<u64>>);

impl Phases {
    pub fn add(&mut self, phase: &str, us: u64) {
        self.0.entry(phase.to_owned()).or_default().push(us);
    }

    /// Medians, the earliest first.
    pub fn medians(&self) -> Vec<(String, u64)> {
        let mut all: Vec<_> = self.0.iter().map(|(phase, us)| (phase.clone(), median(us))).collect();
        all.sort_by_key(|(_, us)| *us);
        all
    }

    pub fn json(&self) -> serde_json::Value {
        self.0
            .iter()
            .map(|(phase, us)| (phase.clone(), median(us)))
            .collect::<BTreeMap<_, _>>()
            .into_iter()
            .collect()
    }
}

/// `MemAvailable` in bytes, and what lies free in the CPUs' own lists, which the kernel does not count: after any munmap(2) of
/// 2 GiB these hold up to a tenth of it for seconds.
pub fn available() -> Result<u64> {
    let zones = std::fs::read_to_string("/proc/zoneinfo").context("/proc/zoneinfo")?;
    let listed =
        zones.lines().filter_map(|line| line.trim().strip_prefix("count:")?.trim().parse::<u64>().ok());
    Ok(mem_available()? + listed.sum::<u64>() * dayfly_units::PAGE_SIZE)
}

fn mem_available() -> Result<u64> {
    let text = std::fs::read_to_string("/proc/meminfo").context("/proc/meminfo")?;
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"));
    let kib = line.and_then(|l| l.trim().strip_suffix(" kB")).and_then(|n| n.trim().parse::<u64>().ok());
    Ok(kib.context("MemAvailable in /proc/meminfo")? << 10)
}

/// `MemAvailable` once it stands still: the median of some readings.
pub fn settled_available() -> Result<u64> {
    std::thread::sleep(Duration::from_millis(200));
    let readings = (0..9).map(|_| {
        std::thread::sleep(Duration::from_millis(10));
        available()
    });
    Ok(median(&readings.collect::<Result<Vec<_>>>()?))
}

/// Waits until at least `bytes` are available; gives when (microseconds of the clock), or `None` after `within`.
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

/// How busy the host was: figures taken beside a compiler are worth little.
pub fn load() -> String {
    std::fs::read_to_string("/proc/loadavg")
        .unwrap_or_default()
        .split(' ')
        .take(3)
        .collect::<Vec<_>>()
        .join(" ")
}

/// Writes a result.
pub fn write(out: &Path, name: &str, value: &serde_json::Value) -> Result<()> {
    let path = out.join(name);
    let text = serde_json::to_string_pretty(value)? + "\n";
    std::fs::write(&path, text).with_context(|| path.display().to_string())?;
    println!("  {}", path.display());
    Ok(())
}

/// Microseconds for people.
#[expect(clippy::cast_precision_loss, reason = "for people")]
pub fn shown(us: u64) -> String {
    match us {
        0..10_000 => format!("{us} us"),
        10_000..10_000_000 => format!("{:.1} ms", us as f64 / 1e3),
        _ => format!("{:.1} s", us as f64 / 1e6),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_values_that_were_measured() {
        let hundred: Vec<u64> = (1..=100).collect();
        assert_eq!(percentile(&hundred, 0.5), 50);
        assert_eq!(percentile(&hundred, 0.99), 99);
        assert_eq!(percentile(&hundred, 1.0), 100);
        assert_eq!(percentile(&[7], 0.5), 7);
        assert_eq!(percentile(&[], 0.5), 0);
        assert_eq!(median(&[9, 1, 5]), 5);
        assert_eq!(median(&[4, 1, 3, 2]), 2);
    }

    #[test]
    fn a_spread_is_held_against_the_floor_s_median() {
        let floor = Spread::of(&[10, 20, 30], None);
        let spread = Spread::of(&[30, 50, 40], Some(&floor));
        assert_eq!((spread.p50_us, spread.p99_us, spread.min_us, spread.n), (40, 50, 30, 3));
        assert_eq!(spread.ratio_to_floor_p50, Some(2.0));
        assert_eq!(ratio(1, 3), 0.333);
        assert_eq!(ratio(1, 0), 0.0);
    }

    #[test]
    fn phases_come_in_the_order_of_their_medians() {
        let mut phases = Phases::default();
        for (phase, us) in [("late", 9), ("early", 2), ("late", 7), ("late", 8), ("early", 1)] {
            phases.add(phase, us);
        }
        assert_eq!(phases.medians(), [("early".to_owned(), 1), ("late".to_owned(), 8)]);
    }
}
