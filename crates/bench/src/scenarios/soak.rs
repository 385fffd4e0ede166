//! Thousands of births and deaths in a row, with kills from outside, and nothing left of them.
//!
//! Lanes ask for clones one at a time and many at once, hang up in the middle of some requests, and
//! end what they have in every way that there is ([`lanes`]). Meanwhile a thread sends SIGKILL to
//! the VMMs: to those that run, that wait in the pool, that are being made, to the pre-forked VMM
//! from which the next is made, and now and then to the zygote itself ([`killer`]). A birth may
//! fail because its VMM was killed; nothing else may fail, and nothing may take longer than ten
//! seconds.
//!
//! Every 500 births all VMs are ended, and what is left is counted ([`look`]): processes, zombies,
//! folders, layers, sockets, descriptors of the daemon, reservations of memory, leaks as the daemon
//! sees them. All of it has to be what it was before the first birth. At the end the daemon's
//! memory may not have grown by more than a twentieth, and the host's has to be back.

mod killer;
mod lanes;
mod look;

use crate::prelude::*;
use crate::testbed::host::{self, MIB};
use crate::testbed::{Guest, Testbed};
use killer::Killer;
use lanes::Lanes;
use look::{COLUMNS, POOL, Sample};

/// Births between two looks.
const ROUND: usize = 500;
const SEED: u64 = 4099;
const MEMORY_BYTES: u64 = 64 * MIB;
/// How long a process that was killed takes to end.
const DYING: Duration = Duration::from_millis(300);
/// The host's memory that may be missing at the end, for each birth: a VMM that was left would hold
/// a MiB at least. Others use the host too.
const LOST_BYTES: u64 = 64 << 10;

/// Options of `soak`.
#[derive(Debug, clap::Args)]
pub struct Options {
    /// Births
    #[arg(long, default_value_t = 10_000, value_name = "N", value_parser = at_least(1))]
    births: usize,
}

/// The daemon's memory after the first fifth of the births, and in the last fifth.
fn resident(samples: &[Sample], births: usize) -> (u64, u64) {
    let mean = |of: &dyn Fn(usize) -> bool| {
        let all: Vec<u64> = samples.iter().filter(|s| of(s.births)).map(|s| s.rss_bytes).collect();
        all.iter().sum::<u64>() / (all.len() as u64).max(1)
    };
    let fifth = births / 5;
    (mean(&|n| n > fifth && n <= 2 * fifth), mean(&|n| n > births - fifth))
}

/// Runs it.
pub async fn run(options: &Options, places: &Places) -> Result<()> {
    let births = options.births;
    let what = format!("{births} births and deaths with kills from outside, seed {SEED}");
    let report = Report::begin(places, "soak", "", &what);
    let guest = Guest::idle_of("soak", MEMORY_BYTES)?;
    let mut testbed = Testbed::baked(places, std::slice::from_ref(&guest)).await?;
    let result = soak(&mut testbed, &guest, &report, births).await;
    if result.is_err() {
        let path = places.out.join("soak.log");
        std::fs::write(&path, testbed.log()).with_context(|| path.display().to_string())?;
        eprintln!("  what the daemon has logged: {}", path.display());
    }
    result
}

async fn soak(testbed: &mut Testbed, guest: &Guest, report: &Report, births: usize) -> Result<()> {
    testbed.start(&["--pool", &POOL.to_string()]).await?;
    let name = &guest.name;
    let first = look::settled(testbed, name, None).await?;
    let available = host::settled_available()?;
    let killer = Killer::new(testbed, SEED)?;
    let mut lanes = Lanes::new(testbed, name, SEED + 1, killer.killed());
    let mut samples = vec![first.clone()];
    let begun = Instant::now();
    let table = Table::new(6, "births", &COLUMNS);
    while lanes.born() < births {
        killer.go();
        let round = lanes.round(ROUND.min(births - lanes.born())).await;
        killer.rest()?;
        round?;
        // The processes that were killed last have ended by then.
        tokio::time::sleep(DYING).await;
        lanes.nothing_is_left().await?;
        let sample = look::settled(testbed, name, Some(&first)).await?;
        let sample = Sample { births: lanes.born(), ..sample };
        table.row(&sample.births.to_string(), &sample);
        samples.push(sample);
    }
    let seconds = begun.elapsed().as_secs();
    let killed = killer.end()?;
    let (tally, longest_us) = lanes.end();
    let lost = lost(available)?;
    let leaks = testbed.client.leaks().await?.len();
    let leaked = testbed.end()?;
    let (early, late) = resident(&samples, births);
    println!("  {births} births in {seconds} s; the longest request took {}", shown(longest_us));
    tally.iter().for_each(|(what, n)| println!("  {n:>8}  {what}"));
    killed.iter().for_each(|(kind, n)| println!("  {n:>8}  killed: {kind}"));
    let [early_kib, late_kib, lost_kib] = [early, late, lost].map(|bytes| bytes >> 10);
    println!(
        "  memory of the daemon: {early_kib} KiB early, {late_kib} KiB late; of the host: \
         {lost_kib} KiB missing"
    );
    report.write(json!({
        "births": births, "seconds": seconds, "seed": SEED,
        "requests": tally, "killed": killed, "longest_request_us": longest_us,
        "daemon_rss": {
            "early_bytes": early, "late_bytes": late, "late_to_early": ratio(late, early),
        },
        "host_memory_missing_bytes": lost, "samples": samples, "leaks": leaks, "leaked": leaked,
    }))?;
    let failed = tally.iter().filter(|(what, _)| what.starts_with(lanes::FAILED));
    let (failed, kills): (u64, u64) = (failed.map(|(_, n)| n).sum(), killed.values().sum());
    ensure!(failed <= kills, "{failed} births failed although {kills} processes were killed");
    ensure!(leaked + leaks == 0, "{leaked} processes and {leaks} other things are left");
    // A short run has no samples that early.
    ensure!(
        early == 0 || late <= early + early / 20,
        "the daemon's memory grows: {early} bytes after {} births, {late} at the end",
        births / 5
    );
    let most = LOST_BYTES * births as u64;
    ensure!(lost <= most, "{lost} bytes of the host's memory have not come back");
    Ok(())
}

/// What is missing of the `available` memory; some of it comes back late.
fn lost(available: u64) -> Result<u64> {
    let mut back = host::settled_available()?;
    for _ in 0..20 {
        if back + MIB >= available {
            break;
        }
        back = back.max(host::settled_available()?);
    }
    Ok(available.saturating_sub(back))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_fifth_is_warm_up() {
        let of = |births, rss_bytes| Sample { births, rss_bytes, ..Sample::default() };
        let samples = [
            of(0, 1),
            of(2_000, 5),
            of(2_500, 10),
            of(4_000, 12),
            of(4_500, 90),
            of(8_500, 14),
            of(10_000, 16),
        ];
        assert_eq!(resident(&samples, 10_000), (11, 15));
    }
}
