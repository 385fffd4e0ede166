//! First births of a daemon: the snapshot is not open, and the store's files may not be in memory.
//!
//! In each round a new daemon gets one request, and later another, which finds a warm clone. The
//! kinds of first births:
//!
//! - **first**: the snapshot was the last one that was cloned before the daemon was started, and
//!   the daemon has been asked for its metrics only, until its pool is full, as before a hit;
//! - **at once**: as *first*, but the request follows the daemon's first answer;
//! - **another**: another snapshot was cloned last, and this one's shape is unknown to the pool;
//! - **no pool**: the daemon runs with `--pool 0`, so that no VMM waits.
//!
//! The hits that they are compared with belong to the same daemons as *first*.

use crate::prelude::*;
use crate::testbed::{Births, Guest, Testbed};

/// How long a daemon without a warm clone runs before its first birth.
const SETTLED: Duration = Duration::from_millis(300);
const KINDS: [&str; 5] = ["hit", "first", "at once", "another", "no pool"];

/// Options of `first`.
#[derive(Debug, clap::Args)]
pub struct Options {
    /// Daemons of each kind
    #[arg(long, default_value_t = 21, value_name = "N", value_parser = at_least(1))]
    births: usize,
}

/// Runs it.
pub async fn run(options: &Options, places: &Places) -> Result<()> {
    let count = options.births;
    let what = format!("{count} daemons of each kind, 256 MiB, 1 vCPU");
    let report = Report::begin(places, "first", "a birth that finds a warm clone", &what);
    let guest = Guest::idle("first")?;
    let other = Guest::idle_of("other", 2 * guest.memory_bytes)?;
    let mut testbed = Testbed::baked(places, &[guest.clone(), other.clone()]).await?;
    let mut all = Births::default();
    remember(&mut testbed, &guest).await?;
    for _ in 0..count {
        testbed.start(&[]).await?;
        testbed.pool_is_full().await?;
        one(&mut testbed, &guest, &mut all, "first").await?;
        testbed.pool_is_full().await?;
        one(&mut testbed, &guest, &mut all, "hit").await?;
        testbed.stop()?;
        testbed.start(&[]).await?;
        one(&mut testbed, &guest, &mut all, "at once").await?;
        testbed.stop()?;
        remember(&mut testbed, &other).await?;
        testbed.start(&[]).await?;
        testbed.pool_is_full().await?;
        one(&mut testbed, &guest, &mut all, "another").await?;
        testbed.stop()?;
        remember(&mut testbed, &guest).await?;
        testbed.start(&["--pool", "0"]).await?;
        testbed.settled(SETTLED).await?;
        one(&mut testbed, &guest, &mut all, "no pool").await?;
        testbed.stop()?;
    }
    let mut figures = json!({});
    let table = Table::new(8, "", &SPREAD);
    let mut hit_us = 0;
    for name in KINDS {
        let kind = all.take(name, "");
        let spread = Spread::of(&kind.us);
        if name == "hit" {
            hit_us = spread.p50();
        }
        table.row(name, &spread);
        let over_us = spread.p50().saturating_sub(hit_us);
        figures[name.replace(' ', "_")] =
            json!({ "birth": spread, "over_a_hit_us": over_us, "phases": kind.phases.json() });
        if name == "first" || name == "another" {
            kind.phases.print(name);
        }
        if name != "hit" {
            println!("  {name}: {} over a hit (p50)", shown(over_us));
        }
    }
    testbed.finish(&report, figures)
}

/// Makes this snapshot the only one that was cloned last: a daemon that knows no other clones it.
async fn remember(testbed: &mut Testbed, guest: &Guest) -> Result<()> {
    std::fs::write(testbed.state().join("requested"), format!("{}\n", guest.name))?;
    testbed.start(&[]).await?;
    let (vm, _) = testbed.create(&guest.name).await?;
    testbed.remove(vm.id).await?;
    testbed.stop()
}

/// A birth of this kind, which is removed.
async fn one(
    testbed: &mut Testbed,
    guest: &Guest,
    all: &mut Births,
    kind: &'static str,
) -> Result<()> {
    let birth = testbed.birth(&guest.name).await?;
    all.add(testbed, &[("", birth)], Some(kind)).await
}
