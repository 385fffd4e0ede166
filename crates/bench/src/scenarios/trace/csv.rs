//! The file of a trace: who is born when, how large, and for how long.
//!
//! ```text
//! # anything after a # is for people
//! arrival_ms,memory_mib,lifetime_ms
//! 0,64,1500
//! 0,256,200
//! 17,64,9000
//! ```
//!
//! The first line that is no comment is the header, word for word. Every further line is one birth:
//! three whole decimal numbers, nothing else. Arrivals count from the start of the trace and never
//! fall; those that are equal are asked for at once. Each memory size becomes one snapshot.
//! Lifetimes count from the answer to the birth. Empty lines are errors.

use crate::prelude::*;
use std::fmt::Write as _;
use std::ops::RangeInclusive;

/// The first line.
const HEADER: &str = "arrival_ms,memory_mib,lifetime_ms";
/// A day: larger numbers are in another unit.
const MS: RangeInclusive<u64> = 0..=86_400_000;
/// What the microguest runs in.
const MIB: RangeInclusive<u64> = 64..=8192;

/// A birth to be asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Arrival {
    /// When, since the start.
    pub arrival_ms: u64,
    /// RAM.
    pub memory_mib: u64,
    /// How long it lives once it is there.
    pub lifetime_ms: u64,
}

/// Reads a trace.
///
/// # Errors
/// The first line that is not as the format says, what was expected there, and what it has; a file
/// without births is wrong at the line after its last.
pub fn parse(text: &str) -> Result<Vec<Arrival>> {
    let end = || (text.lines().count() + 1, "");
    let mut lines = (1..).zip(text.lines()).filter(|(_, line)| !line.starts_with('#'));
    let (line, got) = lines.next().unwrap_or_else(end);
    ensure!(got == HEADER, "line {line}: expected the header {HEADER}, got {got:?}");
    let mut arrivals = Vec::new();
    let mut before_ms = 0;
    for (line, text) in lines {
        let fields: Vec<&str> = text.split(',').collect();
        let &[arrival, memory, lifetime] = fields.as_slice() else {
            bail!("line {line}: expected three numbers with commas between them, got {text:?}");
        };
        let arrival = Arrival {
            arrival_ms: number(line, "arrival_ms", arrival, before_ms..=*MS.end())?,
            memory_mib: number(line, "memory_mib", memory, MIB)?,
            lifetime_ms: number(line, "lifetime_ms", lifetime, MS)?,
        };
        before_ms = arrival.arrival_ms;
        arrivals.push(arrival);
    }
    ensure!(!arrivals.is_empty(), "line {}: expected a birth, got \"\"", end().0);
    Ok(arrivals)
}

fn number(line: usize, column: &str, text: &str, range: RangeInclusive<u64>) -> Result<u64> {
    // `parse` alone takes a plus sign.
    let digits = text.bytes().all(|byte| byte.is_ascii_digit());
    let number = text.parse().ok().filter(|number| digits && range.contains(number));
    number.with_context(|| {
        let (least, most) = (range.start(), range.end());
        format!(
            "line {line}: expected {column} to be a whole number from {least} to {most}, \
             got {text:?}"
        )
    })
}

/// Writes a trace, with `comment` on its first lines.
pub fn format(comment: &str, arrivals: &[Arrival]) -> String {
    let mut text = String::new();
    // Writing to a String cannot fail.
    for line in comment.lines() {
        let _ = writeln!(text, "# {line}");
    }
    let _ = writeln!(text, "{HEADER}");
    for Arrival { arrival_ms, memory_mib, lifetime_ms } in arrivals {
        let _ = writeln!(text, "{arrival_ms},{memory_mib},{lifetime_ms}");
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn arrival(arrival_ms: u64, memory_mib: u64, lifetime_ms: u64) -> Arrival {
        Arrival { arrival_ms, memory_mib, lifetime_ms }
    }

    #[test]
    fn what_was_written_is_read() {
        let all = [arrival(0, 64, 1500), arrival(0, 8192, 0), arrival(17, 64, 9000)];
        let text = format("two\nlines", &all);
        assert_eq!(
            text,
            "# two\n# lines\narrival_ms,memory_mib,lifetime_ms\n0,64,1500\n0,8192,0\n17,64,9000\n"
        );
        assert_eq!(parse(&text).unwrap(), all);
        assert_eq!(parse(text.trim_end()).unwrap(), all);
        assert_eq!(parse(&text.replace('\n', "\r\n")).unwrap(), all);
    }

    #[test]
    fn an_error_has_the_line_what_was_expected_and_the_text() {
        let after_header = |rest: &str| format!("# a comment\n{HEADER}\n{rest}");
        let arrives = "arrival_ms to be a whole number from 0 to 86400000";
        let cases = [
            (String::new(), 1, "the header arrival_ms,memory_mib,lifetime_ms", ""),
            ("# only\n".into(), 2, "the header arrival_ms,memory_mib,lifetime_ms", ""),
            ("0,64,1\n".into(), 1, "the header arrival_ms,memory_mib,lifetime_ms", "0,64,1"),
            (after_header(""), 3, "a birth", ""),
            (after_header("0,64\n"), 3, "three numbers with commas between them", "0,64"),
            (after_header("0,64,1,\n"), 3, "three numbers with commas between them", "0,64,1,"),
            (after_header("0,64,1\n\n"), 4, "three numbers with commas between them", ""),
            (after_header("x,64,1\n"), 3, arrives, "x"),
            (after_header("-1,64,1\n"), 3, arrives, "-1"),
            (after_header("+1,64,1\n"), 3, arrives, "+1"),
            (after_header(" 1,64,1\n"), 3, arrives, " 1"),
            (after_header("1.5,64,1\n"), 3, arrives, "1.5"),
            (after_header(",64,1\n"), 3, arrives, ""),
            (after_header("86400001,64,1\n"), 3, arrives, "86400001"),
            (after_header("0,63,1\n"), 3, "memory_mib to be a whole number from 64 to 8192", "63"),
            (
                after_header("0,64,99999999999999999999\n"),
                3,
                "lifetime_ms to be a whole number from 0 to 86400000",
                "99999999999999999999",
            ),
            (
                after_header("7,64,1\n# in between\n6,64,1\n"),
                5,
                "arrival_ms to be a whole number from 7 to 86400000",
                "6",
            ),
        ];
        for (text, line, expected, got) in cases {
            let wrong = format!("line {line}: expected {expected}, got {got:?}");
            assert_eq!(parse(&text).unwrap_err().to_string(), wrong, "{text:?}");
        }
    }
}
