//! VMCOREINFO: the text in which a Linux kernel describes itself for crash dump tools
//! (Documentation/admin-guide/kdump/vmcoreinfo.rst). It has lines of `KEY=value` and at most one
//! page.
//!
//! The kernel keeps two copies, both at the start of a page: the text alone, and an ELF note that
//! contains it. Every process in the guest can write such a text anywhere. So a text is a claim,
//! which [`crate::kernel`] tests.

use crate::memory::{Frame, PhysMemory, bytes, word};
use std::collections::BTreeMap;

/// First bytes of the text.
const TEXT_START: &[u8] = b"OSRELEASE=";
/// Size in bytes of an ELF note's header (three words of four bytes) and its name, padded to four.
const NOTE_HEADER_BYTES: usize = 24;
/// The note's name with its terminator, padded.
const NOTE_NAME: &[u8; 12] = b"VMCOREINFO\0\0";
/// Length in bytes of that name with one terminator.
const NOTE_NAME_BYTES: u32 = 11;

/// A kernel's description of itself. Every number in it may be false.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct VmcoreInfo(BTreeMap<String, String>);

/// Why a text cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum NoteError {
    /// A required line is missing.
    #[error("VMCOREINFO has no {0}")]
    Missing(String),
    /// A line has no number as its value.
    #[error("VMCOREINFO: {key}: expected a number, got {got:?}")]
    Number {
        /// Key of the line.
        key: String,
        /// Value of the line, shortened.
        got: String,
    },
}

impl VmcoreInfo {
    /// Reads the text in a frame's page, if the page seems to hold one.
    pub(crate) fn in_frame(memory: &dyn PhysMemory, frame: Frame) -> Option<Self> {
        if !memory.may_hold_data(frame) {
            return None;
        }
        let page = memory.page(frame);
        let first = word(page, 0).to_le_bytes();
        // The first word rejects nearly every page.
        if first != TEXT_START[..8] && first[..4] != NOTE_NAME_BYTES.to_le_bytes() {
            return None;
        }
        let page = bytes(page);
        let text = match page.get(12..NOTE_HEADER_BYTES) {
            Some(name) if name == NOTE_NAME && !page.starts_with(TEXT_START) => {
                &page[NOTE_HEADER_BYTES..]
            }
            _ => &page[..],
        };
        text.starts_with(TEXT_START).then(|| Self::parse(text))
    }

    /// Reads lines up to the first zero byte. Lines that are no `KEY=value` are skipped.
    fn parse(text: &[u8]) -> Self {
        let end = text.iter().position(|&b| b == 0).unwrap_or(text.len());
        let text = String::from_utf8_lossy(&text[..end]);
        let lines = text.lines().filter_map(|line| line.split_once('='));
        Self(lines.map(|(key, value)| (key.to_owned(), value.to_owned())).collect())
    }

    /// The kernel's release, as `uname -r` prints it, without unprintable characters.
    pub(crate) fn release(&self) -> String {
        let text = self.0.get("OSRELEASE").map_or("", String::as_str);
        text.chars().filter(char::is_ascii_graphic).take(64).collect()
    }

    /// The release's first two numbers.
    pub(crate) fn version(&self) -> Option<(u32, u32)> {
        let release = self.release();
        let mut numbers = release.split(|c: char| !c.is_ascii_digit()).map(str::parse);
        Some((numbers.next()?.ok()?, numbers.next()?.ok()?))
    }

    /// A symbol's virtual address.
    pub(crate) fn symbol(&self, name: &str) -> Result<u64, NoteError> {
        let key = format!("SYMBOL({name})");
        let text = self.text(&key)?;
        u64::from_str_radix(text, 16).map_err(|_| number_error(key, text))
    }

    /// A number; a negative number is returned as its two's complement.
    pub(crate) fn number(&self, name: &str) -> Result<u64, NoteError> {
        self.decimal(format!("NUMBER({name})"))
    }

    /// A field's offset in its structure, in bytes.
    pub(crate) fn offset(&self, field: &str) -> Result<u64, NoteError> {
        self.decimal(format!("OFFSET({field})"))
    }

    /// A structure's size, in bytes.
    pub(crate) fn size(&self, structure: &str) -> Result<u64, NoteError> {
        self.decimal(format!("SIZE({structure})"))
    }

    /// An array's length, in elements.
    pub(crate) fn length(&self, array: &str) -> Result<u64, NoteError> {
        self.decimal(format!("LENGTH({array})"))
    }

    /// The kernel's page size, in bytes.
    pub(crate) fn page_size(&self) -> Result<u64, NoteError> {
        self.decimal("PAGESIZE".to_owned())
    }

    fn text(&self, key: &str) -> Result<&str, NoteError> {
        self.0.get(key).map(String::as_str).ok_or_else(|| NoteError::Missing(key.to_owned()))
    }

    fn decimal(&self, key: String) -> Result<u64, NoteError> {
        let text = self.text(&key)?;
        let value = text.parse::<u64>().or_else(|_| text.parse::<i64>().map(i64::cast_unsigned));
        value.map_err(|_| number_error(key, text))
    }
}

fn number_error(key: String, got: &str) -> NoteError {
    NoteError::Number { key, got: got.chars().take(40).collect() }
}

#[cfg(test)]
#[path = "vmcoreinfo_tests.rs"]
mod tests;
