//! The images of an archive, to load each of them.

use super::blobs::{Blobs, document, json, sha256};
use super::descriptor::{Index, Platform};
use super::error::{BuildError, on};
use super::oci::saved;
use super::read::plain_archive;
use super::types::{Limits, Progress, Source};
use crate::{cache, staging};
use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::path::{Path, PathBuf};

/// The most images of an archive that is loaded as a whole.
const MAX_IMAGES: usize = 256;

/// An archive whose images are known.
#[derive(Debug)]
pub struct Listing {
    /// The archive uncompressed; `None` if it is so where it lies.
    plain: Option<PathBuf>,
    path: PathBuf,
    /// The images, in the order of the archive.
    pub images: Vec<Listed>,
    /// Holds `plain`.
    _work: staging::Staging,
}

/// An image of an archive.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Listed {
    /// Its names: docker's tags, or the annotations of an OCI layout. They are as the archive has
    /// them, so a name may be a bare tag, and is not escaped.
    pub names: Vec<String>,
    /// `sha256:` and 64 digits: of the configuration, as docker's image id, or of the manifest or
    /// index in an OCI layout. If an OCI layout has several entries of the name, their digests are
    /// mixed, so that another entry gives another digest.
    pub digest: String,
    /// What selects it, as in [`Source::Archive`].
    selector: Option<String>,
}

impl Listing {
    /// Reads the table of contents of the archive at `path`, which may be compressed, or a pipe;
    /// `-`: standard input. What cannot be read in place is copied into the folder `cache`
    /// (`None`: [`cache::default_folder`]) for as long as the listing lives.
    ///
    /// # Errors
    /// [`BuildError`]: no archive of images, more than 256 images, or more bytes than `limits` has.
    pub fn open(
        path: &Path,
        cache: Option<&Path>,
        limits: Limits,
        progress: &mut dyn FnMut(Progress<'_>),
    ) -> Result<Self, BuildError> {
        let cache = cache.map_or_else(cache::default_folder, Path::to_owned);
        std::fs::create_dir_all(&cache).map_err(on("create", &cache))?;
        let work = staging::Staging::new(&cache).map_err(on("make a staging folder in", &cache))?;
        let plain = plain_archive(path, work.path(), limits, progress)?;
        let blobs = Blobs::archive(plain.as_deref().unwrap_or(path))?;
        let images = if blobs.has("manifest.json") {
            docker(&blobs)?
        } else if blobs.has("index.json") {
            layout(&blobs)?
        } else {
            let got = "an archive with neither manifest.json nor index.json".to_owned();
            return Err(BuildError::UnknownSource { path: path.to_owned(), got });
        };
        if !(1..=MAX_IMAGES).contains(&images.len()) {
            let (label, expected) = (path.display().to_string(), format!("1 to {MAX_IMAGES}"));
            return Err(document(&label, "images", expected, images.len()));
        }
        Ok(Self { plain, path: path.to_owned(), images, _work: work })
    }

    /// The source of the image `listed`, for [`super::build`] while this value lives.
    #[must_use]
    pub fn source(&self, listed: &Listed) -> Source {
        let path = self.plain.as_ref().unwrap_or(&self.path).clone();
        let image = listed.selector.clone();
        Source::Loaded { path, image, archive: self.path.clone() }
    }
}

/// The images of `docker save`, in its order.
fn docker(blobs: &Blobs) -> Result<Vec<Listed>, BuildError> {
    let all = saved(blobs)?;
    let only = all.len() == 1;
    let mut images: Vec<Listed> = Vec::new();
    for one in all.into_iter().take(MAX_IMAGES + 1) {
        let digest = sha256(&blobs.document(&one.config)?);
        let id = one.id().to_owned();
        let names = one.repo_tags.unwrap_or_default();
        let selector = if only { None } else { Some(names.first().cloned().unwrap_or(id)) };
        images.push(Listed { names, digest, selector });
    }
    Ok(images)
}

/// The images of an OCI layout. Entries of one name are one image for several platforms, whose
/// digest is the SHA-256 of `FIRST SECOND`, and so on. Of entries without a name that state a
/// platform, those that guests can run are images.
fn layout(blobs: &Blobs) -> Result<Vec<Listed>, BuildError> {
    let label = blobs.label("index.json");
    let index: Index = json(&label, &blobs.document("index.json")?)?;
    let mut images: Vec<Listed> = Vec::new();
    let mut known: BTreeMap<String, usize> = BTreeMap::new();
    for descriptor in index.manifests(&label, 0)? {
        let name = descriptor.names.best().map(str::to_owned);
        let runs = |p: &Platform| p.os == "linux" && p.architecture == "amd64";
        if name.is_none() && !descriptor.platform.as_ref().is_none_or(runs) {
            continue;
        }
        let selector = name.clone().unwrap_or_else(|| descriptor.digest.clone());
        match known.entry(selector) {
            Entry::Occupied(at) => {
                let digest = &mut images[*at.get()].digest;
                if *digest != descriptor.digest {
                    *digest = sha256(format!("{digest} {}", descriptor.digest).as_bytes());
                }
            }
            Entry::Vacant(new) => {
                images.push(Listed {
                    names: name.into_iter().collect(),
                    digest: descriptor.digest,
                    selector: Some(new.key().clone()),
                });
                new.insert(images.len() - 1);
            }
        }
    }
    Ok(images)
}
