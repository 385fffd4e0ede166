//! The file of a tenant's quarantine ([`super::quarantine`]).

use crate::blob::{Dir, IfTaken};
use crate::errors::{Damage, IoError, IoResult};
use dayfly_units::Digest;
use dayfly_units::sealed::{self, HEADER_BYTES, Magic};
use std::collections::BTreeSet;
use std::io::Read;
use std::path::Path;

/// The name of the record.
pub(crate) const FILE: &str = "quarantine";
/// The record while it is written.
const NEW: &str = "quarantine.new";
/// The group's number of an entry that stands for all groups of its pack.
pub(crate) const ALL: u32 = u32::MAX;
const MAGIC: Magic = *b"DFquarn\n";
const VERSION: u32 = 1;
const ENTRY_BYTES: usize = 36;
/// The most bytes of a record: 1.8 million groups, or 110 GiB of pages.
const MAX_BYTES: u64 = 64 << 20;

/// Packs by id, each with the number of a group.
pub(crate) type Record = BTreeSet<(Digest, u32)>;

/// Why the record was not read.
#[derive(Debug, thiserror::Error)]
pub(super) enum ReadError {
    #[error(transparent)]
    Io(#[from] IoError),
    #[error(transparent)]
    Damage(#[from] Damage),
}

pub(super) fn read(dir: &Dir) -> Result<Record, ReadError> {
    let file = dir.open(FILE)?;
    let path = dir.path().join(FILE);
    let mut bytes = Vec::new();
    let most = MAX_BYTES + HEADER_BYTES as u64 + 1;
    file.take(most).read_to_end(&mut bytes).map_err(IoError::new("reading", &path))?;
    Ok(decode(&path, &bytes)?)
}

pub(crate) fn decode(path: &Path, bytes: &[u8]) -> Result<Record, Damage> {
    let opened = sealed::open(&MAGIC, VERSION..=VERSION, MAX_BYTES, bytes);
    let (_, payload) = opened.map_err(|error| Damage::Seal { file: path.to_owned(), error })?;
    let (entries, rest) = payload.as_chunks::<ENTRY_BYTES>();
    if !rest.is_empty() {
        let (place, got) = ("bytes of the entries".to_owned(), payload.len().to_string());
        let expected = format!("a multiple of {ENTRY_BYTES}");
        return Err(Damage::Content { file: path.to_owned(), place, expected, got });
    }
    let entry = |entry: &[u8; ENTRY_BYTES]| {
        let id = Digest(std::array::from_fn(|n| entry[n]));
        (id, u32::from_le_bytes(std::array::from_fn(|n| entry[32 + n])))
    };
    Ok(entries.iter().map(entry).collect())
}

pub(crate) fn encode(record: &Record) -> Vec<u8> {
    let mut payload = Vec::with_capacity(record.len() * ENTRY_BYTES);
    for (id, group) in record {
        payload.extend_from_slice(&id.0);
        payload.extend_from_slice(&group.to_le_bytes());
    }
    sealed::seal(&MAGIC, VERSION, &payload)
}

/// Replaces the record whole, or removes it if there is no entry.
pub(super) fn write(dir: &Dir, record: &Record) -> IoResult<()> {
    dir.unlink(NEW)?;
    if record.is_empty() {
        dir.unlink(FILE)?;
        return dir.sync();
    }
    dir.write(NEW, &encode(record))?;
    let taken = dir.has(FILE)?;
    let if_taken = if taken { IfTaken::Exchange } else { IfTaken::Refuse };
    dir.rename(NEW, dir, FILE, if_taken)?;
    dir.sync()?;
    if taken { dir.unlink(NEW) } else { Ok(()) }
}
