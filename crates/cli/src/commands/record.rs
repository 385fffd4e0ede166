//! `dayfly record`: shows which memory a run of a clone touches, compared with the working set.

use super::options::program;
use crate::output::{self, Format, FormatArgs};
use crate::progress::Steps;
use crate::{artefacts, connect};
use anyhow::{Context, Result};
use dayfly_api::types::{ColourTouched, RecordRequest, Recording};
use dayfly_units::{Bytes, Name};
use serde_json::json;
use std::path::PathBuf;

/// Arguments of `dayfly record`.
#[derive(Debug, clap::Args)]
#[command(after_help = "A throw-away clone runs the program once, and its VMM notes each page at \
                  its first touch. If the memory of a clone is still loading, the pages that \
                  the bake recorded are fetched first. This command reports how many of the \
                  touched pages are among them:\n  \
                  dayfly record web --cmd 'curl -s localhost >/dev/null'")]
pub struct Args {
    /// Name of the snapshot
    snapshot: Name,
    /// Program to run, as text for /bin/sh
    #[arg(long, value_name = "TEXT")]
    cmd: Option<String>,
    /// File for every first touch, as JSON: frame and microseconds
    #[arg(short, long, value_name = "FILE")]
    output: Option<PathBuf>,
    #[command(flatten)]
    format: FormatArgs,
    /// Program to run and its arguments
    #[arg(last = true, conflicts_with = "cmd", value_name = "PROGRAM")]
    argv: Vec<String>,
}

impl Args {
    pub async fn run(self) -> Result<()> {
        let client = connect::client().await?;
        let steps = Steps::new();
        let request =
            RecordRequest { program: program(self.cmd, self.argv), touches: self.output.is_some() };
        let stream = client.record(&self.snapshot, &request).await?;
        let (recording, touches) = artefacts::watch_recording(stream, &steps).await?;
        drop(steps);
        if let Some(path) = &self.output {
            let file = json!({
                "snapshot": self.snapshot,
                "memory_bytes": recording.memory_bytes,
                "touches": touches,
            });
            std::fs::write(path, file.to_string())
                .with_context(|| format!("writing the touches to {}", path.display()))?;
        }
        match self.format.format {
            Format::Json => output::json(&recording),
            Format::Table => output::emit(&text(&recording)),
        }
    }
}

fn text(recording: &Recording) -> String {
    let bytes = |n: u64| if n == 0 { "-".to_owned() } else { Bytes(n).to_string() };
    let row = |name: &str, of: &ColourTouched| {
        let tenths =
            (u128::from(of.expected_bytes) * 1000).checked_div(u128::from(of.touched_bytes));
        let share = tenths.map_or_else(|| "-".to_owned(), |n| format!("{}.{} %", n / 10, n % 10));
        [
            name.to_owned(),
            bytes(of.touched_bytes),
            bytes(of.expected_bytes),
            share,
            bytes(of.unneeded_bytes),
            bytes(of.zero_bytes),
        ]
    };
    let any = |of: &&ColourTouched| of.touched_bytes + of.unneeded_bytes + of.zero_bytes > 0;
    let mut rows: Vec<_> =
        recording.colours.iter().filter(any).map(|of| row(&of.colour, of)).collect();
    rows.push(row("all", &recording.total()));
    output::table(["COLOUR", "TOUCHED", "EXPECTED", "OF IT", "NOT NEEDED", "ZERO"], rows)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_expected_is_a_share_of_what_was_touched() {
        let of = |colour: &str, touched_bytes, expected_bytes, unneeded_bytes, zero_bytes| {
            ColourTouched {
                colour: colour.into(),
                touched_bytes,
                expected_bytes,
                unneeded_bytes,
                zero_bytes,
            }
        };
        let colours = vec![
            of("slab", 0, 0, 0, 0),
            of("user data", 8192, 4096, 0, 4096),
            of("free", 0, 0, 0, 8192),
        ];
        let text = text(&Recording { memory_bytes: 1 << 30, took_us: 5, colours });
        let lines: Vec<Vec<&str>> =
            text.lines().map(|line| line.split_whitespace().collect()).collect();
        assert_eq!(
            lines[1],
            ["user", "data", "8.0", "KiB", "4.0", "KiB", "50.0", "%", "-", "4.0", "KiB"]
        );
        assert_eq!(lines[2], ["free", "-", "-", "-", "-", "8.0", "KiB"]);
        assert_eq!(lines[3][..5], ["all", "8.0", "KiB", "4.0", "KiB"]);
        assert!(!text.contains("slab"));
    }
}
