//! Deep chains: does a clone of a snapshot of a clone of a snapshot … start as one of the first does?
//!
//! A guest of [`MEMORY_BYTES`] with a disk of [`DISK_BYTES`] writes [`COUNT`] blocks and as many pages, spread over both, is snapshotted,
//! cloned, writes, is snapshotted …, [`DEPTH`] times, each time by the store's own commit. Beside it: the first of the chain
//! (`depth_1`), and `depth_1_same`, a snapshot whose guest wrote all of that before it was snapshotted once. The last differs
//! from the chain's end in nothing but depth.
//!
//! `depth_10_long` is the same chain committed without flattening (`store::snapshots::flatten`): what a chain costs that is as long as it is deep.
//!
//! And one VM that writes all the time is snapshotted [`ROW`] times in a row while it goes on.
//!
//! Births are those of [`crate::birth`], in turns: **hit**, **miss**, and **cold**, the first of a daemon, which reads and verifies all files
//! and materialises RAM. A clone of each is told to read all its blocks and pages and compare them with what it remembers.

mod reads;
mod vm;

use crate::bake::{Bake, Keep};
use crate::common::{self, MIB, Spread, ratio, shown};
use crate::floor::{Floor, Programs};
use crate::room::Room;
use anyhow::{Context, Result, ensure};
use dayfly_microguest::Growth;
use dayfly_store::Store;
use dayfly_units::Name;
use dayfly_vmm::arch::layout;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;

/// RAM of the guests.
const MEMORY_BYTES: u64 = 256 * MIB;
/// As large as a usual root disk: a map has a bit for each block.
const DISK_BYTES: u64 = 2048 * MIB;
/// Snapshots of the chain.
const DEPTH: u32 = 10;
/// Blocks, and pages, that each of them writes.
const COUNT: u64 = 0x100;
/// Blocks, and pages, that a guest writes which writes much: with those drawn twice 9 MiB of each.
const MUCH: u64 = 0xa80;
/// Snapshots of one VM.
const ROW: u32 = 100;
/// Births of each kind and depth.
const BIRTHS: usize = 100;
/// First births of a daemon, of each depth.
const COLD: usize = 11;
/// Births in a row that find a clone ready: the pool is for one snapshot at a time.
const TOGETHER: usize = 10;
const PAUSE: Duration = Duration::from_millis(20);

fn words(seeds: u32) -> String {
    format!("grow={:x}:{COUNT:x}:{seeds:x}", layout::GENERATION.0)
}

/// What was made, and what that took.
struct Chain {
    names: [(&'static str, Name); 4],
    /// Layers of the disk of each.
    layers: BTreeMap<&'static str, usize>,
    /// Per snapshot of the chain: microseconds of save and commit, bytes of the store.
    made: Vec<Value>,
    row: Value,
    /// What a snapshot costs of a clone that has done nothing, and of one that has written much.
    spent: Value,
}

fn state_bytes(room: &Room) -> Result<u64> {
    let du = std::process::Command::new("du").args(["-s", "-B1"]).arg(room.state()).output()?;
    let text = String::from_utf8_lossy(&du.stdout).into_owned();
    text.split_whitespace().next().and_then(|n| n.parse().ok()).context("what du says")
}

fn make(room: &Room, floor: &Name) -> Result<Chain> {
    let store = Store::open(&room.state())?;
    let tenant: Name = "default".parse()?;
    let name = |n: u32| format!("chain-{n}").parse::<Name>();
    let bake = Bake {
        room,
        store: &store,
        memory_bytes: MEMORY_BYTES,
        disk_bytes: DISK_BYTES,
        tenant: Some(&tenant),
    };
    Bake { tenant: None, ..bake }.bake(floor, &crate::birth::words())?;
    bake.bake(&name(1)?, &words(1))?;
    let same: Name = "same".parse()?;
    bake.bake(&same, &words(DEPTH))?;
    let long = |n: u32| format!("long-{n}").parse::<Name>();
    let mut made = Vec::new();
    for depth in 2..=DEPTH {
        made.push(deeper(
            room,
            &store,
            Growth::Grow(depth),
            &name(depth - 1)?,
            &name(depth)?,
            Keep { tenant: Some(&tenant), flat: true },
        )?);
        let from = if depth == 2 { name(1)? } else { long(depth - 1)? };
        deeper(
            room,
            &store,
            Growth::Grow(depth),
            &from,
            &long(depth)?,
            Keep { tenant: Some(&tenant), flat: false },
        )?;
    }
    let names = [
        ("depth_1", name(1)?),
        ("depth_1_same", same),
        ("depth_10", name(DEPTH)?),
        ("depth_10_long", long(DEPTH)?),
    ];
    let mut layers = BTreeMap::new();
    let mut found = Vec::new();
    for (what, name) in &names {
        layers.insert(*what, store.snapshot(name)?.disks[0].layers.len());
        found.push(vm::look(room, &store, name)?);
    }
    ensure!(found[0] < found[1] && found[1..].iter().all(|n| *n == found[1]), "slots found: {found:?}");
    let row = row(room, &store, &name(1)?, &tenant)?;
    let spent = spent(room, &store, bake, &tenant)?;
    Ok(Chain { names, layers, made, row, spent })
}

/// A clone of `from` does `what`, and is kept as `to`.
fn deeper(room: &Room, store: &Store, what: Growth, from: &Name, to: &Name, keep: Keep<'_>) -> Result<Value> {
    let before = state_bytes(room)?;
    let mut vm = vm::Grower::new(room, store, from, what)?;
    let saved = vm.snapshot(to, keep)?;
    vm.end()?;
    let layers = saved.committed.manifest.disks[0].layers.len();
    let bytes = state_bytes(room)?.saturating_sub(before);
    Ok(json!({
        "what": format!("{what:?}"), "layers": layers, "save_us": saved.save_us, "commit_us": saved.commit_us,
        "store_bytes": bytes,
    }))
}

/// Snapshots of clones of a guest that has [`MUCH`] slots of its own: one that does nothing, one that writes as many.
fn spent(room: &Room, store: &Store, bake: Bake<'_>, tenant: &Name) -> Result<Value> {
    let much: Name = "much".parse()?;
    bake.bake(&much, &format!("grow={:x}:{MUCH:x}:1", layout::GENERATION.0))?;
    let keep = Keep { tenant: Some(tenant), flat: true };
    let mut all = Vec::new();
    for n in 0..5 {
        for what in [Growth::Idle, Growth::Grow(n + 2)] {
            let to = format!("much-{n}-{}", if what == Growth::Idle { "idle" } else { "grown" }).parse()?;
            all.push(deeper(room, store, what, &much, &to, keep)?);
        }
    }
    println!("  snapshots of clones of a guest with {MUCH} slots: {all:?}");
    Ok(all.into())
}

/// Snapshots one VM again and again while it writes; clones of some of them look whether they have what was there.
fn row(room: &Room, store: &Store, from: &Name, tenant: &Name) -> Result<Value> {
    let mut vm = vm::Grower::new(room, store, from, Growth::Churn(1000))?;
    let name = |n: u32| format!("row-{n}").parse::<Name>();
    let (mut commits, mut most) = (Vec::new(), 0);
    for n in 1..=ROW {
        std::thread::sleep(Duration::from_millis(10));
        let saved = vm.snapshot(&name(n)?, Keep { tenant: Some(tenant), flat: true })?;
        most = most.max(vm.go_on(&saved)?);
        commits.push(saved.commit_us);
    }
    vm.end()?;
    let mut found = BTreeMap::new();
    for n in [1, 2, 5, 6, 20, 50, 63, 64, 65, 66, ROW - 1, ROW] {
        found.insert(n, vm::look(room, store, &name(n)?)?);
    }
    ensure!(found.values().is_sorted(), "slots found: {found:?}");
    let commit = Spread::of(&commits, None);
    println!(
        "  {ROW} snapshots of one VM: at most {most} layers, commit p50 {}, slots found {found:?}",
        shown(commit.p50_us)
    );
    Ok(json!({ "snapshots": ROW, "most_layers": most, "commit": commit, "slots_found": found }))
}

/// Times by kind and depth.
#[derive(Default)]
struct Times(BTreeMap<(&'static str, &'static str), (Vec<u64>, common::Phases)>);

impl Times {
    /// A birth of `name`, noted as what it was.
    async fn birth(&mut self, room: &Room, what: &'static str, name: &Name, cold: bool) -> Result<()> {
        let birth = room.birth(name).await?;
        let details = room.client.vm(&birth.vm.id.to_string()).await?;
        let has = |mark: &str| details.timeline.iter().any(|(phase, _)| phase == mark);
        let kind = match (cold, has("vmm runs: the clone was ready"), has("vmm runs")) {
            (true, ..) => "cold",
            (_, true, _) => "hit",
            (_, _, true) => "miss",
            _ => "shell",
        };
        let (all, phases) = self.0.entry((kind, what)).or_default();
        all.push(birth.took_us());
        for (phase, us) in &details.timeline {
            phases.add(phase, *us);
        }
        room.remove(birth.vm.id).await?;
        Ok(())
    }
}

/// Runs it.
pub async fn run(programs: &Path, floors: &Programs, out: &Path) -> Result<()> {
    println!("chain: {DEPTH} deep, {BIRTHS} births of each depth, hit and miss; load {}", common::load());
    let mut room = Room::new(programs)?;
    let floor_name: Name = "floor".parse()?;
    let chain = make(&room, &floor_name)?;
    let reads = reads::run(&Store::open(&room.state())?, &chain.names)?;
    let mut floor = Floor::start(&floors.fast, &room.memory_of(&floor_name), MEMORY_BYTES)?;
    let mut floor_us = Vec::new();
    let mut times = Times::default();
    for _ in 0..COLD {
        for (what, name) in &chain.names {
            room.start_with(&["--pool", "0"]).await?;
            times.birth(&room, what, name, true).await?;
            room.stop()?;
        }
    }
    room.start_with(&["--pool", "0"]).await?;
    for n in 0..=BIRTHS {
        for (what, name) in &chain.names {
            tokio::time::sleep(PAUSE).await;
            // The first of each reads all files.
            times.birth(&room, if n == 0 { "first" } else { what }, name, false).await?;
        }
        floor_us.push(floor.one_us()?);
    }
    room.stop()?;
    room.start().await?;
    for _ in 0..BIRTHS / TOGETHER {
        for (what, name) in &chain.names {
            // The pool turns to this snapshot.
            times.birth(&room, "first", name, false).await?;
            for _ in 0..TOGETHER {
                room.pool_is_full().await?;
                times.birth(&room, what, name, false).await?;
            }
            room.pool_is_full().await?;
            floor_us.push(floor.one_us()?);
        }
    }
    let leaked = room.end()?;
    report(&chain, &times, &floor_us, reads, leaked, out)
}

fn report(
    chain: &Chain,
    times: &Times,
    floor: &[u64],
    reads: Value,
    leaked: usize,
    out: &Path,
) -> Result<()> {
    let floor = Spread::of(floor, None);
    println!("  floor: {}", shown(floor.p50_us));
    let (mut value, mut ratios) = (serde_json::Map::new(), serde_json::Map::new());
    for kind in ["hit", "shell", "miss", "cold"] {
        let mut of_kind = serde_json::Map::new();
        let spread = |what| times.0.get(&(kind, what)).map(|(us, _)| Spread::of(us, Some(&floor)));
        for (what, _) in &chain.names {
            let (Some(spread), Some((_, phases))) = (spread(*what), times.0.get(&(kind, *what))) else {
                continue;
            };
            let layers = chain.layers.get(what);
            println!(
                "  {kind:<6}{what:<14}{:>3} layers, n {:>4}: p50 {:>9}, p99 {:>9}, least {:>9}",
                layers.copied().unwrap_or(0),
                spread.n,
                shown(spread.p50_us),
                shown(spread.p99_us),
                shown(spread.min_us)
            );
            of_kind.insert(
                (*what).to_owned(),
                json!({ "birth": spread, "layers": layers, "phases": phases.json() }),
            );
        }
        for deep in ["depth_10", "depth_10_long"] {
            let (Some(same), Some(it)) = (spread("depth_1_same"), spread(deep)) else { continue };
            let (p50, least) = (ratio(it.p50_us, same.p50_us), ratio(it.min_us, same.min_us));
            println!("  {kind}: {deep} against depth 1 with the same content: {p50} (p50), {least} (least)");
            ratios.insert(format!("{deep}_{kind}"), json!({ "p50": p50, "least": least }));
        }
        value.insert(kind.to_owned(), of_kind.into());
    }
    println!("  leaked processes: {leaked}");
    let value = json!({
        "floor": floor,
        "births": value,
        "against_depth_1_same": ratios,
        "reads": reads,
        "made": chain.made,
        "row": chain.row,
        "spent": chain.spent,
        "memory_bytes": MEMORY_BYTES,
        "disk_bytes": DISK_BYTES,
        "blocks_of_each": COUNT,
        "load": common::load(),
        "leaked": leaked,
    });
    common::write(out, "chain.json", &value)
}
