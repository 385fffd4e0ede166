//! A layout that grows while its image is pulled: which documents and blobs are needed next.

use super::blobs::{Blobs, document, json, sha256};
use super::choice::{Wanted, choose};
pub use super::descriptor::Descriptor;
use super::descriptor::{Index, blob_path, verified};
use super::error::{BuildError, on};
use super::oci::Manifest;
use serde::Deserialize;
use serde::de::IgnoredAny;
use serde_json::json;
use std::path::{Path, PathBuf};

const INDEX: &str = "application/vnd.oci.image.index.v1+json";
const MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";
const DOCKER_LIST: &str = "application/vnd.docker.distribution.manifest.list.v2+json";
const DOCKER_MANIFEST: &str = "application/vnd.docker.distribution.manifest.v2+json";
/// Upper limit for the indices below an index, of which few images have any.
const MAX_INDICES: usize = 16;
/// Upper limit for the bytes of a configuration.
const MAX_CONFIG_BYTES: u64 = 4 << 20;

/// An OCI layout in a folder.
pub struct Layout {
    folder: PathBuf,
    image: String,
}

/// The fields in which a manifest and an index differ.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Shape {
    #[serde(default)]
    manifests: Option<IgnoredAny>,
    #[serde(default)]
    layers: Option<IgnoredAny>,
    #[serde(default)]
    config: Option<IgnoredAny>,
    #[serde(default)]
    fs_layers: Option<IgnoredAny>,
}

impl Layout {
    /// Makes an empty layout for `image` in the existing folder `folder`.
    pub fn new(folder: PathBuf, image: String) -> Result<Self, BuildError> {
        let layout = Self { folder, image };
        let blobs = layout.folder.join("blobs/sha256");
        std::fs::create_dir_all(&blobs).map_err(on("create", &blobs))?;
        layout.write("oci-layout", br#"{"imageLayoutVersion":"1.0.0"}"#)?;
        Ok(layout)
    }

    fn write(&self, name: &str, bytes: &[u8]) -> Result<(), BuildError> {
        let path = self.folder.join(name);
        std::fs::write(&path, bytes).map_err(on("write", &path))
    }

    fn blobs(&self) -> Blobs {
        Blobs::Pulled(self.folder.clone(), self.image.clone())
    }

    /// The path of the blob that `descriptor` names.
    pub fn path(&self, descriptor: &Descriptor) -> Result<PathBuf, BuildError> {
        Ok(self.folder.join(blob_path(&self.image, &descriptor.digest)?))
    }

    /// Adds a document that a registry sent with the media type `stated`. Returns its descriptor,
    /// and the further indices that are needed to choose an image.
    pub fn add(
        &self,
        stated: &str,
        bytes: &[u8],
        indices: usize,
    ) -> Result<(Descriptor, Vec<Descriptor>), BuildError> {
        let digest = sha256(bytes);
        let label = format!("{}: {digest}", self.image);
        let is_index = is_index(&label, stated, bytes)?;
        let media_type = if is_index { INDEX } else { MANIFEST }.to_owned();
        self.write(&blob_path(&label, &digest)?, bytes)?;
        let size = bytes.len() as u64;
        let names = super::descriptor::Names::default();
        let own = Descriptor { media_type, digest, size, platform: None, names };
        if !is_index {
            return Ok((own, Vec::new()));
        }
        let below: Index = json(&label, bytes)?;
        let mut below = below.manifests(&label, 0)?;
        below.retain(|below| [INDEX, DOCKER_LIST].contains(&below.media_type.as_str()));
        if indices + below.len() > MAX_INDICES {
            let expected = format!("at most {MAX_INDICES} indices");
            return Err(document(&label, "manifests", expected, "more"));
        }
        Ok((own, below))
    }

    /// Chooses the image for guests with `cpu_level` below `top`, whose indices were added.
    pub fn choose(&self, top: &Descriptor, cpu_level: u8) -> Result<Descriptor, BuildError> {
        let one = json!({"manifests": [described(top)]}).to_string();
        let index: Index = json(&self.image, one.as_bytes())?;
        choose(&self.blobs(), Path::new(&self.image), index, Wanted { image: None, cpu_level })
    }

    /// Makes `chosen`, which was added, the only image of the layout.
    pub fn select(&self, chosen: &Descriptor) -> Result<Manifest, BuildError> {
        let manifest = Manifest::read(&self.blobs(), chosen)?;
        if manifest.config.size > MAX_CONFIG_BYTES {
            let expected = format!("at most {MAX_CONFIG_BYTES} bytes");
            return Err(document(&self.image, "config", expected, manifest.config.size));
        }
        let index = json!({"schemaVersion": 2, "manifests": [described(chosen)]});
        self.write("index.json", index.to_string().as_bytes())?;
        Ok(manifest)
    }

    /// Checks the configuration, whose blob was added.
    pub fn check_config(&self, manifest: &Manifest) -> Result<(), BuildError> {
        manifest.check_config(&self.blobs())
    }

    /// Checks a document against the descriptor that named it.
    pub fn check(&self, descriptor: &Descriptor) -> Result<(), BuildError> {
        verified(&self.blobs(), descriptor).map(drop)
    }
}

fn described(descriptor: &Descriptor) -> serde_json::Value {
    let Descriptor { media_type, digest, size, .. } = descriptor;
    json!({"mediaType": media_type, "digest": digest, "size": size})
}

/// Whether a document is an index. Its content and the type that the registry states agree, so that
/// one document is never both (CVE-2021-41190).
pub fn is_index(label: &str, stated: &str, bytes: &[u8]) -> Result<bool, BuildError> {
    let shape: Shape = json(label, bytes)?;
    let expected = "an image index or an image manifest";
    let by_content = match (&shape.manifests, &shape.layers, &shape.config, &shape.fs_layers) {
        (Some(_), None, None, None) => true,
        (None, Some(_), Some(_), None) => false,
        (None, None, None, Some(_)) => {
            let got = "docker's schema 1, which is retired: push the image again with a newer tool";
            return Err(document(label, "(all)", expected, got));
        }
        (Some(_), ..) => return Err(document(label, "(all)", expected, "parts of both")),
        _ => return Err(document(label, "(all)", expected, "neither")),
    };
    let by_type = match stated {
        INDEX | DOCKER_LIST => true,
        MANIFEST | DOCKER_MANIFEST => false,
        // Some registries state `application/json` or nothing.
        _ => by_content,
    };
    if by_type != by_content {
        let name = |is_index| if is_index { "an index" } else { "a manifest" };
        let got = format!("{} that the registry calls {}", name(by_content), name(by_type));
        return Err(document(label, "media type", expected, got));
    }
    Ok(by_content)
}
