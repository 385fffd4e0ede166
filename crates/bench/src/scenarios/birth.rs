//! Births one at a time: request on the API's socket to the first port write of the restored guest.
//!
//! A **hit** finds a warm clone in the pool: the scenario lets the pool fill before each birth. A
//! **miss** finds neither a warm clone nor a warm VMM, and nothing is made beside it: the daemon
//! runs with `--pool 0`, so that every birth forks a VMM. A mark in the timeline of a VM says what
//! its birth found. Births that found a warm VMM only are counted apart.
//!
//! The floor runs in turns with the births, each after the same wait.

use crate::prelude::*;
use crate::testbed::{Births, Floor, Guest, Linked, Testbed, host::MIB};

/// Pause between two births without a pool: the daemon finishes the work of the earlier birth.
const PAUSE: Duration = Duration::from_millis(20);
/// Clones that live beside each other before they are looked at and removed.
const TOGETHER: usize = 20;

/// Options of `birth`.
#[derive(Debug, clap::Args)]
pub struct Options {
    /// Births that find a clone ready, and as many that find nothing ready
    #[arg(long, default_value_t = 100, value_name = "N", value_parser = at_least(1))]
    births: usize,
}

/// Runs it.
pub async fn run(options: &Options, places: &Places) -> Result<()> {
    let count = options.births.next_multiple_of(TOGETHER);
    let what = format!("{count} + {count} births one at a time, 256 MiB, 1 vCPU");
    let report = Report::begin(places, "birth", C_FLOOR, &what);
    let guest = Guest::idle("birth")?;
    let name = &guest.name;
    let mut testbed = Testbed::baked(places, std::slice::from_ref(&guest)).await?;
    let mut floor = Floor::start(&testbed, &guest, Linked::Statically)?;
    let mut dynamic = Floor::start(&testbed, &guest, Linked::Dynamically)?;
    let (mut floor_us, mut dynamic_us, mut all) = (Vec::new(), Vec::new(), Births::default());

    testbed.start(&[]).await?;
    testbed.warm_up(name).await?;
    for _ in 0..count / TOGETHER {
        let mut births = Vec::with_capacity(TOGETHER);
        for _ in 0..TOGETHER {
            testbed.pool_is_full().await?;
            births.push(("", testbed.birth(name).await?));
            testbed.pool_is_full().await?;
            floor_us.push(floor.one_us()?);
            testbed.pool_is_full().await?;
            dynamic_us.push(dynamic.one_us()?);
        }
        all.add(&testbed, &births, None).await?;
    }
    testbed.stop()?;
    testbed.start(&["--pool", "0"]).await?;
    for _ in 0..count / TOGETHER {
        tokio::time::sleep(PAUSE).await;
        testbed.warm_up(name).await?;
        let mut births = Vec::with_capacity(TOGETHER);
        for _ in 0..TOGETHER {
            tokio::time::sleep(PAUSE).await;
            births.push(("", testbed.birth(name).await?));
            tokio::time::sleep(PAUSE).await;
            floor_us.push(floor.one_us()?);
        }
        all.add(&testbed, &births, None).await?;
    }
    finish(&report, &mut testbed, all, [&floor_us, &dynamic_us])
}

/// Prints, writes and draws.
fn finish(
    report: &Report,
    testbed: &mut Testbed,
    mut all: Births,
    [floor_us, dynamic_us]: [&[u64]; 2],
) -> Result<()> {
    let floor = Spread::of(floor_us);
    let of = |us: &[u64]| Spread::of(us).against(&floor);
    let [hit, warm_vmm, miss] = ["hit", "warm_vmm", "miss"].map(|kind| all.take(kind, ""));
    let table = Table::new(8, "", &SPREAD);
    table.row("floor", &floor);
    for (name, kind) in [("hit", &hit), ("warm VMM", &warm_vmm), ("miss", &miss)] {
        if !kind.us.is_empty() {
            table.row(name, of(&kind.us));
        }
    }
    hit.phases.print("a hit");
    miss.phases.print("a miss");
    let figures = json!({
        "floor": floor,
        "floor_dynamic": of(dynamic_us),
        "hit": of(&hit.us),
        "warm_vmm": of(&warm_vmm.us),
        "miss": of(&miss.us),
        "answer": { "hit": of(&hit.answers_us), "miss": of(&miss.answers_us) },
        "phases": hit.phases.json(),
        "phases_miss": miss.phases.json(),
        "memory_bytes": 256 * MIB,
    });
    testbed.finish(report, figures)?;
    let curves = [("floor", floor_us), ("pool hit", &hit.us), ("pool miss", &miss.us)];
    let plot = Plot {
        title: "Request to the first port write of the restored guest, one at a time".into(),
        x: "milliseconds",
        y: "share of the births",
        log_x: true,
        curves: curves.into_iter().map(|(label, us)| Curve::cdf(label, us)).collect(),
    };
    report.draw("", &plot)
}
