//! A trace of births ([`csv`]), replayed against the daemon: the distribution of birth times where demand comes in bursts.
//!
//! After section 6.4.2 of *Swift Birth and Quick Death*, which estimates by functions what births of Google's trace would take;
//! here they are born. A birth time counts from when the trace wants the birth, not from when the client came to ask for it, to
//! the restored guest's first write to a port: a client that is late, because the host is busy with other births, makes it longer.
//! A VM lives as long as the trace says, idle, and is removed.
//!
//! Before the replay each size has been born once, and the pool has had the time to fill: the node is in use, and quiet.

mod csv;
mod google;

use crate::birth::words;
use crate::common::{self, MIB, Spread, percentile, shown};
use crate::room::Room;
use anyhow::{Context, Result};
use csv::Arrival;
use dayfly_bench::plot::{Curve, Plot};
use dayfly_units::Name;
use futures::channel::mpsc::{UnboundedReceiver, unbounded};
use futures::{StreamExt, TryStreamExt};
use serde_json::{Map, Value, json};
use std::cell::RefCell;
use std::collections::BTreeSet;
use std::path::Path;
use std::time::Duration;

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

/// Writes the trace that is replayed when none is given.
pub fn make(path: &Path) -> Result<()> {
    let text = csv::format(&google::comment(google::SEED), &google::trace(google::SEED));
    std::fs::write(path, text).with_context(|| path.display().to_string())
}

/// How many births each moment with any has.
fn sizes_of_bursts(arrivals: &[Arrival]) -> Vec<usize> {
    arrivals.chunk_by(|a, b| a.arrival_ms == b.arrival_ms).map(<[_]>::len).collect()
}

fn name(memory_mib: u64) -> Result<Name> {
    Ok(format!("trace-{memory_mib}").parse()?)
}

/// Hands out arrivals when they are due, each with that time, from a thread that does nothing else: the client's timers are
/// a millisecond coarse.
fn clock(arrivals: Vec<Arrival>) -> UnboundedReceiver<(Arrival, u64)> {
    let (sender, receiver) = unbounded();
    let begun_us = common::now_us() + LEAD_US;
    std::thread::spawn(move || {
        for arrival in arrivals {
            let due_us = begun_us + arrival.arrival_ms * 1000;
            std::thread::sleep(Duration::from_micros(due_us.saturating_sub(common::now_us())));
            if sender.unbounded_send((arrival, due_us)).is_err() {
                return; // nobody waits for it any more
            }
        }
    });
    receiver
}

async fn one(room: &Room, arrival: Arrival, due_us: u64) -> Result<Born> {
    let (vm, sent_us) = room.create(&name(arrival.memory_mib)?).await?;
    tokio::time::sleep(Duration::from_millis(arrival.lifetime_ms)).await;
    // Asked of the VMM now: at birth that would be work beside other births.
    let written_us = room.first_port_write_us(vm.id)?;
    let remove_us = room.remove(vm.id).await?;
    Ok(Born {
        memory_mib: arrival.memory_mib,
        birth_us: written_us.saturating_sub(due_us),
        late_us: sent_us.saturating_sub(due_us),
        remove_us,
        written_us,
        removed_us: common::now_us(),
    })
}

/// Runs it, with the trace in `file`, or else one made now.
pub async fn run(programs: &Path, out: &Path, file: Option<&Path>) -> Result<()> {
    let made = out.join("trace.csv");
    if file.is_none() {
        make(&made)?;
    }
    let file = file.unwrap_or(&made);
    let text = std::fs::read_to_string(file).with_context(|| file.display().to_string())?;
    let arrivals = csv::parse(&text).with_context(|| file.display().to_string())?;
    let bursts = sizes_of_bursts(&arrivals);
    let largest = bursts.iter().copied().max().unwrap_or(0);
    let lasts_ms = arrivals.last().map_or(0, |last| last.arrival_ms);
    println!(
        "trace: {} births in {} bursts of up to {largest} within {} s, from {}; load {}",
        arrivals.len(),
        bursts.len(),
        lasts_ms / 1000,
        file.display(),
        common::load()
    );

    let sizes: BTreeSet<u64> = arrivals.iter().map(|arrival| arrival.memory_mib).collect();
    let mut room = Room::new(programs)?;
    for mib in &sizes {
        room.bake(&name(*mib)?, mib * MIB, &words())?;
    }
    room.start().await?;
    for mib in &sizes {
        let birth = room.birth(&name(*mib)?).await?;
        room.remove(birth.vm.id).await?;
    }
    room.pool_is_full().await?;
    let born = RefCell::new(Vec::with_capacity(arrivals.len()));
    clock(arrivals)
        .map(Ok::<_, anyhow::Error>)
        .try_for_each_concurrent(None, async |(arrival, due_us)| {
            let one = one(&room, arrival, due_us).await?;
            born.borrow_mut().push(one);
            Ok(())
        })
        .await?;
    let leaked = room.end()?;
    report(out, &born.into_inner(), &bursts, lasts_ms, leaked)
}

/// The most that lived at once.
fn most_alive(born: &[Born]) -> usize {
    let starts = born.iter().map(|birth| (birth.written_us, true));
    let mut events: Vec<_> = starts.chain(born.iter().map(|birth| (birth.removed_us, false))).collect();
    events.sort_unstable();
    let (mut alive, mut most) = (0usize, 0);
    for (_, starts) in events {
        alive = if starts { alive + 1 } else { alive.saturating_sub(1) };
        most = most.max(alive);
    }
    most
}

/// [`Spread`], and what nine of ten are not above.
fn distribution(values: &[u64]) -> Value {
    let mut sorted = values.to_vec();
    sorted.sort_unstable();
    let mut value = json!(Spread::of(values, None));
    value["p90_us"] = percentile(&sorted, 0.9).into();
    value
}

fn report(out: &Path, born: &[Born], bursts: &[usize], lasts_ms: u64, leaked: usize) -> Result<()> {
    let all = |of: fn(&Born) -> u64| born.iter().map(of).collect::<Vec<_>>();
    let births = all(|birth| birth.birth_us);
    let mut rows = vec![("births".to_owned(), births.clone())];
    let sizes: BTreeSet<u64> = born.iter().map(|birth| birth.memory_mib).collect();
    for mib in sizes {
        let of_size = born.iter().filter(|birth| birth.memory_mib == mib);
        rows.push((format!("{mib} MiB"), of_size.map(|birth| birth.birth_us).collect()));
    }
    let by_memory: Map<String, Value> =
        rows[1..].iter().map(|(size, us)| (size.clone(), distribution(us))).collect();
    let alive = most_alive(born);
    let curves = rows.iter().map(|(label, us)| Curve::cdf(label, us)).collect();
    rows.push(("asked late by".into(), all(|birth| birth.late_us)));
    rows.push(("removal".into(), all(|birth| birth.remove_us)));
    println!("  {:<14}{:>6}{:>12}{:>12}{:>12}{:>12}", "", "n", "p50", "p90", "p99", "most");
    for (label, us) in &rows {
        let mut sorted = us.clone();
        sorted.sort_unstable();
        let [p50, p90, p99, most] = [0.5, 0.9, 0.99, 1.0].map(|part| shown(percentile(&sorted, part)));
        println!("  {label:<14}{:>6}{p50:>12}{p90:>12}{p99:>12}{most:>12}", us.len());
    }
    println!("  alive at once: {alive} at most; leaked processes: {leaked}");
    let value = json!({
        "births": distribution(&births),
        "births_by_memory": by_memory,
        "asked_late": distribution(&all(|birth| birth.late_us)),
        "removals": distribution(&all(|birth| birth.remove_us)),
        "bursts": bursts.len(),
        "largest_burst": bursts.iter().max(),
        "last_arrival_ms": lasts_ms,
        "alive_at_most": alive,
        "load": common::load(),
        "leaked": leaked,
    });
    common::write(out, "trace.json", &value)?;
    Plot {
        title: "Births of a trace: when due to the first port write of the restored guest".into(),
        x: "milliseconds",
        y: "part of the births",
        log_x: true,
        curves,
    }
    .write(out, "trace.svg")
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
        let all = [0, 0, 3].map(|arrival_ms| Arrival { arrival_ms, memory_mib: 64, lifetime_ms: 1 });
        let handed: Vec<_> = futures::executor::block_on_stream(clock(all.to_vec()))
            .inspect(|(_, due_us)| assert!(common::now_us() >= *due_us))
            .collect();
        assert_eq!(handed.iter().map(|(arrival, _)| *arrival).collect::<Vec<_>>(), all);
        assert_eq!(handed[2].1 - handed[0].1, 3000);
    }
}
