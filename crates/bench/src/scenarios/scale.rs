//! Many VMs: many births by one request, and the n-th birth beside all earlier VMs ([`nth`]).
//!
//! `at_once_N_first` is what a daemon does that never saw such a burst: it makes nearly all of
//! them from nothing. Afterwards it expects another such burst (`dayfly_daemon::vmm::pool`), and
//! `at_once_N` are bursts after the first one.

mod nth;

use crate::prelude::*;
use crate::testbed::{AtOnce, Floor, Guest, Linked, Testbed};
use nth::Nth;

/// VMs that the pool may hold, however much memory the host has: by itself a pool takes a twentieth
/// of the memory, which is enough for 512 from 20 GiB on.
const POOL: &str = "2048";
/// Births of `--full`.
const FULL: usize = 2000;

/// Options of `scale`.
#[derive(Debug, clap::Args)]
pub struct Options {
    /// 2,000 VMs too
    #[arg(long)]
    full: bool,
    /// Births by one request, and one after another
    #[arg(long, default_value_t = 512, value_name = "N")]
    at_once: usize,
    /// Rounds of each
    #[arg(long, default_value_t = 3, value_name = "N", value_parser = at_least(2))]
    rounds: usize,
}

/// A burst of births, and the floor's.
struct Burst {
    ours: AtOnce,
    floor_us: u64,
}

/// Runs it.
pub async fn run(options: &Options, places: &Places) -> Result<()> {
    let (at_once, rounds) = (options.at_once, options.rounds);
    let last = if options.full { FULL } else { at_once };
    let what = format!("{at_once} at once, {last} one after another");
    let report = Report::begin(places, "scale", C_FLOOR, &what);
    let guest = Guest::idle("scale")?;
    let name = &guest.name;
    let mut testbed = Testbed::baked(places, std::slice::from_ref(&guest)).await?;
    let mut floor = Floor::start(&testbed, &guest, Linked::Statically)?;
    testbed.start(&[]).await?;
    testbed.warm_up(name).await?;
    testbed.pool_is_full().await?;
    let per_floor = floor.each_bytes(at_once)?;
    let nth = Nth::measure(&testbed, name, last, rounds).await?;

    // A daemon that has seen no such burst has made next to nothing ahead for it.
    testbed.stop()?;
    testbed.start(&["--pool", POOL]).await?;
    testbed.warm_up(name).await?;
    let first = burst(&testbed, name, at_once, &mut floor, " for the first time").await?;
    let mut bursts = Vec::new();
    for _ in 0..rounds {
        bursts.push(burst(&testbed, name, at_once, &mut floor, "").await?);
    }
    let mut figures = nth.figures(per_floor);
    figures[format!("at_once_{at_once}")] = at_once_json(&bursts);
    figures[format!("at_once_{at_once}_first")] = at_once_json(&[first]);
    if options.full {
        let full = burst(&testbed, name, FULL, &mut floor, "").await?;
        figures[format!("at_once_{FULL}")] = at_once_json(&[full]);
    }
    testbed.finish(&report, figures)?;
    report.draw("", &nth.plot())?;
    let each: Vec<u64> = bursts.iter().flat_map(|burst| burst.ours.each_us.clone()).collect();
    let plot = Plot {
        title: format!("{at_once} births by one request"),
        x: "milliseconds from the request to each first port write",
        y: "share of the births",
        log_x: false,
        curves: vec![Curve::cdf("dayfly", &each)],
    };
    report.draw("-at-once", &plot)
}

/// Births by one request, which are removed again, and as many VMs of the floor.
async fn burst(
    testbed: &Testbed,
    name: &Name,
    count: usize,
    floor: &mut Floor,
    which: &str,
) -> Result<Burst> {
    testbed.pool_is_full().await?;
    let ours = testbed.at_once(name, count).await?;
    let removed_us = testbed.remove_all(&ours.ids).await?;
    testbed.pool_is_full().await?;
    let floor_us = floor.many_us(count)?;
    let times = [ours.all_us, ours.answered_us, floor_us, removed_us, floor.end_us()?];
    let [all, answered, floor, removed, floor_end] = times.map(shown);
    println!(
        "  {count} at once{which}: {all} to the last port write, {answered} to the answer; floor \
         {floor};\n    removed in {removed}, floor {floor_end}"
    );
    Ok(Burst { ours, floor_us })
}

fn at_once_json(bursts: &[Burst]) -> Value {
    let of = |pick: fn(&Burst) -> u64| median(&bursts.iter().map(pick).collect::<Vec<_>>());
    let (all, floor) = (of(|burst| burst.ours.all_us), of(|burst| burst.floor_us));
    let count = bursts.first().map_or(1, |burst| burst.ours.ids.len().max(1));
    json!({
        "all_us": all, "answered_us": of(|burst| burst.ours.answered_us), "floor_us": floor,
        "per_vm_us": all / count as u64, "ratio_to_floor": ratio(all, floor),
        "rounds": bursts.len(),
    })
}
