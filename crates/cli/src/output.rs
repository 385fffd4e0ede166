//! Tables for people, JSON for programs, names for scripts.

use anyhow::{Context, Result};
use clap::{Args, ValueEnum};
use comfy_table::{Table, presets};
use serde::Serialize;
use std::io::Write;
use std::time::{SystemTime, UNIX_EPOCH};

/// How a listing is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, ValueEnum)]
pub enum Format {
    /// Columns.
    #[default]
    Table,
    /// One JSON object a line.
    Json,
}

/// The option of what has no names to list.
#[derive(Debug, Clone, Copy, Default, Args)]
pub struct FormatArgs {
    /// For people, or as JSON
    #[arg(long, value_enum, default_value_t)]
    pub format: Format,
}

/// The options that every listing has.
#[derive(Debug, Clone, Copy, Default, Args)]
pub struct ListArgs {
    /// Columns for people, or one JSON object a line
    #[arg(long, value_enum, default_value_t)]
    pub format: Format,
    /// Only ids or names
    #[arg(short, long)]
    pub quiet: bool,
}

/// Writes a text to standard output.
///
/// # Errors
/// When nobody reads it any more, or its disk is full.
pub fn emit(text: &str) -> Result<()> {
    let mut out = std::io::stdout().lock();
    out.write_all(text.as_bytes()).and_then(|()| out.flush()).context("standard output")
}

/// Writes a line to standard output.
///
/// # Errors
/// As [`emit`].
pub fn line(text: impl std::fmt::Display) -> Result<()> {
    emit(&format!("{text}\n"))
}

/// Writes one value as indented JSON.
///
/// # Errors
/// As [`emit`].
pub fn json(value: &impl Serialize) -> Result<()> {
    line(serde_json::to_string_pretty(value)?)
}

/// Writes a listing as `args` say: `key` names an item, `row` gives its columns.
///
/// # Errors
/// As [`emit`].
pub fn list<T: Serialize, const N: usize>(
    args: ListArgs,
    items: &[T],
    header: [&str; N],
    key: impl Fn(&T) -> String,
    row: impl Fn(&T) -> [String; N],
) -> Result<()> {
    let mut text = String::new();
    if args.quiet {
        items.iter().for_each(|item| text += &(key(item) + "\n"));
    } else if args.format == Format::Json {
        for item in items {
            text += &(serde_json::to_string(item)? + "\n");
        }
    } else {
        text = table(header, items.iter().map(row));
    }
    emit(&text)
}

/// Columns, docker's way: no lines, three spaces between.
pub fn table<const N: usize>(header: [&str; N], rows: impl IntoIterator<Item = [String; N]>) -> String {
    let mut table = Table::new();
    table.load_style(presets::NOTHING).set_header(header);
    rows.into_iter().for_each(|row| {
        table.add_row(row);
    });
    for column in table.column_iter_mut() {
        column.set_padding((0, 3));
    }
    table.lines().map(|line| format!("{}\n", line.trim_end())).collect()
}

/// How long ago a time of day was, in its largest unit.
#[must_use]
pub fn ago(unix_ms: u64) -> String {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
    let seconds = now.saturating_sub(unix_ms / 1000);
    let (count, unit) = match seconds {
        0..60 => (seconds, "second"),
        60..3600 => (seconds / 60, "minute"),
        3600..86400 => (seconds / 3600, "hour"),
        _ => (seconds / 86400, "day"),
    };
    format!("{count} {unit}{} ago", if count == 1 { "" } else { "s" })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_align_without_lines_or_trailing_blanks() {
        let rows = [["a".into(), "long value".into()], ["longer name".into(), String::new()]];
        assert_eq!(table(["NAME", "X"], rows), "NAME          X\na             long value\nlonger name\n");
    }

    #[test]
    fn times_are_told_in_their_largest_unit() {
        let now = u64::try_from(SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_millis());
        let now = now.expect("a time of this age");
        assert_eq!(ago(now - 61_000), "1 minute ago");
        assert_eq!(ago(now - 7_200_000), "2 hours ago");
        assert_eq!(ago(now + 5_000), "0 seconds ago");
    }
}
