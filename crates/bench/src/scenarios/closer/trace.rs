//! The tracer: which task each CPU runs, added up by control group.

use super::groups::{Owner, Part, Tree};
use super::perf::{Sample, Samples, What, tracepoint};
use crate::prelude::*;
use crate::proc::Stat;
use dayfly_host::cpus;
use std::collections::HashMap;

/// How often the rings are emptied. In this time a process may begin and end unseen; its time is
/// then that of `Foreign`.
const TAKE: Duration = Duration::from_millis(20);
/// The pid of the thread that makes kernel threads.
const KTHREADD: u32 = 2;

const PARTS: [(Part, &str); 5] = [
    (Part::Main, "main"),
    (Part::Vms, "vms"),
    (Part::Templates, "templates"),
    (Part::Kernel, "kernel"),
    (Part::Foreign, "foreign"),
];

/// Traced time by owner and CPU.
#[derive(Debug, Clone, Default)]
pub struct Times {
    owners: Vec<Owner>,
    cpus: Vec<u32>,
    /// ns of each owner on each of these CPUs; owners that took none may be missing.
    ns: Vec<Vec<u64>>,
    /// Softirqs by whose time they took; `None` if they could not be traced.
    softirq_ns: Option<[u64; PARTS.len()]>,
    wall_ns: u64,
    /// Samples that the kernel dropped.
    pub lost: u64,
}

fn seconds(ns: u64) -> f64 {
    Duration::from_nanos(ns).as_secs_f64()
}

fn figures(ns: &[u64; PARTS.len()]) -> Value {
    PARTS
        .iter()
        .zip(ns)
        .map(|((_, name), ns)| ((*name).to_owned(), rounded(seconds(*ns))))
        .collect()
}

impl Times {
    /// The seconds of a part.
    pub fn of(&self, part: Part) -> f64 {
        seconds(self.ns_on(&self.cpus, |owner| owner.part == part))
    }

    /// The seconds of the owners that `matches` names, on these CPUs.
    pub fn on(&self, cpus: &[u32], matches: impl Fn(&Owner) -> bool) -> f64 {
        seconds(self.ns_on(cpus, matches))
    }

    /// The seconds of one group.
    pub fn of_group(&self, group: &str) -> f64 {
        seconds(self.ns_on(&self.cpus, |owner| owner.group == group))
    }

    fn ns_on(&self, cpus: &[u32], matches: impl Fn(&Owner) -> bool) -> u64 {
        let owned = self.owners.iter().zip(&self.ns).filter(|(owner, _)| matches(owner));
        let on = |(_, ns): (_, &Vec<u64>)| {
            let by_cpu = self.cpus.iter().zip(ns).filter(|(cpu, _)| cpus.contains(cpu));
            by_cpu.map(|(_, ns)| ns).sum::<u64>()
        };
        owned.map(on).sum()
    }

    /// Adds time of the owner with this index on the CPU at this place.
    fn add(&mut self, owner: usize, cpu: usize, ns: u64) {
        if self.ns.len() <= owner {
            self.ns.resize(owner + 1, vec![0; self.cpus.len()]);
        }
        self.ns[owner][cpu] += ns;
    }

    /// How long was traced.
    pub fn seconds(&self) -> f64 {
        seconds(self.wall_ns)
    }

    /// How many CPUs a part took.
    pub fn cpus_of(&self, part: Part) -> f64 {
        self.of(part) / self.seconds()
    }

    pub fn figures(&self) -> Value {
        figures(&PARTS.map(|(part, _)| self.ns_on(&self.cpus, |owner| owner.part == part)))
    }

    pub fn softirqs(&self) -> Value {
        self.softirq_ns.as_ref().map_or(Value::Null, figures)
    }
}

/// The rings of one CPU.
#[derive(Debug)]
struct Cpu {
    switches: Samples,
    /// Entries and exits.
    softirqs: Option<[Samples; 2]>,
    /// When the last task was begun or left, or the trace began.
    since_ns: u64,
    entered_ns: Option<u64>,
}

/// Traces all CPUs from the first [`Self::run`] on.
#[derive(Debug)]
pub struct Tracer {
    tree: Tree,
    numbers: Vec<u32>,
    cpus: Vec<Cpu>,
    owners: Vec<Owner>,
    /// The place of a process's owner in `owners`.
    by_pid: HashMap<u32, usize>,
}

impl Tracer {
    /// A tracer that compares with the groups of `tree`.
    pub fn new(tree: Tree) -> Result<Self> {
        let points = ["irq/softirq_entry", "irq/softirq_exit"].map(tracepoint);
        let on = |cpu: u32| {
            let sampled = |point: u64| Samples::on(cpu, What::Tracepoint(point));
            let softirqs = match points {
                [Some(entry), Some(exit)] => Some([sampled(entry)?, sampled(exit)?]),
                _ => None,
            };
            let switches = Samples::on(cpu, What::Switch)?;
            Ok(Cpu { switches, softirqs, since_ns: 0, entered_ns: None })
        };
        let numbers: Vec<u32> = cpus::online()?.iter().collect();
        let cpus = numbers.iter().copied().map(on).collect::<Result<_>>()?;
        Ok(Self { tree, numbers, cpus, owners: Vec::new(), by_pid: HashMap::new() })
    }

    /// Traces for this time.
    pub async fn run(&mut self, time: Duration) -> Result<Times> {
        let mut times = Times { cpus: self.numbers.clone(), ..Times::default() };
        let (begun, mut samples) = (now_ns(), Vec::new());
        for cpu in &mut self.cpus {
            cpu.since_ns = begun;
            cpu.switches.take(&mut samples);
            for ring in cpu.softirqs.iter_mut().flatten() {
                ring.take(&mut samples);
            }
            if cpu.softirqs.is_some() {
                times.softirq_ns = Some([0; PARTS.len()]);
            }
        }
        let end = Instant::now() + time;
        while Instant::now() < end {
            tokio::time::sleep(TAKE).await;
            self.take(begun, u64::MAX, &mut times);
        }
        // What runs now was not left yet; a task that spins may have run for long.
        let now = now_ns();
        std::thread::sleep(TAKE);
        self.take(begun, now, &mut times);
        times.wall_ns = now - begun;
        times.owners = self.owners.clone();
        times.lost = self.cpus.iter().map(|cpu| cpu.switches.lost).sum();
        Ok(times)
    }

    /// Adds what the rings have, of the time until `until`.
    fn take(&mut self, begun: u64, until: u64, times: &mut Times) {
        let mut samples = Vec::new();
        for at in 0..self.cpus.len() {
            samples.clear();
            self.cpus[at].switches.take(&mut samples);
            for Sample { ns, pid, begins } in &samples {
                let ns = (*ns).min(until);
                let since = self.cpus[at].since_ns;
                if *pid != 0
                    && !begins
                    && let Some(took) = ns.checked_sub(since)
                {
                    times.add(self.owner(*pid), at, took);
                }
                self.cpus[at].since_ns = ns.max(since);
            }
            self.take_softirqs(at, begun, until, times);
        }
    }

    fn take_softirqs(&mut self, at: usize, begun: u64, until: u64, times: &mut Times) {
        let Some(rings) = &mut self.cpus[at].softirqs else { return };
        let [mut entries, mut exits] = [Vec::new(), Vec::new()];
        rings[0].take(&mut entries);
        rings[1].take(&mut exits);
        let mut all: Vec<(Sample, bool)> =
            entries.into_iter().map(|sample| (sample, true)).collect();
        all.extend(exits.into_iter().map(|sample| (sample, false)));
        all.sort_by_key(|(sample, _)| sample.ns);
        for (Sample { ns, pid, .. }, entry) in all {
            if entry {
                self.cpus[at].entered_ns = Some(ns);
            } else if let Some(entered) = self.cpus[at].entered_ns.take().filter(|ns| *ns >= begun)
                && pid != 0
            {
                let owner = self.owner(pid);
                let part = self.owners[owner].part as usize;
                let took = ns.min(until).saturating_sub(entered);
                if let Some(of) = &mut times.softirq_ns {
                    of[part] += took;
                }
            }
        }
    }

    /// The place of the owner of a process, as the process is seen first.
    fn owner(&mut self, pid: u32) -> usize {
        if let Some(at) = self.by_pid.get(&pid) {
            return *at;
        }
        let outside = |part| Owner { part, group: String::new() };
        let is_thread =
            || pid == KTHREADD || Stat::of(pid).and_then(|stat| stat.number(4)) == Some(KTHREADD);
        let owner = match self.tree.owner_of(pid) {
            Some(Owner { part: Part::Foreign, .. }) if is_thread() => outside(Part::Kernel),
            Some(owner) => owner,
            None => outside(Part::Foreign),
        };
        let found = self.owners.iter().position(|other| *other == owner);
        let at = found.unwrap_or_else(|| {
            self.owners.push(owner);
            self.owners.len() - 1
        });
        self.by_pid.insert(pid, at);
        at
    }
}

/// CLOCK_MONOTONIC in ns.
fn now_ns() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    let seconds = u64::try_from(now.tv_sec).unwrap_or(0);
    seconds * 1_000_000_000 + u64::try_from(now.tv_nsec).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn time_is_added_up_by_owner_and_cpu() {
        let owner = |part, group: &str| Owner { part, group: group.to_owned() };
        let owners = vec![
            owner(Part::Vms, "vms/1"),
            owner(Part::Vms, "booked/2"),
            owner(Part::Main, "main"),
        ];
        let mut times = Times { owners, cpus: vec![0, 3], ..Times::default() };
        // The first two are seen later.
        for (owner, cpu, ms) in [(2, 1, 5), (1, 0, 7), (0, 1, 11), (0, 0, 13), (0, 0, 17)] {
            times.add(owner, cpu, ms * 1_000_000);
        }
        let close = |got: f64, expected_ms: f64| (got * 1e3 - expected_ms).abs() < 1e-6;
        assert!(close(times.of(Part::Vms), 48.0) && close(times.of(Part::Main), 5.0));
        assert!(close(times.of_group("vms/1"), 41.0) && close(times.of_group("vms/9"), 0.0));
        assert!(close(times.on(&[3], |owner| owner.group != "vms/1"), 5.0));
        assert!(close(times.on(&[0, 3], |owner| owner.part == Part::Vms), 48.0));
        assert!(close(times.on(&[7], |_| true), 0.0));
    }
}
