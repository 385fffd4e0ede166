//! Manifests of root disks and kernels.
//!
//! A manifest travels with its files, and the daemon that reads it did not write it. So a manifest
//! is sealed ([`dayfly_units::sealed`]), has a size limit, and each field is checked before use.

use dayfly_boot::MAX_KERNEL_BYTES;
use dayfly_units::ImageConfig;
use dayfly_units::sealed::{self, SealError};
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

/// File name of a manifest in its output folder.
pub const MANIFEST_NAME: &str = "manifest";
/// Upper limit for the bytes of a manifest's JSON.
pub const MAX_MANIFEST_BYTES: u64 = 1 << 20;
/// Largest disk: 16 TiB, the limit of ext4 with 4 KiB blocks and 32-bit block numbers.
const MAX_DISK_BYTES: u64 = 16 << 40;
const VERSION: u32 = 1;

/// The manifest of a root disk.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ImageManifest {
    /// The digest ([`dayfly_units::sparse`]) of `root.ext4`, 64 hexadecimal digits.
    pub digest: String,
    /// Length of the disk in bytes, a multiple of 4096.
    pub size_bytes: u64,
    /// Bytes in pages that are not all zero.
    pub content_bytes: u64,
    /// The disk's source, as text for people.
    pub source: String,
    /// Build time, seconds since 1970.
    pub created_s: u64,
    /// The image's start command and its environment.
    #[serde(deserialize_with = "dayfly_units::image_config::whole")]
    pub run: ImageConfig,
}

/// The manifest of a kernel with its initramfs.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct KernelManifest {
    /// The kernel's release, as `uname -r` prints it.
    pub release: String,
    /// Digest and length of the file `vmlinux`.
    pub vmlinux: FileDigest,
    /// Digest and length of the file `initrd`.
    pub initrd: FileDigest,
    /// BLAKE3 of the agent in the initrd, 64 hexadecimal digits.
    pub agent_digest: String,
    /// Modules in the initrd, in load order.
    pub modules: Vec<String>,
    /// Requested modules that this kernel has built in.
    pub builtin: Vec<String>,
    /// The kernel's source, as text for people.
    pub source: String,
    /// Build time, seconds since 1970.
    pub created_s: u64,
}

/// Digest and length of a file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FileDigest {
    /// BLAKE3 of the file's bytes, 64 hexadecimal digits.
    pub digest: String,
    /// The file's length in bytes.
    pub size_bytes: u64,
}

/// Why a manifest was refused.
#[derive(Debug, thiserror::Error)]
pub enum ManifestError {
    /// The manifest's file cannot be read.
    #[error("{path}: {source}", path = path.display())]
    Io {
        /// Path of the manifest.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// The manifest is damaged, has a foreign format, or is too long.
    #[error("manifest: {0}")]
    Seal(#[from] SealError),
    /// The JSON does not have a manifest's structure.
    #[error(
        "manifest: line {line} column {column}: {source}",
        line = source.line(), column = source.column()
    )]
    Json {
        /// The decoder's error.
        #[from]
        source: serde_json::Error,
    },
    /// A field has an invalid value.
    #[error("manifest: field {field}: expected {expected}, got {got}")]
    Field {
        /// Name of the field.
        field: &'static str,
        /// What is accepted.
        expected: String,
        /// What was found.
        got: String,
    },
}

/// Seconds since 1970.
pub(crate) fn now_s() -> u64 {
    std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).map_or(0, |d| d.as_secs())
}

fn field<T>(
    field: &'static str,
    expected: impl ToString,
    got: impl ToString,
) -> Result<T, ManifestError> {
    let got = got.to_string().chars().take(120).collect();
    Err(ManifestError::Field { field, expected: expected.to_string(), got })
}

fn check_digest(name: &'static str, digest: &str) -> Result<(), ManifestError> {
    if digest.len() == 64
        && digest.bytes().all(|b| b.is_ascii_digit() || (b'a'..=b'f').contains(&b))
    {
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
        Some(item) => {
            field(name, "items of at most 128 KiB without NUL", format!("{} bytes", item.len()))
        }
        None => Ok(()),
    }
}

/// A manifest that can be sealed into a file and read back.
pub trait Sealed: Serialize + DeserializeOwned {
    /// Magic bytes at the start of the file.
    const MAGIC: sealed::Magic;

    /// Checks every field.
    ///
    /// # Errors
    /// [`ManifestError::Field`] for the first invalid field.
    fn check(&self) -> Result<(), ManifestError>;

    /// Returns the bytes of the manifest's file.
    ///
    /// # Errors
    /// [`ManifestError`] if a field is invalid, or if the JSON is longer than
    /// [`MAX_MANIFEST_BYTES`].
    fn to_bytes(&self) -> Result<Vec<u8>, ManifestError> {
        self.check()?;
        let json = serde_json::to_vec_pretty(self)?;
        if json.len() as u64 > MAX_MANIFEST_BYTES {
            return field("(all)", format!("at most {MAX_MANIFEST_BYTES} bytes"), json.len());
        }
        Ok(sealed::seal(&Self::MAGIC, VERSION, &json))
    }

    /// Decodes a manifest. The seal is verified before the JSON is decoded, and each field is
    /// checked before the manifest is returned.
    ///
    /// # Errors
    /// [`ManifestError`].
    fn from_bytes(bytes: &[u8]) -> Result<Self, ManifestError> {
        let (_, json) = sealed::open(&Self::MAGIC, VERSION..=VERSION, MAX_MANIFEST_BYTES, bytes)?;
        let manifest: Self = serde_json::from_slice(json)?;
        manifest.check()?;
        Ok(manifest)
    }

    /// Reads and decodes the file at `path`.
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
        if self.size_bytes == 0
            || self.size_bytes > MAX_DISK_BYTES
            || !self.size_bytes.is_multiple_of(4096)
        {
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
        check_config(&self.run)
    }
}

fn check_config(run: &ImageConfig) -> Result<(), ManifestError> {
    check_list("run.entrypoint", &run.entrypoint, 4096)?;
    check_list("run.cmd", &run.cmd, 4096)?;
    check_list("run.env", &run.env, 4096)?;
    check_text("run.workdir", &run.workdir, 4095)?;
    check_text("run.user", &run.user, 256)
}

impl Sealed for KernelManifest {
    const MAGIC: sealed::Magic = *b"DFkern\r\n";

    fn check(&self) -> Result<(), ManifestError> {
        let word = |b: u8| b.is_ascii_alphanumeric() || b"._+~-".contains(&b);
        if self.release.is_empty() || self.release.len() > 64 || !self.release.bytes().all(word) {
            return field(
                "release",
                "1 to 64 letters, digits and ._+~-",
                format!("{:?}", self.release),
            );
        }
        check_digest("vmlinux.digest", &self.vmlinux.digest)?;
        check_digest("initrd.digest", &self.initrd.digest)?;
        check_digest("agent_digest", &self.agent_digest)?;
        for (name, size) in [
            ("vmlinux.size_bytes", self.vmlinux.size_bytes),
            ("initrd.size_bytes", self.initrd.size_bytes),
        ] {
            if !(1..=MAX_KERNEL_BYTES).contains(&size) {
                return field(name, format!("1 to {}", MAX_KERNEL_BYTES), size);
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
