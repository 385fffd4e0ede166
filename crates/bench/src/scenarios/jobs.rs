//! Short jobs, one clone each, beside idle VMs: birth, an integer sort in the guest, death; in jobs
//! per minute.
//!
//! As in table 2 of *Swift Birth and Quick Death* (section 6.4.1), jobs are made as fast as
//! possible beside no, 128 and 256 idle VMs, and finished jobs are counted. In the paper one sort
//! takes seconds, and at most one guest for each of the 64 CPUs lives. Here as many lanes as the
//! host has CPUs each run one job after another. NPB's integer sort ranks its keys by counting, and
//! so does this one, with a number of keys that takes some tens of milliseconds if KVM emulates.
//!
//! A job is a `create`, the guest's console followed to its end (`logs`, as `dayfly logs -f`), and
//! a `remove`. The guest sorts, checks the order, prints a digest of the result, and powers itself
//! off. A wrong digest ends the benchmark. Nothing polls: the console's stream ends when the daemon
//! has seen the VMM's end.
//!
//! Idle VMs have written to their port and halted. Counts take turns: no idle VMs, 128, 256, and
//! again; a figure is the median of its turns.

use crate::prelude::*;
use crate::testbed::{Guest, Testbed, host::MIB, host::now_us};
use dayfly_api::client::LogOptions;
use dayfly_vmm::arch::layout;
use futures::future::try_join_all;

const COLUMNS: [Column; 8] = [
    ("jobs/min", "/idle", Plain),
    ("least", "/least", Plain),
    ("most", "/most", Plain),
    ("by 0", "/by_0", Digits(2)),
    ("birth", "/medians_us/birth", Us),
    ("run", "/medians_us/run", Us),
    ("death", "/medians_us/death", Us),
    ("n", "/jobs", Plain),
];

const IDLE: [usize; 3] = [0, 128, 256];
/// A job that takes longer counts as hung.
const WITHIN: Duration = Duration::from_secs(60);
const SEED: u64 = 7;
const KEYS: usize = 256;

/// Options of `jobs`.
#[derive(Debug, clap::Args)]
pub struct Options {
    /// Turns beside each number of idle VMs
    #[arg(long, default_value_t = 3, value_name = "N", value_parser = at_least(1))]
    turns: usize,
    /// Seconds of a turn
    #[arg(long, default_value_t = 20, value_name = "S")]
    seconds: u64,
}

/// What a job's guest does once it is born.
fn job_words() -> String {
    format!("until={:x} sort={SEED:x}:{KEYS:x} end=o", layout::GENERATION.0)
}

/// Microseconds of births, runs and deaths of finished jobs, and jobs per minute of each turn.
#[derive(Debug, Default)]
struct Done {
    jobs: Vec<[u64; 3]>,
    per_minute: Vec<u64>,
}

impl Done {
    /// Jobs per minute in the median turn.
    fn rate(&self) -> u64 {
        median(&self.per_minute)
    }

    fn figures(&self, rate_of_none: u64) -> Value {
        let [birth, run, death] = [0, 1, 2]
            .map(|part| median(&self.jobs.iter().map(|job| job[part]).collect::<Vec<_>>()));
        json!({
            "idle": self.rate(), "turns": self.per_minute, "jobs": self.jobs.len(),
            "medians_us": { "birth": birth, "run": run, "death": death },
            "least": self.per_minute.iter().min(), "most": self.per_minute.iter().max(),
            "by_0": ratio(self.rate(), rate_of_none),
        })
    }
}

/// Born, sorted, gone: the microseconds until each was answered.
async fn job(testbed: &Testbed, name: &Name, expected: &str) -> Result<[u64; 3]> {
    let (vm, sent_us) = testbed.create(name).await?;
    let born_us = now_us();
    let said = tokio::time::timeout(WITHIN, console_to_its_end(testbed, vm.id)).await;
    let said =
        said.with_context(|| format!("VM {}: its job takes more than {WITHIN:?}", vm.id))??;
    // Before the snapshot the guest said that it was ready; a clone's console is its own.
    ensure!(said == expected, "VM {}: expected its guest to say {expected:?}, got {said:?}", vm.id);
    let ran_us = now_us();
    Ok([born_us - sent_us, ran_us - born_us, testbed.remove(vm.id).await?])
}

async fn console_to_its_end(testbed: &Testbed, id: VmId) -> Result<String> {
    let followed = LogOptions { follow: true, ..LogOptions::default() };
    let mut console = testbed.client.logs(&id.to_string(), true, followed).await?;
    let mut said = Vec::new();
    while let Some(piece) = console.next().await? {
        said.extend_from_slice(&piece);
    }
    Ok(String::from_utf8_lossy(&said).into_owned())
}

/// One job after another until `end`; what was begun is finished.
async fn lane(
    testbed: &Testbed,
    name: &Name,
    expected: &str,
    end: Instant,
) -> Result<Vec<[u64; 3]>> {
    let mut jobs = Vec::new();
    while Instant::now() < end {
        jobs.push(job(testbed, name, expected).await?);
    }
    Ok(jobs)
}

/// Idle VMs, until there are as many as `count` and all have written to their port: the next
/// instruction halts them.
async fn idle(testbed: &Testbed, name: &Name, ids: &mut Vec<VmId>, count: usize) -> Result<()> {
    let made = try_join_all((ids.len()..count).map(|_| testbed.create(name))).await?;
    ids.extend(made.iter().map(|(vm, _)| vm.id));
    for id in ids {
        testbed.first_port_write_us(*id)?;
    }
    Ok(())
}

/// Runs it.
pub async fn run(options: &Options, places: &Places) -> Result<()> {
    let lanes = std::thread::available_parallelism()?.get();
    let what = format!(
        "{} turns of {} s beside each of {IDLE:?} idle VMs, {lanes} at a time, {KEYS} keys",
        options.turns, options.seconds
    );
    let report = Report::begin(places, "jobs", "", &what);
    let guests = [Guest::new("job", 256 * MIB, job_words())?, Guest::idle("idle")?];
    let [name, bystander] = guests.each_ref().map(|guest| &guest.name);
    let mut testbed = Testbed::baked(places, &guests).await?;
    testbed.start(&[]).await?;
    let expected = dayfly_microguest::sorted(SEED, KEYS);
    job(&testbed, name, &expected).await?;

    let mut done = IDLE.map(|_| Done::default());
    for _ in 0..options.turns {
        let mut ids = Vec::new();
        for (count, done) in IDLE.into_iter().zip(&mut done) {
            idle(&testbed, bystander, &mut ids, count).await?;
            testbed.pool_is_full().await?;
            let begun = Instant::now();
            let end = begun + Duration::from_secs(options.seconds);
            let lanes = (0..lanes).map(|_| lane(&testbed, name, &expected, end));
            let jobs = try_join_all(lanes).await?.concat();
            done.per_minute.push(per_minute(jobs.len(), begun.elapsed()));
            done.jobs.extend(jobs);
        }
        testbed.remove_all(&ids).await?;
    }
    let table = Table::new(4, "idle", &COLUMNS);
    let mut figures = json!({
        "ratio_256_to_0": ratio(done[2].rate(), done[0].rate()), "at_a_time": lanes, "keys": KEYS,
        "memory_bytes": 256 * MIB,
    });
    for (count, of_count) in IDLE.iter().zip(&done) {
        let of_count = of_count.figures(done[0].rate());
        table.row(&count.to_string(), &of_count);
        for key in ["idle", "turns", "jobs", "medians_us"] {
            figures[key][count.to_string()] = of_count[key].clone();
        }
    }
    testbed.finish(&report, figures)
}

/// Jobs per minute, of `jobs` that took `elapsed` together.
fn per_minute(jobs: usize, elapsed: Duration) -> u64 {
    u64::try_from(jobs as u128 * 60_000_000 / elapsed.as_micros().max(1)).unwrap_or(u64::MAX)
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
