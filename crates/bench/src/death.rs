//! Deaths: how long the answer takes, and when the memory is back.
//!
//! The guest itself touches its memory, one word a page, after its birth. *Back* is when `MemAvailable`, with what the CPUs'
//! own lists of free pages hold, has risen by 99 % of what
//! the guest had touched; where that does not happen within two seconds there is no figure. Held against one thread's
//! munmap(2) of as much memory in 4 KiB pages, in turns; and 512 idle VMs against SIGKILL and reaping of the floor's 512.

use crate::birth;
use crate::common::{self, MIB, Spread, median, ratio, shown};
use crate::floor::Floor;
use crate::room::Room;
use crate::scale::{at_once, remove_all};
use anyhow::{Result, bail};
use dayfly_bench::plot::{Curve, Plot};
use dayfly_units::{Name, PAGE_SIZE};
use dayfly_vmm::arch::layout;
use serde_json::{Map, Value, json};
use std::path::Path;
use std::time::{Duration, Instant};

const TIMES: usize = 30;
const AT_ONCE: usize = 512;
const ROUNDS: usize = 3;
/// A guest's RAM besides what it touches.
const REST: u64 = 64 * MIB;
const BACK_WITHIN: Duration = Duration::from_secs(2);
const TOUCH_WITHIN: Duration = Duration::from_secs(120);

fn sizes(full: bool) -> Vec<u64> {
    let mut mib = vec![32, 128, 512, 2048];
    mib.extend(full.then_some(8192));
    mib
}

#[derive(Default)]
struct Deaths {
    answers: Vec<u64>,
    back: Vec<u64>,
    /// By how much the memory came later than the answer; 0 where it was there.
    late: Vec<u64>,
    never: usize,
    munmap: Vec<u64>,
}

/// Born, touched, removed.
async fn one(room: &Room, name: &Name, bytes: u64, deaths: &mut Deaths) -> Result<()> {
    let id = room.birth(name).await?.vm.id;
    let begun = Instant::now();
    while !room.console(id).ends_with("done\n") {
        if begun.elapsed() > TOUCH_WITHIN {
            bail!("VM {id}: its guest has not touched its memory; console {:?}", room.console(id));
        }
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    room.pool_is_full().await?;
    let target = common::settled_available()? + bytes / 100 * 99;
    let asked = common::now_us();
    // By a thread of its own, beside the client, which sleeps meanwhile.
    let watch = std::thread::spawn(move || common::wait_available(target, BACK_WITHIN));
    deaths.answers.push(room.remove(id).await?);
    let answered = common::now_us();
    match watch.join() {
        Ok(Ok(Some(back))) => {
            deaths.back.push(back - asked);
            deaths.late.push(back.saturating_sub(answered));
        }
        Ok(Ok(None)) => deaths.never += 1,
        Ok(Err(error)) => return Err(error),
        Err(_) => bail!("the thread that watches MemAvailable panicked"),
    }
    Ok(())
}

/// Runs it.
pub async fn run(programs: &Path, floor: &Path, out: &Path, full: bool) -> Result<()> {
    println!(
        "death: {TIMES} each of {:?} MiB touched, {AT_ONCE} at once; load {}",
        sizes(full),
        common::load()
    );
    let mut room = Room::new(programs)?;
    let idle: Name = "idle".parse()?;
    room.bake(&idle, birth::MEMORY_BYTES, &birth::words())?;
    let name = |mib: u64| format!("touch-{mib}").parse::<Name>();
    for mib in sizes(full) {
        let pages = mib * MIB / PAGE_SIZE;
        let words = format!("until={:x} say=b touch={pages:x}", layout::GENERATION.0);
        room.bake(&name(mib)?, mib * MIB + REST, &words)?;
    }
    let mut floor = Floor::start(floor, &room.memory_of(&idle), birth::MEMORY_BYTES)?;
    room.start().await?;

    println!(
        "  {:>10}{:>12}{:>12}{:>12}{:>12}{:>14}{:>10}",
        "touched", "answer", "p99", "99 % back", "late by", "munmap floor", "x faster"
    );
    let mut touched = Map::new();
    let (mut answers, mut floors) = (Vec::new(), Vec::new());
    for mib in sizes(full) {
        let mut deaths = Deaths::default();
        for _ in 0..TIMES {
            one(&room, &name(mib)?, mib * MIB, &mut deaths).await?;
            deaths.munmap.push(floor.munmap_us(mib * MIB)?);
        }
        let answer = Spread::of(&deaths.answers, None);
        // A median of the few that came back would say that all did.
        let came = deaths.never * 2 < TIMES;
        let (back, late) = (came.then(|| median(&deaths.back)), came.then(|| median(&deaths.late)));
        let munmap = median(&deaths.munmap);
        let faster = ratio(munmap, answer.p50_us);
        println!(
            "  {:>6} MiB{:>12}{:>12}{:>12}{:>12}{:>14}{faster:>10.2}",
            mib,
            shown(answer.p50_us),
            shown(answer.p99_us),
            back.map_or_else(|| "?".into(), shown),
            late.map_or_else(|| "?".into(), shown),
            shown(munmap)
        );
        #[expect(clippy::cast_precision_loss, reason = "a drawing")]
        for (points, us) in [(&mut answers, answer.p50_us), (&mut floors, munmap)] {
            points.push((mib as f64, us as f64 / 1000.0));
        }
        let value = json!({
            "answer": answer, "memory_back_us": back, "memory_late_us": late, "memory_never_back": deaths.never,
            "munmap_us": munmap, "times_faster_than_munmap": faster,
        });
        touched.insert(mib.to_string(), value);
    }

    let mut rounds = Vec::new();
    for _ in 0..ROUNDS {
        let free = common::settled_available()?;
        let ids = at_once(&room, &idle, AT_ONCE).await?.ids;
        room.pool_is_full().await?;
        let held = free.saturating_sub(common::settled_available()?);
        let target = free - held / 100;
        let asked = common::now_us();
        let ours = remove_all(&room, &ids).await?;
        let back = common::wait_available(target, BACK_WITHIN)?.map(|us| us - asked);
        room.pool_is_full().await?;
        floor.many_us(AT_ONCE)?;
        tokio::time::sleep(Duration::from_millis(500)).await;
        let floor_us = floor.end_us()?;
        println!(
            "  {AT_ONCE} at once: answered in {}, memory back in {}; floor {}",
            shown(ours),
            back.map_or_else(|| "?".into(), shown),
            shown(floor_us)
        );
        rounds.push((ours, back, floor_us));
    }
    let leaked = room.end()?;
    println!("  leaked processes: {leaked}");
    let ours = median(&rounds.iter().map(|r| r.0).collect::<Vec<_>>());
    let floor_us = median(&rounds.iter().map(|r| r.2).collect::<Vec<_>>());
    let back: Vec<u64> = rounds.iter().filter_map(|r| r.1).collect();
    let back = if back.len() == ROUNDS { Value::from(median(&back)) } else { Value::Null };
    let value = json!({
        "touched_mib": touched,
        "at_once_512": {
            "answer_us": ours, "memory_back_us": back, "floor_us": floor_us,
            "ratio_to_floor": ratio(ours, floor_us), "rounds": ROUNDS,
        },
        "load": common::load(),
        "leaked": leaked,
    });
    common::write(out, "death.json", &value)?;
    Plot {
        title: "Death of one VM, by the memory that its guest had touched".into(),
        x: "MiB touched",
        y: "milliseconds",
        log_x: false,
        curves: vec![
            Curve { label: "remove, answered".into(), points: answers },
            Curve { label: "munmap, one thread".into(), points: floors },
        ],
    }
    .write(out, "death.svg")
}
