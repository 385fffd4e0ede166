//! The figures of all runs.

use super::process::Ran;
use crate::target::Target;
use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};

/// The figures of one run.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Row {
    /// The target's name.
    pub target: String,
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
    pub fn of(target: &Target, ran: Ran, planted: bool) -> Self {
        let Ran { progress, took, cpu, crashes } = ran;
        Self {
            target: target.name.to_owned(),
            stateful: target.stateful,
            executions: progress.executions,
            first_edges: progress.first_edges,
            edges: progress.edges,
            still_grows: progress.still_grows(cpu),
            seconds: took.as_secs_f64(),
            cpu_s: cpu.as_secs_f64(),
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

/// Writes `rows` into the file, beside those of other targets that earlier runs left there.
///
/// # Errors
/// The file cannot be read or written.
pub fn write(path: &Path, rows: &[Row]) -> Result<()> {
    let context = || format!("{}", path.display());
    let earlier = match std::fs::read(path) {
        Ok(bytes) => bytes,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => b"[]".to_vec(),
        Err(error) => return Err(error).with_context(context),
    };
    let mut all: Vec<Row> = serde_json::from_slice(&earlier).with_context(context)?;
    all.retain(|earlier| rows.iter().all(|row| row.target != earlier.target));
    all.extend_from_slice(rows);
    all.sort_by(|one, other| one.target.cmp(&other.target));
    std::fs::write(path, serde_json::to_vec_pretty(&all)?).with_context(context)
}

/// The head of the table.
#[must_use]
pub fn head() -> String {
    format!(
        "{:<16} {:>11} {:>7} {:>7} {:>9} {:>7} {:>7}  findings",
        "target", "executions", "before", "edges", "new late", "s", "CPU s"
    )
}
