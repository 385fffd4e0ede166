//! Times by phase.

use super::samples::median;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::collections::BTreeMap;

/// Microseconds by the name of a phase.
#[derive(Debug, Default, Serialize, Deserialize)]
pub struct Phases(BTreeMap<String, Vec<u64>>);

impl Phases {
    /// Adds a sample.
    pub fn add(&mut self, phase: &str, us: u64) {
        self.0.entry(phase.to_owned()).or_default().push(us);
    }

    /// Each phase with its median and the number of samples; the earliest phase comes first.
    pub fn medians(&self) -> Vec<(&str, u64, usize)> {
        let all = self.0.iter().map(|(phase, us)| (phase.as_str(), median(us), us.len()));
        let mut all: Vec<_> = all.collect();
        all.sort_by_key(|(_, us, _)| *us);
        all
    }

    /// Medians by phase.
    pub fn json(&self) -> Value {
        self.medians()
            .into_iter()
            .map(|(phase, us, _)| (phase.to_owned(), Value::from(us)))
            .collect()
    }

    /// Prints the medians below a line with `title`.
    pub fn print(&self, title: &str) {
        println!("  {title}, medians since the request was sent:");
        for (phase, us, _) in self.medians() {
            println!("    {:>10}  {phase}", super::shown(us));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn phases_come_in_the_order_of_their_medians() {
        let mut phases = Phases::default();
        for (phase, us) in [("late", 9), ("early", 2), ("late", 7), ("late", 8), ("early", 1)] {
            phases.add(phase, us);
        }
        assert_eq!(phases.medians(), [("early", 1, 2), ("late", 8, 3)]);
    }
}
