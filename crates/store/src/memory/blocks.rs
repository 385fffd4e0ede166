//! The index of a disk file's blocks by content. For every 4 KiB block that is not all zero it has
//! 8 bytes of the block's hash and the block's number. Layout and order of checks:
//! `docs/snapshot-format.md`, "Block index".
//!
//! An index is made once for each content, kept as `blocks/<sparse digest of the file>`, and made
//! again if it is damaged: it is a cache. A hit is a hint; callers compare the bytes.

use crate::blob::IfTaken;
use crate::errors::{Damage, IoError, IoResult};
use crate::inner::Inner;
use crate::integrity::verify::Stamp;
use crate::meter::Meter;
use crate::pages::PagesError;
use crate::pages::pack::PAGE;
use crate::pages::put::{MAX_FILE_PAGES, pieces, read_piece};
use crate::sparse::is_zero;
use crate::workers;
use dayfly_units::Digest;
use dayfly_units::sealed::{self, HEADER_BYTES, Magic};
use dayfly_units::sync::lock;
use std::fs::File;
use std::io::Read;
use std::path::Path;

/// The folder of the indexes, created with the first index.
pub(crate) const BLOCKS: &str = "blocks";
const MAGIC: Magic = *b"DFblkix\n";
const VERSION: u32 = 1;
const FIXED_BYTES: usize = 40;
const ENTRY_BYTES: usize = 12;
const MAX_BYTES: u64 = FIXED_BYTES as u64 + MAX_FILE_PAGES * ENTRY_BYTES as u64;

/// The most indexes of which it is remembered that they are sound.
const MAX_SOUND: usize = 4096;

/// Index of the blocks of one file.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct BlockIndex {
    /// Hash prefixes, ascending, each once.
    pub(super) prefixes: Vec<u64>,
    /// For each prefix the first block that has it.
    pub(super) blocks: Vec<u32>,
}

fn prefix(hash: &Digest) -> u64 {
    u64::from_be_bytes(std::array::from_fn(|n| hash.0[n]))
}

impl BlockIndex {
    /// Reads and hashes all of `file`; holes are skipped.
    fn of(file: &File, path: &Path, meter: &Meter) -> Result<Self, PagesError> {
        let pieces = pieces(file, path)?;
        let found =
            workers::map(pieces.len(), Vec::new, |buffer, n| -> IoResult<Vec<(u64, u32)>> {
                let (at, bytes) = read_piece(file, &pieces[n], buffer, path)?;
                meter.add(bytes.len() as u64);
                let blocks =
                    (at..).zip(bytes.chunks_exact(PAGE)).filter(|(_, block)| !is_zero(block));
                Ok(blocks.map(|(number, block)| (prefix(&Digest::of(block)), number)).collect())
            })?;
        let mut entries: Vec<(u64, u32)> = found.into_iter().flatten().collect();
        entries.sort_unstable();
        entries.dedup_by_key(|(prefix, _)| *prefix);
        let (prefixes, blocks) = entries.into_iter().unzip();
        Ok(Self { prefixes, blocks })
    }

    /// Checks that the file `name` of `dir` is a valid block index for the digest `of`.
    pub(crate) fn check(dir: &crate::blob::Dir, name: &str, of: &Digest) -> Result<(), PagesError> {
        let bytes = read(dir, name)?;
        Ok(Self::decode(&dir.path().join(name), of, &bytes).map(drop)?)
    }

    /// A block whose content may have this hash.
    pub(crate) fn find(&self, hash: &Digest) -> Option<u32> {
        self.prefixes.binary_search(&prefix(hash)).ok().map(|at| self.blocks[at])
    }

    pub(crate) fn encode(&self, of: &Digest) -> Vec<u8> {
        let mut out = Vec::with_capacity(FIXED_BYTES + self.blocks.len() * ENTRY_BYTES);
        out.extend_from_slice(&of.0);
        out.extend_from_slice(&(self.blocks.len() as u64).to_le_bytes());
        self.prefixes.iter().for_each(|prefix| out.extend_from_slice(&prefix.to_le_bytes()));
        self.blocks.iter().for_each(|block| out.extend_from_slice(&block.to_le_bytes()));
        sealed::seal(&MAGIC, VERSION, &out)
    }

    pub(crate) fn decode(path: &Path, of: &Digest, bytes: &[u8]) -> Result<Self, Damage> {
        let opened = sealed::open(&MAGIC, VERSION..=VERSION, MAX_BYTES, bytes);
        let (_, payload) = opened.map_err(|error| Damage::Seal { file: path.to_owned(), error })?;
        let wrong = |place: &str, expected: String, got: String| Damage::Content {
            file: path.to_owned(),
            place: place.to_owned(),
            expected,
            got,
        };
        let Some((fixed, rest)) = payload.split_at_checked(FIXED_BYTES) else {
            return Err(wrong(
                "payload",
                format!("at least {FIXED_BYTES} bytes"),
                payload.len().to_string(),
            ));
        };
        if fixed[..32] != of.0 {
            return Err(wrong("digest of the file", of.to_string(), hex::encode(&fixed[..32])));
        }
        let count = u64::from_le_bytes(std::array::from_fn(|n| fixed[32 + n]));
        if count.checked_mul(ENTRY_BYTES as u64) != Some(rest.len() as u64) {
            return Err(wrong("blocks", (rest.len() / ENTRY_BYTES).to_string(), count.to_string()));
        }
        let (prefixes, blocks) = rest.split_at(rest.len() / ENTRY_BYTES * 8);
        let prefixes: Vec<u64> =
            prefixes.as_chunks().0.iter().map(|p| u64::from_le_bytes(*p)).collect();
        if !prefixes.is_sorted_by(|a, b| a < b) {
            return Err(wrong("prefixes", "ascending".to_owned(), "another order".to_owned()));
        }
        Ok(Self {
            prefixes,
            blocks: blocks.as_chunks().0.iter().map(|b| u32::from_le_bytes(*b)).collect(),
        })
    }
}

impl Inner {
    /// The index of `file`, whose sparse digest `of` the caller has verified.
    pub(crate) fn block_index(
        &self,
        of: &Digest,
        file: &File,
        meter: &Meter,
    ) -> Result<BlockIndex, PagesError> {
        let dir = self.root.make_or_open(BLOCKS)?;
        let name = of.to_string();
        let path = dir.path().join(&name);
        let taken = dir.has(&name)?;
        if taken {
            match read(&dir, &name).and_then(|bytes| Ok(BlockIndex::decode(&path, of, &bytes)?)) {
                Ok(index) => return Ok(index),
                Err(error) => tracing::warn!(%error, "making an index of blocks again"),
            }
        }
        let index = BlockIndex::of(file, &path, meter)?;
        if let Err(error) = self.keep_block_index(&dir, &name, &index.encode(of)) {
            // The index is a cache, so the work continues without it.
            tracing::warn!(%error, cause = %error.source, "not keeping an index of blocks");
        }
        Ok(index)
    }

    /// The file of the index of `file`, which is made if there is none, and made again if it is
    /// damaged; `None` if it cannot be kept. An index is decoded once, and again after its file has
    /// changed: a reader in another process cannot make it again. The file is a new description,
    /// read-only.
    pub(super) fn block_index_file(
        &self,
        of: &Digest,
        file: &File,
        meter: &Meter,
    ) -> Result<Option<File>, PagesError> {
        let dir = self.root.make_or_open(BLOCKS)?;
        let name = of.to_string();
        let opened = || -> IoResult<Option<(File, Stamp)>> {
            match dir.open(&name) {
                Ok(file) => {
                    let path = dir.path().join(&name);
                    let stamp = Stamp::of(&file).map_err(IoError::new("looking at", &path))?;
                    Ok(Some((file, stamp)))
                }
                Err(e) if e.is_not_found() => Ok(None),
                Err(e) => Err(e),
            }
        };
        if let Some((file, stamp)) = opened()?
            && lock(&self.sound_indexes).get(of) == Some(&stamp)
        {
            return Ok(Some(file));
        }
        self.block_index(of, file, meter)?;
        let Some((file, stamp)) = opened()? else { return Ok(None) };
        // A damaged one may still be there, if the disk is full.
        if stamp.is_settled() && BlockIndex::check(&dir, &name, of).is_ok() {
            let mut sound = lock(&self.sound_indexes);
            if sound.len() >= MAX_SOUND {
                sound.clear();
            }
            sound.insert(*of, stamp);
        }
        Ok(Some(file))
    }

    fn keep_block_index(&self, dir: &crate::blob::Dir, name: &str, bytes: &[u8]) -> IoResult<()> {
        self.writable()?;
        let stage = self.stage()?;
        stage.write(name, bytes)?;
        stage.sync()?;
        let if_taken = if dir.has(name)? { IfTaken::Exchange } else { IfTaken::Refuse };
        stage.rename(name, dir, name, if_taken)?;
        dir.sync()
    }
}

/// The index in `file` of the file with the digest `of`; `None` if it is damaged.
pub(super) fn read_index(of: &Digest, file: &File) -> Option<BlockIndex> {
    let mut bytes = Vec::new();
    file.take(MAX_BYTES + HEADER_BYTES as u64 + 1).read_to_end(&mut bytes).ok()?;
    BlockIndex::decode(Path::new("a block index"), of, &bytes).ok()
}

/// Reads a sealed file; stops one byte past the longest valid length.
fn read(dir: &crate::blob::Dir, name: &str) -> Result<Vec<u8>, PagesError> {
    let file = dir.open(name)?;
    let io = |e| IoError::new("reading", &dir.path().join(name))(e);
    let mut bytes = Vec::new();
    (&file).take(MAX_BYTES + HEADER_BYTES as u64 + 1).read_to_end(&mut bytes).map_err(io)?;
    Ok(bytes)
}

#[cfg(test)]
#[path = "blocks_tests.rs"]
mod tests;
