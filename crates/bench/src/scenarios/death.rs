//! Deaths: how long the answer takes, and when the memory is free again.
//!
//! The guest touches its memory after its birth, one word a page. *Back* is when `MemAvailable`,
//! with the free pages on the lists of single CPUs, has risen by 99 % of what the guest had
//! touched; there is no figure if that takes more than two seconds. Compared, in turns, with
//! munmap(2) of as much memory in 4 KiB pages by one thread; and many idle VMs with SIGKILL and
//! reaping of as many of the floor.

use crate::prelude::*;
use crate::testbed::host::{self, MIB};
use crate::testbed::{Floor, Guest, Linked, Testbed};

const BACK_WITHIN: Duration = Duration::from_secs(2);
const TOUCH_WITHIN: Duration = Duration::from_secs(120);

const COLUMNS: [Column; 6] = [
    ("answer", "/answer/p50_us", Us),
    ("p99", "/answer/p99_us", Us),
    ("99 % back", "/memory_back_us", Us),
    ("late by", "/memory_late_us", Us),
    ("munmap", "/munmap_us", Us),
    ("x faster", "/times_faster_than_munmap", Digits(2)),
];

/// Options of `death`.
#[derive(Debug, clap::Args)]
pub struct Options {
    /// 8 GiB too
    #[arg(long)]
    full: bool,
    /// Deaths of each size
    #[arg(long, default_value_t = 30, value_name = "N", value_parser = at_least(1))]
    deaths: usize,
    /// Idle VMs that are removed by one request
    #[arg(long, default_value_t = 512, value_name = "N")]
    at_once: usize,
    /// Rounds of those
    #[arg(long, default_value_t = 3, value_name = "N", value_parser = at_least(1))]
    rounds: usize,
}

impl Options {
    /// MiB that guests touch.
    fn sizes(&self) -> Vec<u64> {
        let mut mib = vec![32, 128, 512, 2048];
        mib.extend(self.full.then_some(8192));
        mib
    }
}

/// Deaths of one size, in microseconds.
#[derive(Default)]
struct Deaths {
    answers: Vec<u64>,
    back: Vec<u64>,
    /// By how much the memory came later than the answer; 0 if it came earlier.
    late: Vec<u64>,
    never: usize,
    munmap: Vec<u64>,
}

/// A VM is born, touches its memory, and is removed.
async fn one(testbed: &Testbed, name: &Name, bytes: u64, deaths: &mut Deaths) -> Result<()> {
    let id = testbed.birth(name).await?.vm.id;
    testbed.console_ends(id, "done\n", TOUCH_WITHIN).await?;
    testbed.pool_is_full().await?;
    let target = host::settled_available()? + bytes / 100 * 99;
    let asked = host::now_us();
    // Another thread watches, because the client sleeps meanwhile.
    let watch = std::thread::spawn(move || host::wait_available(target, BACK_WITHIN));
    deaths.answers.push(testbed.remove(id).await?);
    let answered = host::now_us();
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
pub async fn run(options: &Options, places: &Places) -> Result<()> {
    let (count, at_once, sizes) = (options.deaths, options.at_once, options.sizes());
    let what = format!("{count} of each of {sizes:?} MiB, {at_once} at once");
    let report = Report::begin(places, "death", C_FLOOR, &what);
    let mut guests = vec![Guest::idle("idle")?];
    for mib in &sizes {
        guests.push(Guest::touching(*mib)?);
    }
    let mut testbed = Testbed::baked(places, &guests).await?;
    let mut floor = Floor::start(&testbed, &guests[0], Linked::Statically)?;
    testbed.start(&[]).await?;
    let table = Table::new(9, "touched", &COLUMNS);
    let mut touched = json!({});
    for (mib, guest) in sizes.iter().zip(&guests[1..]) {
        let mut deaths = Deaths::default();
        for _ in 0..count {
            one(&testbed, &guest.name, mib * MIB, &mut deaths).await?;
            deaths.munmap.push(floor.munmap_us(mib * MIB)?);
        }
        let figures = deaths.figures();
        table.row(&format!("{mib} MiB"), &figures);
        touched[mib.to_string()] = figures;
    }
    let mut figures = json!({ "touched_mib": touched });
    figures[format!("at_once_{at_once}")] =
        together(&testbed, &guests[0].name, &mut floor, options).await?;
    testbed.finish(&report, figures)
}

impl Deaths {
    fn figures(&self) -> Value {
        let answer = Spread::of(&self.answers);
        // A median of only a few deaths would say that the memory of all came back.
        let came = self.never * 2 < self.answers.len();
        let munmap = median(&self.munmap);
        json!({
            "memory_back_us": came.then(|| median(&self.back)),
            "memory_late_us": came.then(|| median(&self.late)),
            "memory_never_back": self.never, "munmap_us": munmap,
            "times_faster_than_munmap": ratio(munmap, answer.p50()), "answer": answer,
        })
    }
}

/// Idle VMs are removed by one request, and as many of the floor are killed and reaped.
async fn together(
    testbed: &Testbed,
    idle: &Name,
    floor: &mut Floor,
    options: &Options,
) -> Result<Value> {
    let (count, rounds) = (options.at_once, options.rounds);
    let (mut answers, mut backs, mut floors) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..rounds {
        let free = host::settled_available()?;
        let ids = testbed.at_once(idle, count).await?.ids;
        testbed.pool_is_full().await?;
        let used = free.saturating_sub(host::settled_available()?);
        let asked = host::now_us();
        let ours = testbed.remove_all(&ids).await?;
        let back = host::wait_available(free - used / 100, BACK_WITHIN)?.map(|us| us - asked);
        testbed.pool_is_full().await?;
        floor.many_us(count)?;
        tokio::time::sleep(Duration::from_millis(500)).await;
        let floor_us = floor.end_us()?;
        println!(
            "  {count} at once: answered in {}, memory back in {}; floor {}",
            shown(ours),
            back.map_or_else(|| "-".into(), shown),
            shown(floor_us)
        );
        answers.push(ours);
        backs.extend(back);
        floors.push(floor_us);
    }
    let (ours, floor) = (median(&answers), median(&floors));
    let back = (backs.len() == rounds).then(|| median(&backs));
    Ok(json!({
        "answer_us": ours, "memory_back_us": back, "floor_us": floor,
        "ratio_to_floor": ratio(ours, floor), "rounds": rounds,
    }))
}
