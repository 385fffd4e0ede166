//! Sealed JSON manifests of images, kernels and snapshots.
//!
//! A reader checks in this order: the size against [`MAX_MANIFEST_BYTES`], the seal (magic, header
//! digest, version, length, payload digest), the JSON, and last [`Manifest::check`].
//!
//! The last version of each manifest has exactly the fields below. A new field raises the version;
//! the reader gives it a default in older versions.

use crate::blob::Dir;
use crate::errors::{Damage, IoError};
use crate::objects::types::{FileRef, LayerId, LayerRef};
use dayfly_units::sealed::{self, Magic};
use dayfly_units::{CpuModel, Digest, Egress, ImageConfig, Name};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::io::{self, Read};
use std::path::PathBuf;

/// The longest manifest without its seal, in bytes.
pub(crate) const MAX_MANIFEST_BYTES: u64 = 1 << 20;
/// The most disks of a snapshot.
pub(crate) const MAX_DISKS: usize = 8;
/// The most layers of a disk.
pub(crate) const MAX_LAYERS: usize = 64;
/// The most ancestors of a snapshot that its manifest names.
pub const MAX_ANCESTORS: usize = 8;
/// The name of the manifest in its folder.
pub(crate) const FILE: &str = "manifest";

/// The manifest of an image.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ImageManifest {
    /// The image's name.
    pub name: Name,
    /// The raw disk; a sparse digest.
    pub disk: FileRef,
    /// Time of storing, in milliseconds since 1970.
    pub created_unix_ms: u64,
    /// The image's origin, for people.
    pub source: String,
    /// How to start the image's program.
    #[serde(deserialize_with = "dayfly_units::image_config::known")]
    pub config: ImageConfig,
}

/// The manifest of a kernel.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct KernelManifest {
    /// The kernel's name, such as `6.12`.
    pub name: Name,
    /// The output of `uname -r` in the guest.
    pub release: String,
    /// BLAKE3 of vmlinux followed by the initramfs.
    pub digest: Digest,
    /// The ELF; a plain digest.
    pub vmlinux: FileRef,
    /// The initramfs; a plain digest.
    pub initrd: FileRef,
    /// The image of the kernel's modules, a disk of each VM that boots the kernel. Since version 2;
    /// `None` in version 1, and for a kernel without modules.
    #[serde(default)]
    pub modules: Option<ImageRef>,
    /// Time of storing, in milliseconds since 1970.
    pub created_unix_ms: u64,
}

/// The image below a disk's layers.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ImageRef {
    /// The image's name.
    pub name: Name,
    /// Digest of the image's disk: an image of that name with another digest does not match.
    pub digest: Digest,
}

/// The kernel that a snapshot runs. A clone does not need its files.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct KernelRef {
    /// The kernel's name when the VM booted.
    pub name: Name,
    /// The output of `uname -r` in the guest.
    pub release: String,
    /// The kernel's digest.
    pub digest: Digest,
}

/// A disk of a snapshot.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DiskRef {
    /// The image, below all layers.
    pub image: ImageRef,
    /// Size that the guest sees, in bytes.
    pub size_bytes: u64,
    /// Whether each clone gets a writable layer for this disk.
    pub writable: bool,
    /// Stored layers over the image, the lowest first.
    pub layers: Vec<LayerRef>,
}

/// The manifest of a snapshot.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SnapshotManifest {
    /// The snapshot's name.
    pub name: Name,
    /// Time of the snapshot, in milliseconds since 1970.
    pub created_unix_ms: u64,
    /// The snapshot that the VM was cloned from, for people: no content is read from it.
    pub parent: Option<Name>,
    /// The digests of the RAM of snapshots in whose state the guest once was, the oldest first: the
    /// one that the VM was cloned from, and that one's ancestors. A digest names content, so it
    /// cannot be that of another snapshot with the same name. Since version 3; empty before.
    #[serde(default)]
    pub ancestors: Vec<Digest>,
    /// The kernel in the snapshot's memory.
    pub kernel: KernelRef,
    /// Number of vCPUs, the least of a clone.
    pub vcpus: u8,
    /// The most vCPUs of a clone: those that the guest knows of. Since version 7; absent before,
    /// and if the guest knows of no more than `vcpus`.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub max_vcpus: u8,
    /// The model of the vCPUs. Since version 6; absent before, and for the host's own.
    #[serde(default, skip_serializing_if = "CpuModel::is_host")]
    pub cpu_model: CpuModel,
    /// RAM in bytes.
    pub memory_bytes: u64,
    /// Number of network devices. Since version 2; 0 in version 1.
    #[serde(default)]
    pub nets: u8,
    /// Version of the agent in the guest.
    pub agent_version: String,
    /// How to start the image's program.
    #[serde(deserialize_with = "dayfly_units::image_config::known")]
    pub config: ImageConfig,
    /// Labels for people and programs.
    pub labels: BTreeMap<String, String>,
    /// The disks, in the order vda, vdb, ….
    pub disks: Vec<DiskRef>,
    /// RAM; a sparse digest.
    pub memory: FileRef,
    /// vCPUs and devices, sealed by the VMM; a plain digest.
    pub state: FileRef,
    /// For the disks' files, by digest, the roots of their hash trees ([`dayfly_units::tree`]). A
    /// file without one is verified whole. Since version 4; empty before.
    #[serde(default)]
    pub trees: BTreeMap<Digest, Digest>,
    /// The egress policy of clones that ask for none. Since version 5; absent before, and if the VM
    /// had no policy.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub egress: Option<Egress>,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes a reference")]
const fn is_zero(number: &u8) -> bool {
    *number == 0
}

impl SnapshotManifest {
    /// The most vCPUs of a clone.
    #[must_use]
    pub fn known_vcpus(&self) -> u8 {
        self.max_vcpus.max(self.vcpus)
    }

    /// The images that the snapshot depends on, each once.
    #[must_use]
    pub fn images(&self) -> Vec<ImageRef> {
        let by_name: BTreeMap<_, _> =
            self.disks.iter().map(|d| (&d.image.name, &d.image)).collect();
        by_name.into_values().cloned().collect()
    }

    /// The layers that the snapshot depends on, disk by disk, the lowest first.
    #[must_use]
    pub fn layer_ids(&self) -> Vec<LayerId> {
        self.disks.iter().flat_map(|d| &d.layers).map(|l| l.id).collect()
    }
}

/// Why a manifest was not read.
#[derive(Debug, thiserror::Error)]
pub enum ManifestError {
    /// The host could not read it.
    #[error(transparent)]
    Io(#[from] IoError),
    /// The manifest is damaged, of another format, or out of bounds.
    #[error(transparent)]
    Damage(#[from] Damage),
}

impl ManifestError {
    /// Whether another version of dayfly wrote the manifest, in an encoding that this one does not
    /// read.
    pub(crate) const fn is_version(&self) -> bool {
        matches!(self, Self::Damage(damage) if damage.is_version())
    }
}

/// The manifests in a folder. A damaged entry does not hide the others.
#[derive(Debug)]
pub struct Listing<T> {
    /// Readable manifests, sorted by name.
    pub items: Vec<T>,
    /// Names of unreadable entries, each with the cause.
    pub damaged: Vec<(String, ManifestError)>,
}

impl<T> Listing<T> {
    /// Takes an entry that another version of dayfly made, out of `damaged`.
    pub(crate) fn other_version(&mut self) -> Option<(String, ManifestError)> {
        let place = self.damaged.iter().position(|(_, error)| error.is_version())?;
        Some(self.damaged.swap_remove(place))
    }
}

/// Common to the three kinds of manifest.
pub(crate) trait Manifest: Serialize + DeserializeOwned {
    const MAGIC: Magic;
    const VERSION: u32 = 1;
    /// The oldest version that is read.
    const OLDEST: u32 = 1;
    /// The kind's name, such as `image`.
    const KIND: &'static str;
    fn name(&self) -> &Name;
    /// The lowest version that a reader must know.
    fn version(&self) -> u32 {
        Self::VERSION
    }
    /// Checks bounds that JSON cannot express. The error has the place of the first bad field, the
    /// allowed values, and the value found.
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
    const VERSION: u32 = 2;
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
    const VERSION: u32 = 7;
    const KIND: &'static str = "snapshot";
    fn name(&self) -> &Name {
        &self.name
    }
    fn version(&self) -> u32 {
        // A daemon that does not know policies must not make clones without the one that they are
        // to have. Version 5 does not read what names a CPU model, and version 6 does not read the
        // most vCPUs. Version 4 may clone every other snapshot.
        match (self.max_vcpus, self.cpu_model, &self.egress) {
            (0, CpuModel::Host, None) => 4,
            (0, CpuModel::Host, Some(_)) => 5,
            (0, ..) => 6,
            _ => 7,
        }
    }
    fn check(&self) -> Result<(), (String, String, String)> {
        let most = |place: String, most: usize, got: usize| {
            if got <= most {
                Ok(())
            } else {
                Err((place, format!("at most {most}"), got.to_string()))
            }
        };
        if self.disks.is_empty() {
            return Err(("disks".to_owned(), "at least 1".to_owned(), "0".to_owned()));
        }
        if self.max_vcpus != 0 && self.max_vcpus < self.vcpus {
            let (expected, got) = (format!("at least {}", self.vcpus), self.max_vcpus.to_string());
            return Err(("max_vcpus".to_owned(), expected, got));
        }
        most("disks".to_owned(), MAX_DISKS, self.disks.len())?;
        most("ancestors".to_owned(), MAX_ANCESTORS, self.ancestors.len())?;
        self.memory.check("memory")?;
        self.state.check("state")?;
        for (d, disk) in self.disks.iter().enumerate() {
            most(format!("disks[{d}].layers"), MAX_LAYERS, disk.layers.len())?;
            for (l, layer) in disk.layers.iter().enumerate() {
                layer.check(&format!("disks[{d}].layers[{l}]"))?;
            }
        }
        let files = |disk: &DiskRef| {
            let layers = disk.layers.iter().map(|layer| layer.data.digest);
            std::iter::once(disk.image.digest).chain(layers).collect::<Vec<_>>()
        };
        let files: BTreeSet<Digest> = self.disks.iter().flat_map(files).collect();
        if let Some(stray) = self.trees.keys().find(|digest| !files.contains(digest)) {
            let (place, expected) = ("trees".to_owned(), "digests of the disks' files".to_owned());
            return Err((place, expected, stray.to_string()));
        }
        Ok(())
    }
}

/// The sealed bytes of a manifest.
pub(crate) fn encode<M: Manifest>(manifest: &M) -> io::Result<Vec<u8>> {
    let json = serde_json::to_vec_pretty(manifest)?;
    if json.len() as u64 > MAX_MANIFEST_BYTES {
        let text =
            format!("manifest: expected at most {MAX_MANIFEST_BYTES} bytes, got {}", json.len());
        return Err(io::Error::new(io::ErrorKind::InvalidInput, text));
    }
    Ok(sealed::seal(&M::MAGIC, manifest.version(), &json))
}

/// Reads and verifies the manifest in `folder`; the folder's last component must equal the name in
/// the manifest.
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
        return Err(
            Damage::Content { file: path, place, expected: expected.to_owned(), got }.into()
        );
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

/// Reads every manifest in `parent`, the folder of one kind.
pub(crate) fn list<M: Manifest>(parent: &Dir) -> Result<Listing<M>, IoError> {
    let mut listing = Listing { items: Vec::new(), damaged: Vec::new() };
    for name in parent.entries()? {
        match parent.sub(&name).map_err(ManifestError::from).and_then(|folder| read::<M>(&folder)) {
            Ok(manifest) => listing.items.push(manifest),
            // The entry was removed after it was listed.
            Err(ManifestError::Io(e)) if e.is_not_found() && !parent.has(&name)? => {}
            Err(error) => listing.damaged.push((name, error)),
        }
    }
    Ok(listing)
}

#[cfg(test)]
#[path = "manifest_tests.rs"]
pub(crate) mod tests;
