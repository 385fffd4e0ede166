//! Births one at a time: request on the API's socket to the first port write of the restored guest.
//!
//! A **hit** finds a clone ready in the pool: before each, the pool is given the time to fill. A **miss** finds neither a clone nor a
//! shell, and nothing is being made beside it: the daemon runs with `--pool 0`, so that every birth forks a VMM. What a birth found it
//! says itself, by a mark in its timeline; whatever is neither is counted apart.
//!
//! The floor runs in turns with the births, each after the same wait.

use crate::common::{self, MIB, Phases, Spread, shown};
use crate::floor::{Floor, Programs};
use crate::room::{Birth, Room};
use anyhow::{Context, Result};
use dayfly_bench::plot::{Curve, Plot};
use dayfly_units::Name;
use dayfly_vmm::arch::layout;
use futures::future::try_join_all;
use serde_json::json;
use std::path::Path;
use std::time::Duration;

/// RAM of the guests.
pub const MEMORY_BYTES: u64 = 256 * MIB;
const HITS: usize = 100;
const MISSES: usize = 100;
/// Between two of them: what the one before left to be done is done.
const PAUSE: Duration = Duration::from_millis(20);
/// Clones that live beside each other before they are looked at and removed.
const TOGETHER: usize = 20;

/// What a guest does that is only to be born: it has written 64 pages before the snapshot, and writes to one port after it.
pub fn words() -> String {
    format!("fill=7:40 born={:x}", layout::GENERATION.0)
}

/// How births of one kind went.
#[derive(Debug, Default)]
struct Kind {
    us: Vec<u64>,
    answers: Vec<u64>,
    phases: Phases,
}

#[derive(Debug, Default)]
struct Kinds {
    hit: Kind,
    shell: Kind,
    miss: Kind,
}

impl Kinds {
    /// Notes births where they belong, by what their timelines say. All are asked for together: the daemon waits some seconds
    /// for an agent that these guests do not have.
    async fn note(&mut self, room: &Room, births: Vec<Birth>) -> Result<()> {
        let ids: Vec<_> = births.iter().map(|birth| birth.vm.id.to_string()).collect();
        let details = try_join_all(ids.iter().map(|id| room.client.vm(id))).await?;
        for (birth, details) in births.into_iter().zip(details) {
            self.note_one(&birth, &details.timeline)?;
            room.remove(birth.vm.id).await?;
        }
        Ok(())
    }

    fn note_one(&mut self, birth: &Birth, timeline: &[(String, u64)]) -> Result<()> {
        let has = |mark: &str| timeline.iter().any(|(phase, _)| phase == mark);
        let kind = if has("vmm runs: the clone was ready") {
            &mut self.hit
        } else if has("vmm runs") {
            &mut self.miss
        } else {
            &mut self.shell
        };
        note_phases(&mut kind.phases, birth, timeline)?;
        kind.us.push(birth.took_us());
        kind.answers.push(birth.answered_us - birth.sent_us);
        Ok(())
    }
}

/// Adds what a birth's timeline tells, since the request was sent.
pub fn note_phases(phases: &mut Phases, birth: &Birth, timeline: &[(String, u64)]) -> Result<()> {
    let written = timeline.iter().find(|(phase, _)| phase == "vmm: first port write").map(|(_, us)| *us);
    // The timeline counts from when the daemon had read the request; the guest's write is known in both clocks.
    let asked_us =
        birth.took_us().saturating_sub(written.context("a timeline without the first port write")?);
    phases.add("daemon asked", asked_us);
    for (phase, us) in timeline {
        phases.add(phase, asked_us + us);
    }
    phases.add("client has the answer", birth.answered_us - birth.sent_us);
    Ok(())
}

/// Runs it.
pub async fn run(programs: &Path, floors: &Programs, out: &Path) -> Result<()> {
    println!("birth: {HITS} + {MISSES} births one at a time, 256 MiB, 1 vCPU; load {}", common::load());
    let mut room = Room::new(programs)?;
    let name: Name = "birth".parse()?;
    room.bake(&name, MEMORY_BYTES, &words())?;
    let start = |program| Floor::start(program, &room.memory_of(&name), MEMORY_BYTES);
    let (mut floor, mut plain) = (start(&floors.fast)?, start(&floors.plain)?);
    let (mut floor_us, mut plain_us) = (Vec::new(), Vec::new());
    let mut kinds = Kinds::default();

    room.start().await?;
    let first = room.birth(&name).await?;
    room.remove(first.vm.id).await?;
    for _ in 0..HITS / TOGETHER {
        let mut births = Vec::with_capacity(TOGETHER);
        for _ in 0..TOGETHER {
            room.pool_is_full().await?;
            births.push(room.birth(&name).await?);
            room.pool_is_full().await?;
            floor_us.push(floor.one_us()?);
            room.pool_is_full().await?;
            plain_us.push(plain.one_us()?);
        }
        kinds.note(&room, births).await?;
    }
    room.stop()?;
    room.start_with(&["--pool", "0"]).await?;
    for _ in 0..MISSES / TOGETHER {
        let mut births = Vec::with_capacity(TOGETHER);
        for n in 0..=TOGETHER {
            tokio::time::sleep(PAUSE).await;
            let birth = room.birth(&name).await?;
            if n == 0 {
                // The first of a daemon reads all files of its snapshot.
                room.remove(birth.vm.id).await?;
                continue;
            }
            births.push(birth);
            tokio::time::sleep(PAUSE).await;
            floor_us.push(floor.one_us()?);
        }
        kinds.note(&room, births).await?;
    }
    let leaked = room.end()?;

    let floor = Spread::of(&floor_us, None);
    let of = |us: &[u64]| Spread::of(us, Some(&floor));
    let Kinds { hit, shell, miss } = &kinds;
    table(&[("floor", &floor), ("hit", &of(&hit.us)), ("shell", &of(&shell.us)), ("miss", &of(&miss.us))]);
    for (title, kind) in [("a hit", hit), ("a miss", miss)] {
        println!("  {title}, medians since the request was sent:");
        for (phase, us) in kind.phases.medians() {
            println!("    {:>10}  {phase}", shown(us));
        }
    }
    println!("  leaked processes: {leaked}");
    let value = json!({
        "floor": floor,
        "floor_dynamic": of(&plain_us),
        "hit": of(&hit.us),
        "shell": of(&shell.us),
        "miss": of(&miss.us),
        "answer": { "hit": of(&hit.answers), "miss": of(&miss.answers) },
        "phases": hit.phases.json(),
        "phases_miss": miss.phases.json(),
        "memory_bytes": MEMORY_BYTES,
        "load": common::load(),
        "leaked": leaked,
    });
    common::write(out, "birth.json", &value)?;
    let curves = [("floor", &floor_us), ("pool hit", &hit.us), ("pool miss", &miss.us)];
    Plot {
        title: "Request to the first port write of the restored guest, one at a time".into(),
        x: "milliseconds",
        y: "part of the births",
        log_x: true,
        curves: curves.into_iter().map(|(label, us)| Curve::cdf(label, us)).collect(),
    }
    .write(out, "birth.svg")
}

/// Prints rows of figures.
fn table(rows: &[(&str, &Spread)]) {
    println!("  {:<8}{:>10}{:>12}{:>12}{:>12}{:>10}", "", "n", "p50", "p99", "least", "x floor");
    for (name, s) in rows.iter().filter(|(_, s)| s.n > 0) {
        let ratio = s.ratio_to_floor_p50.map_or_else(String::new, |ratio| format!("{ratio:.2}"));
        let (p50, p99, least) = (shown(s.p50_us), shown(s.p99_us), shown(s.min_us));
        println!("  {name:<8}{:>10}{p50:>12}{p99:>12}{least:>12}{ratio:>10}", s.n);
    }
}
