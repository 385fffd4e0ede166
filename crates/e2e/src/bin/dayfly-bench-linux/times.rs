//! Times to the first answer, and the stages on the way.

use crate::guests::Answer;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::time::Duration;

/// Times to the first answer, nearest ranks.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Times {
    /// How many.
    pub n: usize,
    /// Half are no slower.
    pub p50_ms: f64,
    /// 99 of 100 are no slower.
    pub p99_ms: f64,
    /// The least.
    pub min_ms: f64,
    /// The most.
    pub max_ms: f64,
    /// Medians since the request, in their order: those of the timeline since the daemon had it, the client's since it was sent.
    pub stages: Vec<Stage>,
}

/// A stage that was reached.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Stage {
    /// Its name.
    pub stage: String,
    /// Half are no later.
    pub p50_ms: f64,
    /// How many reached it: a VM's start tells what was ready for it.
    pub n: usize,
}

/// Times as they come.
#[derive(Debug, Default)]
pub struct Series {
    took: Vec<Duration>,
    stages: BTreeMap<String, Vec<Duration>>,
}

impl Series {
    /// Notes a VM.
    pub fn add(&mut self, answer: &Answer, timeline: &[(String, u64)]) {
        self.took.push(answer.took);
        let daemon = timeline.iter().map(|(stage, us)| (stage.clone(), Duration::from_micros(*us)));
        let client = [
            ("client: program started", answer.started),
            ("client: program's output", answer.said),
            ("client: program's exit", answer.took),
        ];
        for (stage, at) in daemon.chain(client.map(|(stage, at)| (stage.to_owned(), at))) {
            self.stages.entry(stage).or_default().push(at);
        }
    }

    /// What they come to.
    pub fn times(mut self) -> Times {
        self.took.sort_unstable();
        let mut stages: Vec<Stage> = self
            .stages
            .into_iter()
            .map(|(stage, mut at)| {
                at.sort_unstable();
                Stage { stage, p50_ms: rank(&at, 50), n: at.len() }
            })
            .collect();
        stages.sort_by(|a, b| a.p50_ms.total_cmp(&b.p50_ms));
        Times {
            n: self.took.len(),
            p50_ms: rank(&self.took, 50),
            p99_ms: rank(&self.took, 99),
            min_ms: rank(&self.took, 0),
            max_ms: rank(&self.took, 100),
            stages,
        }
    }
}

/// Nearest rank: the smallest value that is no smaller than so many of a hundred, in milliseconds.
fn rank(sorted: &[Duration], percent: usize) -> f64 {
    let rank = (sorted.len() * percent).div_ceil(100).max(1);
    sorted.get(rank - 1).copied().map_or(0.0, ms)
}

/// Milliseconds.
pub fn ms(duration: Duration) -> f64 {
    rounded(duration.as_secs_f64() * 1e3)
}

/// To three digits after the point: as fine as anyone can use.
pub fn rounded(value: f64) -> f64 {
    (value * 1e3).round() / 1e3
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_are_values_that_were_measured() {
        let hundred: Vec<Duration> = (1..=100).map(Duration::from_millis).collect();
        let got = [0, 50, 99, 100].map(|percent| rank(&hundred, percent));
        assert_eq!(got, [1.0, 50.0, 99.0, 100.0]);
        assert_eq!(rank(&hundred[..1], 99), 1.0);
        assert_eq!(rank(&[], 50), 0.0);
    }
}
