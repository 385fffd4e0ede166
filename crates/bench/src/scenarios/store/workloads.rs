//! What the workloads' snapshots take (`crate::stock::scripts`).
//!
//! Of each: a VM boots the image of the workloads and begins; late in it all programs are stopped,
//! looked at, and a snapshot is taken. It is the only one in its store, so what the packs grow by
//! is its own. Then its disk is read whole in the VM, which still lives, and in a clone.

use super::exact::{Exact, Files, Memory, compared};
use super::split::Split;
use crate::prelude::*;
use crate::stock::scripts::{LATER, Script, Workload};
use crate::stock::{Stock, reported};

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
pub async fn run(stock: &Stock, image: &Name, workload: Workload, memory: Bytes) -> Result<Figure> {
    let Script { what, run, late, bound_s, done } = workload.script();
    let label = |doing: &str| stock.steps.begin(format!("{workload:?}, {memory}: {doing}"));
    let snapshot = "bench-workload".parse()?;
    stock.remove_vms().await?;
    stock.remove_snapshot(&snapshot).await?;
    let empty = stock.client.store_stats().await?;
    let there = empty.pages.unique;
    ensure!(
        there == 0,
        "expected a store without pages, so that a snapshot's bytes are its own; got {there} pages"
    );

    label("booting");
    let vm = stock.boot(image, memory.0).await?;
    label("running");
    let began = Instant::now();
    stock.sh(vm, LATER, &[run, late, &bound_s.to_string()]).await?;
    let stop = "DAYFLY_GUEST=1 dayfly-witness stop >/dev/null; exec dayfly-witness memory";
    let before: Memory = reported(&stock.sh(vm, stop, &[]).await?)?;
    let ran_s = began.elapsed().as_secs();
    let progress = stock.sh(vm, done, &[]).await?.trim().to_owned();

    label("taking a snapshot");
    let began = Instant::now();
    let taken = stock.snapshot(vm, &snapshot).await?;
    let snapshot_s = began.elapsed().as_secs_f64();
    let split = Split::since(&stock.client, &empty, &snapshot).await?;

    label("reading the disk of the original");
    let original: Files = stock.witness(vm, "disk /").await?;
    stock.remove_vms().await?;
    let (clone, mut exact) = compared(stock, &snapshot, &before, Some(&original)).await?;
    if workload == Workload::Pattern {
        exact.memory_same &= stock.sh(clone, done, &[]).await?.trim() == progress;
    }
    stock.remove_vms().await?;
    stock.remove_snapshot(&snapshot).await?;
    stock.steps.end();
    Ok(Figure {
        workload,
        what: what.clone(),
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
