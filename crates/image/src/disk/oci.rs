//! Reads images of the OCI specification (image-layout.md, image-index.md, manifest.md, config.md)
//! and of `docker save`.
//!
//! Every blob is verified while it is read. Documents must match digest and size of the descriptor
//! that names them. Layers must match their descriptor too, and, uncompressed, the `diff_id` in the
//! image's config.

use super::blobs::{Blobs, Sha, decoder, document, json};
use super::choice::{Wanted, choose};
use super::descriptor::{Descriptor, Index, blob_path, check_blob, verified};
use super::error::BuildError;
use super::layer;
use super::spool::Spool;
use super::tree::Tree;
use dayfly_units::{GuestPort, ImageConfig};
use serde::Deserialize;
use std::collections::{BTreeMap, BTreeSet};
use std::io::Read;
use std::path::Path;

/// Upper limit for the layers of an image (docker's limit is 127).
const MAX_LAYERS: usize = 512;
/// Upper limit for the bytes after the end of a layer's archive, because tar pads with zeroes.
const MAX_TRAILING_BYTES: u64 = 1 << 30;

/// Upper limit for the exposed ports of an image; a VM publishes at most 256.
const MAX_EXPOSED: usize = 1024;

/// A manifest: what an image is made of.
#[derive(Deserialize)]
pub struct Manifest {
    /// The image's configuration.
    pub config: Descriptor,
    /// The layers, lowest first.
    pub layers: Vec<Descriptor>,
}

impl Manifest {
    /// Reads the manifest that `descriptor` names. Each layer is of a known type.
    pub fn read(blobs: &Blobs, descriptor: &Descriptor) -> Result<Self, BuildError> {
        let digest = &descriptor.digest;
        let manifest: Self = json(digest, &verified(blobs, descriptor)?)?;
        if manifest.layers.len() > MAX_LAYERS {
            let expected = format!("at most {MAX_LAYERS}");
            return Err(document(digest, "layers", expected, manifest.layers.len()));
        }
        manifest.layers.iter().try_for_each(|layer| check_layer_type(digest, layer))?;
        Ok(manifest)
    }

    /// Checks that the image runs on linux/amd64, and that each layer has its digest.
    pub fn check_config(&self, blobs: &Blobs) -> Result<(), BuildError> {
        let config = config(&self.config.digest, &verified(blobs, &self.config)?)?;
        check_count(&self.config.digest, self.layers.len(), config.rootfs.diff_ids.len())
    }
}

#[derive(Deserialize)]
struct Config {
    #[serde(default)]
    architecture: String,
    #[serde(default)]
    os: String,
    #[serde(default)]
    config: Option<Run>,
    #[serde(default)]
    rootfs: RootFs,
}

#[derive(Deserialize, Default)]
struct RootFs {
    #[serde(default)]
    diff_ids: Vec<String>,
}

#[derive(Deserialize, Default)]
#[serde(rename_all = "PascalCase", default)]
struct Run {
    entrypoint: Option<Vec<String>>,
    cmd: Option<Vec<String>>,
    env: Option<Vec<String>>,
    working_dir: Option<String>,
    user: Option<String>,
    /// A set in Go: names with empty objects.
    exposed_ports: Option<BTreeMap<String, serde::de::IgnoredAny>>,
}

/// An entry of `docker save`'s manifest.json.
#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
pub struct Saved {
    /// The name of the configuration in the archive.
    pub config: String,
    /// Names with tags.
    #[serde(default)]
    pub repo_tags: Option<Vec<String>>,
    layers: Vec<String>,
}

impl Saved {
    /// The image's id, as the name of its configuration has it.
    pub fn id(&self) -> &str {
        self.config.trim_end_matches(".json").rsplit('/').next().unwrap_or_default()
    }
}

/// The images of a `docker save` archive.
pub fn saved(blobs: &Blobs) -> Result<Vec<Saved>, BuildError> {
    json(&blobs.label("manifest.json"), &blobs.document("manifest.json")?)
}

/// A layer to apply.
struct Layer {
    name: String,
    /// Digest and size of the blob as stored; `docker save` records neither.
    stored: Option<(String, u64)>,
    diff_id: Option<String>,
}

/// Unpacks the wanted image of an OCI layout into `tree`.
pub fn layout(
    blobs: &Blobs,
    path: &Path,
    wanted: Wanted<'_>,
    tree: &mut Tree,
    spool: &mut Spool<'_>,
) -> Result<ImageConfig, BuildError> {
    let label = blobs.label("index.json");
    let index: Index = json(&label, &blobs.document("index.json")?)?;
    let found = choose(blobs, path, index, wanted)?;
    let manifest = Manifest::read(blobs, &found)?;
    let config = config(&found.digest, &verified(blobs, &manifest.config)?)?;
    let diffs = &config.rootfs.diff_ids;
    check_count(&manifest.config.digest, manifest.layers.len(), diffs.len())?;
    let layers = manifest.layers.into_iter().zip(diffs).map(|(descriptor, diff)| {
        Ok(Layer {
            name: blob_path(&found.digest, &descriptor.digest)?,
            stored: Some((descriptor.digest, descriptor.size)),
            diff_id: Some(diff.clone()),
        })
    });
    let layers = layers.collect::<Result<Vec<_>, BuildError>>()?;
    apply(blobs, &layers, tree, spool)?;
    Ok(run_config(config.config))
}

/// Unpacks the wanted image of a `docker save` archive into `tree`.
pub fn docker(
    blobs: &Blobs,
    path: &Path,
    wanted: Wanted<'_>,
    tree: &mut Tree,
    spool: &mut Spool<'_>,
) -> Result<ImageConfig, BuildError> {
    let all = saved(blobs)?;
    let names = |s: &Saved| {
        let tags = s.repo_tags.clone().unwrap_or_default();
        if tags.is_empty() {
            s.config.trim_end_matches(".json").to_owned()
        } else {
            tags.join(" or ")
        }
    };
    let is = |s: &Saved, want: &str| {
        let id = s.id();
        let tags = s.repo_tags.as_deref().unwrap_or_default();
        tags.iter().any(|t| t == want || t.strip_suffix(":latest") == Some(want))
            || (want.len() >= 12 && id.starts_with(want.trim_start_matches("sha256:")))
    };
    let matching: Vec<&Saved> =
        all.iter().filter(|s| wanted.image.is_none_or(|want| is(s, want))).collect();
    let saved = match matching[..] {
        [one] => one,
        _ => return Err(BuildError::ambiguous(path, matching.len(), all.iter().map(names))),
    };
    let config = config(&blobs.label(&saved.config), &blobs.document(&saved.config)?)?;
    let diffs = &config.rootfs.diff_ids;
    check_count(&saved.config, saved.layers.len(), diffs.len())?;
    let layer = |(name, diff): (&String, &String)| Layer {
        name: name.clone(),
        stored: None,
        diff_id: Some(diff.clone()),
    };
    let layers: Vec<Layer> = saved.layers.iter().zip(diffs).map(layer).collect();
    apply(blobs, &layers, tree, spool)?;
    Ok(run_config(config.config))
}

fn check_count(file: &str, layers: usize, diffs: usize) -> Result<(), BuildError> {
    if layers > MAX_LAYERS {
        return Err(document(file, "layers", format!("at most {MAX_LAYERS}"), layers));
    }
    if layers != diffs {
        return Err(document(
            file,
            "rootfs.diff_ids",
            format!("one for each of {layers} layers"),
            diffs,
        ));
    }
    Ok(())
}

fn check_layer_type(file: &str, layer: &Descriptor) -> Result<(), BuildError> {
    const TAR: &str = "application/vnd.oci.image.layer.v1.tar";
    const SHARED_NOT: &str = "application/vnd.oci.image.layer.nondistributable.v1.tar";
    const DOCKER: &str = "application/vnd.docker.image.rootfs.diff.tar";
    const FOREIGN: &str = "application/vnd.docker.image.rootfs.foreign.diff.tar";
    let kind = layer.media_type.as_str();
    let base = kind.strip_suffix("+gzip").or_else(|| kind.strip_suffix("+zstd")).unwrap_or(kind);
    let base = base.strip_suffix(".gzip").or_else(|| base.strip_suffix(".zstd")).unwrap_or(base);
    if [TAR, SHARED_NOT, DOCKER, FOREIGN].contains(&base) {
        return Ok(());
    }
    let got: String = kind.chars().take(100).collect();
    Err(document(
        file,
        "media type of a layer",
        format!("{TAR}, plain, +gzip or +zstd"),
        format!("{got:?}"),
    ))
}

fn config(file: &str, bytes: &[u8]) -> Result<Config, BuildError> {
    let config: Config = json(file, bytes)?;
    let platform = format!("{}/{}", config.os, config.architecture);
    // Images that older tools built from scratch declare neither field.
    if !matches!(platform.as_str(), "linux/amd64" | "/") {
        let got: String = platform.chars().take(100).collect();
        return Err(document(file, "os/architecture", "linux/amd64", got));
    }
    Ok(config)
}

fn run_config(run: Option<Run>) -> ImageConfig {
    let run = run.unwrap_or_default();
    ImageConfig {
        entrypoint: run.entrypoint.unwrap_or_default(),
        cmd: run.cmd.unwrap_or_default(),
        env: run.env.unwrap_or_default(),
        workdir: run.working_dir.unwrap_or_default(),
        user: run.user.unwrap_or_default(),
        exposed: exposed(run.exposed_ports.unwrap_or_default().keys()),
    }
}

/// The ports of a configuration, as docker writes them. What is no port, or of a protocol that is
/// not published, is left out, because images have it and docker runs them.
fn exposed<'a>(ports: impl Iterator<Item = &'a String>) -> Vec<String> {
    let ports: BTreeSet<GuestPort> = ports.filter_map(|port| port.parse().ok()).collect();
    ports.iter().take(MAX_EXPOSED).map(ToString::to_string).collect()
}

fn apply(
    blobs: &Blobs,
    layers: &[Layer],
    tree: &mut Tree,
    spool: &mut Spool<'_>,
) -> Result<(), BuildError> {
    for (number, layer) in layers.iter().enumerate() {
        spool.begin(format!("unpacking layer {} of {}", number + 1, layers.len()));
        let label = blobs.label(&layer.name);
        let broken = |source| BuildError::Stream { layer: label.clone(), at: 0, source };
        let (blob, size) = blobs.open(&layer.name)?;
        let cap = layer.stored.as_ref().map_or(size, |(_, stated)| *stated);
        if cap != size {
            let (expected, got) = (format!("{cap} bytes"), format!("{size} bytes"));
            return Err(BuildError::Digest { file: label, expected, got });
        }
        let mut blob = Sha::new(blob.take(cap));
        let plain = Sha::new(decoder(&mut blob).map_err(broken)?);
        let plain = layer::apply(tree, spool, plain, &label)?;
        let (diff, bytes) = plain.finish(MAX_TRAILING_BYTES).map_err(broken)?;
        if let Some(expected) = layer.diff_id.as_ref().filter(|d| **d != diff) {
            return Err(BuildError::Digest {
                file: format!("{label}, uncompressed"),
                expected: expected.chars().take(100).collect(),
                got: format!("{diff} of {bytes} bytes"),
            });
        }
        let (digest, bytes) = blob.finish(cap).map_err(broken)?;
        if let Some((expected, size)) = &layer.stored {
            check_blob(&label, expected, *size, &digest, bytes)?;
        }
    }
    Ok(())
}
