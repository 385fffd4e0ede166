//! Tables for people, JSON for programs, names for scripts.
//!
//! Labels, names, versions and messages may come from a guest, an image or an archive. So this
//! module writes no control characters except newline and tab. Cells and names are escaped; JSON
//! uses its own `\u001b`.

use anyhow::{Context, Result};
use clap::{Args, ValueEnum};
use comfy_table::{Table, presets};
use dayfly_units::text::{SHORT, escaped, is_unsafe};
use serde::Serialize;
use std::fmt::Write as _;
use std::io::{IsTerminal, Write};
use std::time::{SystemTime, UNIX_EPOCH};

/// The format of a list.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, ValueEnum)]
pub enum Format {
    /// A table with columns
    #[default]
    Table,
    /// JSON, one object per line
    Json,
}

/// The format option of commands whose output has no names to list.
#[derive(Debug, Clone, Copy, Default, Args)]
pub struct FormatArgs {
    /// Format of the output
    #[arg(long, value_enum, default_value_t)]
    pub format: Format,
}

/// The options of every list.
#[derive(Debug, Clone, Copy, Default, Args)]
pub struct ListArgs {
    /// Format of the list
    #[arg(long, value_enum, default_value_t)]
    pub format: Format,
    /// Print only ids or names
    #[arg(short, long)]
    pub quiet: bool,
}

/// Writes a text of several lines to standard output. Control characters except newline and tab are
/// escaped.
///
/// # Errors
/// If the reader has closed standard output, or its disk is full.
pub fn emit(text: &str) -> Result<()> {
    let mut out = std::io::stdout().lock();
    write!(out, "{}", escaped(text, usize::MAX).keep_lines())
        .and_then(|()| out.flush())
        .context("standard output")
}

/// Writes one line to standard output. Every control character in it is escaped.
///
/// # Errors
/// As for [`emit`].
pub fn line(text: impl std::fmt::Display) -> Result<()> {
    emit(&format!("{}\n", escaped(&text.to_string(), usize::MAX)))
}

/// Writes one value as indented JSON.
///
/// # Errors
/// As for [`emit`].
pub fn json(value: &impl Serialize) -> Result<()> {
    emit(&(safe_json(&serde_json::to_string_pretty(value)?) + "\n"))
}

/// Writes a list in the format of `args`. `key` returns an item's name, and `row` its columns.
///
/// # Errors
/// As for [`emit`].
pub fn list<T: Serialize, const N: usize>(
    args: ListArgs,
    items: &[T],
    header: [&str; N],
    key: impl Fn(&T) -> String,
    row: impl Fn(&T) -> [String; N],
) -> Result<()> {
    let mut text = String::new();
    if args.quiet {
        items.iter().for_each(|item| text += &(cell(key(item)) + "\n"));
    } else if args.format == Format::Json {
        for item in items {
            text += &json_line(item)?;
        }
    } else {
        text = table(header, items.iter().map(row));
    }
    emit(&text)
}

/// One value as a line of JSON, including the newline.
///
/// # Errors
/// If the value cannot be encoded as JSON.
pub fn json_line(value: &impl Serialize) -> Result<String> {
    Ok(safe_json(&serde_json::to_string(value)?) + "\n")
}

/// Escapes all characters of a JSON text that a terminal acts on. serde_json escapes only those
/// below U+0020. Characters outside ASCII are always inside a string, where a `\u` escape has the
/// same meaning.
fn safe_json(json: &str) -> String {
    let mut safe = String::with_capacity(json.len());
    for character in json.chars() {
        if character != '\n' && is_unsafe(character) {
            for unit in character.encode_utf16(&mut [0; 2]) {
                // Writing to a String cannot fail.
                let _ = write!(safe, "\\u{unit:04x}");
            }
        } else {
            safe.push(character);
        }
    }
    safe
}

/// The text of a table cell or of a line with one name.
fn cell(text: String) -> String {
    if text.len() <= SHORT && !text.contains(is_unsafe) {
        text
    } else {
        escaped(&text, SHORT).to_string()
    }
}

/// A table in docker's style: no lines, three spaces between columns. On a terminal it has no line
/// that the terminal would wrap: columns of [`LEAST`] are left out, then long cells are cut.
pub fn table<const N: usize>(
    header: [&str; N],
    rows: impl IntoIterator<Item = [String; N]>,
) -> String {
    let terminal = std::io::stdout().is_terminal();
    let width = terminal.then(crate::session::window_size).flatten();
    let width = width.map_or(usize::MAX, |size| usize::from(size.cols));
    table_within(width, header, rows)
}

/// Columns that a narrow terminal does without, the first one first. `--format json` and `inspect`
/// have them.
const LEAST: [&str; 10] = [
    "KERNEL",
    "CPUS",
    "DIGEST",
    "PARENT",
    "ADDRESS",
    "SHARED",
    "OF MEMORY",
    "BOOKED",
    "MEMORY",
    "PEAK",
];
/// Spaces between columns.
const GAP: usize = 3;
/// Characters to which a cell is cut at most.
const SHORTEST: usize = 8;

/// The columns that are shown in a line of `width` characters, and the width of each.
fn fit(header: &[&str], rows: &[Vec<String>], width: usize) -> Vec<(usize, usize)> {
    let length = |text: &str| text.chars().count();
    let mut columns: Vec<(usize, usize)> = header
        .iter()
        .enumerate()
        .map(|(n, name)| {
            let cells = rows.iter().map(|row| length(&row[n]));
            (n, cells.max().unwrap_or(0).max(length(name)))
        })
        .collect();
    let total = |columns: &[(usize, usize)]| -> usize {
        columns.iter().map(|(_, width)| width + GAP).sum::<usize>().saturating_sub(GAP)
    };
    for name in LEAST {
        if total(&columns) > width {
            columns.retain(|(n, _)| header[*n] != name);
        }
    }
    // The widest column gives way, one character at a time.
    while total(&columns) > width
        && let Some(widest) = columns.iter_mut().map(|(_, width)| width).max()
        && *widest > SHORTEST
    {
        *widest -= 1;
    }
    columns
}

pub(crate) fn table_within<const N: usize>(
    width: usize,
    header: [&str; N],
    rows: impl IntoIterator<Item = [String; N]>,
) -> String {
    let rows: Vec<Vec<String>> =
        rows.into_iter().map(|row| row.map(cell).into_iter().collect()).collect();
    let columns = fit(&header, &rows, width);
    let cut = |text: &str, width: usize| {
        if text.chars().count() <= width {
            return text.to_owned();
        }
        text.chars().take(width.saturating_sub(1)).chain(['…']).collect()
    };
    let mut table = Table::new();
    table.load_style(presets::NOTHING);
    table.set_header(columns.iter().map(|(n, width)| cut(header[*n], *width)));
    for row in &rows {
        table.add_row(columns.iter().map(|(n, width)| cut(&row[*n], *width)));
    }
    for column in table.column_iter_mut() {
        column.set_padding((0, 3));
    }
    table.lines().map(|line| format!("{}\n", line.trim_end())).collect()
}

/// The time since `unix_ms`, in its largest unit.
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

/// A time in UTC, as RFC 3339 has it: `2026-11-28T01:02:03.004Z`.
#[must_use]
pub fn rfc3339(unix_ms: u64) -> String {
    const DAYS_OF_400_YEARS: u64 = 146_097;
    let (seconds, ms) = (unix_ms / 1000, unix_ms % 1000);
    let (days, second) = (seconds / 86_400, seconds % 86_400);
    // Howard Hinnant, chrono-Compatible Low-Level Date Algorithms: years begin in March, so that
    // the leap day is their last. Day 0 is 0000-03-01.
    let day = days + 719_468;
    let (era, of_era) = (day / DAYS_OF_400_YEARS, day % DAYS_OF_400_YEARS);
    let year_of_era = (of_era - of_era / 1460 + of_era / 36_524 - of_era / 146_096) / 365;
    let of_year = of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let from_march = (5 * of_year + 2) / 153;
    let day = of_year - (153 * from_march + 2) / 5 + 1;
    let month = if from_march < 10 { from_march + 3 } else { from_march - 9 };
    let year = era * 400 + year_of_era + u64::from(month <= 2);
    let (hour, minute, second) = (second / 3600, second / 60 % 60, second % 60);
    format!("{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}.{ms:03}Z")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_align_without_lines_or_trailing_blanks() {
        let rows = [["a".into(), "long value".into()], ["longer name".into(), String::new()]];
        assert_eq!(
            table(["NAME", "X"], rows),
            "NAME          X\na             long value\nlonger name\n"
        );
    }

    #[test]
    fn a_line_fits_a_narrow_terminal() {
        let header = ["VM ID", "NAME", "KERNEL", "ADDRESS", "PORTS"];
        let row = ["0123456789ab", "a-name", "6.12", "10.88.0.2", "127.0.0.1:8080->80, 9->9"];
        let row = || [row.map(str::to_owned)];
        let whole = table_within(usize::MAX, header, row());
        assert!(whole.contains("KERNEL") && whole.contains("9->9"), "{whole}");
        let narrower = table_within(66, header, row());
        assert!(!narrower.contains("KERNEL") && narrower.contains("10.88.0.2"), "{narrower}");
        let narrow = table_within(40, header, row());
        assert_eq!(
            narrow,
            "VM ID          NAME     PORTS\n0123456789ab   a-name   127.0.0.1:8080-…\n"
        );
        // A terminal without room for anything still gets something.
        assert!(table_within(3, header, row()).lines().all(|line| line.chars().count() < 40));
    }

    #[test]
    fn a_cell_neither_forges_a_row_nor_reaches_a_terminal_as_it_is() {
        let rows = [
            ["a\nforged".into(), "\x1b]52;c;x\x07 \u{9b}2J \u{202e}".into()],
            ["b".into(), "x".repeat(9999)],
        ];
        let text = table(["NAME", "X"], rows);
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines.len(), 3, "{text}");
        assert!(
            lines[1].contains(r"a\nforged")
                && lines[1].contains(r"\x1b]52;c;x\x07 \u{9b}2J \u{202e}"),
            "{text}"
        );
        assert!(lines[2].chars().count() < 300, "{text}");
    }

    #[test]
    fn json_has_no_control_character_and_means_the_same() {
        let label = "\x1b]0;x\x07\u{7f}\u{9b}\u{202e}\u{e0041} caf\u{e9}\n";
        let line = json_line(&[label]).unwrap();
        assert!(line.ends_with("]\n") && !line.trim_end().contains(is_unsafe), "{line:?}");
        assert_eq!(serde_json::from_str::<[String; 1]>(&line).unwrap(), [label]);
    }

    #[test]
    fn days_of_the_calendar_are_right() {
        for (seconds, expected) in [
            (0, "1970-01-01T00:00:00"),
            (951_782_399, "2000-02-28T23:59:59"),
            (951_782_400, "2000-02-29T00:00:00"),
            (951_868_800, "2000-03-01T00:00:00"),
            (1_709_164_800, "2024-02-29T00:00:00"),
            (1_735_689_599, "2024-12-31T23:59:59"),
            (1_735_689_600, "2025-01-01T00:00:00"),
            (4_107_542_400, "2100-03-01T00:00:00"),
        ] {
            assert_eq!(rfc3339(seconds * 1000 + 7), format!("{expected}.007Z"));
        }
    }

    #[test]
    fn times_are_shown_in_their_largest_unit() {
        let now = u64::try_from(
            SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_millis(),
        );
        let now = now.expect("a time of this age");
        assert_eq!(ago(now - 61_000), "1 minute ago");
        assert_eq!(ago(now - 7_200_000), "2 hours ago");
        assert_eq!(ago(now + 5_000), "0 seconds ago");
    }
}
