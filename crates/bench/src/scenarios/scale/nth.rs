//! The n-th birth beside all earlier VMs, and the memory of an idle clone.
//!
//! Each round goes up to `last` and removes all VMs: what the host does only once (memory that it
//! never handed out before, lists that grow) is in the first round alone. The n-th birth is the
//! median, over all rounds, of the births around n, each after the pool had the time to fill.
//! Births back to back are as many just before those, without a pause.

use crate::prelude::*;
use crate::testbed::{Birth, Testbed};
use serde_json::Map;
use std::collections::BTreeMap;
use std::ops::RangeInclusive;

const COLUMNS: [Column; 3] = [
    ("n-th birth", "/nth", Ms),
    ("back to back", "/nth_back_to_back", Ms),
    ("each round (ms)", "/nth_rounds", Plain),
];
/// Births around n, in each round.
const WINDOW: usize = 21;

/// The births that count as the n-th of `last`.
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

impl Mark {
    /// Each below the key that it has for all marks.
    fn figures(&self) -> Map<String, Value> {
        let rounds: Vec<f64> = self.rounds_us.iter().map(|us| ms(*us)).collect();
        let mut figures = Map::from_iter([
            ("nth".to_owned(), ms(median(&self.calm_us)).into()),
            ("nth_rounds".to_owned(), rounds.into()),
            ("nth_phases_us".to_owned(), self.phases.json()),
        ]);
        if !self.busy_us.is_empty() {
            figures.insert("nth_back_to_back".to_owned(), ms(median(&self.busy_us)).into());
        }
        figures
    }
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
    pub async fn measure(
        testbed: &Testbed,
        name: &Name,
        last: usize,
        rounds: usize,
    ) -> Result<Self> {
        let marks = [1, 64, 256, 512, 1024, 2000].into_iter().filter(|n| *n <= last);
        let marks = marks.map(|n| (n, Mark::default())).collect();
        let mut nth =
            Self { last, marks, took_us: Vec::new(), removed_us: Vec::new(), per_clone: 0 };
        for round in 0..rounds {
            nth.round(testbed, name, round == 0).await?;
        }
        Ok(nth)
    }

    async fn round(&mut self, testbed: &Testbed, name: &Name, weigh: bool) -> Result<()> {
        let last = self.last;
        let calm = |n: usize| self.marks.keys().any(|mark| window(*mark, last).contains(&n));
        let scales = testbed.scales().await?;
        let mut births = Vec::with_capacity(last);
        for n in 1..=last {
            if calm(n) {
                testbed.pool_is_full().await?;
            }
            births.push(testbed.birth(name).await?);
        }
        testbed.pool_is_full().await?;
        if weigh {
            self.per_clone = scales.each_bytes(testbed, last).await?;
        }
        let of = |births: &[Birth]| births.iter().map(Birth::took_us).collect::<Vec<_>>();
        for (n, mark) in &mut self.marks {
            let window = window(*n, last);
            let first = window.start() - 1;
            let around = &births[first..*window.end()];
            let us = of(around);
            mark.rounds_us.push(median(&us));
            mark.calm_us.extend(us);
            if first >= 2 * WINDOW {
                mark.busy_us.extend(of(&births[first - WINDOW..first]));
            }
            for (birth, timeline) in around.iter().zip(testbed.timelines(around.iter()).await?) {
                birth.note(&timeline, &mut mark.phases)?;
            }
        }
        let ids: Vec<VmId> = births.iter().map(|birth| birth.vm.id).collect();
        self.removed_us.push(testbed.remove_all(&ids).await?);
        self.took_us = of(&births);
        Ok(())
    }

    /// Prints and returns them; an idle VM of the floor takes `per_floor` bytes.
    pub fn figures(&self, per_floor: u64) -> Value {
        let table = Table::new(6, "n", &COLUMNS);
        let mut figures = json!({ "nth_back_to_back": {} });
        for (n, mark) in &self.marks {
            let of_mark = mark.figures();
            table.row(&n.to_string(), &of_mark);
            for (key, value) in of_mark {
                figures[key][n.to_string()] = value;
            }
        }
        let mut all = self.marks.values().map(|mark| median(&mark.calm_us));
        let first = all.next().unwrap_or(0);
        let last_to_first = ratio(all.next_back().unwrap_or(first), first);
        println!(
            "  the last by the first: {last_to_first:.2}\n  memory of an idle clone: {} KiB, of \
             the floor's VM: {} KiB",
            self.per_clone >> 10,
            per_floor >> 10
        );
        figures["last_to_first"] = last_to_first.into();
        figures["one_after_another"] = self.last.into();
        figures["removed_at_once_us"] = median(&self.removed_us).into();
        figures["memory"] = json!({
            "per_clone_bytes": self.per_clone, "per_floor_bytes": per_floor,
            "over_floor_bytes": self.per_clone.saturating_sub(per_floor),
        });
        figures
    }

    /// All births of the last round.
    pub fn plot(&self) -> Plot {
        let points = (1..).zip(self.took_us.iter().copied());
        Plot {
            title: "The n-th birth, beside all earlier VMs".into(),
            x: "n",
            y: "milliseconds",
            log_x: false,
            curves: vec![Curve::counts("each birth", points, 1000)],
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_window_has_as_many_births_around_n_as_there_are() {
        assert_eq!(window(1, 512), 1..=21);
        assert_eq!(window(64, 512), 54..=74);
        assert_eq!(window(512, 512), 492..=512);
        assert_eq!(window(1, 4), 1..=4);
    }
}
