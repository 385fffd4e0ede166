//! Maps of sparse files.

use crate::error::{Refusal, refuse};

/// A data run of a sparse file: offset in the file, and length in bytes.
pub type Run = (u64, u64);

/// Upper limit for the runs of a sparse file: 8 MiB of memory.
pub const MAX_RUNS: usize = 1 << 19;
/// Largest file that an entry may claim, in bytes: the limit of ext4 with 4 KiB blocks.
pub const MAX_FILE_BYTES: u64 = 16 << 40;

/// Checks that runs are in order, lie inside the file, and add up to `stored` bytes.
pub fn check(runs: &[Run], length: u64, stored: u64) -> Result<(), Refusal> {
    let (mut end, mut total) = (0_u64, 0_u64);
    for (offset, bytes) in runs {
        match offset.checked_add(*bytes) {
            Some(upto) if *offset >= end && upto <= length => (end, total) = (upto, total + bytes),
            _ => {
                let got = format!("{bytes} bytes at {offset} of a file of {length}");
                return refuse("a sparse map in order and inside the file", got);
            }
        }
    }
    if total != stored {
        return refuse(format!("{stored} bytes of data in the sparse map"), total.to_string());
    }
    Ok(())
}

/// Reads the map of format 1.0 byte by byte. The map has decimal lines: the number of runs, then
/// offset and bytes of each run.
#[derive(Default)]
pub struct MapReader {
    line: Vec<u8>,
    want: Option<usize>,
    offset: Option<u64>,
    pub runs: Vec<Run>,
}

impl MapReader {
    /// Takes a byte. Returns whether the map is complete.
    pub fn take(&mut self, byte: u8) -> Result<bool, Refusal> {
        const EXPECTED: &str = "a sparse map of decimal lines";
        if byte != b'\n' {
            if self.line.len() >= 20 {
                return refuse(EXPECTED, "a line of more than 20 bytes");
            }
            self.line.push(byte);
            return Ok(false);
        }
        let text = std::str::from_utf8(&self.line).ok();
        let digits = text.filter(|t| t.bytes().all(|b| b.is_ascii_digit()));
        let Some(value) = digits.and_then(|t| t.parse::<u64>().ok()) else {
            return refuse(EXPECTED, format!("\"{}\"", crate::error::show(&self.line)));
        };
        self.line.clear();
        match (self.want, self.offset.take()) {
            (None, _) => match usize::try_from(value) {
                Ok(runs) if runs <= MAX_RUNS => self.want = Some(runs),
                _ => {
                    return refuse(
                        format!("{EXPECTED}, at most {MAX_RUNS} runs"),
                        format!("{value} runs"),
                    );
                }
            },
            (Some(_), None) => self.offset = Some(value),
            (Some(_), Some(offset)) => self.runs.push((offset, value)),
        }
        Ok(self.offset.is_none() && self.want == Some(self.runs.len()))
    }
}

/// The text of format 1.0 for `runs` of a file of `length` bytes, padded to whole blocks.
pub fn map_text(runs: &[Run], length: u64) -> Vec<u8> {
    use std::fmt::Write;
    // Without an empty run at the end of the file, GNU tar drops a hole at the end.
    let last =
        runs.last().is_none_or(|(offset, bytes)| offset + bytes < length).then_some((length, 0));
    let mut text = format!("{}\n", runs.len() + last.iter().count());
    for (offset, bytes) in runs.iter().chain(&last) {
        // Writing to a string does not fail.
        let _ = write!(text, "{offset}\n{bytes}\n");
    }
    let mut text = text.into_bytes();
    text.resize(text.len().next_multiple_of(crate::block::BLOCK), 0);
    text
}
