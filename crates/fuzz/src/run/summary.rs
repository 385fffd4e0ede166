//! The figures of all runs.

use super::process::Ran;
use crate::target::Target;
use serde::Serialize;
use std::path::PathBuf;

/// The figures of one run.
#[derive(Debug, Clone, Serialize)]
pub struct Row {
    /// The target's name.
    pub target: &'static str,
    /// Whether its inputs are sequences of events.
    pub stateful: bool,
    /// Inputs executed.
    pub executions: u64,
    /// Edges reached at the start, by the corpus alone.
    pub first_edges: u64,
    /// Edges reached at the end.
    pub edges: u64,
    /// Whether a new edge was reached in the last third of the run.
    pub still_grows: bool,
    /// Duration in seconds.
    pub seconds: f64,
    /// CPU time in seconds.
    pub cpu_s: f64,
    /// Whether the planted fault was found, if faults were planted.
    pub planted_found: Option<bool>,
    /// Inputs that broke a property.
    pub findings: Vec<PathBuf>,
    /// The first line of the error.
    pub error: Option<String>,
}

impl Row {
    /// The figures of `ran`.
    #[must_use]
    pub fn of(target: &'static Target, ran: Ran, planted: bool) -> Self {
        let Ran { progress, took, cpu_s, crashes } = ran;
        Self {
            target: target.name,
            stateful: target.stateful,
            executions: progress.executions,
            first_edges: progress.first_edges,
            edges: progress.edges,
            still_grows: progress.still_grows(took),
            seconds: took.as_secs_f64(),
            cpu_s,
            planted_found: planted.then_some(progress.planted),
            findings: if planted { Vec::new() } else { crashes },
            error: progress.error.filter(|_| !planted),
        }
    }

    /// Whether the run found what it must not find, or did not find what it must.
    #[must_use]
    pub fn failed(&self) -> bool {
        !self.findings.is_empty() || self.error.is_some() || self.planted_found == Some(false)
    }

    /// A line of the table.
    #[must_use]
    pub fn line(&self) -> String {
        let result = match (self.planted_found, self.findings.len()) {
            (Some(true), _) => "planted fault found".to_owned(),
            (Some(false), _) => "PLANTED FAULT NOT FOUND".to_owned(),
            (None, 0) if self.error.is_none() => "-".to_owned(),
            (None, count) => format!("{count} FINDINGS"),
        };
        let new = if self.still_grows { "yes" } else { "no" };
        format!(
            "{:<16} {:>11} {:>7} {:>7} {new:>9} {:>7.0} {:>7.0}  {result}",
            self.target, self.executions, self.first_edges, self.edges, self.seconds, self.cpu_s,
        )
    }
}

/// The head of the table.
#[must_use]
pub fn head() -> String {
    format!(
        "{:<16} {:>11} {:>7} {:>7} {:>9} {:>7} {:>7}  findings",
        "target", "executions", "before", "edges", "new late", "s", "CPU s"
    )
}
