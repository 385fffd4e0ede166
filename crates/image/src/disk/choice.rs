//! Chooses an image of an OCI layout: by name or digest, and of several platforms the best that a
//! guest's CPU can run (containerd: `platforms`).

use super::blobs::{Blobs, document};
use super::descriptor::{Descriptor, Index, MAX_MANIFESTS, Platform};
use super::error::BuildError;
use std::collections::BTreeMap;
use std::path::Path;

/// Upper limit for the nesting depth of indices.
const MAX_INDEX_DEPTH: usize = 4;

/// Which image of an archive or layout is wanted.
#[derive(Debug, Clone, Copy)]
pub struct Wanted<'a> {
    /// A name or a digest; `None` if there must be only one image.
    pub image: Option<&'a str>,
    /// The highest level of x86-64 that guests' CPUs have (psABI, "Micro-Architecture Levels").
    pub cpu_level: u8,
}

impl Wanted<'_> {
    fn is(&self, descriptor: &Descriptor) -> bool {
        let Descriptor { names, digest, .. } = descriptor;
        let all = [names.name.as_deref(), names.full_name.as_deref(), Some(digest.as_str())];
        self.image.is_none() || all.contains(&self.image)
    }

    /// The level of x86-64 that an image for `platform` needs; `None` if a guest cannot run it.
    fn level(&self, platform: Option<&Platform>) -> Option<u8> {
        let Some(platform) = platform else { return Some(1) };
        let level = match platform.variant.as_str() {
            "" | "v1" => 1,
            "v2" => 2,
            "v3" => 3,
            "v4" => 4,
            _ => return None,
        };
        let fits = platform.os == "linux" && platform.architecture == "amd64";
        (fits && level <= self.cpu_level).then_some(level)
    }

    /// What an index should have, for errors.
    fn expected(&self) -> String {
        match self.cpu_level {
            0 | 1 => "an image for linux/amd64".to_owned(),
            level => format!("an image for linux/amd64, at most variant v{level}"),
        }
    }
}

/// An image for a CPU that guests have.
struct Found {
    descriptor: Descriptor,
    level: u8,
}

/// An entry of an index that was not looked at yet.
struct Todo {
    descriptor: Descriptor,
    depth: usize,
    /// Whether an index above it is wanted.
    wanted: bool,
    /// What the image is called; images of one group are one image for several platforms.
    group: String,
}

/// Follows `top` to the manifest of the wanted image for linux/amd64. Of an image for several
/// levels of x86-64, the highest that guests' CPUs have is chosen.
pub fn choose(
    blobs: &Blobs,
    path: &Path,
    top: Index,
    wanted: Wanted<'_>,
) -> Result<Descriptor, BuildError> {
    let label = blobs.label("index.json");
    let top = top.manifests(&label, 0)?;
    let names: Vec<String> = top.iter().map(name_of).collect();
    // A digest that index.json does not list may be one of a manifest inside an index.
    let is_digest = wanted.image.is_some_and(|image| image.starts_with("sha256:"));
    let searches = is_digest && !top.iter().any(|descriptor| wanted.is(descriptor));
    let mut todo: Vec<Todo> = top.into_iter().rev().map(Todo::top).collect();
    let mut found: BTreeMap<String, Found> = BTreeMap::new();
    let (mut seen, mut any) = (0, false);
    while let Some(Todo { descriptor, depth, wanted: above, group }) = todo.pop() {
        seen += 1;
        if seen > MAX_MANIFESTS || depth > MAX_INDEX_DEPTH {
            let expected =
                format!("at most {MAX_MANIFESTS} manifests, {MAX_INDEX_DEPTH} indices deep");
            return Err(document(&descriptor.digest, "index", expected, "more"));
        }
        let is_wanted = above || wanted.is(&descriptor);
        any |= is_wanted;
        // A caller that names a digest has chosen the platform.
        let named = wanted.image == Some(descriptor.digest.as_str());
        let level = if named { Some(1) } else { wanted.level(descriptor.platform.as_ref()) };
        let Some(level) = level.filter(|_| is_wanted || searches) else { continue };
        match kind(&descriptor) {
            Ok(Kind::Index) => {
                let below = Index::read(blobs, &descriptor)?;
                // Before they are copied, because each of them takes over the index's names.
                let below = below.manifests(&descriptor.digest, seen + todo.len())?;
                todo.extend(below.into_iter().rev().map(|mut below| {
                    below.names = below.names.inside(&descriptor.names);
                    let group = group.clone();
                    Todo { descriptor: below, depth: depth + 1, wanted: is_wanted, group }
                }));
            }
            Ok(Kind::Manifest) if is_wanted => {
                keep(&mut found, group, Found { descriptor, level });
            }
            Err(error) if is_wanted => return Err(error),
            _ => {}
        }
    }
    match found.len() {
        0 if any => Err(document(&label, "manifests", wanted.expected(), "none")),
        0 => Err(BuildError::ambiguous(path, 0, names.into_iter())),
        count => {
            let names: Vec<String> = found.values().map(|one| name_of(&one.descriptor)).collect();
            match found.into_values().next() {
                Some(one) if count == 1 => Ok(one.descriptor),
                _ => Err(BuildError::ambiguous(path, count, names.into_iter())),
            }
        }
    }
}

impl Todo {
    fn top(descriptor: Descriptor) -> Self {
        let name = descriptor.names.best();
        // Entries without names, and for several platforms, are one image.
        let nameless = || descriptor.platform.is_none().then_some(descriptor.digest.as_str());
        let group = name.or_else(nameless).unwrap_or_default().to_owned();
        Self { descriptor, depth: 0, wanted: false, group }
    }
}

/// Keeps the image of the highest level in a group: of equal ones the first.
fn keep(found: &mut BTreeMap<String, Found>, group: String, new: Found) {
    match found.get(&group) {
        Some(old) if old.level >= new.level => {}
        _ => drop(found.insert(group, new)),
    }
}

fn name_of(descriptor: &Descriptor) -> String {
    descriptor.names.best().unwrap_or(&descriptor.digest).to_owned()
}

enum Kind {
    Index,
    Manifest,
}

fn kind(descriptor: &Descriptor) -> Result<Kind, BuildError> {
    match descriptor.media_type.as_str() {
        "application/vnd.oci.image.index.v1+json"
        | "application/vnd.docker.distribution.manifest.list.v2+json" => Ok(Kind::Index),
        "application/vnd.oci.image.manifest.v1+json"
        | "application/vnd.docker.distribution.manifest.v2+json" => Ok(Kind::Manifest),
        other => {
            let got: String = other.chars().take(100).collect();
            Err(document(
                &descriptor.digest,
                "mediaType",
                "an image index or manifest",
                format!("{got:?}"),
            ))
        }
    }
}
