//! Tests of the format. Unpacking is tested by the users of this crate, the agent and the command
//! line.

#![allow(clippy::unwrap_used, reason = "tests")]

mod format;
mod oracles;
mod property;

use crate::reader::{CopyOptions, Limits, Reader};
use crate::{ArchiveError, Head, Kind};
use std::io::{Read, Seek};

/// An entry with its content; holes are filled with zeroes.
#[derive(Debug, Clone, PartialEq)]
pub struct Whole {
    pub head: Head,
    pub content: Vec<u8>,
}

/// Upper limit for the bytes of a file that are read back.
const MOST: u64 = 8 << 20;

/// Every entry of an archive.
pub fn read(archive: impl Read) -> Result<Vec<Whole>, ArchiveError> {
    let mut reader = Reader::new(archive, Limits { max_entries: 1000, max_bytes: 64 << 20 });
    let mut all = Vec::new();
    while let Some(entry) = reader.next_entry()? {
        let mut content = Vec::new();
        if entry.head.kind == Kind::File {
            let mut file = tempfile::tempfile().unwrap();
            let how = CopyOptions { zeroes_are_holes: true, room: MOST };
            reader.copy_data(&entry, &file, how)?;
            file.rewind().unwrap();
            file.take(MOST).read_to_end(&mut content).unwrap();
        }
        all.push(Whole { head: entry.head, content });
    }
    Ok(all)
}

/// A header block with a corrected checksum.
pub fn summed(mut block: Vec<u8>) -> Vec<u8> {
    block[148..156].copy_from_slice(b"        ");
    let sum: u32 = block[..512].iter().map(|b| u32::from(*b)).sum();
    block[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
    block
}

/// A header with some data, padded.
pub fn raw(kind: u8, name: &[u8], size: u64, data: &[u8]) -> Vec<u8> {
    let fields = crate::header::Fields {
        name,
        link: b"",
        kind,
        mode: 0o644,
        owner: (0, 0),
        size,
        mtime_s: 0,
        device: (0, 0),
    };
    let mut out = fields.block().to_vec();
    out.extend_from_slice(data);
    out.resize(out.len().next_multiple_of(512), 0);
    out
}

/// Extended records for the next entry.
pub fn pax(records: &[(&str, &[u8])]) -> Vec<u8> {
    let mut data = Vec::new();
    for (key, value) in records {
        crate::pax::push(&mut data, key.as_bytes(), value);
    }
    raw(b'x', b"pax", data.len() as u64, &data)
}

/// An archive of these entries.
pub fn of(entries: &[Vec<u8>]) -> Vec<u8> {
    let mut out = entries.concat();
    out.extend_from_slice(&[0; 1024]);
    out
}
