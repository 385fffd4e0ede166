//! Functions for the crate `fuzz`: decoders that only this crate uses otherwise. A function that
//! decodes returns what it decoded, encoded again; `None` if the bytes were refused.

use crate::Digest;
use crate::format::Format;
use crate::memory::BlockIndex;
use crate::objects::manifest::{self, Manifest};
use crate::objects::upload::Frame;
use crate::pages::pack::{MAX_PACK_PAGES, Pack};
use crate::pages::record;
use crate::vms::unsynced;
use crate::{ImageManifest, KernelManifest, SnapshotManifest, sparse};
use dayfly_units::Name;
use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::FileExt;
use std::path::Path;

/// The path in errors.
const PATH: &str = "fuzz";

/// The index of a disk file's blocks.
#[must_use]
pub fn blocks(of: &Digest, bytes: &[u8]) -> Option<Vec<u8>> {
    BlockIndex::decode(Path::new(PATH), of, bytes).ok().map(|index| index.encode(of))
}

/// The features of a store.
#[must_use]
pub fn format(bytes: &[u8]) -> Option<Vec<u8>> {
    Format::decode(Path::new(PATH), bytes).ok()?.encode().ok()
}

fn manifest<M: Manifest>(bytes: &[u8]) -> Option<Vec<u8>> {
    manifest::encode(&manifest::decode::<M>(Path::new(PATH), bytes).ok()?).ok()
}

/// The manifest of an image.
#[must_use]
pub fn image(bytes: &[u8]) -> Option<Vec<u8>> {
    manifest::<ImageManifest>(bytes)
}

/// The manifest of a kernel.
#[must_use]
pub fn kernel(bytes: &[u8]) -> Option<Vec<u8>> {
    manifest::<KernelManifest>(bytes)
}

/// The manifest of a snapshot.
#[must_use]
pub fn snapshot(bytes: &[u8]) -> Option<Vec<u8>> {
    manifest::<SnapshotManifest>(bytes)
}

/// What a pack holds.
#[derive(Debug)]
pub struct Packed {
    /// Its number of pages.
    pub pages: u32,
    /// Its number of groups.
    pub groups: usize,
    /// The number of groups that could be decompressed, of the first 64.
    pub good_groups: usize,
}

/// Opens a pack, and reads its hashes and groups.
///
/// # Panics
/// If the footer was accepted, and a group or a hash is not where the footer says.
#[must_use]
pub fn pack(file: &File, tenant: &Name) -> Option<Packed> {
    let pack = Pack::open(Path::new(PATH), file, tenant).ok()?;
    let hashes = pack.hashes(file, 0..pack.pages).ok()?;
    assert_eq!(hashes.len(), pack.pages as usize, "a hash for each page");
    assert!(pack.pages <= MAX_PACK_PAGES, "{} pages", pack.pages);
    let groups = pack.groups();
    let (mut good_groups, mut next, mut raw) = (0, 0, Vec::new());
    for group in 0..groups {
        let span = pack.span(group, group);
        assert!(span.start == next && span.end <= pack.stored_bytes(), "group {group}: {span:?}");
        next = span.end;
        if group >= 64 {
            continue;
        }
        let mut stored = vec![0; usize::try_from(span.end - span.start).unwrap_or(usize::MAX)];
        let pages = pack.pages_of(group);
        if file.read_exact_at(&mut stored, span.start).is_ok()
            && pack.decode(group, pages.start, &stored, &mut raw).is_ok()
        {
            assert_eq!(raw.len(), pages.len() * sparse::PAGE, "bytes of group {group}");
            good_groups += 1;
        }
    }
    assert_eq!(next, pack.stored_bytes(), "bytes of all groups");
    Some(Packed { pages: pack.pages, groups, good_groups })
}

/// The quarantine of a tenant's pages.
#[must_use]
pub fn quarantine(bytes: &[u8]) -> Option<Vec<u8>> {
    record::decode(Path::new(PATH), bytes).ok().map(|record| record::encode(&record))
}

/// What is remembered of a layer whose fsync failed, as JSON.
#[must_use]
pub fn unsynced(bytes: &[u8]) -> Option<Vec<u8>> {
    unsynced::decode(bytes).and_then(|note| serde_json::to_vec(&note).ok())
}

/// Copies at most `most` bytes of an upload's content to `to`. Returns the number, and whether
/// content and upload both ended there.
///
/// # Errors
/// The upload is no zstd frame, or is damaged.
pub fn upload(from: &mut dyn Read, to: &mut dyn io::Write, most: u64) -> io::Result<(u64, bool)> {
    let mut frame = Frame::new(from)?;
    let copied = io::copy(&mut frame.by_ref().take(most), to)?;
    Ok((copied, frame.ends_here()?))
}
