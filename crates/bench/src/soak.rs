//! Thousands of births and deaths in a row, with kills from outside, and nothing left of them.
//!
//! Lanes ask for clones one at a time and many at once, hang up in the middle of some requests, and end what they have in every way
//! that there is ([`lanes`]). Meanwhile somebody sends SIGKILL to the VMMs: to those that run, that wait in the pool, that are being
//! made, to the spare from which the next is made, and now and then to the zygote itself ([`killer`]). A birth may fail because its VMM
//! was killed; nothing else may fail, and nothing may take longer than ten seconds.
//!
//! Every 500 births all VMs are ended, and what is left is counted ([`look`]): processes, zombies, folders, layers, sockets, descriptors of
//! the daemon, reservations of memory, leaks as the daemon sees them. All of it has to be what it was before the first birth. At the
//! end the daemon's memory may not have grown by more than a twentieth, and the host's has to be back.

mod killer;
mod lanes;
mod look;

use crate::common::{self, MIB, ratio, shown};
use crate::room::Room;
use anyhow::{Context, Result, bail};
use dayfly_units::Name;
use killer::Killer;
use lanes::Lanes;
use look::Sample;
use serde_json::json;
use std::path::Path;
use std::time::{Duration, Instant};

/// How many are born where nobody says.
pub const BIRTHS: usize = 10_000;
/// Births between two looks.
const ROUND: usize = 500;
const SEED: u64 = 4099;
/// VMMs that wait: few enough that bursts find none.
const POOL: usize = 16;
const MEMORY_BYTES: u64 = 64 * MIB;
/// How long a process that was killed takes to end.
const DYING: Duration = Duration::from_millis(300);
/// The host's memory that may be missing at the end, for each birth: a VMM that was left would hold a MiB at least. Others use the host too.
const LOST_BYTES: u64 = 64 << 10;

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
pub async fn run(programs: &Path, out: &Path, births: usize) -> Result<()> {
    println!(
        "soak: {births} births and deaths with kills from outside, seed {SEED}; load {}",
        common::load()
    );
    let mut room = Room::new(programs)?;
    let result = soak(&mut room, out, births).await;
    if result.is_err() {
        let path = out.join("soak.log");
        std::fs::write(&path, room.log()).with_context(|| path.display().to_string())?;
        eprintln!("  what the daemon has logged: {}", path.display());
    }
    result
}

async fn soak(room: &mut Room, out: &Path, births: usize) -> Result<()> {
    let name: Name = "soak".parse()?;
    room.bake(&name, MEMORY_BYTES, &crate::birth::words())?;
    room.start_with(&["--pool", &POOL.to_string()]).await?;
    let first = look::settled(room, &name, None).await?;
    let available = common::settled_available()?;
    let killer = Killer::new(room, SEED)?;
    let mut lanes = Lanes::new(room, &name, SEED + 1, killer.killed());
    let mut samples = vec![first.clone()];
    let begun = Instant::now();
    look::head();
    while lanes.born() < births {
        killer.go();
        let round = lanes.round(ROUND.min(births - lanes.born())).await;
        killer.rest()?;
        round?;
        // Who was killed last is gone by then.
        tokio::time::sleep(DYING).await;
        lanes.nothing_is_left().await?;
        let sample = Sample { births: lanes.born(), ..look::settled(room, &name, Some(&first)).await? };
        sample.print();
        samples.push(sample);
    }
    let seconds = begun.elapsed().as_secs();
    let killed = killer.end()?;
    let (tally, longest_us) = lanes.end();
    let mut back = common::settled_available()?;
    for _ in 0..20 {
        if back + MIB >= available {
            break;
        }
        back = back.max(common::settled_available()?);
    }
    let lost = available.saturating_sub(back);
    let leaks = room.client.leaks().await?.len();
    let leaked = room.end()?;
    let (early, late) = resident(&samples, births);

    println!("  {births} births in {seconds} s; the longest request took {}", shown(longest_us));
    for (what, n) in &tally {
        println!("  {n:>8}  {what}");
    }
    for (kind, n) in &killed {
        println!("  {n:>8}  killed: {kind}");
    }
    println!(
        "  memory of the daemon: {} KiB early, {} KiB late; of the host: {} KiB missing",
        early >> 10,
        late >> 10,
        lost >> 10
    );
    println!("  leaked processes: {leaked}");
    let value = json!({
        "births": births, "seconds": seconds, "seed": SEED,
        "requests": tally, "killed": killed, "longest_request_us": longest_us,
        "daemon_rss": { "early_bytes": early, "late_bytes": late, "late_to_early": ratio(late, early) },
        "host_memory_missing_bytes": lost,
        "samples": samples,
        "leaks": leaks,
        "leaked": leaked,
        "load": common::load(),
    });
    common::write(out, "soak.json", &value)?;
    let failed: u64 = tally.iter().filter(|(what, _)| what.starts_with(lanes::FAILED)).map(|(_, n)| n).sum();
    let kills: u64 = killed.values().sum();
    if failed > kills {
        bail!("{failed} births failed although {kills} processes were killed");
    }
    if leaked + leaks > 0 {
        bail!("{leaked} processes and {leaks} other things are left");
    }
    // A short run has no samples that early.
    if early > 0 && late > early + early / 20 {
        bail!("the daemon's memory grows: {early} bytes after {} births, {late} at the end", births / 5);
    }
    if lost > LOST_BYTES * births as u64 {
        bail!("{lost} bytes of the host's memory have not come back");
    }
    Ok(())
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
