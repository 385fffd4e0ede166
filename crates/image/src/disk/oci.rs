//! Reads images of the OCI specification (image-layout.md, image-index.md, manifest.md, config.md)
//! and of `docker save`.
//!
//! Every blob is verified while it is read. Documents must match digest and size of the descriptor
//! that names them. Layers must match their descriptor too, and, uncompressed, the `diff_id` in the
//! image's config.

use super::blobs::{Blobs, Sha, decoder, document, json, sha256};
use super::error::BuildError;
use super::layer;
use super::spool::Spool;
use super::tree::Tree;
use dayfly_units::ImageConfig;
use serde::Deserialize;
use std::io::Read;
use std::path::Path;

/// Upper limit for the layers of an image (docker's limit is 127).
const MAX_LAYERS: usize = 512;
/// Upper limit for the nesting depth of indices.
const MAX_INDEX_DEPTH: usize = 4;
/// Upper limit for the manifests in an index.
const MAX_MANIFESTS: usize = 4096;
/// Characters of a name that an error shows.
const MAX_SHOWN: usize = 256;
/// Upper limit for the bytes of an image's name.
const MAX_NAME_BYTES: usize = 4096;
/// Upper limit for the bytes after the end of a layer's archive, because tar pads with zeroes.
const MAX_TRAILING_BYTES: u64 = 1 << 30;

#[derive(Debug, Clone, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Descriptor {
    #[serde(default)]
    media_type: String,
    digest: String,
    size: u64,
    #[serde(default)]
    platform: Option<Platform>,
    #[serde(default, rename = "annotations")]
    names: Names,
}

/// The annotations that name an image. Others are not kept, because an index passes its annotations
/// on to each manifest in it.
#[derive(Debug, Clone, Default, Deserialize)]
struct Names {
    #[serde(default, rename = "org.opencontainers.image.ref.name")]
    name: Option<String>,
    #[serde(default, rename = "io.containerd.image.name")]
    full_name: Option<String>,
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
    fn inside(self, outer: &Self) -> Self {
        Self {
            name: outer.name.clone().or(self.name),
            full_name: outer.full_name.clone().or(self.full_name),
        }
    }
}

#[derive(Debug, Clone, Deserialize)]
struct Platform {
    architecture: String,
    os: String,
}

#[derive(Deserialize)]
struct Index {
    manifests: Vec<Descriptor>,
}

#[derive(Deserialize)]
struct Manifest {
    config: Descriptor,
    layers: Vec<Descriptor>,
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
}

/// An entry of `docker save`'s manifest.json.
#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Saved {
    config: String,
    #[serde(default)]
    repo_tags: Option<Vec<String>>,
    layers: Vec<String>,
}

/// A layer to apply.
struct Layer {
    name: String,
    /// Digest and size of the blob as stored; `docker save` records neither.
    stored: Option<(String, u64)>,
    diff_id: Option<String>,
}

/// Unpacks the image `reference` of an OCI layout into `tree`.
pub fn layout(
    blobs: &Blobs,
    path: &Path,
    reference: Option<&str>,
    tree: &mut Tree,
    spool: &mut Spool<'_>,
) -> Result<ImageConfig, BuildError> {
    let label = blobs.label("index.json");
    let index: Index = json(&label, &blobs.document("index.json")?)?;
    let found = choose(blobs, path, index.manifests, reference)?;
    let manifest: Manifest = json(&found.digest, &verified(blobs, &found)?)?;
    let config = config(&found.digest, &verified(blobs, &manifest.config)?)?;
    let diffs = &config.rootfs.diff_ids;
    check_count(&manifest.config.digest, manifest.layers.len(), diffs.len())?;
    let layers = manifest.layers.into_iter().zip(diffs).map(|(descriptor, diff)| {
        check_layer_type(&found.digest, &descriptor)?;
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

/// Unpacks the image `reference` of a `docker save` archive into `tree`.
pub fn docker(
    blobs: &Blobs,
    path: &Path,
    reference: Option<&str>,
    tree: &mut Tree,
    spool: &mut Spool<'_>,
) -> Result<ImageConfig, BuildError> {
    let label = blobs.label("manifest.json");
    let all: Vec<Saved> = json(&label, &blobs.document("manifest.json")?)?;
    let names = |s: &Saved| {
        let tags = s.repo_tags.clone().unwrap_or_default();
        if tags.is_empty() {
            s.config.trim_end_matches(".json").to_owned()
        } else {
            tags.join(" or ")
        }
    };
    let is = |s: &Saved, want: &str| {
        let id = s.config.trim_end_matches(".json").rsplit('/').next().unwrap_or_default();
        let tags = s.repo_tags.as_deref().unwrap_or_default();
        tags.iter().any(|t| t == want || t.strip_suffix(":latest") == Some(want))
            || (want.len() >= 12 && id.starts_with(want.trim_start_matches("sha256:")))
    };
    let matching: Vec<&Saved> =
        all.iter().filter(|s| reference.is_none_or(|want| is(s, want))).collect();
    let saved = match matching[..] {
        [one] => one,
        _ => return Err(ambiguous(path, matching.len(), all.iter().map(names))),
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

fn ambiguous(path: &Path, count: usize, names: impl Iterator<Item = String>) -> BuildError {
    let choices: Vec<String> =
        names.take(64).map(|name| name.chars().take(MAX_SHOWN).collect()).collect();
    BuildError::Ambiguous { path: path.to_owned(), count, choices: choices.join(", ") }
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

/// The path `blobs/sha256/<hex>` of a digest. No other form is accepted, so a digest cannot name
/// another file.
fn blob_path(file: &str, digest: &str) -> Result<String, BuildError> {
    let hex = digest.strip_prefix("sha256:").unwrap_or_default();
    if hex.len() == 64 && hex.bytes().all(|b| b.is_ascii_digit() || (b'a'..=b'f').contains(&b)) {
        return Ok(format!("blobs/sha256/{hex}"));
    }
    let got: String = digest.chars().take(100).collect();
    Err(document(file, "digest", "sha256: and 64 hexadecimal digits", format!("{got:?}")))
}

/// Reads the document that `descriptor` names, and verifies its digest and size.
fn verified(blobs: &Blobs, descriptor: &Descriptor) -> Result<Vec<u8>, BuildError> {
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

fn check_blob(
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

/// Follows the index to the manifest for linux/amd64.
fn choose(
    blobs: &Blobs,
    path: &Path,
    top: Vec<Descriptor>,
    reference: Option<&str>,
) -> Result<Descriptor, BuildError> {
    let name_of = |d: &Descriptor| {
        let name = d.names.full_name.as_ref().or(d.names.name.as_ref());
        name.unwrap_or(&d.digest).clone()
    };
    let is = |d: &Descriptor, want: &str| {
        [d.names.name.as_deref(), d.names.full_name.as_deref(), Some(d.digest.as_str())]
            .contains(&Some(want))
    };
    let listed = |file: &str, manifests: &[Descriptor], before: usize| {
        if manifests.len() + before > MAX_MANIFESTS {
            let expected = format!("at most {MAX_MANIFESTS} manifests");
            return Err(document(file, "index", expected, manifests.len() + before));
        }
        manifests.iter().try_for_each(|d| d.names.check(file))
    };
    listed(&blobs.label("index.json"), &top, 0)?;
    let matching: Vec<Descriptor> =
        top.iter().filter(|d| reference.is_none_or(|want| is(d, want))).cloned().collect();
    if matching.is_empty() {
        return Err(ambiguous(path, 0, top.iter().map(name_of)));
    }
    let mut found: Vec<Descriptor> = Vec::new();
    let mut seen = 0;
    let mut todo: Vec<(usize, Descriptor)> = matching.into_iter().rev().map(|d| (0, d)).collect();
    while let Some((depth, d)) = todo.pop() {
        seen += 1;
        if seen > MAX_MANIFESTS || depth > MAX_INDEX_DEPTH {
            let expected =
                format!("at most {MAX_MANIFESTS} manifests, {MAX_INDEX_DEPTH} indices deep");
            return Err(document(&d.digest, "index", expected, "more"));
        }
        let fits = d.platform.as_ref().is_none_or(|p| p.os == "linux" && p.architecture == "amd64");
        if !fits {
            continue;
        }
        match d.media_type.as_str() {
            "application/vnd.oci.image.index.v1+json"
            | "application/vnd.docker.distribution.manifest.list.v2+json" => {
                let index: Index = json(&d.digest, &verified(blobs, &d)?)?;
                // Before they are copied, because each of them takes over the names of this index.
                listed(&d.digest, &index.manifests, seen + todo.len())?;
                todo.extend(index.manifests.into_iter().rev().map(|mut below| {
                    below.names = below.names.inside(&d.names);
                    (depth + 1, below)
                }));
            }
            "application/vnd.oci.image.manifest.v1+json"
            | "application/vnd.docker.distribution.manifest.v2+json" => {
                if !found.iter().any(|f| f.digest == d.digest) {
                    found.push(d);
                }
            }
            other => {
                let got: String = other.chars().take(100).collect();
                return Err(document(
                    &d.digest,
                    "mediaType",
                    "an image index or manifest",
                    format!("{got:?}"),
                ));
            }
        }
    }
    match found.len() {
        1 => Ok(found.remove(0)),
        0 => {
            let got = "none";
            Err(document(&blobs.label("index.json"), "manifests", "an image for linux/amd64", got))
        }
        count => Err(ambiguous(path, count, found.iter().map(name_of))),
    }
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
    }
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
