//! What was measured: `target/bench/birth-linux.json`, and the table on the terminal.

use crate::Options;
use crate::cpu::{Spent, cpus};
use crate::guests::program;
use crate::measure::Burst;
use crate::times::{Series, Stage, Times, ms, rounded};
use serde::{Deserialize, Serialize};
use std::fmt;

/// How a boot's first answer is to compare with a clone's.
const LEAST_RATIO: f64 = 40.0;
/// How many at once may compare with as many single ones' CPU time.
const MOST_RATIO: f64 = 1.1;

/// The figures of one run.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Figures {
    /// `native`, or `machine`.
    pub kvm: String,
    /// The guest's kernel.
    pub kernel: String,
    /// CPUs of the host that has the VMs.
    pub cpus: usize,
    /// vCPUs of a guest.
    pub vcpus: u8,
    /// RAM of a guest.
    pub memory_bytes: u64,
    /// What is run in each guest.
    pub program: Vec<String>,
    /// Whether the bake rehearsed the program.
    pub rehearsed: bool,
    /// Cold boot to first answer.
    pub boot: Times,
    /// Clone to first answer, one at a time.
    pub clone: Times,
    /// Boots' median by clones' median.
    pub ratio: f64,
    /// CPU time of one clone.
    pub cpu: Cpu,
    /// Many clones at once.
    pub at_once: AtOnce,
    /// Guests that the emulation crashed, and that were made again.
    pub lost: usize,
    /// Things left over after everything was removed.
    pub leaked: usize,
    /// CPUs of this host that were busy with something else than the machine meanwhile; nothing where there is no machine.
    pub others_cpus: Option<f64>,
    /// Load averages of this host before it began, of 1, 5 and 15 minutes.
    pub load: String,
}

/// CPU time of one clone: the host's, in a series of single ones (see `measure`).
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub struct Cpu {
    /// Of one clone, without the background: the median of the series.
    pub per_clone_ms: f64,
    /// What was subtracted of each clone's.
    background_ms: f64,
    /// CPUs busy with nothing asked for, before a series and after it.
    idle_cpus: [f64; 2],
    /// How far the series are apart: the largest by the smallest.
    spread: f64,
}

impl Cpu {
    /// Of a series of `count` that took `spent`.
    pub fn new(count: usize, spent: Spent, before: Spent, after: Spent) -> Self {
        let idle = f64::midpoint(before.cpus(), after.cpus());
        let each = |cpus: f64| rounded(cpus * spent.wall.as_secs_f64() * 1e3 / floats(count));
        Self {
            per_clone_ms: each(spent.cpus() - idle),
            background_ms: each(idle),
            idle_cpus: [rounded(before.cpus()), rounded(after.cpus())],
            spread: 1.0,
        }
    }

    /// The series of the median.
    pub fn of(series: &[Self]) -> Option<Self> {
        let sorted = sorted_by(series, |s| s.per_clone_ms);
        let (first, last) = (sorted.first()?, sorted.last()?);
        let middle = sorted.get((sorted.len() - 1) / 2)?;
        Some(Self { spread: rounded(last.per_clone_ms / first.per_clone_ms), ..*middle })
    }
}

/// Many clones asked for at the same moment.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct AtOnce {
    clones: usize,
    rounds: usize,
    /// First request to last exit: the median of the rounds.
    wall_ms: f64,
    /// All rounds.
    walls_ms: Vec<f64>,
    /// The CPU time of as many single clones, over all CPUs.
    expected_ms: f64,
    /// `wall_ms` by `expected_ms`.
    ratio: f64,
    /// CPUs busy until the last exit, in the round of the median.
    busy_cpus: f64,
    /// CPU time by clones, until the host was quiet again: what the pool made afterwards is in it.
    cpu_ms_per_clone: f64,
    /// VMMs made ahead when it began, for any snapshot.
    waiting: usize,
}

impl AtOnce {
    /// What `rounds` came to, held against `single`.
    pub fn of(clones: usize, rounds: &[Burst], single: &Cpu) -> Option<Self> {
        let sorted = sorted_by(rounds, |round| round.wall.as_secs_f64());
        let middle = sorted.get((sorted.len() - 1) / 2)?;
        let expected_ms = rounded(floats(clones) * single.per_clone_ms / floats(cpus()));
        Some(Self {
            clones,
            rounds: rounds.len(),
            wall_ms: ms(middle.wall),
            walls_ms: rounds.iter().map(|round| ms(round.wall)).collect(),
            expected_ms,
            ratio: rounded(ms(middle.wall) / expected_ms),
            busy_cpus: rounded(middle.cpus),
            cpu_ms_per_clone: rounded(ms(middle.busy) / floats(clones)),
            waiting: middle.waiting,
        })
    }
}

impl Figures {
    /// All of it; what only the outside knows comes later.
    pub fn new(
        options: &Options,
        boots: Series,
        clones: Series,
        cpu: Cpu,
        at_once: AtOnce,
        lost: usize,
    ) -> Self {
        let (boot, clone) = (boots.times(), clones.times());
        Self {
            kvm: String::new(),
            kernel: String::new(),
            cpus: cpus(),
            vcpus: options.cpus,
            memory_bytes: options.memory.0,
            program: program().argv,
            rehearsed: !options.unrehearsed,
            ratio: rounded(boot.p50_ms / clone.p50_ms),
            boot,
            clone,
            cpu,
            at_once,
            lost,
            leaked: 0,
            others_cpus: None,
            load: String::new(),
        }
    }

    /// Notes what else this host did: the machine, whose CPUs are its threads, cannot tell.
    pub fn disturbed(&mut self, others: Spent) {
        self.others_cpus = Some(rounded(others.cpus()));
    }
}

impl fmt::Display for Figures {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { boot, clone, cpu, at_once: many, .. } = self;
        writeln!(
            f,
            "  {:<28}{:>6}{:>11}{:>11}{:>11}",
            "to the first answer, ms", "n", "p50", "p99", "least"
        )?;
        for (what, t) in [("cold boot", boot), ("clone", clone)] {
            writeln!(f, "  {what:<28}{:>6}{:>11.1}{:>11.1}{:>11.1}", t.n, t.p50_ms, t.p99_ms, t.min_ms)?;
        }
        writeln!(f, "  boot / clone: {:.1} (wanted: at least {LEAST_RATIO:.0})", self.ratio)?;
        for (what, t) in [("a boot", boot), ("a clone", clone)] {
            writeln!(f, "  {what}, medians since the request:")?;
            for Stage { stage, p50_ms, n } in &t.stages {
                let some = if *n == t.n { String::new() } else { format!(" ({n} of {})", t.n) };
                writeln!(f, "    {p50_ms:>10.1} ms  {stage}{some}")?;
            }
        }
        writeln!(
            f,
            "  CPU time of a clone: {:.1} ms (less {:.1} ms of background; series differ by {:.2} x)",
            cpu.per_clone_ms, cpu.background_ms, cpu.spread
        )?;
        writeln!(
            f,
            "  {} at once: {:.0} ms, as many single ones' CPU time over {} CPUs {:.0} ms: {:.2} x (wanted: at most {MOST_RATIO})",
            many.clones, many.wall_ms, self.cpus, many.expected_ms, many.ratio
        )?;
        writeln!(
            f,
            "    {:.2} CPUs busy, {:.1} ms of CPU time each, {} VMMs were ready",
            many.busy_cpus, many.cpu_ms_per_clone, many.waiting
        )?;
        if let Some(others) = self.others_cpus {
            writeln!(
                f,
                "  beside the machine {others:.2} CPUs of this host were busy: figures are worth little where that is much"
            )?;
        }
        write!(f, "  lost to the emulation, and made again: {}; left over: {}", self.lost, self.leaked)
    }
}

fn sorted_by<T: Copy>(values: &[T], key: impl Fn(&T) -> f64) -> Vec<T> {
    let mut sorted = values.to_vec();
    sorted.sort_by(|a, b| key(a).total_cmp(&key(b)));
    sorted
}

#[expect(clippy::cast_precision_loss, reason = "small counts")]
fn floats(count: usize) -> f64 {
    count as f64
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

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
}
