//! The archive: an OCI layout (image-layout.md) with the `manifest.json` of `docker save`, as
//! docker 25 and later write it.
//!
//! ```text
//! oci-layout                 version of the layout
//! blobs/sha256/…             configurations, layers, manifests, each once
//! index.json                 each name of an image, with its manifest (OCI)
//! manifest.json              each image, with its names (docker)
//! ```

use super::error::SaveError;
use super::layer;
use dayfly_archive::{Head, Kind, Writer};
use dayfly_units::ImageConfig;
use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};
use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::{self, Read, Write};

const MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";
const CONFIG: &str = "application/vnd.oci.image.config.v1+json";
const LAYER: &str = "application/vnd.oci.image.layer.v1.tar";

/// An image to save.
#[derive(Debug)]
pub struct SavedImage {
    /// Its root disk.
    pub disk: File,
    /// How to start its program.
    pub config: ImageConfig,
    /// Its names, with tags: `docker.io/library/debian:12`. May be empty.
    pub names: Vec<String>,
    /// When it was made (RFC 3339).
    pub created: String,
    /// What it was made from, for people.
    pub comment: String,
}

/// A blob that is named by its digest.
struct Blob {
    digest: String,
    bytes: u64,
}

impl Blob {
    fn of(content: &[u8]) -> Self {
        Self { digest: hex::encode(Sha256::digest(content)), bytes: content.len() as u64 }
    }

    fn path(&self) -> String {
        format!("blobs/sha256/{}", self.digest)
    }

    fn descriptor(&self, kind: &str) -> Value {
        json!({ "mediaType": kind, "digest": format!("sha256:{}", self.digest),
            "size": self.bytes })
    }
}

/// Counts and hashes what is written.
struct Sum(Sha256, u64);

impl Write for Sum {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.update(bytes);
        self.1 += bytes.len() as u64;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// What is known of an image before its layer is written.
struct Plan<'a> {
    image: &'a SavedImage,
    layer: Blob,
    config: Vec<u8>,
    manifest: Vec<u8>,
}

impl<'a> Plan<'a> {
    fn of(image: &'a SavedImage) -> Result<Self, SaveError> {
        let mut sum = io::BufWriter::with_capacity(1 << 20, Sum(Sha256::new(), 0));
        layer::write(&image.disk, &mut sum)?;
        let Sum(hash, bytes) = sum.into_inner().map_err(io::IntoInnerError::into_error)?;
        let layer = Blob { digest: hex::encode(hash.finalize()), bytes };
        let config = config(image, &layer).to_string().into_bytes();
        let manifest = json!({
            "schemaVersion": 2,
            "mediaType": MANIFEST,
            "config": Blob::of(&config).descriptor(CONFIG),
            "layers": [layer.descriptor(LAYER)],
        });
        Ok(Self { image, layer, config, manifest: manifest.to_string().into_bytes() })
    }
}

/// The image's configuration (OCI config.md). Empty fields are left out.
fn config(image: &SavedImage, layer: &Blob) -> Value {
    let ImageConfig { entrypoint, cmd, env, workdir, user, exposed } = &image.config;
    let mut run = serde_json::Map::new();
    let mut put = |name: &str, is_empty: bool, value: Value| {
        if !is_empty {
            run.insert(name.to_owned(), value);
        }
    };
    put("Entrypoint", entrypoint.is_empty(), json!(entrypoint));
    put("Cmd", cmd.is_empty(), json!(cmd));
    put("Env", env.is_empty(), json!(env));
    put("WorkingDir", workdir.is_empty(), json!(workdir));
    put("User", user.is_empty(), json!(user));
    let ports: BTreeMap<&String, Value> = exposed.iter().map(|port| (port, json!({}))).collect();
    put("ExposedPorts", ports.is_empty(), json!(ports));
    json!({
        "architecture": "amd64",
        "os": "linux",
        "created": image.created,
        "config": run,
        "rootfs": { "type": "layers", "diff_ids": [format!("sha256:{}", layer.digest)] },
        "history": [{ "created": image.created, "created_by": "dayfly save",
            "comment": image.comment }],
    })
}

/// Writes images to `out`. Calls `step` before each part of the work.
///
/// # Errors
/// A disk cannot be read; errors of `out`.
pub fn write(
    images: &[SavedImage],
    out: &mut dyn Write,
    step: &mut dyn FnMut(String),
) -> Result<(), SaveError> {
    let mut plans = Vec::new();
    for (number, image) in images.iter().enumerate() {
        step(format!("reading image {} of {}", number + 1, images.len()));
        plans.push(Plan::of(image)?);
    }
    let mut archive = Archive { out: Writer::new(out), there: BTreeSet::new() };
    archive.folder("blobs/")?;
    archive.folder("blobs/sha256/")?;
    for (number, plan) in plans.iter().enumerate() {
        step(format!("writing image {} of {}", number + 1, images.len()));
        archive.blob(&plan.config)?;
        archive.blob(&plan.manifest)?;
        archive.layer(plan)?;
    }
    archive.file("index.json", &index(&plans).to_string().into_bytes())?;
    archive.file("manifest.json", &docker(&plans).to_string().into_bytes())?;
    archive.file("oci-layout", br#"{"imageLayoutVersion":"1.0.0"}"#)?;
    archive.out.finish()?;
    Ok(())
}

/// The index: a descriptor for each name, or one for an image without names.
fn index(plans: &[Plan<'_>]) -> Value {
    let mut manifests = Vec::new();
    for plan in plans {
        let mut descriptor = Blob::of(&plan.manifest).descriptor(MANIFEST);
        descriptor["platform"] = json!({ "architecture": "amd64", "os": "linux" });
        if plan.image.names.is_empty() {
            manifests.push(descriptor.clone());
        }
        for name in &plan.image.names {
            let tag = name.rsplit_once(':').map_or("latest", |(_, tag)| tag);
            descriptor["annotations"] = json!({ "io.containerd.image.name": name,
                "org.opencontainers.image.ref.name": tag });
            manifests.push(descriptor.clone());
        }
    }
    json!({ "schemaVersion": 2, "mediaType": "application/vnd.oci.image.index.v1+json",
        "manifests": manifests })
}

fn docker(plans: &[Plan<'_>]) -> Value {
    let one = |plan: &Plan<'_>| {
        // docker's short form, which `docker load` expects.
        let short = |name: &String| {
            let name = name.strip_prefix("docker.io/").unwrap_or(name);
            name.strip_prefix("library/").unwrap_or(name).to_owned()
        };
        let names: Vec<String> = plan.image.names.iter().map(short).collect();
        let names = (!names.is_empty()).then_some(names);
        json!({ "Config": Blob::of(&plan.config).path(), "RepoTags": names,
            "Layers": [plan.layer.path()] })
    };
    plans.iter().map(one).collect()
}

struct Archive<W> {
    out: Writer<W>,
    /// Blobs that are written.
    there: BTreeSet<String>,
}

impl<W: Write> Archive<W> {
    fn folder(&mut self, path: &str) -> Result<(), SaveError> {
        Ok(self.out.entry(&Head::new(path, Kind::Folder, 0o755))?)
    }

    fn file(&mut self, path: &str, content: &[u8]) -> Result<(), SaveError> {
        let head = Head::new(path, Kind::File, 0o644);
        Ok(self.out.file(&head, content.len() as u64, &mut &content[..])?)
    }

    fn blob(&mut self, content: &[u8]) -> Result<(), SaveError> {
        let blob = Blob::of(content);
        if self.there.insert(blob.digest.clone()) {
            self.file(&blob.path(), content)?;
        }
        Ok(())
    }

    /// Writes a layer with the digest that the plan says.
    fn layer(&mut self, plan: &Plan<'_>) -> Result<(), SaveError> {
        if !self.there.insert(plan.layer.digest.clone()) {
            return Ok(());
        }
        let head = Head::new(plan.layer.path(), Kind::File, 0o644);
        let disk = &plan.image.disk;
        // The writer of the layer pushes and the writer of the archive pulls, so they meet in a
        // pipe.
        let (reader, writer) = io::pipe()?;
        std::thread::scope(|scope| {
            let writing = scope.spawn(move || {
                let mut writer = io::BufWriter::with_capacity(1 << 20, writer);
                layer::write(disk, &mut writer).and_then(|()| Ok(writer.flush()?))
            });
            let written =
                self.out.file(&head, plan.layer.bytes, &mut reader.take(plan.layer.bytes));
            let pushed = writing.join().unwrap_or_else(|_| {
                Err(io::Error::other("the thread that reads the disk ended").into())
            });
            // An early end of the archive's writer breaks the pipe: its error is the cause.
            written?;
            pushed
        })
    }
}
