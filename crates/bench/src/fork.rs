//! Forks of a VM that runs: for how long it stands still, what it loses in the second after, and when a clone runs.
//!
//! The guest writes a part of its memory after its birth, then rewrites 8 MiB of that without end: its dots are its work. Held against what others do, with the
//! same VM in the same minute: stop it, copy what it has written to memory (the least that a copy while it stands takes), or to a file on a disk (a diff
//! snapshot; its state, and syncing, are left out), and let it go on.

use crate::birth;
use crate::common::{self, MIB, Spread, median, ratio, shown};
use crate::floor::Floor;
use crate::room::Room;
use crate::scale::{at_once, remove_all};
use anyhow::{Context, Result, bail};
use dayfly_api::types::{ForkRequest, Forked};
use dayfly_bench::plot::{Curve, Plot};
use dayfly_units::{Name, PAGE_SIZE, VmId};
use dayfly_vmm::arch::layout;
use rustix::fs::MemfdFlags;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::fs::File;
use std::os::fd::AsFd;
use std::path::Path;
use std::time::{Duration, Instant};

/// Forks of one case, and of the one that the others are held against.
const TIMES: usize = 20;
const MANY_TIMES: usize = 200;
/// How often those with the same pages in more and more RAM take turns: what the host does besides then hits all alike.
const TURNS: usize = 8;
/// Seconds whose dots are counted, before a fork and from it on.
const SECONDS: usize = 5;
const SECOND: Duration = Duration::from_secs(1);
/// What the guest rewrites.
const HOT_PAGES: u64 = 8 * MIB / PAGE_SIZE;
const CHILDREN: u32 = 100;
const ROUNDS: usize = 9;
const WITHIN: Duration = Duration::from_secs(120);

/// A parent: RAM, and pages that it has written.
#[derive(Debug, Clone, Copy)]
struct Case {
    mib: u64,
    pages: u64,
    /// As a part of RAM.
    percent: u64,
}

impl Case {
    const fn of(mib: u64, percent: u64) -> Self {
        Self { mib, pages: mib * MIB / PAGE_SIZE * percent / 100, percent }
    }

    const fn with(mib: u64, pages: u64) -> Self {
        Self { mib, pages, percent: pages * PAGE_SIZE * 100 / (mib * MIB) }
    }

    fn name(&self) -> Result<Name> {
        Ok(format!("fork-{}-{}", self.mib, self.pages).parse()?)
    }

    fn words(&self) -> String {
        let (until, hot) = (layout::GENERATION.0, HOT_PAGES.min(self.pages));
        format!("until={until:x} touch={:x} say=b work={hot:x}:8", self.pages)
    }
}

const MAIN: Case = Case::of(1536, 10);
/// The same pages in more and more RAM.
const EQUAL: [Case; 3] = [Case::with(256, 6400), Case::with(1536, 6400), Case::with(4096, 6400)];

fn cases(full: bool) -> Vec<Case> {
    let sizes: &[u64] = if full { &[256, 512, 1024, 1536, 2048, 4096] } else { &[256, 1536, 4096] };
    let parts = |mib: &u64| [1, 10, 50].map(|percent| Case::of(*mib, percent));
    sizes.iter().flat_map(parts).collect()
}

/// What one case came to.
struct Figures {
    paused_us: Spread,
    frozen_us: Spread,
    answered_us: Spread,
    /// From its going on to the clone's answer.
    birth_us: Spread,
    pages: u64,
    stopped_copy_us: u64,
    stopped_file_us: u64,
    /// Dots in the second from a fork on, by those in the second before.
    second: f64,
}

impl Figures {
    fn json(&self, case: &Case) -> Value {
        json!({
            "memory_mib": case.mib, "written_pages": case.pages, "written_percent": case.percent,
            "pause": self.paused_us, "frozen_after": self.frozen_us, "answered": self.answered_us, "child_birth": self.birth_us,
            "pages_copied_in_pause": self.pages,
            "pause_to_copy_us": self.stopped_copy_us, "pause_to_file_us": self.stopped_file_us,
            "part_of_copy": ratio(self.paused_us.p50_us, self.stopped_copy_us),
            "part_of_file": ratio(self.paused_us.p50_us, self.stopped_file_us),
            "work_in_second_after": self.second,
        })
    }
}

async fn fork(room: &Room, parent: VmId, count: u32) -> Result<Forked> {
    let request = ForkRequest { count, name: None, labels: BTreeMap::new(), forks: 0, template: None };
    Ok(room.client.fork(&parent.to_string(), &request).await?)
}

/// A parent that works.
async fn parent(room: &Room, case: &Case) -> Result<VmId> {
    let id = room.birth(&case.name()?).await?.vm.id;
    let begun = Instant::now();
    while !room.console(id).ends_with('.') {
        if begun.elapsed() > WITHIN {
            bail!("VM {id}: its guest does no work; console {:?}", room.console(id));
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    Ok(id)
}

/// Stops the VM, copies what it has written to `target`, and lets it go on; the microseconds of that.
fn stopped(room: &Room, id: VmId, target: &File, bytes: u64) -> Result<u64> {
    target.set_len(bytes)?;
    let mut control = room.control(id)?;
    let begun = Instant::now();
    control.pause()?;
    let copied = control.precopy(true, target.as_fd());
    control.resume()?;
    let took = begun.elapsed();
    copied?;
    Ok(u64::try_from(took.as_micros())?)
}

async fn measure(room: &Room, case: &Case, times: usize) -> Result<Figures> {
    let id = parent(room, case).await?;
    let dots = || room.console_bytes(id);
    let (mut paused, mut frozen, mut answered, mut births) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    let mut pages = Vec::new();
    let first = fork(room, id, 1).await?;
    room.remove(first.items[0].id).await?;
    for _ in 0..times {
        let begun = Instant::now();
        let forked = fork(room, id, 1).await?;
        let took = u64::try_from(begun.elapsed().as_micros())?;
        paused.push(forked.paused_us);
        frozen.push(forked.frozen_us);
        answered.push(took);
        births.push(took.saturating_sub(forked.frozen_us));
        pages.push(forked.pages);
        room.remove(forked.items.first().context("a clone")?.id).await?;
    }
    let mut second = Vec::new();
    for _ in 0..SECONDS {
        let start = dots()?;
        tokio::time::sleep(SECOND).await;
        let before = dots()? - start;
        let start = dots()?;
        let until = tokio::time::Instant::now() + SECOND;
        let forked = fork(room, id, 1).await?;
        // A clone that works as its parent does would have half of a host with two CPUs that are busy.
        room.remove(forked.items.first().context("a clone")?.id).await?;
        tokio::time::sleep_until(until).await;
        second.push(ratio_ppm(dots()? - start, before));
    }
    let bytes = case.mib * MIB;
    let (mut copies, mut files) = (Vec::new(), Vec::new());
    for _ in 0..5 {
        let memory = rustix::fs::memfd_create("stopped", MemfdFlags::CLOEXEC)?;
        copies.push(stopped(room, id, &memory.into(), bytes)?);
        files.push(stopped(room, id, &tempfile::tempfile_in(room.state())?, bytes)?);
    }
    room.remove(id).await?;
    #[expect(clippy::cast_precision_loss, reason = "a quotient")]
    let second = median(&second) as f64 / 1e6;
    Ok(Figures {
        paused_us: Spread::of(&paused, None),
        frozen_us: Spread::of(&frozen, None),
        answered_us: Spread::of(&answered, None),
        birth_us: Spread::of(&births, None),
        pages: median(&pages),
        stopped_copy_us: median(&copies),
        stopped_file_us: median(&files),
        second,
    })
}

/// Pauses of those with the same pages in more and more RAM.
async fn equal_pauses(room: &Room) -> Result<Vec<Spread>> {
    let mut paused = EQUAL.map(|_| Vec::new());
    for _ in 0..TURNS {
        for (case, paused) in EQUAL.iter().zip(&mut paused) {
            let id = parent(room, case).await?;
            for n in 0..=TIMES {
                let forked = fork(room, id, 1).await?;
                room.remove(forked.items.first().context("a clone")?.id).await?;
                // The first of each has more to do than all that follow.
                paused.extend((n > 0).then_some(forked.paused_us));
            }
            room.remove(id).await?;
        }
    }
    Ok(paused.iter().map(|paused| Spread::of(paused, None)).collect())
}

fn ratio_ppm(a: u64, b: u64) -> u64 {
    (a * 1_000_000).checked_div(b).unwrap_or(0)
}

/// Snapshots that nobody has cloned before, one for each round.
fn fresh(round: usize) -> Result<Name> {
    Ok(format!("fresh-{round}").parse()?)
}

/// Many clones of one that runs and is idle afterwards, against the floor's VMs and as many births: of a snapshot whose clones wait primed, and of one that
/// nobody asked for before, whose clones start in shells as children do.
async fn children(room: &Room, floor: &mut Floor, parent_of: &Name, plain: &Name) -> Result<Value> {
    let id = room.birth(parent_of).await?.vm.id;
    let begun = Instant::now();
    while !room.console(id).ends_with("b\nready\n") {
        if begun.elapsed() > WITHIN {
            bail!("VM {id}: its guest has not written its memory; console {:?}", room.console(id));
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    let count = usize::try_from(CHILDREN)?;
    let (mut forks, mut pauses, mut frozen) = (Vec::new(), Vec::new(), Vec::new());
    let (mut plains, mut freshes, mut per_child, mut per_floor) =
        (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    for round in 0..ROUNDS {
        room.pool_is_full().await?;
        let (before, waited) = (common::settled_available()?, room.waiting().await?.0);
        let begun = Instant::now();
        let forked = fork(room, id, CHILDREN).await?;
        forks.push(u64::try_from(begun.elapsed().as_micros())?);
        pauses.push(forked.paused_us);
        frozen.push(forked.frozen_us);
        for child in &forked.items {
            room.first_port_write_us(child.id)?;
        }
        room.pool_is_full().await?;
        // What waits in the pool now, and did not before, is weighed with them.
        let weighed = (count + room.waiting().await?.0).saturating_sub(waited) as u64;
        per_child.push(before.saturating_sub(common::settled_available()?) / weighed.max(1));
        remove_all(room, &forked.items.iter().map(|vm| vm.id).collect::<Vec<_>>()).await?;
        room.pool_is_full().await?;
        let births = at_once(room, plain, count).await?;
        plains.push(births.answered_us());
        remove_all(room, &births.ids).await?;
        // One, so that it is open.
        let fresh = fresh(round)?;
        let one = room.birth(&fresh).await?.vm.id;
        room.remove(one).await?;
        room.pool_is_full().await?;
        let births = at_once(room, &fresh, count).await?;
        freshes.push(births.answered_us());
        remove_all(room, &births.ids).await?;
        room.client.remove_snapshot(&fresh).await?;
        room.pool_is_full().await?;
        let before = common::settled_available()?;
        floor.many_us(count)?;
        per_floor.push(before.saturating_sub(common::settled_available()?) / u64::from(CHILDREN));
        floor.end_us()?;
    }
    room.remove(id).await?;
    let (forked, births, unprimed, frozen) =
        (median(&forks), median(&plains), median(&freshes), median(&frozen));
    let (child, floor) = (median(&per_child), median(&per_floor));
    println!(
        "  {CHILDREN} children: {}, of which {} until their parent goes on; as many births in shells {}, of clones that wait primed {}; each takes {} KiB of memory, the floor's VM {} KiB",
        shown(forked),
        shown(frozen),
        shown(unprimed),
        shown(births),
        child >> 10,
        floor >> 10
    );
    Ok(json!({
        "children": CHILDREN, "answered_us": forked, "pause_us": median(&pauses), "frozen_us": frozen, "births_us": unprimed,
        "ratio_of_the_rest_to_births": ratio(forked.saturating_sub(frozen), unprimed),
        "primed_births_us": births, "ratio_to_primed_births": ratio(forked, births),
        "ratio_to_births": ratio(forked, unprimed), "memory_each_bytes": child, "floor_each_bytes": floor,
        "memory_over_floor_bytes": child.saturating_sub(floor), "rounds": forks.len(),
    }))
}

/// Runs it.
pub async fn run(programs: &Path, floor: &Path, out: &Path, full: bool) -> Result<()> {
    println!(
        "fork: {TIMES} each, {MANY_TIMES} of {} MiB with 10 % written; load {}",
        MAIN.mib,
        common::load()
    );
    let mut room = Room::new(programs)?;
    for case in cases(full).into_iter().chain(EQUAL) {
        room.bake(&case.name()?, case.mib * MIB, &case.words())?;
    }
    let (plain, idle): (Name, Name) = ("plain".parse()?, "idle".parse()?);
    room.bake(&plain, birth::MEMORY_BYTES, &birth::words())?;
    for round in 0..ROUNDS {
        room.bake(&fresh(round)?, birth::MEMORY_BYTES, &birth::words())?;
    }
    let until = layout::GENERATION.0;
    room.bake(&idle, birth::MEMORY_BYTES, &format!("until={until:x} touch=400 say=b born={until:x}"))?;
    let mut floor = Floor::start(floor, &room.memory_of(&plain), birth::MEMORY_BYTES)?;
    room.start().await?;
    println!(
        "  {:>9}{:>10}{:>12}{:>10}{:>10}{:>8}{:>12}{:>12}{:>12}{:>8}",
        "RAM", "written", "pause p50", "p99", "pages", "work", "stop+copy", "stop+file", "birth", "x file"
    );
    let (mut values, mut curve, mut files) = (Vec::new(), Vec::new(), Vec::new());
    for case in cases(full) {
        let is_main = case.mib == MAIN.mib && case.percent == MAIN.percent;
        let got = measure(&room, &case, if is_main { MANY_TIMES } else { TIMES }).await?;
        println!(
            "  {:>5} MiB{:>6} MiB{:>12}{:>10}{:>10}{:>7.0}%{:>12}{:>12}{:>12}{:>8.1}",
            case.mib,
            case.pages * PAGE_SIZE / MIB,
            shown(got.paused_us.p50_us),
            shown(got.paused_us.p99_us),
            got.pages,
            got.second * 100.0,
            shown(got.stopped_copy_us),
            shown(got.stopped_file_us),
            shown(got.birth_us.p50_us),
            ratio(got.stopped_file_us, got.paused_us.p50_us)
        );
        if case.percent == 10 {
            #[expect(clippy::cast_precision_loss, reason = "a drawing")]
            for (points, us) in [(&mut curve, got.paused_us.p50_us), (&mut files, got.stopped_file_us)] {
                points.push((case.mib as f64, us as f64 / 1000.0));
            }
        }
        values.push(got.json(&case));
    }
    let equal = equal_pauses(&room).await?;
    let children = children(&room, &mut floor, &idle, &plain).await?;
    let leaked = room.end()?;
    let p50 = |spread: Option<&Spread>| spread.map_or(0, |spread| spread.p50_us);
    let grows = ratio(p50(equal.last()), p50(equal.first()));
    let each: Vec<_> = EQUAL
        .iter()
        .zip(&equal)
        .map(|(case, got)| format!("{} MiB {}", case.mib, shown(got.p50_us)))
        .collect();
    println!("  25 MiB written in {}: it grows {grows} times; leaked processes: {leaked}", each.join(", "));
    let value = json!({
        "cases": values, "equal_pages": equal, "equal_pages_mib": EQUAL.map(|case| case.mib), "pause_4096_by_256_mib": grows, "children": children, "load": common::load(), "leaked": leaked,
    });
    common::write(out, "fork.json", &value)?;
    Plot {
        title: "For how long a VM stands still that is forked, with a tenth of its memory written".into(),
        x: "MiB of RAM",
        y: "milliseconds",
        log_x: false,
        curves: vec![
            Curve { label: "dayfly fork".into(), points: curve },
            Curve { label: "stop, write a diff to a file".into(), points: files },
        ],
    }
    .write(out, "fork.svg")
}
