//! Short jobs, one clone each, beside idle VMs: birth, an integer sort in the guest, death; in jobs per minute.
//!
//! As table 2 of *Swift Birth and Quick Death* (section 6.4.1): jobs are made as fast as possible with no, 128 and 256 idle VMs
//! beside them, and those that finished are counted. There, one sort takes seconds and never more than a guest for each of the 64
//! CPUs lives; so here: as many lanes as the host has CPUs, each with one job after another. NPB's integer sort ranks its keys by
//! counting, and so does ours, of as many keys as take some tens of milliseconds where KVM emulates every instruction.
//!
//! A job is a `create`, the guest's console followed to its end (`logs`, as `dayfly logs -f`), and a `remove`. The guest sorts,
//! looks through what it sorted, prints a digest of it, and powers itself off; a job whose digest is not the one that the keys
//! have ends the benchmark. Nobody polls: the console's stream ends when the daemon has seen the VMM's end.
//!
//! Idle VMs have written to their port and halted. Counts take turns: no idle VMs, 128, 256, and again; a figure is the median of
//! its turns.

use crate::birth::{MEMORY_BYTES, words};
use crate::common::{self, median, ratio, shown};
use crate::room::Room;
use crate::scale::remove_all;
use anyhow::{Context, Result, bail};
use dayfly_bench::plot::{Curve, Plot};
use dayfly_units::{Name, VmId};
use dayfly_vmm::arch::layout;
use futures::future::try_join_all;
use serde_json::{Map, json};
use std::path::Path;
use std::time::{Duration, Instant};

const IDLE: [usize; 3] = [0, 128, 256];
const ROUNDS: usize = 3;
const TURN: Duration = Duration::from_secs(20);
/// How long a job may take before it counts as hung.
const WITHIN: Duration = Duration::from_secs(60);
const SEED: u64 = 7;
const KEYS: usize = 256;

/// What a job's guest does once it is born.
fn job_words() -> String {
    format!("until={:x} sort={SEED:x}:{KEYS:x} end=o", layout::GENERATION.0)
}

/// Microseconds of finished jobs, by what they were spent on.
#[derive(Debug, Default)]
struct Done {
    births: Vec<u64>,
    runs: Vec<u64>,
    deaths: Vec<u64>,
    /// One for each turn.
    per_minute: Vec<u64>,
}

impl Done {
    fn add(&mut self, [birth, run, death]: [u64; 3]) {
        self.births.push(birth);
        self.runs.push(run);
        self.deaths.push(death);
    }
}

/// Born, sorted, gone: the microseconds until each was answered.
async fn job(room: &Room, name: &Name, expected: &str) -> Result<[u64; 3]> {
    let (vm, sent_us) = room.create(name).await?;
    let born_us = common::now_us();
    let said = tokio::time::timeout(WITHIN, console_to_its_end(room, vm.id)).await;
    let said = said.with_context(|| format!("VM {}: its job takes more than {WITHIN:?}", vm.id))??;
    // Before the snapshot the guest said that it was ready; a clone's console is its own.
    if said != expected {
        bail!("VM {}: expected its guest to say {expected:?}, got {said:?}", vm.id);
    }
    let ran_us = common::now_us();
    let death_us = room.remove(vm.id).await?;
    Ok([born_us - sent_us, ran_us - born_us, death_us])
}

async fn console_to_its_end(room: &Room, id: VmId) -> Result<String> {
    let mut console = room.client.logs(&id.to_string(), true).await?;
    let mut said = Vec::new();
    while let Some(piece) = console.next().await? {
        said.extend_from_slice(&piece);
    }
    Ok(String::from_utf8_lossy(&said).into_owned())
}

/// One job after another until `end`; what was begun is finished.
async fn lane(room: &Room, name: &Name, expected: &str, end: Instant) -> Result<Vec<[u64; 3]>> {
    let mut jobs = Vec::new();
    while Instant::now() < end {
        jobs.push(job(room, name, expected).await?);
    }
    Ok(jobs)
}

/// Idle VMs, until there are as many as `count` and all have written to their port: the next instruction halts them.
async fn idle(room: &Room, name: &Name, ids: &mut Vec<VmId>, count: usize) -> Result<()> {
    let made = try_join_all((ids.len()..count).map(|_| room.create(name))).await?;
    ids.extend(made.iter().map(|(vm, _)| vm.id));
    for id in ids {
        room.first_port_write_us(*id)?;
    }
    Ok(())
}

/// Runs it.
pub async fn run(programs: &Path, out: &Path) -> Result<()> {
    let lanes = std::thread::available_parallelism()?.get();
    println!(
        "jobs: {ROUNDS} turns of {} s beside each of {IDLE:?} idle VMs, {lanes} at a time, {KEYS} keys; load {}",
        TURN.as_secs(),
        common::load()
    );
    let mut room = Room::new(programs)?;
    let (name, bystander): (Name, Name) = ("job".parse()?, "idle".parse()?);
    room.bake(&name, MEMORY_BYTES, &job_words())?;
    room.bake(&bystander, MEMORY_BYTES, &words())?;
    room.start().await?;
    let expected = dayfly_microguest::sorted(SEED, KEYS);
    job(&room, &name, &expected).await?;

    let mut done = IDLE.map(|_| Done::default());
    for _ in 0..ROUNDS {
        let mut ids = Vec::new();
        for (count, done) in IDLE.into_iter().zip(&mut done) {
            idle(&room, &bystander, &mut ids, count).await?;
            room.pool_is_full().await?;
            let begun = Instant::now();
            let lanes = (0..lanes).map(|_| lane(&room, &name, &expected, begun + TURN));
            let jobs = try_join_all(lanes).await?.concat();
            done.per_minute.push(per_minute(jobs.len(), begun.elapsed()));
            jobs.into_iter().for_each(|job| done.add(job));
        }
        remove_all(&room, &ids).await?;
    }
    let leaked = room.end()?;

    let rates: Vec<u64> = done.iter().map(|done| median(&done.per_minute)).collect();
    table(&done, &rates);
    println!("  leaked processes: {leaked}");
    let by_idle = |of: &dyn Fn(&Done) -> serde_json::Value| -> Map<String, serde_json::Value> {
        IDLE.iter().zip(&done).map(|(count, done)| (count.to_string(), of(done))).collect()
    };
    let value = json!({
        "idle": by_idle(&|done| median(&done.per_minute).into()),
        "ratio_256_to_0": ratio(rates[2], rates[0]),
        "turns": by_idle(&|done| done.per_minute.clone().into()),
        "jobs": by_idle(&|done| done.births.len().into()),
        "medians_us": by_idle(&|done| json!({
            "birth": median(&done.births), "run": median(&done.runs), "death": median(&done.deaths),
        })),
        "at_a_time": lanes,
        "keys": KEYS,
        "memory_bytes": MEMORY_BYTES,
        "load": common::load(),
        "leaked": leaked,
    });
    common::write(out, "jobs.json", &value)?;
    let curve = |label: &str, of: &dyn Fn(&Done) -> u64| {
        #[expect(clippy::cast_precision_loss, reason = "a drawing")]
        let points = IDLE.iter().zip(&done).map(|(count, done)| (*count as f64, of(done) as f64));
        Curve { label: label.to_owned(), points: points.collect() }
    };
    Plot {
        title: format!("Jobs (birth, sort of {KEYS} keys, death) beside idle VMs, {lanes} at a time"),
        x: "idle VMs",
        y: "jobs per minute",
        log_x: false,
        curves: vec![
            curve("median turn", &|done| median(&done.per_minute)),
            curve("best turn", &|done| done.per_minute.iter().copied().max().unwrap_or(0)),
            curve("worst turn", &|done| done.per_minute.iter().copied().min().unwrap_or(0)),
        ],
    }
    .write(out, "jobs.svg")
}

/// Jobs per minute, of `jobs` that took `elapsed` together.
fn per_minute(jobs: usize, elapsed: Duration) -> u64 {
    u64::try_from(jobs as u128 * 60_000_000 / elapsed.as_micros().max(1)).unwrap_or(u64::MAX)
}

/// Prints rows of figures.
fn table(done: &[Done], rates: &[u64]) {
    println!(
        "  {:>6}{:>12}{:>12}{:>12}{:>12}{:>12}{:>8}",
        "idle", "jobs/min", "of idle 0", "birth", "run", "death", "n"
    );
    for ((count, done), rate) in IDLE.iter().zip(done).zip(rates) {
        let (birth, run, death) = (median(&done.births), median(&done.runs), median(&done.deaths));
        println!(
            "  {count:>6}{rate:>12}{:>12.2}{:>12}{:>12}{:>12}{:>8}",
            ratio(*rate, rates[0]),
            shown(birth),
            shown(run),
            shown(death),
            done.births.len()
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rate_is_of_the_time_that_was_taken() {
        assert_eq!(per_minute(100, Duration::from_secs(20)), 300);
        assert_eq!(per_minute(1, Duration::from_millis(1500)), 40);
        assert_eq!(per_minute(0, Duration::ZERO), 0);
    }

    #[test]
    fn the_numbers_of_a_job_are_hexadecimal() {
        assert!(job_words().ends_with(" sort=7:100 end=o"), "{}", job_words());
    }
}
