//! References to stored files and to the layers of disks.

use dayfly_units::{Digest, DigestError, VmId};
use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;

/// Expected digest and size of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FileRef {
    /// Digest of the content: sparse ([`crate::sparse`]) for disks, layers' data and memory,
    /// otherwise plain BLAKE3.
    pub digest: Digest,
    /// Length in bytes.
    pub bytes: u64,
    /// Bytes in pages that are not all zero; equals `bytes` for a plain digest.
    pub data_bytes: u64,
}

impl FileRef {
    pub(crate) fn check(&self, place: &str) -> Result<(), (String, String, String)> {
        if self.data_bytes <= self.bytes {
            return Ok(());
        }
        Err((
            format!("{place}.data_bytes"),
            format!("at most {}", self.bytes),
            self.data_bytes.to_string(),
        ))
    }
}

pub(crate) const DATA: &str = "data";
pub(crate) const MAP: &str = "map";

/// The id of a stored layer: BLAKE3 over `dayfly layer 1\n`, the sparse digest of its data, the
/// length of its data as u64 little-endian, and the digest of its map.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct LayerId(Digest);

impl LayerId {
    /// The id of a layer with these files.
    #[must_use]
    pub fn of(data: &FileRef, map: &FileRef) -> Self {
        let mut hasher = blake3::Hasher::new();
        hasher
            .update(b"dayfly layer 1\n")
            .update(&data.digest.0)
            .update(&data.bytes.to_le_bytes())
            .update(&map.digest.0);
        Self(hasher.finalize().into())
    }
}

impl fmt::Display for LayerId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl FromStr for LayerId {
    type Err = DigestError;
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        text.parse().map(Self)
    }
}

/// A stored layer and its files.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LayerRef {
    /// Name of its folder in `layers/`.
    pub id: LayerId,
    /// The file of its blocks; a sparse digest.
    pub data: FileRef,
    /// The file of its sealed map; a plain digest.
    pub map: FileRef,
}

impl LayerRef {
    pub(crate) fn check(&self, place: &str) -> Result<(), (String, String, String)> {
        self.data.check(&format!("{place}.data"))?;
        self.map.check(&format!("{place}.map"))?;
        let expected = LayerId::of(&self.data, &self.map);
        if expected == self.id {
            return Ok(());
        }
        Err((format!("{place}.id"), expected.to_string(), self.id.to_string()))
    }
}

/// A layer that one VM made: its writable layer, or a frozen layer that is in no snapshot yet.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct VmLayer {
    /// The VM that made the layer.
    pub vm: VmId,
    /// Number of the disk, from 0.
    pub disk: u8,
    /// Number of the layer on that disk, counted up.
    pub number: u32,
}

impl VmLayer {
    /// [`Self::data_name`] of the first layer of the first disk.
    pub(crate) const FIRST_DATA: &str = "disk0.0.data";

    pub(crate) fn data_name(&self) -> String {
        format!("disk{}.{}.data", self.disk, self.number)
    }

    pub(crate) fn map_name(&self) -> String {
        format!("disk{}.{}.map", self.disk, self.number)
    }

    /// The name of the file that says that the layer's fsync failed.
    pub(crate) fn unsynced_name(&self) -> String {
        format!("disk{}.{}.unsynced", self.disk, self.number)
    }

    /// The layer that has a file `name` in the folder of `vm`.
    pub(crate) fn named(vm: VmId, name: &str) -> Option<Self> {
        let (disk, number) = name.strip_prefix("disk")?.split_once('.')?;
        let (number, _) = number.split_once('.')?;
        let layer = Self { vm, disk: disk.parse().ok()?, number: number.parse().ok()? };
        (name == layer.data_name() || name == layer.map_name()).then_some(layer)
    }
}

/// What the files of a VM's layer had before their fsync failed; `None` for one that was not read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Unsynced {
    pub(crate) data: Option<FileRef>,
    pub(crate) map: Option<FileRef>,
}

/// A frozen layer of a running VM's disk, in any of the three places.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ChainLayer {
    /// In `layers/`.
    Stored(LayerRef),
    /// Frozen by the VM itself, and in no snapshot.
    Frozen(VmLayer),
    /// A shared layer, frozen by the VM that this one was forked from or by an ancestor of it. That
    /// VM may be gone: a [`crate::Pin`] retains the layer.
    #[serde(rename = "borrowed")]
    Shared(VmLayer),
}
