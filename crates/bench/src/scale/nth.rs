//! The n-th birth beside all that were born before it, and what an idle clone weighs.
//!
//! Up to `last` and down again, some times: what the host does only once (memory that it has never had in hand, lists that grow) is in the
//! first round alone. The n-th birth is the median, over all rounds, of the births around n, each after the pool had the time to fill;
//! those back to back are as many just before, one right after the other.

use super::remove_all;
use crate::birth::note_phases;
use crate::common::{self, Phases, median, ratio, shown};
use crate::room::{Birth, Room};
use anyhow::Result;
use dayfly_bench::plot::Curve;
use dayfly_units::{Name, VmId};
use futures::future::try_join_all;
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;
use std::ops::RangeInclusive;

const ROUNDS: usize = 3;
/// Births around n, in each round.
const WINDOW: usize = 21;

/// The births that stand for the n-th of `last`.
fn window(n: usize, last: usize) -> RangeInclusive<usize> {
    let first = n.saturating_sub(WINDOW / 2).max(1).min(last.saturating_sub(WINDOW - 1).max(1));
    first..=(first + WINDOW - 1).min(last)
}

/// Births at a mark, of all rounds.
#[derive(Debug, Default)]
struct Mark {
    calm_us: Vec<u64>,
    /// Of each round.
    rounds_us: Vec<u64>,
    busy_us: Vec<u64>,
    phases: Phases,
}

/// What was measured.
#[derive(Debug)]
pub struct Nth {
    last: usize,
    marks: BTreeMap<usize, Mark>,
    /// All births of the last round.
    took_us: Vec<u64>,
    removed_us: Vec<u64>,
    per_clone: u64,
}

impl Nth {
    /// Births up to `last`, which is at least the first of `marks`.
    pub async fn measure(room: &Room, name: &Name, last: usize) -> Result<Self> {
        let marks = [1, 64, 256, 512, 1024, 2000].into_iter().filter(|n| *n <= last);
        let marks = marks.map(|n| (n, Mark::default())).collect();
        let mut nth = Self { last, marks, took_us: Vec::new(), removed_us: Vec::new(), per_clone: 0 };
        for round in 0..ROUNDS {
            nth.round(room, name, round == 0).await?;
        }
        Ok(nth)
    }

    async fn round(&mut self, room: &Room, name: &Name, weigh: bool) -> Result<()> {
        let last = self.last;
        let calm = |n: usize| self.marks.keys().any(|mark| window(*mark, last).contains(&n));
        room.pool_is_full().await?;
        let (before, waited) = (common::settled_available()?, room.waiting().await?.0);
        let mut births = Vec::with_capacity(last);
        for n in 1..=last {
            if calm(n) {
                room.pool_is_full().await?;
            }
            births.push(room.birth(name).await?);
        }
        room.pool_is_full().await?;
        if weigh {
            // Those that wait in the pool weigh as much as those that were asked for.
            let weighed = (last + room.waiting().await?.0).saturating_sub(waited) as u64;
            self.per_clone = before.saturating_sub(common::settled_available()?) / weighed.max(1);
        }
        for (n, mark) in &mut self.marks {
            let window = window(*n, last);
            let of = |births: &[Birth]| births.iter().map(Birth::took_us).collect::<Vec<_>>();
            let births_around = &births[window.start() - 1..*window.end()];
            let us = of(births_around);
            mark.rounds_us.push(median(&us));
            mark.calm_us.extend(us);
            if *window.start() > 2 * WINDOW {
                mark.busy_us.extend(of(&births[window.start() - 1 - WINDOW..window.start() - 1]));
            }
            let ids: Vec<_> = births_around.iter().map(|birth| birth.vm.id.to_string()).collect();
            let details = try_join_all(ids.iter().map(|id| room.client.vm(id))).await?;
            for (birth, details) in births_around.iter().zip(details) {
                note_phases(&mut mark.phases, birth, &details.timeline)?;
            }
        }
        let ids: Vec<VmId> = births.iter().map(|birth| birth.vm.id).collect();
        self.removed_us.push(remove_all(room, &ids).await?);
        self.took_us = births.iter().map(Birth::took_us).collect();
        Ok(())
    }

    /// For people.
    pub fn print(&self, per_floor: u64) {
        println!("  {:>8}{:>14}{:>18}   each round", "n", "n-th birth", "back to back");
        for (n, mark) in &self.marks {
            let busy = if mark.busy_us.is_empty() { String::new() } else { shown(median(&mark.busy_us)) };
            let rounds = mark.rounds_us.iter().map(|us| shown(*us)).collect::<Vec<_>>().join(", ");
            println!("  {n:>8}{:>14}{busy:>18}   {rounds}", shown(median(&mark.calm_us)));
        }
        println!("  the last by the first: {:.2}", self.last_to_first());
        println!(
            "  memory of an idle clone: {} KiB, of the floor's: {} KiB",
            self.per_clone >> 10,
            per_floor >> 10
        );
    }

    fn last_to_first(&self) -> f64 {
        let mut all = self.marks.values().map(|mark| median(&mark.calm_us));
        let first = all.next().unwrap_or(0);
        ratio(all.next_back().unwrap_or(first), first)
    }

    /// Adds it to `value`.
    pub fn write(&self, per_floor: u64, value: &mut Map<String, Value>) {
        #[expect(clippy::cast_precision_loss, reason = "milliseconds for people")]
        let ms = |us: u64| us as f64 / 1000.0;
        let by_n = |pick: &dyn Fn(&Mark) -> Option<Value>| -> Value {
            let marks = self.marks.iter().filter_map(|(n, mark)| Some((n.to_string(), pick(mark)?)));
            marks.collect::<Map<_, _>>().into()
        };
        value.extend([
            ("nth".to_owned(), by_n(&|mark| Some(ms(median(&mark.calm_us)).into()))),
            ("nth_rounds".to_owned(), by_n(&|mark| Some(mark.rounds_us.iter().map(|us| ms(*us)).collect()))),
            (
                "nth_back_to_back".to_owned(),
                by_n(&|mark| (!mark.busy_us.is_empty()).then(|| ms(median(&mark.busy_us)).into())),
            ),
            ("nth_phases_us".to_owned(), by_n(&|mark| Some(mark.phases.json()))),
            ("last_to_first".to_owned(), self.last_to_first().into()),
            ("one_after_another".to_owned(), self.last.into()),
            ("removed_at_once_us".to_owned(), median(&self.removed_us).into()),
            (
                "memory".to_owned(),
                json!({
                    "per_clone_bytes": self.per_clone, "per_floor_bytes": per_floor,
                    "over_floor_bytes": self.per_clone.saturating_sub(per_floor),
                }),
            ),
        ]);
    }

    /// All births of the last round, to be drawn.
    pub fn curve(&self) -> Curve {
        #[expect(clippy::cast_precision_loss, reason = "a drawing")]
        let points = self.took_us.iter().enumerate().map(|(n, us)| ((n + 1) as f64, *us as f64 / 1000.0));
        Curve { label: "each birth".into(), points: points.collect() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn windows_are_as_many_births_around_n() {
        assert_eq!(window(1, 512), 1..=21);
        assert_eq!(window(64, 512), 54..=74);
        assert_eq!(window(512, 512), 492..=512);
        assert_eq!(window(1, 4), 1..=4);
        const { assert!(ROUNDS * WINDOW >= 30, "medians of at least 30") };
    }
}
