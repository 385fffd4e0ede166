//! Descriptors of the OCI image specification (descriptor.md, image-index.md): what names a blob.

use super::blobs::{Blobs, document, json, sha256};
use super::error::BuildError;
use serde::Deserialize;

/// Upper limit for the manifests in an index, and in all indices of an image together.
pub const MAX_MANIFESTS: usize = 4096;
/// Upper limit for the bytes of an image's name.
const MAX_NAME_BYTES: usize = 4096;

/// What names a blob: its digest, its size, and what it is.
#[derive(Debug, Clone, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Descriptor {
    /// Media type; empty if the document has none.
    #[serde(default)]
    pub media_type: String,
    /// `sha256:` and 64 hexadecimal digits.
    pub digest: String,
    /// Size of the blob in bytes.
    pub size: u64,
    /// What a manifest or an index is for.
    #[serde(default)]
    pub platform: Option<Platform>,
    /// The names of an image.
    #[serde(default, rename = "annotations")]
    pub names: Names,
}

/// The system that an image is for.
#[derive(Debug, Clone, Deserialize)]
pub struct Platform {
    /// As Go calls it, for instance `amd64`.
    pub architecture: String,
    /// As Go calls it, for instance `linux`.
    pub os: String,
    /// The least CPU of the architecture; for amd64 `v1` to `v4`, and empty as `v1`.
    #[serde(default)]
    pub variant: String,
}

/// The annotations that name an image. Others are not kept, because an index passes its annotations
/// on to each manifest in it.
#[derive(Debug, Clone, Default, Deserialize)]
pub struct Names {
    /// Usually a tag.
    #[serde(default, rename = "org.opencontainers.image.ref.name")]
    pub name: Option<String>,
    /// A whole reference, for instance `docker.io/library/debian:12`.
    #[serde(default, rename = "io.containerd.image.name")]
    pub full_name: Option<String>,
}

/// A list of manifests and further indices.
#[derive(Deserialize)]
pub struct Index {
    manifests: Vec<Descriptor>,
}

impl Index {
    /// What the index lists, if that is at most [`MAX_MANIFESTS`] with the `before` that are known.
    pub fn manifests(self, file: &str, before: usize) -> Result<Vec<Descriptor>, BuildError> {
        let count = self.manifests.len() + before;
        if count > MAX_MANIFESTS {
            let expected = format!("at most {MAX_MANIFESTS} manifests");
            return Err(document(file, "index", expected, count));
        }
        self.manifests.iter().try_for_each(|below| below.names.check(file))?;
        Ok(self.manifests)
    }

    /// Reads the index that `descriptor` names.
    pub fn read(blobs: &Blobs, descriptor: &Descriptor) -> Result<Self, BuildError> {
        json(&descriptor.digest, &verified(blobs, descriptor)?)
    }
}

impl Names {
    fn check(&self, file: &str) -> Result<(), BuildError> {
        let bytes = [&self.name, &self.full_name].into_iter().flatten().map(String::len).max();
        match bytes.filter(|bytes| *bytes > MAX_NAME_BYTES) {
            Some(got) => Err(document(
                file,
                "name of an image",
                format!("at most {MAX_NAME_BYTES} bytes"),
                got,
            )),
            None => Ok(()),
        }
    }

    /// These names, and those of `outer` in place of them.
    pub fn inside(self, outer: &Self) -> Self {
        Self {
            name: outer.name.clone().or(self.name),
            full_name: outer.full_name.clone().or(self.full_name),
        }
    }

    /// The most exact of these names.
    pub fn best(&self) -> Option<&str> {
        self.full_name.as_deref().or(self.name.as_deref())
    }
}

/// The path `blobs/sha256/<hex>` of a digest. No other form is accepted, so a digest cannot name
/// another file.
pub fn blob_path(file: &str, digest: &str) -> Result<String, BuildError> {
    let hex = digest.strip_prefix("sha256:").unwrap_or_default();
    if hex.len() == 64 && hex.bytes().all(|b| b.is_ascii_digit() || (b'a'..=b'f').contains(&b)) {
        return Ok(format!("blobs/sha256/{hex}"));
    }
    let got: String = digest.chars().take(100).collect();
    Err(document(file, "digest", "sha256: and 64 hexadecimal digits", format!("{got:?}")))
}

/// Reads the document that `descriptor` names, and verifies its digest and size.
pub fn verified(blobs: &Blobs, descriptor: &Descriptor) -> Result<Vec<u8>, BuildError> {
    let name = blob_path("descriptor", &descriptor.digest)?;
    let bytes = blobs.document(&name)?;
    check_blob(
        &blobs.label(&name),
        &descriptor.digest,
        descriptor.size,
        &sha256(&bytes),
        bytes.len() as u64,
    )?;
    Ok(bytes)
}

pub fn check_blob(
    file: &str,
    digest: &str,
    size: u64,
    got: &str,
    got_size: u64,
) -> Result<(), BuildError> {
    if size != got_size || digest != got {
        return Err(BuildError::Digest {
            file: file.to_owned(),
            expected: format!("{digest} of {size} bytes"),
            got: format!("{got} of {got_size} bytes"),
        });
    }
    Ok(())
}
