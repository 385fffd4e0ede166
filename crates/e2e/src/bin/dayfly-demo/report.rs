//! The figures, as a table and as JSON.

use crate::clones::Clone;
use anyhow::{Context, Result};
use dayfly_api::types::Snapshot;
use dayfly_e2e::guest;
use dayfly_units::Bytes;
use serde::Serialize;
use std::collections::BTreeSet;
use std::fmt;
use std::path::Path;
use std::time::Duration;

/// What `target/demo.json` holds.
#[derive(Debug, Clone, Serialize)]
pub struct Figures {
    /// `native` or `machine`.
    pub kvm: String,
    /// `uname -r` of the guests.
    pub kernel: String,
    /// A cold boot, from the request to the first answer.
    pub boot_ms: f64,
    /// A clone, from the request to the first answer, one at a time.
    pub clone_ms: Percentiles,
    /// All clones at once, from the requests to the last answer.
    pub burst_ms: f64,
    /// Clones made each way.
    pub clones: usize,
    /// Right answers; of the two ways, the one with fewer.
    pub answers_ok: usize,
    /// Different values; of the two ways, the one with fewer.
    pub unique: Unique,
    /// Memory that only one clone takes, all of them being alive: the mean.
    pub rss_kib_per_clone: u64,
    /// Guests that the emulation crashed and that were created again; 0 natively.
    pub lost: usize,
    /// Things left over after everything was removed.
    pub leaked: usize,
}

/// Nearest-rank percentiles.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct Percentiles {
    /// Half are no slower.
    pub p50: f64,
    /// 99 of 100 are no slower.
    pub p99: f64,
}

/// How many different values the clones had.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct Unique {
    /// Host names.
    pub hostname: usize,
    /// Machine ids.
    pub machine_id: usize,
    /// 32 bytes of the kernel's random generator.
    pub random: usize,
}

/// The figures, and values that only the table shows.
#[derive(Debug, Clone)]
pub struct Report {
    /// For `demo.json`.
    pub figures: Figures,
    disk_bytes_per_clone: u64,
    resident_kib: u64,
    burst_each: Percentiles,
    snapshot: Snapshot,
}

impl Unique {
    fn of<'a>(clones: impl Iterator<Item = &'a Clone> + std::clone::Clone) -> Self {
        let count =
            |value: fn(&Clone) -> &str| clones.clone().map(value).collect::<BTreeSet<_>>().len();
        Self {
            hostname: count(|c| &c.sum.hostname),
            machine_id: count(|c| &c.sum.machine_id),
            random: count(|c| &c.sum.random),
        }
    }
}

impl Report {
    /// Computes counts and means. `ways` are the clones one at a time, and those at once.
    pub fn new(
        kvm: &str,
        kernel: &str,
        boot: Duration,
        latencies: &[Duration],
        burst: Duration,
        ways: [&[Clone]; 2],
        snapshot: &Snapshot,
    ) -> Self {
        let right = |clones: &[Clone]| {
            clones.iter().filter(|c| c.sum.checksum == guest::checksum(c.index)).count()
        };
        let [serial, at_once] = ways;
        // A value that clones of both ways have counts once.
        let (a, b) = (Unique::of(serial.iter()), Unique::of(at_once.iter()));
        let both = Unique::of(serial.iter().chain(at_once));
        let least = |a: usize, b: usize, both: usize| {
            a.min(b).min(both.saturating_sub(serial.len().max(at_once.len())))
        };
        let mean = |of: fn(&Clone) -> u64| {
            at_once.iter().map(of).sum::<u64>() / (at_once.len() as u64).max(1)
        };
        let burst_each: Vec<Duration> = at_once.iter().map(|c| c.took).collect();
        Self {
            figures: Figures {
                kvm: kvm.into(),
                kernel: kernel.into(),
                boot_ms: ms(boot),
                clone_ms: percentiles(latencies),
                burst_ms: ms(burst),
                clones: at_once.len(),
                answers_ok: right(serial).min(right(at_once)),
                unique: Unique {
                    hostname: least(a.hostname, b.hostname, both.hostname),
                    machine_id: least(a.machine_id, b.machine_id, both.machine_id),
                    random: least(a.random, b.random, both.random),
                },
                rss_kib_per_clone: mean(|c| c.details.private_kib),
                lost: 0,
                leaked: 0,
            },
            disk_bytes_per_clone: mean(|c| c.details.disk_bytes),
            resident_kib: mean(|c| c.details.resident_kib),
            burst_each: percentiles(&burst_each),
            snapshot: snapshot.clone(),
        }
    }

    /// Whether every copy answered correctly with unique values, and nothing was left over.
    pub fn is_well(&self) -> bool {
        let f = &self.figures;
        let all = [f.answers_ok, f.unique.hostname, f.unique.machine_id, f.unique.random];
        all.iter().all(|n| *n == f.clones) && f.leaked == 0
    }

    /// Writes `demo.json`.
    pub fn write(&self, path: &Path) -> Result<()> {
        if let Some(folder) = path.parent() {
            std::fs::create_dir_all(folder).with_context(|| folder.display().to_string())?;
        }
        let text = serde_json::to_string_pretty(&self.figures)? + "\n";
        std::fs::write(path, text).with_context(|| path.display().to_string())
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let figures = &self.figures;
        let row = |f: &mut fmt::Formatter<'_>, what: &str, value: String| {
            writeln!(f, "  {what:<50}{value}")
        };
        let n = figures.clones;
        writeln!(
            f,
            "\nLinux {} with Debian bookworm and Python, KVM: {}\n",
            figures.kernel, figures.kvm
        )?;
        row(f, "cold boot to first answer", format!("{:.0} ms", figures.boot_ms))?;
        row(f, "clone to first answer, p50", format!("{:.1} ms", figures.clone_ms.p50))?;
        row(f, "clone to first answer, p99", format!("{:.1} ms", figures.clone_ms.p99))?;
        row(
            f,
            "  a boot takes as long as",
            format!("{:.0} clones", figures.boot_ms / figures.clone_ms.p50),
        )?;
        row(
            f,
            &format!("{n} clones at once, to the last answer"),
            format!("{:.0} ms", figures.burst_ms),
        )?;
        row(f, "  each of them, p50", format!("{:.0} ms", self.burst_each.p50))?;
        let resident = Bytes(self.resident_kib << 10);
        let own = Bytes(figures.rss_kib_per_clone << 10);
        row(f, "memory per clone (resident with what it shares)", format!("{own} ({resident})"))?;
        row(f, "disk per clone", Bytes(self.disk_bytes_per_clone).to_string())?;
        let stored = Bytes(self.snapshot.memory_stored_bytes);
        row(
            f,
            "snapshot: memory stored of RAM",
            format!("{stored} of {}", Bytes(self.snapshot.memory_bytes)),
        )?;
        row(f, "right answers", format!("{} of {n}", figures.answers_ok))?;
        row(f, "different hostnames", format!("{} of {n}", figures.unique.hostname))?;
        row(f, "different machine-ids", format!("{} of {n}", figures.unique.machine_id))?;
        row(f, "different random bytes", format!("{} of {n}", figures.unique.random))?;
        row(f, "lost to the emulation, and made again", figures.lost.to_string())?;
        row(f, "left over", figures.leaked.to_string())
    }
}

fn ms(duration: Duration) -> f64 {
    // Rounded to microseconds.
    (duration.as_secs_f64() * 1e6).round() / 1e3
}

/// Nearest rank: p50 is the smallest value that at least 50 % of all values do not exceed.
fn percentiles(durations: &[Duration]) -> Percentiles {
    let mut sorted = durations.to_vec();
    sorted.sort_unstable();
    let rank = |percent: usize| {
        let rank = (sorted.len() * percent).div_ceil(100).max(1);
        sorted.get(rank - 1).copied().map_or(0.0, ms)
    };
    Percentiles { p50: rank(50), p99: rank(99) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_values_that_were_measured() {
        let durations: Vec<Duration> = (1..=20).rev().map(Duration::from_millis).collect();
        let got = percentiles(&durations);
        assert_eq!((got.p50, got.p99), (10.0, 20.0));
        let got = percentiles(&durations[..1]);
        assert_eq!((got.p50, got.p99), (20.0, 20.0));
    }
}
