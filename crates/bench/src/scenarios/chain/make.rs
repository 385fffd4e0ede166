//! Makes the chain, by the daemon.
//!
//! A guest of [`MEMORY_BYTES`] with a disk of [`DISK_BYTES`] writes [`COUNT`] blocks and as many
//! pages, spread over both, and is snapshotted. Its clone writes as many and is snapshotted, and so
//! on, [`DEPTH`] times. The guest of `depth_1_same` wrote all of that before its only snapshot, so
//! it differs from the chain's end in nothing but depth.
//!
//! The daemon merges layers of long chains. `depth_10_long` is the chain's end with layers that
//! were never merged, one for each depth: [`long`] puts it together from snapshots of guests that
//! wrote for one depth only.
//!
//! Besides, one VM that writes all the time is snapshotted [`ROW`] times in a row.
//!
//! `save_us` and `commit_us` are what the client of a running VM sees. Before 2026-11-26 they were
//! those of the VMM and of the store alone, so older figures do not compare.
//!
//! Every clone first reads all its blocks and pages and compares them with what it remembers.

use crate::prelude::*;
use crate::testbed::{Guest, Taken, Testbed, host::MIB};
use dayfly_store::{ChainLayer, DiskSpec, PagedSpec, SnapshotSpec};
use dayfly_vmm::arch::layout;
use std::collections::BTreeMap;
use std::io;

/// RAM of the guests.
pub const MEMORY_BYTES: u64 = 256 * MIB;
/// As large as a usual root disk: a map has a bit for each block.
pub const DISK_BYTES: u64 = 2048 * MIB;
/// Snapshots of the chain.
pub const DEPTH: u32 = 10;
/// Blocks, and pages, that each of them writes.
pub const COUNT: u64 = 0x100;
/// Blocks, and pages, of a guest that writes much: without those drawn twice 9 MiB of each.
const MUCH: u64 = 0xa80;
/// Snapshots of one VM.
const ROW: u32 = 100;
/// Snapshots of clones of a guest that wrote much, of each kind.
const SPENT: u32 = 5;
/// How long a guest may take to write, or to read everything.
const WITHIN: Duration = Duration::from_secs(120);

/// What was made, and what that took.
pub struct Chain {
    /// The snapshots whose births are compared.
    pub names: [(&'static str, Name); 4],
    /// Layers of the disk of each.
    pub layers: BTreeMap<&'static str, usize>,
    /// Per snapshot of the chain: microseconds of save and commit, bytes of the store.
    pub made: Vec<Value>,
    /// What snapshots of one VM in a row cost.
    pub row: Value,
    /// What a snapshot costs of a clone that has done nothing, and of one that has written much.
    pub spent: Value,
}

fn name(what: &str, number: u32) -> Result<Name> {
    Ok(format!("{what}-{number}").parse()?)
}

/// A guest that writes `count` slots for each of `seeds` seeds from `first` on; its clones look,
/// and then do as `then` says (`dayfly_microguest`).
fn guest(name: &str, count: u64, seeds: u32, first: u32, then: char) -> Result<Guest> {
    let words = format!("grow={:x}:{count:x}:{seeds:x}:{first:x}:{then}", layout::GENERATION.0);
    Ok(Guest { disk_bytes: DISK_BYTES, ..Guest::new(name, MEMORY_BYTES, words)? })
}

/// Makes everything, in a testbed whose store also has `floor`, and whose daemon does not run.
pub async fn chain(places: &Places, floor: &Guest) -> Result<(Testbed, Chain)> {
    let mut guests = vec![
        floor.clone(),
        guest("chain-1", COUNT, 1, 1, 'g')?,
        guest("same", COUNT, DEPTH, 1, 'g')?,
        guest("churning", COUNT, 1, 1, 'c')?,
        guest("idle", MUCH, 1, 1, 'l')?,
        guest("growing", MUCH, 1, 1, 'g')?,
    ];
    for depth in 1..=DEPTH {
        guests.push(guest(&format!("layer-{depth}"), COUNT, 1, depth, 'g')?);
    }
    let mut testbed = Testbed::baked(places, &guests).await?;
    testbed.start(&["--pool", "0"]).await?;
    let mut made = Vec::new();
    for depth in 2..=DEPTH {
        let (from, to) = (name("chain", depth - 1)?, name("chain", depth)?);
        made.push(deeper(&testbed, &format!("Grow({depth})"), &from, &to).await?);
    }
    let row = row(&testbed, &guests[3].name).await?;
    let spent = spent(&testbed, &guests[4].name, &guests[5].name).await?;
    testbed.stop()?;
    long(&testbed)?;

    let names = [
        ("depth_1", name("chain", 1)?),
        ("depth_1_same", guests[2].name.clone()),
        ("depth_10", name("chain", DEPTH)?),
        ("depth_10_long", name("long", DEPTH)?),
    ];
    testbed.start(&["--pool", "0"]).await?;
    let (mut layers, mut found) = (BTreeMap::new(), Vec::new());
    for (what, name) in &names {
        layers.insert(*what, testbed.client.snapshot(name).await?.layers.len());
        found.push(look(&testbed, name).await?);
    }
    testbed.stop()?;
    ensure!(
        found[0] < found[1] && found[1..].iter().all(|n| *n == found[1]),
        "slots found: {found:?}"
    );
    Ok((testbed, Chain { names, layers, made, row, spent }))
}

/// A clone that has looked, and then done what its guest does; and how many slots it found.
async fn clone(testbed: &Testbed, from: &Name) -> Result<(VmId, u64)> {
    let (vm, _) = testbed.create(from).await?;
    let done = async {
        loop {
            let console = testbed.console(vm.id);
            ensure!(!console.contains("failed"), "a clone of {from}; its console: {console:?}");
            let mut lines = console.lines();
            let found = lines.find_map(|line| line.strip_prefix("found "));
            let waits = ["ready\n", "churning\n"].iter().any(|end| console.ends_with(end));
            if let Some(found) = found.filter(|_| waits) {
                return u64::from_str_radix(found, 16).context("slots that were found");
            }
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    };
    let found = tokio::time::timeout(WITHIN, done).await;
    let found = found.with_context(|| format!("a clone of {from} does not end its work"))??;
    ensure!(found > 0, "a clone of {from} found nothing");
    Ok((vm.id, found))
}

/// How many slots of its disk and memory a clone of `from` finds written.
async fn look(testbed: &Testbed, from: &Name) -> Result<u64> {
    let (vm, found) = clone(testbed, from).await?;
    testbed.remove(vm).await?;
    Ok(found)
}

/// A clone of `from` does `what`, and becomes the snapshot `to`.
async fn deeper(testbed: &Testbed, what: &str, from: &Name, to: &Name) -> Result<Value> {
    let before = state_bytes(testbed)?;
    let (vm, _) = clone(testbed, from).await?;
    let Taken { snapshot, save_us, commit_us } = testbed.snapshot(vm, to).await?;
    testbed.remove(vm).await?;
    Ok(json!({
        "what": what, "layers": snapshot.layers.len(), "save_us": save_us, "commit_us": commit_us,
        "store_bytes": state_bytes(testbed)?.saturating_sub(before),
    }))
}

/// What the state folder takes on its disk.
fn state_bytes(testbed: &Testbed) -> Result<u64> {
    let du = std::process::Command::new("du").args(["-s", "-B1"]).arg(testbed.state()).output()?;
    let text = String::from_utf8_lossy(&du.stdout).into_owned();
    text.split_whitespace().next().and_then(|n| n.parse().ok()).context("the output of du")
}

/// Snapshots of clones of guests that have written [`MUCH`] slots: one clone does nothing, one
/// writes as many.
async fn spent(testbed: &Testbed, idle: &Name, growing: &Name) -> Result<Value> {
    let mut all = Vec::new();
    for n in 0..SPENT {
        all.push(deeper(testbed, "Idle", idle, &name("much-idle", n)?).await?);
        all.push(deeper(testbed, "Grow(2)", growing, &name("much-grown", n)?).await?);
    }
    println!("  snapshots of clones of a guest with {MUCH} slots: {}", Value::from(all.clone()));
    Ok(all.into())
}

/// Snapshots one VM again and again while it writes; clones of some snapshots look whether they
/// have what was there.
async fn row(testbed: &Testbed, from: &Name) -> Result<Value> {
    let (vm, _) = clone(testbed, from).await?;
    let (mut commits, mut most) = (Vec::new(), 0);
    for n in 1..=ROW {
        tokio::time::sleep(Duration::from_millis(10)).await;
        let taken = testbed.snapshot(vm, &name("row", n)?).await?;
        most = most.max(taken.snapshot.layers.len());
        commits.push(taken.commit_us);
    }
    testbed.remove(vm).await?;
    let mut found = BTreeMap::new();
    for n in [1, 2, 5, 6, 20, 50, 63, 64, 65, 66, ROW - 1, ROW] {
        found.insert(n, look(testbed, &name("row", n)?).await?);
    }
    ensure!(found.values().is_sorted(), "slots found: {found:?}");
    let commit = Spread::of(&commits);
    println!(
        "  {ROW} snapshots of one VM: at most {most} layers, commit p50 {}, slots found {found:?}",
        shown(commit.p50())
    );
    Ok(json!({ "snapshots": ROW, "most_layers": most, "commit": commit, "slots_found": found }))
}

/// The end of the chain with a layer for each depth.
fn long(testbed: &Testbed) -> Result<()> {
    let store = testbed.store()?;
    let end = store.open_snapshot(&name("chain", DEPTH)?)?;
    let (manifest, disk) = (&end.manifest, &end.manifest.disks[0]);
    let layer = |depth| {
        let layers = store.snapshot(&name("layer", depth)?)?.disks[0].layers.clone();
        ensure!(layers.len() == 1, "depth {depth}: expected one layer, got {}", layers.len());
        Ok(ChainLayer::Stored(layers[0]))
    };
    let writer = store.snapshot_writer(&name("long", DEPTH)?)?;
    io::copy(&mut &end.state, &mut writer.state())?;
    dayfly_store::sparse::copy(&mut &end.memory, writer.memory(), manifest.memory_bytes)?;
    let spec = SnapshotSpec {
        parent: manifest.parent.clone(),
        ancestors: Vec::new(),
        kernel: manifest.kernel.clone(),
        vcpus: manifest.vcpus,
        max_vcpus: manifest.max_vcpus,
        cpu_model: manifest.cpu_model,
        nets: manifest.nets,
        memory_bytes: manifest.memory_bytes,
        agent_version: manifest.agent_version.clone(),
        config: manifest.config.clone(),
        labels: manifest.labels.clone(),
        egress: manifest.egress.clone(),
        disks: vec![DiskSpec {
            image: disk.image.clone(),
            size_bytes: disk.size_bytes,
            writable: true,
            layers: (1..=DEPTH).map(layer).collect::<Result<_>>()?,
        }],
    };
    writer.saved().commit_paged(&spec, &PagedSpec::of(&"default".parse()?))?;
    Ok(())
}
