//! Forks of a running VM: its pause, the work that it loses in the second after, and when a clone
//! runs.
//!
//! The guest writes a part of its memory after its birth, then rewrites 8 MiB of that without end:
//! the dots that it prints count its work. Compared with what others do, with the same VM in the
//! same minute: stop it, copy what it has written, and resume it. A copy to memory is the least
//! that a copy of a stopped VM takes. A copy to a file on a disk is a diff snapshot, without the
//! state and without syncing.

use crate::prelude::*;
use crate::testbed::{Floor, Guest, Linked, Testbed, host::MIB};
use dayfly_api::types::{ForkRequest, Forked, Lifetime};
use dayfly_vmm::arch::layout;
use rustix::fs::MemfdFlags;
use std::collections::BTreeMap;
use std::fs::File;
use std::os::fd::AsFd;

/// Turns of the cases with the same pages in more and more RAM: whatever else the host does then
/// hits all alike.
const TURNS: usize = 8;
/// Seconds whose dots are counted, before a fork and after it.
const SECONDS: usize = 5;
const SECOND: Duration = Duration::from_secs(1);
/// Pages that the guest rewrites.
const HOT_PAGES: u64 = 8 * MIB / PAGE_SIZE;
const CHILDREN: u32 = 100;
const WITHIN: Duration = Duration::from_secs(120);

/// The pause is compared with that of a stop and a copy.
const COLUMNS: [Column; 7] = [
    ("pause", "/pause/p50_us", Us),
    ("p99", "/pause/p99_us", Us),
    ("pages", "/pages_copied_in_pause", Plain),
    ("work", "/work_in_second_after", Digits(2)),
    ("by copy", "/part_of_copy", Digits(3)),
    ("by file", "/part_of_file", Digits(3)),
    ("birth", "/child_birth/p50_us", Us),
];

/// Options of `fork`.
#[derive(Debug, clap::Args)]
pub struct Options {
    /// Parents of six sizes instead of three
    #[arg(long)]
    full: bool,
    /// Forks of each parent; ten times as many of the one with 1.5 GiB and a tenth written
    #[arg(long, default_value_t = 20, value_name = "N", value_parser = at_least(1))]
    forks: usize,
    /// Rounds of 100 clones
    #[arg(long, default_value_t = 9, value_name = "N", value_parser = at_least(1))]
    rounds: usize,
}

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

    /// Its guest writes the pages after its birth, and then rewrites the first of them without end.
    fn guest(&self) -> Result<Guest> {
        let (until, hot) = (layout::GENERATION.0, HOT_PAGES.min(self.pages));
        let words = format!("until={until:x} touch={:x} say=b work={hot:x}:8", self.pages);
        Guest::new(&format!("fork-{}-{}", self.mib, self.pages), self.mib * MIB, words)
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

/// Clones of `parent`; and the microseconds until the daemon answered.
async fn fork(testbed: &Testbed, parent: VmId, count: u32) -> Result<(Forked, u64)> {
    let request = ForkRequest {
        count,
        name: None,
        labels: BTreeMap::new(),
        forks: 0,
        egress: None,
        publish: Vec::new(),
        publish_exposed: false,
        lifetime: Lifetime::UNLIMITED,
        limits: None,
        template: None,
    };
    let begun = Instant::now();
    let forked = testbed.client.fork(&parent.to_string(), &request).await?;
    Ok((forked, u64::try_from(begun.elapsed().as_micros())?))
}

/// As [`fork`], of one clone, which is removed at once: if it worked as its parent does, it would
/// take half of a host with two CPUs.
async fn fork_one(testbed: &Testbed, parent: VmId) -> Result<(Forked, u64)> {
    let (forked, took_us) = fork(testbed, parent, 1).await?;
    testbed.remove(forked.items.first().context("a clone")?.id).await?;
    Ok((forked, took_us))
}

/// A parent that works.
async fn parent(testbed: &Testbed, case: &Case) -> Result<VmId> {
    let id = testbed.birth(&case.guest()?.name).await?.vm.id;
    testbed.console_ends(id, ".", WITHIN).await?;
    Ok(id)
}

/// Stops the VM, copies what it has written to `target`, and lets it go on; the microseconds of
/// that.
fn stopped(testbed: &Testbed, id: VmId, target: &File, bytes: u64) -> Result<u64> {
    target.set_len(bytes)?;
    let mut control = testbed.control(id)?;
    let begun = Instant::now();
    control.pause()?;
    let copied = control.precopy(true, target.as_fd());
    control.resume()?;
    let took = begun.elapsed();
    copied?;
    Ok(u64::try_from(took.as_micros())?)
}

/// The figures of one case, which are printed too.
async fn measure(testbed: &Testbed, case: &Case, times: usize, table: &Table<'_>) -> Result<Value> {
    let id = parent(testbed, case).await?;
    let [mut paused, mut frozen, mut answered, mut births, mut pages] = [const { Vec::new() }; 5];
    fork_one(testbed, id).await?;
    for _ in 0..times {
        let (forked, took_us) = fork_one(testbed, id).await?;
        paused.push(forked.paused_us);
        frozen.push(forked.frozen_us);
        answered.push(took_us);
        // From the parent's going on to the clone's answer.
        births.push(took_us.saturating_sub(forked.frozen_us));
        pages.push(forked.pages);
    }
    let second = work_in_second_after(testbed, id).await?;
    let (mut copies, mut files) = (Vec::new(), Vec::new());
    for _ in 0..5 {
        let memory = rustix::fs::memfd_create("stopped", MemfdFlags::CLOEXEC)?;
        let file = tempfile::tempfile_in(testbed.state())?;
        copies.push(stopped(testbed, id, &memory.into(), case.mib * MIB)?);
        files.push(stopped(testbed, id, &file, case.mib * MIB)?);
    }
    testbed.remove(id).await?;
    let (pause, copy, file) = (median(&paused), median(&copies), median(&files));
    let figures = json!({
        "memory_mib": case.mib, "written_pages": case.pages, "written_percent": case.percent,
        "pause": Spread::of(&paused), "frozen_after": Spread::of(&frozen),
        "answered": Spread::of(&answered), "child_birth": Spread::of(&births),
        "pages_copied_in_pause": median(&pages), "pause_to_copy_us": copy,
        "pause_to_file_us": file, "part_of_copy": ratio(pause, copy),
        "part_of_file": ratio(pause, file), "work_in_second_after": second,
    });
    table.row(&format!("{} {}", case.mib, case.pages * PAGE_SIZE / MIB), &figures);
    Ok(figures)
}

/// Dots in the second from a fork on, by those in the second before.
async fn work_in_second_after(testbed: &Testbed, id: VmId) -> Result<f64> {
    let dots = || testbed.console(id).len() as u64;
    let mut millionths = Vec::new();
    for _ in 0..SECONDS {
        let start = dots();
        tokio::time::sleep(SECOND).await;
        let before = dots() - start;
        let start = dots();
        let until = tokio::time::Instant::now() + SECOND;
        fork_one(testbed, id).await?;
        tokio::time::sleep_until(until).await;
        millionths.push(((dots() - start) * 1_000_000).checked_div(before).unwrap_or(0));
    }
    Ok(ratio(median(&millionths), 1_000_000))
}

/// Pauses of those with the same pages in more and more RAM.
async fn equal_pauses(testbed: &Testbed, times: usize) -> Result<Vec<Spread>> {
    let mut paused = EQUAL.map(|_| Vec::new());
    for _ in 0..TURNS {
        for (case, paused) in EQUAL.iter().zip(&mut paused) {
            let id = parent(testbed, case).await?;
            // The first of each has more to do than all that follow.
            fork_one(testbed, id).await?;
            for _ in 0..times {
                paused.push(fork_one(testbed, id).await?.0.paused_us);
            }
            testbed.remove(id).await?;
        }
    }
    Ok(paused.iter().map(|paused| Spread::of(paused)).collect())
}

/// A snapshot that was never cloned before, one for each round.
fn fresh(round: usize) -> Result<Guest> {
    Guest::idle(&format!("fresh-{round}"))
}

/// One figure for each round of many clones.
#[derive(Default)]
struct Rounds {
    forks: Vec<u64>,
    pauses: Vec<u64>,
    frozen: Vec<u64>,
    /// Births of a snapshot whose warm clones wait.
    warm: Vec<u64>,
    /// Births of a snapshot that was never cloned before: they start in warm VMMs, as children do.
    cold: Vec<u64>,
    per_child: Vec<u64>,
    per_floor: Vec<u64>,
}

/// Many clones of a VM that is idle afterwards, compared with the floor's VMs and as many births.
async fn children(
    testbed: &Testbed,
    floor: &mut Floor,
    idle: &Name,
    plain: &Name,
    rounds: usize,
) -> Result<Value> {
    let id = testbed.birth(idle).await?.vm.id;
    testbed.console_ends(id, "b\nready\n", WITHIN).await?;
    let count = usize::try_from(CHILDREN)?;
    let births = async |name: &Name| {
        testbed.pool_is_full().await?;
        let births = testbed.at_once(name, count).await?;
        testbed.remove_all(&births.ids).await?;
        Ok::<_, anyhow::Error>(births.answered_us)
    };
    let mut all = Rounds::default();
    for round in 0..rounds {
        let scales = testbed.scales().await?;
        let (forked, took_us) = fork(testbed, id, CHILDREN).await?;
        all.forks.push(took_us);
        all.pauses.push(forked.paused_us);
        all.frozen.push(forked.frozen_us);
        let ids: Vec<VmId> = forked.items.iter().map(|vm| vm.id).collect();
        for id in &ids {
            testbed.first_port_write_us(*id)?;
        }
        all.per_child.push(scales.each_bytes(testbed, count).await?);
        testbed.remove_all(&ids).await?;
        all.warm.push(births(plain).await?);
        // One birth opens the snapshot.
        let fresh = fresh(round)?.name;
        testbed.warm_up(&fresh).await?;
        all.cold.push(births(&fresh).await?);
        testbed.client.remove_snapshot(&fresh).await?;
        testbed.pool_is_full().await?;
        all.per_floor.push(floor.each_bytes(count)?);
    }
    testbed.remove(id).await?;
    Ok(all.figures())
}

impl Rounds {
    /// Prints them too.
    fn figures(&self) -> Value {
        let Self { forks, pauses, frozen, warm, cold, per_child, per_floor } = self;
        let [forked, pause, frozen, warm, cold, child, floor] =
            [forks, pauses, frozen, warm, cold, per_child, per_floor].map(|all| median(all));
        println!(
            "  {CHILDREN} children: {}, of which {} until their parent goes on;\n    \
             as many births in warm VMMs {}, of warm clones {};\n    \
             memory of each {} KiB, of the floor's VM {} KiB",
            shown(forked),
            shown(frozen),
            shown(cold),
            shown(warm),
            child >> 10,
            floor >> 10
        );
        json!({
            "children": CHILDREN, "answered_us": forked, "pause_us": pause, "frozen_us": frozen,
            "births_us": cold, "ratio_to_births": ratio(forked, cold),
            "ratio_of_the_rest_to_births": ratio(forked.saturating_sub(frozen), cold),
            "warm_births_us": warm, "ratio_to_warm_births": ratio(forked, warm),
            "memory_each_bytes": child, "floor_each_bytes": floor,
            "memory_over_floor_bytes": child.saturating_sub(floor), "rounds": forks.len(),
        })
    }
}

/// Runs it.
pub async fn run(options: &Options, places: &Places) -> Result<()> {
    let (forks, many) = (options.forks, options.forks * 10);
    let what = format!("{forks} of each, {many} of {} MiB with 10 % written", MAIN.mib);
    let report = Report::begin(places, "fork", C_FLOOR, &what);
    let until = layout::GENERATION.0;
    let idle = format!("until={until:x} touch=400 say=b born={until:x}");
    let idle = Guest::new("idle", 256 * MIB, idle)?;
    let plain = Guest::idle("plain")?;
    let mut guests = vec![idle.clone(), plain.clone()];
    for case in cases(options.full).iter().chain(&EQUAL) {
        guests.push(case.guest()?);
    }
    for round in 0..options.rounds {
        guests.push(fresh(round)?);
    }
    let mut testbed = Testbed::baked(places, &guests).await?;
    let mut floor = Floor::start(&testbed, &plain, Linked::Statically)?;
    testbed.start(&[]).await?;
    let table = Table::new(9, "MiB wrote", &COLUMNS);
    let mut figures = Vec::new();
    for case in cases(options.full) {
        let is_main = case.mib == MAIN.mib && case.percent == MAIN.percent;
        let times = if is_main { many } else { forks };
        figures.push(measure(&testbed, &case, times, &table).await?);
    }
    let equal = equal_pauses(&testbed, forks).await?;
    let children = children(&testbed, &mut floor, &idle.name, &plain.name, options.rounds).await?;
    let grows = ratio(equal[2].p50(), equal[0].p50());
    let each = EQUAL.iter().zip(&equal);
    let each: Vec<_> =
        each.map(|(case, got)| format!("{} MiB {}", case.mib, shown(got.p50()))).collect();
    println!("  pause with 25 MiB written in {}: it grows {grows} times", each.join(", "));
    let figures = json!({
        "cases": figures, "equal_pages": equal, "equal_pages_mib": EQUAL.map(|case| case.mib),
        "pause_4096_by_256_mib": grows, "children": children,
    });
    testbed.finish(&report, figures)
}
