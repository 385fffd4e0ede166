//! A trace of births ([`csv`]), replayed against the daemon: the distribution of birth times where
//! demand comes in bursts.
//!
//! After section 6.4.2 of *Swift Birth and Quick Death*, which estimates by functions what births
//! of Google's trace would take; here they are born. A birth time counts from when the trace wants
//! the birth, not from when the client came to ask for it, to the restored guest's first write to a
//! port: a client that is late, because the host is busy with other births, makes it longer. A VM
//! lives as long as the trace says, idle, and is removed.
//!
//! Before the replay each size has been born once, and the pool has had the time to fill: the node
//! is in use, and quiet.

mod csv;
mod google;

use crate::prelude::*;
use crate::testbed::host::{MIB, now_us};
use crate::testbed::{Guest, Testbed};
use csv::Arrival;
use futures::channel::mpsc::{UnboundedReceiver, unbounded};
use futures::{StreamExt, TryStreamExt};
use std::cell::RefCell;
use std::collections::BTreeMap;

/// Options of `trace`.
#[derive(Debug, clap::Args)]
pub struct Options {
    /// Replay this trace (CSV: `arrival_ms,memory_mib,lifetime_ms`) instead of one that is made
    #[arg(long, value_name = "FILE")]
    trace: Option<PathBuf>,
    /// Write the trace that is replayed otherwise, and do nothing else
    #[arg(long, value_name = "FILE")]
    make: Option<PathBuf>,
}

/// Time for the client to be ready for the first.
const LEAD_US: u64 = 100_000;

/// What became of a birth, in microseconds.
#[derive(Debug)]
struct Born {
    memory_mib: u64,
    /// From when it was due to its guest's first write.
    birth_us: u64,
    /// By how much later than due it was asked for.
    late_us: u64,
    remove_us: u64,
    /// When it lived.
    written_us: u64,
    removed_us: u64,
}

/// Writes the trace that is replayed if none is given.
fn make(path: &Path) -> Result<()> {
    let text = csv::format(&google::comment(google::SEED), &google::trace(google::SEED));
    std::fs::write(path, text).with_context(|| path.display().to_string())
}

/// How many births each moment with any has.
fn sizes_of_bursts(arrivals: &[Arrival]) -> Vec<usize> {
    arrivals.chunk_by(|a, b| a.arrival_ms == b.arrival_ms).map(<[_]>::len).collect()
}

/// Hands out arrivals when they are due, each with that time, from a thread that does nothing else:
/// the client's timers are a millisecond coarse.
fn clock(arrivals: Vec<Arrival>) -> UnboundedReceiver<(Arrival, u64)> {
    let (sender, receiver) = unbounded();
    let begun_us = now_us() + LEAD_US;
    std::thread::spawn(move || {
        for arrival in arrivals {
            let due_us = begun_us + arrival.arrival_ms * 1000;
            std::thread::sleep(Duration::from_micros(due_us.saturating_sub(now_us())));
            if sender.unbounded_send((arrival, due_us)).is_err() {
                return; // the replay has ended
            }
        }
    });
    receiver
}

async fn one(testbed: &Testbed, guest: &Guest, arrival: Arrival, due_us: u64) -> Result<Born> {
    let (vm, sent_us) = testbed.create(&guest.name).await?;
    tokio::time::sleep(Duration::from_millis(arrival.lifetime_ms)).await;
    // Asked of the VMM now: at birth that would be work beside other births.
    let written_us = testbed.first_port_write_us(vm.id)?;
    let remove_us = testbed.remove(vm.id).await?;
    Ok(Born {
        memory_mib: arrival.memory_mib,
        birth_us: written_us.saturating_sub(due_us),
        late_us: sent_us.saturating_sub(due_us),
        remove_us,
        written_us,
        removed_us: now_us(),
    })
}

/// Runs it.
pub async fn run(options: &Options, places: &Places) -> Result<()> {
    if let Some(path) = &options.make {
        return make(path);
    }
    let made = places.out.join("trace.csv");
    if options.trace.is_none() {
        make(&made)?;
    }
    let file = options.trace.as_ref().unwrap_or(&made);
    let text = std::fs::read_to_string(file).with_context(|| file.display().to_string())?;
    let arrivals = csv::parse(&text).with_context(|| file.display().to_string())?;
    let bursts = sizes_of_bursts(&arrivals);
    let largest = bursts.iter().copied().max().unwrap_or(0);
    let lasts_ms = arrivals.last().map_or(0, |last| last.arrival_ms);
    let what = format!(
        "{} births in {} bursts of up to {largest} within {} s, from {}",
        arrivals.len(),
        bursts.len(),
        lasts_ms / 1000,
        file.display()
    );
    let report = Report::begin(places, "trace", "", &what);
    let mut guests = BTreeMap::new();
    for Arrival { memory_mib: mib, .. } in &arrivals {
        guests.insert(*mib, Guest::idle_of(&format!("trace-{mib}"), mib * MIB)?);
    }
    let all: Vec<Guest> = guests.values().cloned().collect();
    let mut testbed = Testbed::baked(places, &all).await?;
    testbed.start(&[]).await?;
    for guest in &all {
        testbed.warm_up(&guest.name).await?;
    }
    testbed.pool_is_full().await?;
    let born = RefCell::new(Vec::with_capacity(arrivals.len()));
    clock(arrivals)
        .map(Ok::<_, anyhow::Error>)
        .try_for_each_concurrent(None, async |(arrival, due_us)| {
            let one = one(&testbed, &guests[&arrival.memory_mib], arrival, due_us).await?;
            born.borrow_mut().push(one);
            Ok(())
        })
        .await?;
    finish(&report, &mut testbed, &born.into_inner(), &bursts, lasts_ms)
}

/// The most that lived at once.
fn most_alive(born: &[Born]) -> usize {
    let starts = born.iter().map(|birth| (birth.written_us, true));
    let mut events: Vec<_> =
        starts.chain(born.iter().map(|birth| (birth.removed_us, false))).collect();
    events.sort_unstable();
    let (mut alive, mut most) = (0usize, 0);
    for (_, starts) in events {
        alive = if starts { alive + 1 } else { alive.saturating_sub(1) };
        most = most.max(alive);
    }
    most
}

/// Prints, writes and draws.
fn finish(
    report: &Report,
    testbed: &mut Testbed,
    born: &[Born],
    bursts: &[usize],
    lasts_ms: u64,
) -> Result<()> {
    let all = |of: fn(&Born) -> u64| born.iter().map(of).collect::<Vec<_>>();
    let births = all(|birth| birth.birth_us);
    let mut by_memory: BTreeMap<u64, Vec<u64>> = BTreeMap::new();
    for birth in born {
        by_memory.entry(birth.memory_mib).or_default().push(birth.birth_us);
    }
    let alive = most_alive(born);
    println!("  alive at once: {alive} at most");
    let mut figures = json!({
        "births": Spread::of(&births),
        "births_by_memory": {},
        "asked_late": Spread::of(&all(|birth| birth.late_us)),
        "removals": Spread::of(&all(|birth| birth.remove_us)),
        "bursts": bursts.len(),
        "largest_burst": bursts.iter().max(),
        "last_arrival_ms": lasts_ms,
        "alive_at_most": alive,
    });
    let mut curves = vec![Curve::cdf("births", &births)];
    let table = Table::new(8, "", &SPREAD);
    table.row("births", &figures["births"]);
    for (mib, us) in by_memory {
        let size = format!("{mib} MiB");
        figures["births_by_memory"][&size] = json!(Spread::of(&us));
        table.row(&size, &figures["births_by_memory"][&size]);
        curves.push(Curve::cdf(&size, &us));
    }
    table.row("late by", &figures["asked_late"]);
    table.row("removal", &figures["removals"]);
    testbed.finish(report, figures)?;
    let plot = Plot {
        title: "Births of a trace: when due to the first port write of the restored guest".into(),
        x: "milliseconds",
        y: "share of the births",
        log_x: true,
        curves,
    };
    report.draw("", &plot)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn those_that_live_at_once_are_counted() {
        let born = |written_us, removed_us| Born {
            memory_mib: 64,
            birth_us: 0,
            late_us: 0,
            remove_us: 0,
            written_us,
            removed_us,
        };
        assert_eq!(most_alive(&[]), 0);
        assert_eq!(most_alive(&[born(1, 4), born(2, 3), born(5, 6)]), 2);
        // Gone in the microsecond in which the next came.
        assert_eq!(most_alive(&[born(1, 2), born(2, 3)]), 1);
    }

    #[test]
    fn a_burst_is_what_comes_in_one_millisecond() {
        let at = |arrival_ms| Arrival { arrival_ms, memory_mib: 64, lifetime_ms: 1 };
        assert_eq!(sizes_of_bursts(&[0, 0, 3, 4, 4, 4].map(at)), [2, 1, 3]);
    }

    #[test]
    fn the_clock_hands_out_what_is_due_not_earlier_and_in_order() {
        let all =
            [0, 0, 3].map(|arrival_ms| Arrival { arrival_ms, memory_mib: 64, lifetime_ms: 1 });
        let handed: Vec<_> = futures::executor::block_on_stream(clock(all.to_vec()))
            .inspect(|(_, due_us)| assert!(now_us() >= *due_us))
            .collect();
        assert_eq!(handed.iter().map(|(arrival, _)| *arrival).collect::<Vec<_>>(), all);
        assert_eq!(handed[2].1 - handed[0].1, 3000);
    }
}
