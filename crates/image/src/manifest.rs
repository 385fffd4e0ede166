//! What is known of an artefact: the manifests of root disks and kernels.
//!
//! A manifest travels with its files and is read by a daemon that did not write it, so it is sealed
//! ([`dayfly_units::sealed`]), capped, and checked field by field before anything is done with it.

use dayfly_units::sealed::{self, SealError};
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

/// Most bytes of a manifest's JSON.
pub const MAX_MANIFEST_BYTES: u64 = 1 << 20;
/// Largest disk: 16 TiB, what ext4 holds with 4 KiB blocks and 32-bit block numbers.
const MAX_DISK_BYTES: u64 = 16 << 40;
const VERSION: u32 = 1;

/// A root disk.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ImageManifest {
    /// [`crate::sparse_digest`] of `root.ext4`, 64 hexadecimal digits.
    pub digest: String,
    /// Length of the disk in bytes, a multiple of 4096.
    pub size_bytes: u64,
    /// Bytes in pages that are not all zero.
    pub content_bytes: u64,
    /// Where it came from, for people.
    pub source: String,
    /// When it was built, seconds since 1970.
    pub created_s: u64,
    /// How the image wants to be started.
    pub run: RunConfig,
}

/// How an image wants to be started (OCI config.md).
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RunConfig {
    /// Program and first arguments.
    pub entrypoint: Vec<String>,
    /// Arguments, or the whole command where there is no entrypoint.
    pub cmd: Vec<String>,
    /// `NAME=value`.
    pub env: Vec<String>,
    /// Working folder; empty: the root.
    pub workdir: String,
    /// `name`, `uid`, `name:group` or `uid:gid`; empty: root.
    pub user: String,
}

/// A kernel with its initramfs.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct KernelManifest {
    /// The kernel's release, as `uname -r` gives it.
    pub release: String,
    /// The file `vmlinux`.
    pub vmlinux: FileDigest,
    /// The file `initrd`.
    pub initrd: FileDigest,
    /// BLAKE3 of the agent in the initrd, 64 hexadecimal digits.
    pub agent_digest: String,
    /// Modules in the initrd, in the order in which they are loaded.
    pub modules: Vec<String>,
    /// Modules asked for that this kernel has built in.
    pub builtin: Vec<String>,
    /// Where the kernel came from, for people.
    pub source: String,
    /// When it was built, seconds since 1970.
    pub created_s: u64,
}

/// A file by its content.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FileDigest {
    /// BLAKE3 of the file's bytes, 64 hexadecimal digits.
    pub digest: String,
    /// Its length.
    pub size_bytes: u64,
}

/// Why a manifest was refused.
#[derive(Debug, thiserror::Error)]
pub enum ManifestError {
    /// It cannot be read.
    #[error("{path}: {source}", path = path.display())]
    Io {
        /// The manifest.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// It is damaged, foreign or too long.
    #[error("manifest: {0}")]
    Seal(#[from] SealError),
    /// Its JSON is not a manifest's.
    #[error("manifest: line {line} column {column}: {source}", line = source.line(), column = source.column())]
    Json {
        /// What the decoder says.
        #[from]
        source: serde_json::Error,
    },
    /// A field has a value that makes no sense.
    #[error("manifest: field {field}: expected {expected}, got {got}")]
    Field {
        /// Which.
        field: &'static str,
        /// What is accepted.
        expected: String,
        /// What was found.
        got: String,
    },
}

fn field<T>(field: &'static str, expected: impl ToString, got: impl ToString) -> Result<T, ManifestError> {
    let got = got.to_string().chars().take(120).collect();
    Err(ManifestError::Field { field, expected: expected.to_string(), got })
}

fn check_digest(name: &'static str, digest: &str) -> Result<(), ManifestError> {
    if digest.len() == 64 && digest.bytes().all(|b| b.is_ascii_digit() || (b'a'..=b'f').contains(&b)) {
        return Ok(());
    }
    field(name, "64 lower-case hexadecimal digits", digest)
}

fn check_text(name: &'static str, text: &str, max: usize) -> Result<(), ManifestError> {
    if text.len() > max {
        return field(name, format!("at most {max} bytes"), text.len());
    }
    if text.chars().any(char::is_control) {
        return field(name, "no control characters", format!("{text:?}"));
    }
    Ok(())
}

fn check_list(name: &'static str, list: &[String], max: usize) -> Result<(), ManifestError> {
    if list.len() > max {
        return field(name, format!("at most {max} items"), list.len());
    }
    match list.iter().find(|item| item.len() > 128 << 10 || item.contains('\0')) {
        Some(item) => field(name, "items of at most 128 KiB without NUL", format!("{} bytes", item.len())),
        None => Ok(()),
    }
}

/// A manifest that can be sealed into a file and read back.
pub trait Sealed: Serialize + DeserializeOwned {
    /// First bytes of the file.
    const MAGIC: sealed::Magic;

    /// Checks every field.
    ///
    /// # Errors
    /// [`ManifestError::Field`] naming the first that makes no sense.
    fn check(&self) -> Result<(), ManifestError>;

    /// The bytes of the manifest's file.
    ///
    /// # Errors
    /// When a field makes no sense, or the whole is longer than [`MAX_MANIFEST_BYTES`].
    fn to_bytes(&self) -> Result<Vec<u8>, ManifestError> {
        self.check()?;
        let json = serde_json::to_vec_pretty(self)?;
        if json.len() as u64 > MAX_MANIFEST_BYTES {
            return field("(all)", format!("at most {MAX_MANIFEST_BYTES} bytes"), json.len());
        }
        Ok(sealed::seal(&Self::MAGIC, VERSION, &json))
    }

    /// Reads a manifest back; nothing is decoded before the seal is verified, nothing is given before it is checked.
    ///
    /// # Errors
    /// [`ManifestError`].
    fn from_bytes(bytes: &[u8]) -> Result<Self, ManifestError> {
        let (_, json) = sealed::open(&Self::MAGIC, VERSION..=VERSION, MAX_MANIFEST_BYTES, bytes)?;
        let manifest: Self = serde_json::from_slice(json)?;
        manifest.check()?;
        Ok(manifest)
    }

    /// Reads the manifest's file.
    ///
    /// # Errors
    /// [`ManifestError`].
    fn load(path: &Path) -> Result<Self, ManifestError> {
        let failed = |source| ManifestError::Io { path: path.to_owned(), source };
        let mut bytes = Vec::new();
        let cap = MAX_MANIFEST_BYTES + sealed::HEADER_BYTES as u64 + 1;
        File::open(path).map_err(failed)?.take(cap).read_to_end(&mut bytes).map_err(failed)?;
        Self::from_bytes(&bytes)
    }
}

impl Sealed for ImageManifest {
    const MAGIC: sealed::Magic = *b"DFimage\n";

    fn check(&self) -> Result<(), ManifestError> {
        check_digest("digest", &self.digest)?;
        if self.size_bytes == 0 || self.size_bytes > MAX_DISK_BYTES || !self.size_bytes.is_multiple_of(4096) {
            return field(
                "size_bytes",
                format!("a multiple of 4096 up to {MAX_DISK_BYTES}"),
                self.size_bytes,
            );
        }
        if self.content_bytes > self.size_bytes || !self.content_bytes.is_multiple_of(4096) {
            let expected = format!("a multiple of 4096 up to {}", self.size_bytes);
            return field("content_bytes", expected, self.content_bytes);
        }
        check_text("source", &self.source, 8192)?;
        self.run.check()
    }
}

impl RunConfig {
    /// Checks every field.
    ///
    /// # Errors
    /// [`ManifestError::Field`] naming the first that makes no sense.
    pub fn check(&self) -> Result<(), ManifestError> {
        check_list("run.entrypoint", &self.entrypoint, 4096)?;
        check_list("run.cmd", &self.cmd, 4096)?;
        check_list("run.env", &self.env, 4096)?;
        check_text("run.workdir", &self.workdir, 4095)?;
        check_text("run.user", &self.user, 256)
    }
}

impl Sealed for KernelManifest {
    const MAGIC: sealed::Magic = *b"DFkern\r\n";

    fn check(&self) -> Result<(), ManifestError> {
        let word = |b: u8| b.is_ascii_alphanumeric() || b"._+~-".contains(&b);
        if self.release.is_empty() || self.release.len() > 64 || !self.release.bytes().all(word) {
            return field("release", "1 to 64 letters, digits and ._+~-", format!("{:?}", self.release));
        }
        check_digest("vmlinux.digest", &self.vmlinux.digest)?;
        check_digest("initrd.digest", &self.initrd.digest)?;
        check_digest("agent_digest", &self.agent_digest)?;
        for (name, size) in
            [("vmlinux.size_bytes", self.vmlinux.size_bytes), ("initrd.size_bytes", self.initrd.size_bytes)]
        {
            if !(1..=crate::kernel::MAX_KERNEL_BYTES).contains(&size) {
                return field(name, format!("1 to {}", crate::kernel::MAX_KERNEL_BYTES), size);
            }
        }
        for (name, list) in [("modules", &self.modules), ("builtin", &self.builtin)] {
            check_list(name, list, 1024)?;
            list.iter().try_for_each(|item| check_text(name, item, 4095))?;
        }
        check_text("source", &self.source, 8192)
    }
}

#[cfg(test)]
#[path = "manifest_tests.rs"]
mod tests;
