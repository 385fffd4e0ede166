//! The sealed JSON manifests: what an image, a kernel and a snapshot are made of.
//!
//! A manifest is read in this order: size against [`MAX_MANIFEST_BYTES`], the seal (magic, header digest, version, length,
//! payload digest), then JSON, then [`Manifest::check`]. The last version of each has exactly the fields below; a field is added by raising the version, and
//! reading the older one with a default.

use crate::blob::Dir;
use crate::digest::Digest;
use crate::errors::{Damage, IoError};
use crate::layers::LayerRef;
use dayfly_units::Name;
use dayfly_units::sealed::{self, Magic};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::io::{self, Read};
use std::path::PathBuf;

/// The longest manifest, without its seal.
pub(crate) const MAX_MANIFEST_BYTES: u64 = 1 << 20;
/// The most disks of a snapshot.
pub(crate) const MAX_DISKS: usize = 8;
/// The most layers of a disk.
pub(crate) const MAX_LAYERS: usize = 64;
/// The name of the manifest in its folder.
pub(crate) const FILE: &str = "manifest";

/// How an image wants to be started (OCI's words).
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ImageConfig {
    /// Program and first arguments.
    pub entrypoint: Vec<String>,
    /// Further arguments.
    pub cmd: Vec<String>,
    /// `NAME=value`.
    pub env: Vec<String>,
    /// Where programs start.
    pub workdir: String,
    /// As whom they run.
    pub user: String,
}

/// A root disk.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ImageManifest {
    /// Its name.
    pub name: Name,
    /// The raw disk; a sparse digest.
    pub disk: FileRef,
    /// When it was stored, in milliseconds since 1970.
    pub created_unix_ms: u64,
    /// Where it was built from, for people.
    pub source: String,
    /// How it wants to be started.
    pub config: ImageConfig,
}

/// A guest kernel.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct KernelManifest {
    /// Its name, such as `6.12`.
    pub name: Name,
    /// `uname -r` in the guest.
    pub release: String,
    /// BLAKE3 of vmlinux followed by the initramfs.
    pub digest: Digest,
    /// The ELF; a plain digest.
    pub vmlinux: FileRef,
    /// The initramfs; a plain digest.
    pub initrd: FileRef,
    /// When it was stored, in milliseconds since 1970.
    pub created_unix_ms: u64,
}

/// A file as it must be.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FileRef {
    /// Of its content: sparse ([`crate::sparse`]) for disks, layers' data and memory, else plain BLAKE3.
    pub digest: Digest,
    /// Its length.
    pub bytes: u64,
    /// Bytes in pages that are not all zero; for a plain file its length.
    pub data_bytes: u64,
}

/// The image that a disk lies on.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ImageRef {
    /// Its name.
    pub name: Name,
    /// Its disk's digest: an image of that name with other content is not it.
    pub digest: Digest,
}

/// The kernel that a snapshot runs. Its files are not needed to clone.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct KernelRef {
    /// Its name when the VM booted.
    pub name: Name,
    /// `uname -r` in the guest.
    pub release: String,
    /// Its digest.
    pub digest: Digest,
}

/// A disk of a snapshot.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DiskRef {
    /// The lowest layer.
    pub image: ImageRef,
    /// The size that the guest sees.
    pub size_bytes: u64,
    /// Whether clones get a writable layer for it.
    pub writable: bool,
    /// Frozen layers over the image, the lowest first.
    pub layers: Vec<LayerRef>,
}

/// A snapshot.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SnapshotManifest {
    /// Its name.
    pub name: Name,
    /// When it was taken, in milliseconds since 1970.
    pub created_unix_ms: u64,
    /// The snapshot that its VM was cloned from; for people, nothing is read from it.
    pub parent: Option<Name>,
    /// The kernel in its memory.
    pub kernel: KernelRef,
    /// vCPUs.
    pub vcpus: u8,
    /// RAM.
    pub memory_bytes: u64,
    /// Network devices; since version 2, before which there were none.
    #[serde(default)]
    pub nets: u8,
    /// Version of the agent in it.
    pub agent_version: String,
    /// How its image wants to be started.
    pub config: ImageConfig,
    /// For people and programs.
    pub labels: BTreeMap<String, String>,
    /// In order vda, vdb, ….
    pub disks: Vec<DiskRef>,
    /// RAM; a sparse digest.
    pub memory: FileRef,
    /// vCPUs and devices, sealed by the VMM; a plain digest.
    pub state: FileRef,
}

/// Why a manifest was not read.
#[derive(Debug, thiserror::Error)]
pub enum ManifestError {
    /// The host could not read it.
    #[error(transparent)]
    Io(#[from] IoError),
    /// It is not what it should be.
    #[error(transparent)]
    Damage(#[from] Damage),
}

/// What a folder holds. Damaged entries do not hide the others.
#[derive(Debug)]
pub struct Listing<T> {
    /// What could be read, by name.
    pub items: Vec<T>,
    /// Names of what could not, and why.
    pub damaged: Vec<(String, ManifestError)>,
}

/// What the three manifests have in common.
pub(crate) trait Manifest: Serialize + DeserializeOwned {
    const MAGIC: Magic;
    const VERSION: u32 = 1;
    /// The oldest version that is read.
    const OLDEST: u32 = 1;
    /// Such as `image`.
    const KIND: &'static str;
    fn name(&self) -> &Name;
    /// What JSON cannot say: the place of the first field that is out of its bounds, what it may be, and what it is.
    fn check(&self) -> Result<(), (String, String, String)>;
}

impl Manifest for ImageManifest {
    const MAGIC: Magic = *b"DFimage\n";
    const KIND: &'static str = "image";
    fn name(&self) -> &Name {
        &self.name
    }
    fn check(&self) -> Result<(), (String, String, String)> {
        self.disk.check("disk")
    }
}

impl Manifest for KernelManifest {
    const MAGIC: Magic = *b"DFkernl\n";
    const KIND: &'static str = "kernel";
    fn name(&self) -> &Name {
        &self.name
    }
    fn check(&self) -> Result<(), (String, String, String)> {
        self.vmlinux.check("vmlinux")?;
        self.initrd.check("initrd")
    }
}

impl Manifest for SnapshotManifest {
    const MAGIC: Magic = *b"DFsnaps\n";
    const VERSION: u32 = 2;
    const KIND: &'static str = "snapshot";
    fn name(&self) -> &Name {
        &self.name
    }
    fn check(&self) -> Result<(), (String, String, String)> {
        let most = |place: String, most: usize, got: usize| {
            if got <= most { Ok(()) } else { Err((place, format!("at most {most}"), got.to_string())) }
        };
        if self.disks.is_empty() {
            return Err(("disks".to_owned(), "at least 1".to_owned(), "0".to_owned()));
        }
        most("disks".to_owned(), MAX_DISKS, self.disks.len())?;
        self.memory.check("memory")?;
        self.state.check("state")?;
        for (d, disk) in self.disks.iter().enumerate() {
            most(format!("disks[{d}].layers"), MAX_LAYERS, disk.layers.len())?;
            for (l, layer) in disk.layers.iter().enumerate() {
                layer.check(&format!("disks[{d}].layers[{l}]"))?;
            }
        }
        Ok(())
    }
}

impl FileRef {
    pub(crate) fn check(&self, place: &str) -> Result<(), (String, String, String)> {
        if self.data_bytes <= self.bytes {
            return Ok(());
        }
        Err((format!("{place}.data_bytes"), format!("at most {}", self.bytes), self.data_bytes.to_string()))
    }
}

/// A manifest as it goes to disk.
pub(crate) fn encode<M: Manifest>(manifest: &M) -> io::Result<Vec<u8>> {
    let json = serde_json::to_vec_pretty(manifest)?;
    if json.len() as u64 > MAX_MANIFEST_BYTES {
        let text = format!("manifest: expected at most {MAX_MANIFEST_BYTES} bytes, got {}", json.len());
        return Err(io::Error::new(io::ErrorKind::InvalidInput, text));
    }
    Ok(sealed::seal(&M::MAGIC, M::VERSION, &json))
}

/// Reads and verifies the manifest in `folder`, whose last component must be the name in it.
pub(crate) fn read<M: Manifest>(folder: &Dir) -> Result<M, ManifestError> {
    let path = folder.path().join(FILE);
    let file = folder.open(FILE)?;
    let cap = MAX_MANIFEST_BYTES + sealed::HEADER_BYTES as u64;
    let mut bytes = Vec::new();
    file.take(cap + 1).read_to_end(&mut bytes).map_err(IoError::new("reading", &path))?;
    let manifest: M = decode(&path, &bytes)?;
    let expected = folder.path().file_name().and_then(|n| n.to_str()).unwrap_or_default();
    if manifest.name().as_str() != expected {
        let (place, got) = ("name".to_owned(), manifest.name().to_string());
        return Err(Damage::Content { file: path, place, expected: expected.to_owned(), got }.into());
    }
    Ok(manifest)
}

/// Verifies and decodes the bytes of the manifest at `path`.
pub(crate) fn decode<M: Manifest>(path: &std::path::Path, bytes: &[u8]) -> Result<M, Damage> {
    let content = |place: String, expected: String, got: String| Damage::Content {
        file: PathBuf::from(path),
        place,
        expected,
        got,
    };
    let opened = sealed::open(&M::MAGIC, M::OLDEST..=M::VERSION, MAX_MANIFEST_BYTES, bytes);
    let (_, json) = opened.map_err(|error| Damage::Seal { file: PathBuf::from(path), error })?;
    let manifest: M = serde_json::from_slice(json).map_err(|e| {
        content(
            format!("line {}, column {}", e.line(), e.column()),
            format!("the JSON of a {} manifest", M::KIND),
            e.to_string(),
        )
    })?;
    manifest.check().map_err(|(place, expected, got)| content(place, expected, got))?;
    Ok(manifest)
}

/// Every manifest in `parent`, the folder of its kind.
pub(crate) fn list<M: Manifest>(parent: &Dir) -> Result<Listing<M>, IoError> {
    let mut listing = Listing { items: Vec::new(), damaged: Vec::new() };
    for name in parent.entries()? {
        match parent.sub(&name).map_err(ManifestError::from).and_then(|folder| read::<M>(&folder)) {
            Ok(manifest) => listing.items.push(manifest),
            // Removed since it was listed.
            Err(ManifestError::Io(e)) if e.is_not_found() && !parent.has(&name)? => {}
            Err(error) => listing.damaged.push((name, error)),
        }
    }
    Ok(listing)
}

#[cfg(test)]
#[path = "manifest_tests.rs"]
pub(crate) mod tests;
