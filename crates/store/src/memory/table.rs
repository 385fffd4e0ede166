//! The table of a snapshot's RAM: the kind of every frame. Layout and order of checks:
//! `docs/snapshot-format.md`, "Table".

use crate::errors::Damage;
use crate::objects::manifest::{MAX_DISKS, MAX_LAYERS};
use crate::objects::types::FileRef;
use crate::pages::pack::{PAGE, tenant_field};
use dayfly_units::sealed::{self, HEADER_BYTES, Magic};
use dayfly_units::{Digest, Name};
use std::path::Path;

pub(crate) const MAGIC: Magic = *b"DFtable\n";
pub(crate) const VERSION: u32 = 1;
/// The most frames of a table: 256 GiB of RAM.
pub const MAX_FRAMES: u32 = 1 << 26;
const FIXED_BYTES: usize = 152;
const RUN_BYTES: usize = 12;
const HASH_BYTES: usize = 32;
/// The longest payload in bytes: one run and one page for every frame, and 1 MiB for the rest.
pub(crate) const MAX_BYTES: u64 = MAX_FRAMES as u64 * (RUN_BYTES + HASH_BYTES) as u64 + (1 << 20);
/// Blocks of the largest disk, 1 TiB.
const MAX_BLOCKS: u32 = 1 << 28;

/// The kind of a frame, and where its content is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// All zero.
    Zero,
    /// Unused by the guest; reads as zeroes after a restore.
    Free,
    /// A block of one of the snapshot's own disks. For a run it is the block of the first frame;
    /// the other blocks follow it.
    Disk {
        /// Number of the disk, from 0.
        disk: u8,
        /// 0 for the image, n for the n-th frozen layer, the lowest first.
        layer: u8,
        /// The block at byte `block` × 4096 of that file.
        block: u32,
    },
    /// A page of the tenant's namespace. For a run it is the hash of the first frame; the other
    /// hashes follow it.
    Page {
        /// Index in [`Table::hashes`].
        hash: u32,
    },
}

/// Consecutive frames of one kind and colour.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Run {
    /// The first frame; its bytes begin at `first` × 4096 of RAM.
    pub first: u32,
    /// Number of frames; not 0.
    pub frames: u32,
    /// The frames' kind.
    pub kind: Kind,
    /// The frames' colour, the guest's use of them; 0 means unknown.
    pub colour: u8,
}

/// The table of a snapshot's RAM, verified.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Table {
    /// The tenant whose namespace has the pages.
    pub tenant: Name,
    /// RAM as restored: its sparse digest ([`crate::sparse`]), its length, and its bytes in pages
    /// that are not all zero.
    pub ram: FileRef,
    /// A second digest of RAM, which can be computed on many cores from pages verified one by one:
    /// see [`FramesDigest`].
    pub frames_digest: Digest,
    /// The files that frames may refer to: for each disk the sparse digests of its image and of its
    /// layers' data.
    pub disks: Vec<Vec<Digest>>,
    pub(super) runs: Vec<Run>,
    pub(super) hashes: Vec<Digest>,
}

/// The digest of frames: BLAKE3 over `dayfly frames 1\n`, an entry for every frame that is not all
/// zero, in order, and the number of frames as u32 little-endian.
///
/// An entry is the frame's number as u32 little-endian and the BLAKE3 of its 4096 bytes.
#[derive(Debug)]
pub struct FramesDigest(blake3::Hasher);

impl Default for FramesDigest {
    fn default() -> Self {
        let mut hasher = blake3::Hasher::new();
        hasher.update(b"dayfly frames 1\n");
        Self(hasher)
    }
}

impl FramesDigest {
    /// Adds the next frame that is not all zero.
    pub fn frame(&mut self, number: u32, hash: &Digest) {
        let mut entry = [0; 36];
        entry[..4].copy_from_slice(&number.to_le_bytes());
        entry[4..].copy_from_slice(&hash.0);
        self.0.update(&entry);
    }

    /// The digest of RAM with `frames` frames.
    #[must_use]
    pub fn finish(mut self, frames: u32) -> Digest {
        self.0.update(&frames.to_le_bytes());
        self.0.finalize().into()
    }
}

impl Table {
    /// Number of frames of RAM, 4096 bytes each.
    #[must_use]
    pub fn frames(&self) -> u32 {
        self.runs.last().map_or(0, |run| run.first + run.frames)
    }

    /// The runs of frames, in order, without gaps.
    #[must_use]
    pub fn runs(&self) -> &[Run] {
        &self.runs
    }

    /// The hashes of all pages, each once.
    #[must_use]
    pub fn hashes(&self) -> &[Digest] {
        &self.hashes
    }

    /// The part of a run that begins at `frame`; `None` if `frame` is past the end of RAM.
    #[must_use]
    pub fn from_frame(&self, frame: u32) -> Option<Run> {
        let at = self.runs.partition_point(|run| run.first + run.frames <= frame);
        let run = self.runs.get(at)?;
        let skipped = frame - run.first;
        let kind = match run.kind {
            Kind::Disk { disk, layer, block } => Kind::Disk { disk, layer, block: block + skipped },
            Kind::Page { hash } => Kind::Page { hash: hash + skipped },
            other => other,
        };
        Some(Run { first: frame, frames: run.frames - skipped, kind, colour: run.colour })
    }

    /// The sealed bytes of the table.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let number = |n: usize| u32::try_from(n).unwrap_or(u32::MAX).to_le_bytes();
        let mut out = Vec::with_capacity(
            FIXED_BYTES + self.runs.len() * RUN_BYTES + self.hashes.len() * HASH_BYTES,
        );
        for n in [self.frames() as usize, self.runs.len(), self.hashes.len(), self.disks.len()] {
            out.extend_from_slice(&number(n));
        }
        out.extend_from_slice(&tenant_field(&self.tenant));
        out.extend_from_slice(&self.ram.digest.0);
        out.extend_from_slice(&self.ram.data_bytes.to_le_bytes());
        out.extend_from_slice(&self.frames_digest.0);
        for disk in &self.disks {
            out.extend_from_slice(&number(disk.len()));
            disk.iter().for_each(|layer| out.extend_from_slice(&layer.0));
        }
        for run in &self.runs {
            let (kind, disk, layer, arg) = match run.kind {
                Kind::Zero => (0, 0, 0, 0),
                Kind::Free => (1, 0, 0, 0),
                Kind::Disk { disk, layer, block } => (2, disk, layer, block),
                Kind::Page { hash } => (3, 0, 0, hash),
            };
            out.extend_from_slice(&run.frames.to_le_bytes());
            out.extend_from_slice(&[kind, run.colour, disk, layer]);
            out.extend_from_slice(&arg.to_le_bytes());
        }
        self.hashes.iter().for_each(|hash| out.extend_from_slice(&hash.0));
        sealed::seal(&MAGIC, VERSION, &out)
    }

    /// Verifies and decodes the bytes of the table at `path`.
    ///
    /// # Errors
    /// [`Damage`] names the field, the expected value and the value found.
    pub fn decode(path: &Path, bytes: &[u8]) -> Result<Self, Damage> {
        let opened = sealed::open(&MAGIC, VERSION..=VERSION, MAX_BYTES, bytes);
        let (_, payload) = opened.map_err(|error| Damage::Seal { file: path.to_owned(), error })?;
        parse(payload).map_err(|Wrong { at, place, expected, got }| {
            let place = format!("{place} at byte {}", HEADER_BYTES + at);
            Damage::Content { file: path.to_owned(), place, expected, got }
        })
    }
}

/// A field of the payload with a wrong value.
struct Wrong {
    /// Offset in the payload.
    at: usize,
    place: String,
    expected: String,
    got: String,
}

fn within(at: usize, place: &str, min: u64, max: u64, got: u64) -> Result<(), Wrong> {
    if (min..=max).contains(&got) {
        return Ok(());
    }
    Err(Wrong {
        at,
        place: place.to_owned(),
        expected: format!("{min} to {max}"),
        got: got.to_string(),
    })
}

/// Takes bytes from the front and counts them.
struct Reader<'a> {
    rest: &'a [u8],
    at: usize,
}

impl<'a> Reader<'a> {
    fn take(&mut self, place: &str, bytes: usize) -> Result<&'a [u8], Wrong> {
        let Some((taken, rest)) = self.rest.split_at_checked(bytes) else {
            let (expected, got) = (format!("{bytes} bytes"), self.rest.len().to_string());
            return Err(Wrong { at: self.at, place: place.to_owned(), expected, got });
        };
        self.rest = rest;
        self.at += bytes;
        Ok(taken)
    }

    fn number(&mut self, place: &str) -> Result<u32, Wrong> {
        Ok(number(self.take(place, 4)?))
    }

    fn digest(&mut self, place: &str) -> Result<Digest, Wrong> {
        let bytes = self.take(place, HASH_BYTES)?;
        Ok(Digest(std::array::from_fn(|n| bytes[n])))
    }
}

fn number(bytes: &[u8]) -> u32 {
    u32::from_le_bytes(std::array::from_fn(|n| bytes[n]))
}

fn parse(payload: &[u8]) -> Result<Table, Wrong> {
    let mut from = Reader { rest: payload, at: 0 };
    let frames = from.number("frames")?;
    let (runs, hashes) = (from.number("runs")?, from.number("hashes")?);
    let disks = from.number("disks")?;
    within(0, "frames", 1, u64::from(MAX_FRAMES), u64::from(frames))?;
    within(4, "runs", 1, u64::from(frames), u64::from(runs))?;
    within(8, "hashes", 0, u64::from(frames), u64::from(hashes))?;
    within(12, "disks", 0, MAX_DISKS as u64, u64::from(disks))?;
    let tenant = parse_tenant(from.take("tenant", 64)?)?;
    let bytes = u64::from(frames) * PAGE as u64;
    let digest = from.digest("digest of RAM")?;
    let data = from.take("data bytes", 8)?;
    let data_bytes = u64::from_le_bytes(std::array::from_fn(|n| data[n]));
    within(112, "data bytes", 0, bytes, data_bytes)?;
    let ram = FileRef { digest, bytes, data_bytes };
    let frames_digest = from.digest("digest of frames")?;
    let mut layers = Vec::with_capacity(disks as usize);
    for _ in 0..disks {
        let at = from.at;
        let count = from.number("layers of a disk")?;
        within(at, "layers of a disk", 1, MAX_LAYERS as u64 + 1, u64::from(count))?;
        layers.push((0..count).map(|_| from.digest("layer")).collect::<Result<Vec<_>, _>>()?);
    }
    let expected = runs as usize * RUN_BYTES + hashes as usize * HASH_BYTES;
    if from.rest.len() != expected {
        let (at, place) = (from.at, "bytes of runs and hashes".to_owned());
        return Err(Wrong {
            at,
            place,
            expected: expected.to_string(),
            got: from.rest.len().to_string(),
        });
    }
    let (run_bytes, hash_bytes) = from.rest.split_at(runs as usize * RUN_BYTES);
    let runs = parse_runs(run_bytes, from.at, frames, hashes, &layers)?;
    let hashes = hash_bytes.as_chunks::<HASH_BYTES>().0.iter().map(|hash| Digest(*hash)).collect();
    Ok(Table { tenant, ram, frames_digest, disks: layers, runs, hashes })
}

fn parse_tenant(field: &[u8]) -> Result<Name, Wrong> {
    let text = field.get(1..=usize::from(field[0])).and_then(|text| std::str::from_utf8(text).ok());
    let name =
        text.and_then(|text| text.parse::<Name>().ok()).filter(|name| tenant_field(name) == field);
    name.ok_or_else(|| Wrong {
        at: 16,
        place: "tenant".to_owned(),
        expected: "length, name, zeroes".to_owned(),
        got: field.escape_ascii().to_string(),
    })
}

fn parse_runs(
    bytes: &[u8],
    at: usize,
    frames: u32,
    hashes: u32,
    disks: &[Vec<Digest>],
) -> Result<Vec<Run>, Wrong> {
    let mut runs = Vec::with_capacity(bytes.len() / RUN_BYTES);
    let mut first = 0;
    for (n, run) in bytes.as_chunks::<RUN_BYTES>().0.iter().enumerate() {
        let at = at + n * RUN_BYTES;
        let count = number(run);
        within(at, "frames of a run", 1, u64::from(frames - first), u64::from(count))?;
        let (kind, colour, disk, layer, arg) = (run[4], run[5], run[6], run[7], number(&run[8..]));
        let end = u64::from(arg) + u64::from(count);
        let kind = match (kind, disk, layer, arg) {
            (0, 0, 0, 0) => Kind::Zero,
            (1, 0, 0, 0) => Kind::Free,
            (2, ..) => {
                within(at + 6, "disk", 0, (disks.len() as u64).saturating_sub(1), u64::from(disk))?;
                let layers = disks.get(usize::from(disk)).map_or(0, Vec::len) as u64;
                within(at + 7, "layer", 1, layers, u64::from(layer) + 1)?;
                within(at + 8, "end of blocks", 1, u64::from(MAX_BLOCKS), end)?;
                Kind::Disk { disk, layer, block: arg }
            }
            (3, 0, 0, _) => {
                within(at + 8, "end of hashes", 1, u64::from(hashes), end)?;
                Kind::Page { hash: arg }
            }
            _ => {
                let expected = "kind 0 to 3 and zeroes in fields that it does not use".to_owned();
                let got = run.escape_ascii().to_string();
                return Err(Wrong { at: at + 4, place: "run".to_owned(), expected, got });
            }
        };
        runs.push(Run { first, frames: count, kind, colour });
        first += count;
    }
    within(
        at + bytes.len(),
        "frames of all runs",
        u64::from(frames),
        u64::from(frames),
        u64::from(first),
    )?;
    Ok(runs)
}

#[cfg(test)]
#[path = "table_tests.rs"]
mod tests;
