//! The pack: unique pages in compressed groups. Layout and order of checks:
//! `docs/snapshot-format.md`, "Pack".
//!
//! ## Why groups of 16 pages at level 3
//! Measured by `examples/groups.rs` on RAM of a booted 512 MiB Linux 6.12 guest (an even sample of
//! 16,192 unique pages). It ran on one of two busy Xeon cores. A fetch reads from memory and
//! includes both digests:
//!
//! | pages | level 1: ratio, us, MB/s | level 3 | level 6 | level 9 |
//! |---|---|---|---|---|
//! | 1 | 1.72, 9, 243 | 1.73, 9, 210 | 1.74, 8, 87 | 1.74, 6, 46 |
//! | 4 | 1.76, 13, 498 | 1.77, 12, 368 | 1.79, 12, 146 | 1.79, 12, 59 |
//! | 8 | 1.76, 20, 587 | 1.77, 20, 495 | 1.79, 20, 174 | 1.80, 18, 100 |
//! | **16** | 1.76, 34, 689 | **1.78, 33, 567** | 1.80, 34, 175 | 1.80, 32, 124 |
//! | 32 | 1.76, 60, 557 | 1.78, 57, 577 | 1.80, 60, 194 | 1.80, 63, 119 |
//! | 64 | 1.76, 117, 691 | 1.79, 125, 456 | 1.80, 118, 174 | 1.81, 111, 115 |
//!
//! Pages of /usr/lib, which the example takes without a file, compress better in long groups: level
//! 3 gives 1.75 for 1 page, 1.83 for 8, 1.86 for 16, 1.94 for 64.
//!
//! So the ratio alone hardly justifies groups. These costs do:
//!
//! - A cold read takes longer than decompressing 16 pages.
//! - A pager fetches neighbours in groups of 16, which takes 2 us a page; a page alone takes 9 us.
//! - Compressing short groups costs up to 2.7 times the CPU.
//!
//! Above 16, a single page takes 60 us or more, for 1 % of ratio. Level 6 costs three times the CPU
//! for 1 %.
use super::frame;
use super::sums::Sound;
use crate::blob::fault;
use crate::errors::{Damage, IoError};
use dayfly_units::error::chain;
use dayfly_units::sealed::{self, HEADER_BYTES, Magic};
use dayfly_units::{Digest, Name};
use std::cell::RefCell;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use zstd::bulk::Decompressor;

pub(crate) use crate::sparse::PAGE;

pub(super) const MAGIC: Magic = *b"DFpack\r\n";
pub(super) const END_MAGIC: Magic = *b"DFpkend\n";
pub(super) const VERSION: u32 = 1;
/// Pages per group, as written; a reader accepts 1 to [`MAX_GROUP_PAGES`].
pub const GROUP_PAGES: u32 = 16;
/// The zstd level, as written.
pub const LEVEL: i32 = 3;
/// The most pages per group, so that one fetch decompresses at most 256 KiB.
pub(crate) const MAX_GROUP_PAGES: u32 = 64;
/// The most pages per pack: 64 MiB uncompressed.
pub const MAX_PACK_PAGES: u32 = 16384;
/// Bytes after the footer: magic, offset of the footer, BLAKE3 of these 16 bytes.
pub(super) const END_BYTES: usize = 48;
/// Bytes of the footer's payload before the groups.
pub(super) const FIXED_BYTES: usize = 72;
const GROUP_BYTES: usize = 20;
const HASH_BYTES: usize = 32;
const MAX_FOOTER_BYTES: u64 = 1 << 20;
const _: () = assert!(
    FIXED_BYTES as u64 + MAX_PACK_PAGES as u64 * (GROUP_BYTES + HASH_BYTES) as u64
        <= MAX_FOOTER_BYTES
);

/// The first 16 bytes of the BLAKE3 of a group as stored.
pub(super) type Sum = [u8; 16];

pub(super) fn sum(stored: &[u8]) -> Sum {
    let hash = blake3::hash(stored);
    std::array::from_fn(|n| hash.as_bytes()[n])
}

/// A pack with a verified footer. It takes 20 bytes of memory per group.
#[derive(Debug)]
pub(crate) struct Pack {
    /// BLAKE3 of the sealed footer; also the file's name.
    pub(crate) id: Digest,
    pub(crate) path: PathBuf,
    pub(crate) pages: u32,
    pub(crate) group_pages: u32,
    /// Length of the file in bytes.
    pub(crate) bytes: u64,
    /// End of each group in the file; the first group starts at byte 0.
    ends: Vec<u32>,
    sums: Vec<Sum>,
    /// Offset of the pages' hashes in the file.
    hashes_at: u64,
    /// The groups whose stored bytes were compared with their sums.
    pub(super) sound: Sound,
}

/// The content of a footer, before it is sealed.
pub(super) struct Footer<'a> {
    pub(super) tenant: &'a Name,
    pub(super) group_pages: u32,
    /// For each group: its stored bytes and their sum.
    pub(super) groups: &'a [(u32, Sum)],
    pub(super) hashes: &'a [Digest],
}

impl Footer<'_> {
    /// The sealed footer and the end behind it. The groups take `at` bytes. Also returns the pack's
    /// id.
    pub(super) fn encode(&self, at: u64) -> (Digest, Vec<u8>) {
        let mut payload =
            Vec::with_capacity(FIXED_BYTES + self.groups.len() * 20 + self.hashes.len() * 32);
        payload.extend_from_slice(
            &(u32::try_from(self.hashes.len()).unwrap_or(u32::MAX)).to_le_bytes(),
        );
        payload.extend_from_slice(&self.group_pages.to_le_bytes());
        payload.extend_from_slice(&tenant_field(self.tenant));
        for (bytes, sum) in self.groups {
            payload.extend_from_slice(&bytes.to_le_bytes());
            payload.extend_from_slice(sum);
        }
        self.hashes.iter().for_each(|hash| payload.extend_from_slice(&hash.0));
        let mut footer = sealed::seal(&MAGIC, VERSION, &payload);
        let id = Digest::of(&footer);
        let mut end = Vec::with_capacity(END_BYTES);
        end.extend_from_slice(&END_MAGIC);
        end.extend_from_slice(&at.to_le_bytes());
        end.extend_from_slice(&Digest::of(&end).0);
        footer.extend_from_slice(&end);
        (id, footer)
    }
}

/// A name as a field of 64 bytes: its length, its bytes, zeroes.
pub(crate) fn tenant_field(tenant: &Name) -> [u8; 64] {
    let text = tenant.as_str().as_bytes();
    let mut field = [0; 64];
    field[0] = u8::try_from(text.len()).unwrap_or(0);
    field[1..=text.len()].copy_from_slice(text);
    field
}

/// Why a pack was not opened, or a group of it not read.
#[derive(Debug, thiserror::Error)]
pub(crate) enum PackError {
    #[error(transparent)]
    Io(#[from] IoError),
    #[error(transparent)]
    Damage(#[from] Damage),
}

impl PackError {
    /// The I/O error; of damage, that the file cannot be read back.
    pub(super) fn into_io(self) -> IoError {
        match self {
            Self::Io(e) => e,
            Self::Damage(damage) => {
                let kind = std::io::ErrorKind::InvalidData;
                let source = std::io::Error::new(kind, damage.to_string());
                IoError { doing: "reading back", path: damage.file().to_owned(), source }
            }
        }
    }

    /// The damage; of an I/O error, the file that cannot be read.
    pub(crate) fn into_damage(self) -> Damage {
        match self {
            Self::Damage(damage) => damage,
            Self::Io(e) => {
                let (place, got) = ("the file".to_owned(), chain(&e));
                let expected = "that it can be read".to_owned();
                Damage::Content { file: e.path, place, expected, got }
            }
        }
    }
}

impl Pack {
    /// Opens `file`, which is at `path` in the folder of `tenant`. Verifies its end, seal, tenant,
    /// counts and sizes.
    pub(crate) fn open(path: &Path, file: &File, tenant: &Name) -> Result<Self, PackError> {
        let io = |e| IoError::new("reading", path)(e);
        let damage = |place: &str, expected: String, got: String| {
            PackError::from(Damage::Content {
                file: path.to_owned(),
                place: place.to_owned(),
                expected,
                got,
            })
        };
        let bytes = file.metadata().map_err(io)?.len();
        let least = (END_BYTES + HEADER_BYTES + FIXED_BYTES) as u64;
        if bytes < least {
            return Err(damage("size in bytes", format!("at least {least}"), bytes.to_string()));
        }
        let end_at = bytes - END_BYTES as u64;
        let mut end = [0; END_BYTES];
        file.read_exact_at(&mut end, end_at).map_err(io)?;
        let now = Digest::of(&end[..16]);
        if end[..8] != END_MAGIC || end[16..] != now.0 {
            let (expected, got) = (now.to_string(), end.escape_ascii().to_string());
            return Err(damage(
                "end of the pack",
                format!("DFpkend, an offset and digest {expected}"),
                got,
            ));
        }
        let at = u64::from_le_bytes(std::array::from_fn(|n| end[8 + n]));
        let length =
            end_at.checked_sub(at).filter(|l| *l <= MAX_FOOTER_BYTES + HEADER_BYTES as u64);
        let Some(length) = length.and_then(|l| usize::try_from(l).ok()) else {
            let expected = format!("within {} bytes of {end_at}", MAX_FOOTER_BYTES);
            return Err(damage("offset of the footer", expected, at.to_string()));
        };
        let mut footer = vec![0; length];
        file.read_exact_at(&mut footer, at).map_err(io)?;
        let opened = sealed::open(&MAGIC, VERSION..=VERSION, MAX_FOOTER_BYTES, &footer);
        let (_, payload) = opened.map_err(|error| Damage::Seal { file: path.to_owned(), error })?;
        let parsed = Self::parse(payload, tenant, at);
        let mut pack = parsed.map_err(|(place, expected, got)| damage(place, expected, got))?;
        pack.id = Digest::of(&footer);
        path.clone_into(&mut pack.path);
        pack.bytes = bytes;
        Ok(pack)
    }

    /// Decodes the payload of a footer that begins at byte `at`. The error has place, expected and
    /// got.
    fn parse(
        payload: &[u8],
        tenant: &Name,
        at: u64,
    ) -> Result<Self, (&'static str, String, String)> {
        let text = |v: u64| v.to_string();
        let Some((fixed, rest)) = payload.split_at_checked(FIXED_BYTES) else {
            return Err((
                "footer",
                format!("at least {FIXED_BYTES} bytes"),
                payload.len().to_string(),
            ));
        };
        let number = |bytes: &[u8]| u32::from_le_bytes(std::array::from_fn(|n| bytes[n]));
        let (pages, group_pages) = (number(&fixed[0..4]), number(&fixed[4..8]));
        if !(1..=MAX_PACK_PAGES).contains(&pages) {
            return Err(("pages", format!("1 to {MAX_PACK_PAGES}"), pages.to_string()));
        }
        if !(1..=MAX_GROUP_PAGES).contains(&group_pages) {
            return Err((
                "pages of a group",
                format!("1 to {MAX_GROUP_PAGES}"),
                group_pages.to_string(),
            ));
        }
        if fixed[8..] != tenant_field(tenant) {
            return Err(("tenant", tenant.to_string(), fixed[8..].escape_ascii().to_string()));
        }
        let groups = pages.div_ceil(group_pages) as usize;
        let expected = groups * GROUP_BYTES + pages as usize * HASH_BYTES;
        if rest.len() != expected {
            return Err((
                "bytes of groups and hashes",
                expected.to_string(),
                rest.len().to_string(),
            ));
        }
        let most = zstd::zstd_safe::compress_bound(group_pages as usize * PAGE) as u64;
        let (mut ends, mut sums, mut sum_of_bytes) =
            (Vec::with_capacity(groups), Vec::with_capacity(groups), 0_u64);
        for group in rest[..groups * GROUP_BYTES].as_chunks::<GROUP_BYTES>().0 {
            let bytes = u64::from(number(group));
            if !(1..=most).contains(&bytes) {
                return Err(("bytes of a group", format!("1 to {most}"), text(bytes)));
            }
            sum_of_bytes += bytes;
            ends.push(u32::try_from(sum_of_bytes).unwrap_or(u32::MAX));
            sums.push(std::array::from_fn(|n| group[4 + n]));
        }
        if sum_of_bytes != at || at > u64::from(u32::MAX) {
            return Err(("bytes of all groups", text(at), text(sum_of_bytes)));
        }
        let hashes_at = at + (HEADER_BYTES + FIXED_BYTES + groups * GROUP_BYTES) as u64;
        let (id, path) = (Digest([0; 32]), PathBuf::new());
        let sound = Sound::default();
        Ok(Self { id, path, pages, group_pages, bytes: 0, ends, sums, hashes_at, sound })
    }

    /// Bytes of memory that this value takes.
    pub(crate) const fn memory_bytes(&self) -> usize {
        self.ends.capacity() * 4 + self.sums.capacity() * size_of::<Sum>() + size_of::<Self>()
    }

    pub(crate) const fn groups(&self) -> usize {
        self.ends.len()
    }

    /// Compressed bytes of all groups.
    pub(crate) fn stored_bytes(&self) -> u64 {
        self.ends.last().copied().map_or(0, u64::from)
    }

    /// The numbers of the pages in a group.
    pub(crate) fn pages_of(&self, group: usize) -> std::ops::Range<u32> {
        let first = u32::try_from(group).unwrap_or(u32::MAX).saturating_mul(self.group_pages);
        first.min(self.pages)..first.saturating_add(self.group_pages).min(self.pages)
    }

    /// The byte range in the file of the groups `first` to `last`.
    pub(crate) fn span(&self, first: usize, last: usize) -> std::ops::Range<u64> {
        let start = first.checked_sub(1).map_or(0, |before| self.ends[before]);
        u64::from(start)..u64::from(self.ends[last])
    }

    /// Reads the hashes of a range of pages from disk. Their seal was verified when the pack was
    /// opened. A later bit flip makes a hash differ from the hash that the caller compares it with.
    pub(crate) fn hashes(
        &self,
        file: &File,
        pages: std::ops::Range<u32>,
    ) -> Result<Vec<Digest>, IoError> {
        let mut bytes = vec![0; pages.len() * HASH_BYTES];
        let at = self.hashes_at + u64::from(pages.start) * HASH_BYTES as u64;
        fault::read(&self.path).map_err(IoError::new("reading", &self.path))?;
        file.read_exact_at(&mut bytes, at).map_err(IoError::new("reading", &self.path))?;
        Ok(bytes.as_chunks::<HASH_BYTES>().0.iter().map(|hash| Digest(*hash)).collect())
    }

    /// Whether a group's stored bytes have its sum.
    pub(super) fn has_sum(&self, group: usize, stored: &[u8]) -> bool {
        sum(stored) == self.sums[group]
    }

    /// A damage error that names pack, group and page.
    pub(crate) fn damage(&self, page: u32, what: &str, expected: String, got: String) -> Damage {
        let group = page / self.group_pages;
        let place = format!("group {group}, page {page}: {what}");
        Damage::Content { file: self.path.clone(), place, expected, got }
    }

    /// Decompresses a group from its stored bytes into `raw`, which is then exactly the group's
    /// pages. The sum of the stored bytes is compared first, and then the frame is checked. `page`
    /// is the requested page, for the error message.
    pub(crate) fn decode(
        &self,
        group: usize,
        page: u32,
        stored: &[u8],
        raw: &mut Vec<u8>,
    ) -> Result<(), Damage> {
        let now = sum(stored);
        if now != self.sums[group] {
            let (expected, got) = (hex::encode(self.sums[group]), hex::encode(now));
            return Err(self.damage(page, "digest of the group as stored", expected, got));
        }
        let length = self.pages_of(group).len() * PAGE;
        if !frame::is_plain(stored, length) {
            let (expected, got) = (plain(length), "another one".to_owned());
            return Err(self.damage(page, "the group", expected, got));
        }
        raw.clear();
        raw.reserve(length);
        // A zstd context takes 95 KiB, so each thread reuses one.
        type Context = RefCell<Option<Decompressor<'static>>>;
        thread_local!(static CONTEXT: Context = const { RefCell::new(None) });
        let decoded = CONTEXT.with_borrow_mut(|context| {
            let context = match context {
                Some(context) => context,
                None => context.insert(Decompressor::new()?),
            };
            context.decompress_to_buffer(stored, raw)
        });
        match decoded {
            Ok(got) if got == length => Ok(()),
            Ok(got) => {
                Err(self.damage(page, "bytes of the group", length.to_string(), got.to_string()))
            }
            Err(e) => Err(self.damage(page, "the group", plain(length), e.to_string())),
        }
    }

    /// Checks that `bytes` are the page that `hash` names.
    pub(crate) fn check(&self, page: u32, hash: &Digest, bytes: &[u8]) -> Result<(), Damage> {
        let got = Digest::of(bytes);
        if got == *hash {
            return Ok(());
        }
        Err(self.damage(page, "digest of the page", hash.to_string(), got.to_string()))
    }
}

/// What the stored bytes of a group are.
fn plain(length: usize) -> String {
    format!("{length} bytes of one zstd frame")
}

#[cfg(test)]
#[path = "pack_tests.rs"]
mod tests;
