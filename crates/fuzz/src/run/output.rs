//! What libFuzzer prints: `#4096 NEW    cov: 123 ft: 456 corp: 7/89b …`, and at the end
//! `stat::number_of_executed_units: 4096`.

use std::time::Duration;

/// The progress of a run, line by line.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Progress {
    /// Inputs executed.
    pub executions: u64,
    /// Edges reached.
    pub edges: u64,
    /// Edges reached by the corpus with which the run began.
    pub first_edges: u64,
    /// The run's CPU time when the last new edge was reached.
    pub last_new_edge: Duration,
    /// Whether the planted fault was found.
    pub planted: bool,
    /// The first line of an error.
    pub error: Option<String>,
}

fn number_after(line: &str, key: &str) -> Option<u64> {
    let rest = line.get(line.find(key)? + key.len()..)?;
    let rest = rest.trim_start();
    rest.get(..rest.find(|c: char| !c.is_ascii_digit()).unwrap_or(rest.len()))?.parse().ok()
}

impl Progress {
    /// Takes a line that came when the run had used `cpu`.
    pub fn line(&mut self, line: &str, cpu: Duration) {
        if line.starts_with('#') {
            self.executions = number_after(line, "#").unwrap_or(0).max(self.executions);
        }
        if let Some(units) = number_after(line, "stat::number_of_executed_units:") {
            self.executions = units;
        }
        if let Some(edges) = number_after(line, " cov: ") {
            if line.contains("INITED") {
                self.first_edges = edges;
            }
            if edges > self.edges {
                (self.edges, self.last_new_edge) = (edges, cpu);
            }
        }
        self.planted |= line.contains("the planted fault");
        let is_error = ["panicked at", "ERROR: libFuzzer", "ERROR: AddressSanitizer"]
            .iter()
            .any(|start| line.contains(start));
        if is_error && self.error.is_none() {
            self.error = Some(line.to_owned());
        }
    }

    /// Whether a new edge was reached in the last third of a run that used `cpu`.
    #[must_use]
    pub fn still_grows(&self, cpu: Duration) -> bool {
        self.last_new_edge > cpu * 2 / 3
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn executions_edges_and_errors_are_read() {
        let mut progress = Progress::default();
        let s = Duration::from_secs;
        for (line, at) in [
            ("INFO: Seed: 123", 0),
            ("#10\tINITED cov: 200 ft: 300 corp: 4/100b exec/s: 0 rss: 60Mb", 1),
            ("#4096\tpulse  cov: 200 ft: 310 corp: 5/120b lim: 4 exec/s: 2048 rss: 61Mb", 2),
            ("#5000\tNEW    cov: 212 ft: 320 corp: 6/150b lim: 8 exec/s: 2500 rss: 61Mb", 6),
            ("#6000\tREDUCE cov: 212 ft: 320 corp: 6/149b lim: 8 exec/s: 2500 rss: 61Mb", 9),
            ("stat::number_of_executed_units: 6500", 10),
        ] {
            progress.line(line, s(at));
        }
        let (executions, edges, first_edges, last_new_edge) = (6500, 212, 200, s(6));
        let expected =
            Progress { executions, edges, first_edges, last_new_edge, ..Progress::default() };
        assert_eq!(progress, expected);
        assert!(progress.still_grows(s(8)) && !progress.still_grows(s(10)));
        progress.line("thread '<unnamed>' panicked at crates/fuzz/src/target.rs:1:1:", s(10));
        progress.line("the planted fault", s(10));
        progress.line("==1== ERROR: libFuzzer: deadly signal", s(10));
        assert!(progress.planted && progress.error.unwrap().contains("panicked at"));
    }
}
