//! What fio reports: its `--output-format=json` (fio(1), "JSON output").

use super::jobs::{Block, Disk};
use crate::prelude::*;

/// Most bytes of a report; that of one job has about 6 KiB.
const MAX_BYTES: usize = 256 << 10;

#[derive(Debug, Deserialize)]
struct Output {
    jobs: Vec<Reported>,
}

#[derive(Debug, Deserialize)]
struct Reported {
    error: i64,
    read: Direction,
    write: Direction,
}

#[derive(Debug, Deserialize)]
struct Direction {
    iops: f64,
    bw_bytes: u64,
    total_ios: u64,
}

/// The job's figure in its unit: requests a second, or MB a second.
///
/// # Errors
/// The report is of no such job, or the job failed or did nothing.
pub fn rate(job: &Disk, report: &str) -> Result<f64> {
    let reported = only_job(report)?;
    let (does, other) = if job.is_write {
        (&reported.write, &reported.read)
    } else {
        (&reported.read, &reported.write)
    };
    let right = does.total_ios > 0 && other.total_ios == 0;
    ensure!(right, "fio: expected requests of one direction, got {reported:?}");
    let rate = match job.block {
        Block::Random4K => does.iops,
        Block::Sequential1M => float(does.bw_bytes) / 1e6,
    };
    ensure!(rate.is_finite() && rate > 0.0, "fio: expected a rate, got {reported:?}");
    Ok(rate)
}

/// # Errors
/// The report is none, or the job that fills the file failed.
pub fn filled(report: &str) -> Result<()> {
    only_job(report).map(drop)
}

fn only_job(report: &str) -> Result<Reported> {
    let bytes = report.len();
    ensure!(bytes <= MAX_BYTES, "fio: expected at most {MAX_BYTES} bytes, got {bytes}");
    // fio writes warnings to standard output too, before the report.
    let at = if report.starts_with('{') { Some(0) } else { report.find("\n{").map(|at| at + 1) };
    let text = report.get(at.context("fio: expected JSON, got none")?..).unwrap_or_default();
    let mut values = serde_json::Deserializer::from_str(text).into_iter::<Output>();
    let output = values.next().context("fio: expected JSON, got none")?.context("fio's JSON")?;
    let [job] = <[Reported; 1]>::try_from(output.jobs)
        .map_err(|jobs| anyhow!("fio: expected one job, got {}", jobs.len()))?;
    ensure!(job.error == 0, "fio: error {} of the job", job.error);
    Ok(job)
}

#[cfg(test)]
mod tests {
    use super::*;

    const READ: Disk = Disk { block: Block::Random4K, is_write: false, depth: 1 };

    fn report(error: i64, reads: u64, writes: u64) -> String {
        let direction = |ios: u64| {
            let (bytes, iops) = (ios * 4096, float(ios) / 2.0);
            json!({ "io_bytes": bytes, "bw": 1, "bw_bytes": bytes, "iops": iops,
                    "total_ios": ios, "lat_ns": { "mean": 1.5 } })
        };
        let job = json!({ "jobname": "io", "error": error, "read": direction(reads),
                          "write": direction(writes), "trim": direction(0) });
        let all = json!({ "fio version": "fio-3.33", "jobs": [job], "disk_util": [] });
        serde_json::to_string_pretty(&all).unwrap()
    }

    #[test]
    fn the_rate_is_that_of_the_job_s_direction_in_its_unit() {
        let near = |got: Result<f64>, expected: f64| (got.unwrap() - expected).abs() < 1e-9;
        assert!(near(rate(&READ, &report(0, 1000, 0)), 500.0));
        let write = Disk { block: Block::Sequential1M, is_write: true, depth: 32 };
        assert!(near(rate(&write, &report(0, 0, 1000)), 4.096));
        let warned = format!("fio: a warning {{\n{}\nfio: another", report(0, 1000, 0));
        assert!(near(rate(&READ, &warned), 500.0));
    }

    #[test]
    fn what_was_not_measured_is_an_error() {
        assert!(rate(&READ, &report(28, 1000, 0)).is_err(), "no space");
        assert!(rate(&READ, &report(0, 0, 0)).is_err(), "nothing was done");
        assert!(rate(&READ, &report(0, 1000, 1000)).is_err(), "of another job");
        for bad in ["", "{", "fio: {", "{}", r#"{"jobs":[]}"#, r#"{"jobs":[{"error":0}]}"#] {
            assert!(rate(&READ, bad).is_err(), "{bad}");
        }
        let long = report(0, 1000, 0) + &" ".repeat(MAX_BYTES);
        assert!(rate(&READ, &long).unwrap_err().to_string().contains("at most"));
    }
}
