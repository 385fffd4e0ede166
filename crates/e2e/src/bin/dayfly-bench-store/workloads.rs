//! What the workloads' snapshots take (`dayfly_e2e::bench::scripts`).
//!
//! Of each: a VM boots the image of the workloads and begins; late in it all programs are stopped, looked at, and a snapshot is taken. It is
//! the only one in its store, so what the packs grow by is its own. Then its disk is read whole in the VM, which still lives, and in a clone.

use crate::exact::{Exact, parse};
use crate::split::{Split, percent};
use anyhow::{Context, Result, ensure};
use dayfly_cli::progress::Steps;
use dayfly_e2e::bench::guests::Guests;
use dayfly_e2e::bench::place::Place;
use dayfly_e2e::bench::scripts::{LATER, Script, Workload};
use dayfly_units::{Bytes, Name};
use serde::{Deserialize, Serialize};
use std::time::Instant;

/// What one came to.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Figure {
    /// Which.
    pub workload: Workload,
    /// What it did.
    pub what: String,
    /// RAM of the guest.
    pub memory_bytes: u64,
    /// Seconds it ran, by the host's clock.
    pub ran_s: u64,
    /// How far it was.
    pub progress: String,
    /// RAM, and what it takes.
    pub split: Split,
    /// Pages to store, each content once, of a hundred of RAM: before compression.
    pub kept_percent: f64,
    /// What the store has more, of a hundred of RAM: after compression.
    pub stored_percent: f64,
    /// What the disk's own layer holds.
    pub layers_bytes: u64,
    /// Seconds that the snapshot took.
    pub snapshot_s: f64,
    /// What was compared with a clone.
    pub exact: Exact,
}

/// Runs `workload` once.
pub async fn run(
    place: &Place,
    guests: &Guests,
    image: &Name,
    workload: Workload,
    memory: Bytes,
    steps: &Steps,
) -> Result<Figure> {
    let Script { what, run, late, bound_s, done } = workload.script();
    let label = |doing: &str| steps.begin(format!("{workload:?}, {memory}: {doing}"));
    let snapshot = "bench-workload".parse()?;
    guests.remove_vms().await?;
    guests.remove_snapshot(&snapshot).await?;
    let empty = guests.client.store_stats().await?;
    let there = empty.pages.unique;
    ensure!(
        there == 0,
        "expected a store without pages, so that a snapshot's bytes are its own; got {there} pages"
    );

    label("booting");
    let vm = guests.boot(image, memory.0).await?;
    label("running");
    let began = Instant::now();
    guests.sh(vm, LATER, &[run, late, &bound_s.to_string()]).await?;
    let before = guests
        .sh(vm, "DAYFLY_GUEST=1 dayfly-witness stop >/dev/null; exec dayfly-witness memory", &[])
        .await?;
    let before = parse(&before).context("memory before the snapshot")?;
    let ran_s = began.elapsed().as_secs();
    let progress = guests.sh(vm, done, &[]).await?.trim().to_owned();

    label("taking a snapshot");
    let began = Instant::now();
    let taken = guests.snapshot(vm, &snapshot).await?;
    let snapshot_s = began.elapsed().as_secs_f64();
    let split = Split::since(&guests.client, &empty, &snapshot).await?;

    label("reading the disk of the original");
    let original =
        parse(&guests.sh(vm, "dayfly-witness disk /", &[]).await?).context("the original's files")?;
    guests.remove_vms().await?;
    let from_store = place.forget().await?;
    label("reading memory and disk of a clone");
    let clone = guests.clone_of(&snapshot).await?;
    let after =
        parse(&guests.sh(clone, "dayfly-witness memory", &[]).await?).context("memory of the clone")?;
    let files =
        parse(&guests.sh(clone, "dayfly-witness files /", &[]).await?).context("the clone's files")?;
    let mut exact = Exact::new(&before, Some(&original), &after, &files, from_store);
    if workload == Workload::Pattern {
        exact.memory_same &= guests.sh(clone, done, &[]).await?.trim() == progress;
    }
    guests.remove_vms().await?;
    guests.remove_snapshot(&snapshot).await?;
    steps.end();
    Ok(Figure {
        workload,
        what: what.to_owned(),
        memory_bytes: memory.0,
        ran_s,
        progress,
        kept_percent: percent(split.new_bytes, split.ram_bytes),
        stored_percent: percent(split.stored_bytes(), split.ram_bytes),
        split,
        layers_bytes: taken.layers_stored_bytes,
        snapshot_s,
        exact,
    })
}
