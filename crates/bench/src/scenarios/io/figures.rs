//! Medians, ratios and what was promised of them.

use super::jobs::Job;
use super::rounds::{Measured, Rates, Vmm};
use crate::figures::geometric_mean;
use crate::prelude::*;
use crate::scenarios::closer::Promises;

/// The wanted geometric mean of the ratios.
const LEAST_MEAN: f64 = 1.0;
/// The wanted least ratio.
const LEAST_RATIO: f64 = 0.8;

const COLUMNS: [Column; 6] = [
    ("unit", "/unit", Plain),
    ("dayfly", "/dayfly/median", Digits(0)),
    ("QEMU", "/qemu/median", Digits(0)),
    ("ratio", "/ratio", Digits(2)),
    ("least", "/least_ratio", Digits(2)),
    ("most", "/most_ratio", Digits(2)),
];

/// Figures of the rounds.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Rounds {
    median: f64,
    /// In the order of the rounds.
    each: Vec<f64>,
}

impl Rounds {
    fn of(rates: Option<&Rates>, job: &str) -> Option<Self> {
        let each = rates?.get(job)?.clone();
        Some(Self { median: median_of(&each)?, each })
    }
}

/// A job, and how both VMMs did it.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Row {
    job: String,
    unit: &'static str,
    /// Whether it counts for the promises: QEMU's process moves the packets, as dayfly's does.
    counts: bool,
    dayfly: Rounds,
    qemu: Rounds,
    /// dayfly's median divided by QEMU's.
    ratio: f64,
    /// Of the ratios of single rounds.
    least_ratio: f64,
    most_ratio: f64,
}

impl Row {
    fn of(job: &Job, against: Vmm, measured: &Measured) -> Option<Self> {
        let name = job.to_string();
        let rounds = |vmm| Rounds::of(measured.rates.get(&vmm), &name);
        let (dayfly, qemu) = (rounds(Vmm::Dayfly)?, rounds(against)?);
        let ratios = || std::iter::zip(&dayfly.each, &qemu.each).map(|(a, b)| a / b);
        let (least_ratio, most_ratio) = (ratios().reduce(f64::min)?, ratios().reduce(f64::max)?);
        let counts = against == Vmm::Qemu;
        let job_name = if counts { name } else { format!("{name}, vhost") };
        Some(Self {
            job: job_name,
            unit: job.unit(),
            counts,
            ratio: dayfly.median / qemu.median,
            dayfly,
            qemu,
            least_ratio,
            most_ratio,
        })
    }
}

/// The figure in the middle; of an even number, the lower one, as of all medians here.
fn median_of(figures: &[f64]) -> Option<f64> {
    let mut sorted = figures.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted.get(sorted.len().saturating_sub(1) / 2).copied()
}

/// The rows of the jobs, those against QEMU with vhost last.
pub fn rows(jobs: &[Job], measured: &Measured) -> Vec<Row> {
    let against = |vmm| jobs.iter().filter_map(move |job| Row::of(job, vmm, measured));
    against(Vmm::Qemu).chain(against(Vmm::QemuVhost)).collect()
}

/// Prints the rows.
pub fn print(rows: &[Row]) {
    let table = Table::new(21, "job", &COLUMNS);
    rows.iter().for_each(|row| table.row(&row.job, row));
}

/// What is promised of the rows, and that no packet waits for a block request.
pub fn promise(rows: &[Row], measured: &Measured, promises: &mut Promises) -> f64 {
    let ratios = || rows.iter().filter(|row| row.counts).map(|row| row.ratio);
    let mean = geometric_mean(ratios());
    promises.at_least("geometric mean of the ratios", LEAST_MEAN, mean);
    let least = ratios().reduce(f64::min).unwrap_or(f64::NAN);
    promises.at_least("least ratio", LEAST_RATIO, least);
    if let Some(written) = measured.written {
        // Without a count of the disks' thread, none of the packets' thread means nothing.
        let counted = if written.disks_bytes > 0 { float(written.packets_bytes) } else { f64::NAN };
        promises.at_most("bytes to disks by the packets' thread", 0.0, counted);
    }
    mean
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scenarios::io::guests::Aio;
    use crate::scenarios::io::jobs::chosen;
    use crate::scenarios::io::threads::Written;
    use std::collections::BTreeMap;

    fn measured(rates: &[(Vmm, &str, &[f64])]) -> Measured {
        let mut all: BTreeMap<Vmm, Rates> = BTreeMap::new();
        for (vmm, job, each) in rates {
            all.entry(*vmm).or_default().insert((*job).to_owned(), each.to_vec());
        }
        Measured {
            rates: all,
            written: None,
            qemu: "QEMU".to_owned(),
            aio: Aio::Threads,
            tried: BTreeMap::new(),
            lost: 0,
            leaks: Vec::new(),
        }
    }

    fn near(got: f64, expected: f64) -> bool {
        (got - expected).abs() < 1e-9
    }

    #[test]
    fn a_ratio_is_of_medians_and_its_spread_of_rounds() {
        let measured = measured(&[
            (Vmm::Dayfly, "net-tcp-rr", &[300.0, 100.0, 200.0]),
            (Vmm::Qemu, "net-tcp-rr", &[100.0, 100.0, 400.0]),
            (Vmm::QemuVhost, "net-tcp-rr", &[400.0, 400.0, 400.0]),
        ]);
        let rows = rows(&chosen(&[]).unwrap(), &measured);
        let [row, vhost] = &rows[..] else { panic!("{rows:?}") };
        assert!(near(row.ratio, 2.0) && near(row.least_ratio, 0.5) && near(row.most_ratio, 3.0));
        assert!(row.counts && !vhost.counts && near(vhost.ratio, 0.5), "{vhost:?}");
        assert_eq!(vhost.job, "net-tcp-rr, vhost");
        print(&rows);
    }

    #[test]
    fn a_median_is_a_figure_that_was_measured() {
        assert_eq!(median_of(&[5.0, 1.0, 9.0]), Some(5.0));
        assert_eq!((median_of(&[4.0, 1.0]), median_of(&[])), (Some(1.0), None));
    }

    fn holds(dayfly: [f64; 2], written: Option<Written>) -> bool {
        let jobs = ["disk-4k-read-1", "disk-4k-write-1"];
        let of = |vmm, rates: [f64; 2]| {
            std::iter::zip(jobs, rates).map(move |(job, rate)| (vmm, job, vec![rate]))
        };
        let all: Vec<_> = of(Vmm::Dayfly, dayfly).chain(of(Vmm::Qemu, [100.0; 2])).collect();
        let all: Vec<_> = all.iter().map(|(vmm, job, each)| (*vmm, *job, &each[..])).collect();
        let measured = Measured { written, ..measured(&all) };
        let mut promises = Promises::default();
        promise(&rows(&chosen(&[]).unwrap(), &measured), &measured, &mut promises);
        promises.hold().is_ok()
    }

    #[test]
    fn the_promise_is_of_the_mean_of_each_ratio_and_of_the_count() {
        assert!(holds([80.0, 126.0], None));
        assert!(!holds([99.0, 100.0], None), "the mean is less than 1");
        assert!(!holds([79.0, 500.0], None), "a ratio is less than 0.8");
        let written = |packets_bytes, disks_bytes| Some(Written { packets_bytes, disks_bytes });
        assert!(holds([100.0; 2], written(0, 4096)));
        assert!(!holds([100.0; 2], written(1, 4096)));
        assert!(!holds([100.0; 2], written(0, 0)), "nothing was counted");
    }

    #[test]
    fn nothing_measured_is_no_promise_that_holds() {
        let measured = measured(&[]);
        let mut promises = Promises::default();
        promise(&rows(&chosen(&[]).unwrap(), &measured), &measured, &mut promises);
        assert!(promises.hold().is_err());
    }
}
