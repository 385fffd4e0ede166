//! Deep chains: does a clone of a snapshot of a clone of a snapshot … start as one of the first
//! does?
//!
//! [`make`] makes the chain, and snapshots to compare its end (`depth_10`) with: its first one
//! (`depth_1`), `depth_1_same`, which has the same content at depth 1, and `depth_10_long`, which
//! has the same content in as many layers as the chain is deep.
//!
//! Births are those of [`super::birth`], in turns: **hit**, **miss**, and **cold**, the first of a
//! daemon, which reads and verifies all files.

mod make;
mod reads;

use crate::prelude::*;
use crate::testbed::{Birth, Births, Floor, Guest, Linked};
use make::{COUNT, Chain, DEPTH, DISK_BYTES, MEMORY_BYTES};

/// First births of a daemon, of each depth.
const COLD: usize = 11;
/// Births in a row that find a clone ready: the pool is for one snapshot at a time.
const TOGETHER: usize = 10;
const PAUSE: Duration = Duration::from_millis(20);

const COLUMNS: [Column; 5] = [
    ("layers", "/layers", Plain),
    ("n", "/birth/n", Plain),
    ("p50", "/birth/p50_us", Us),
    ("p99", "/birth/p99_us", Us),
    ("least", "/birth/min_us", Us),
];

/// Options of `chain`.
#[derive(Debug, clap::Args)]
pub struct Options {
    /// Births of each kind and depth
    #[arg(long, default_value_t = 100, value_name = "N", value_parser = at_least(1))]
    births: usize,
}

/// Runs it.
pub async fn run(options: &Options, places: &Places) -> Result<()> {
    let births = options.births.next_multiple_of(TOGETHER);
    let what = format!("{DEPTH} deep, {births} births of each depth, hit and miss");
    let report = Report::begin(places, "chain", C_FLOOR, &what);
    let guest = Guest::idle("floor")?;
    let (mut testbed, chain) = make::chain(places, &guest).await?;
    let reads = reads::run(&testbed.store()?, &chain.names)?;
    let mut floor = Floor::start(&testbed, &guest, Linked::Statically)?;
    let (mut floor_us, mut all) = (Vec::new(), Births::default());
    for _ in 0..COLD {
        for (what, name) in &chain.names {
            testbed.start(&["--pool", "0"]).await?;
            let birth = testbed.birth(name).await?;
            all.add(&testbed, &[(what, birth)], Some("cold")).await?;
            testbed.stop()?;
        }
    }
    testbed.start(&["--pool", "0"]).await?;
    for (_, name) in &chain.names {
        // The first of each reads all files.
        testbed.warm_up(name).await?;
    }
    for _ in 0..births / TOGETHER {
        let mut turns: Vec<(&str, Birth)> = Vec::new();
        for _ in 0..TOGETHER {
            for (what, name) in &chain.names {
                tokio::time::sleep(PAUSE).await;
                turns.push((what, testbed.birth(name).await?));
            }
            floor_us.push(floor.one_us()?);
        }
        all.add(&testbed, &turns, None).await?;
    }
    testbed.stop()?;
    testbed.start(&[]).await?;
    for _ in 0..births / TOGETHER {
        for (what, name) in &chain.names {
            // The pool turns to this snapshot.
            testbed.warm_up(name).await?;
            let mut births: Vec<(&str, Birth)> = Vec::new();
            for _ in 0..TOGETHER {
                testbed.pool_is_full().await?;
                births.push((what, testbed.birth(name).await?));
            }
            all.add(&testbed, &births, None).await?;
            testbed.pool_is_full().await?;
            floor_us.push(floor.one_us()?);
        }
    }
    let mut figures = figures(&chain, all, &floor_us);
    figures["reads"] = reads;
    testbed.finish(&report, figures)
}

fn figures(chain: &Chain, mut all: Births, floor_us: &[u64]) -> Value {
    let floor = Spread::of(floor_us);
    println!("  floor: {}", shown(floor.p50()));
    let table = Table::new(22, "births", &COLUMNS);
    let (mut births, mut ratios) = (json!({}), json!({}));
    for kind in ["hit", "warm_vmm", "miss", "cold"] {
        let mut spreads = Vec::new();
        births[kind] = json!({});
        for (what, _) in &chain.names {
            let of_kind = all.take(kind, what);
            if of_kind.us.is_empty() {
                continue;
            }
            let spread = Spread::of(&of_kind.us).against(&floor);
            let layers = chain.layers.get(what);
            let figures =
                json!({ "birth": spread, "layers": layers, "phases": of_kind.phases.json() });
            table.row(&format!("{kind} {what}"), &figures);
            births[kind][what] = figures;
            spreads.push((*what, spread));
        }
        let of = |what| spreads.iter().find(|(name, _)| *name == what).map(|(_, spread)| spread);
        for deep in ["depth_10", "depth_10_long"] {
            let (Some(same), Some(it)) = (of("depth_1_same"), of(deep)) else { continue };
            let [p50, least] = [0.5, 0.0].map(|q| ratio(it.quantile(q), same.quantile(q)));
            println!(
                "  {kind}: {deep} / depth 1 with the same content: {p50} (p50), {least} (least)"
            );
            ratios[format!("{deep}_{kind}")] = json!({ "p50": p50, "least": least });
        }
    }
    json!({
        "floor": floor, "births": births, "against_depth_1_same": ratios, "made": chain.made,
        "row": chain.row, "spent": chain.spent, "memory_bytes": MEMORY_BYTES,
        "disk_bytes": DISK_BYTES, "blocks_of_each": COUNT,
    })
}
