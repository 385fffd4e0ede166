//! Fetches an image from a registry into a layout, from which [`crate::build`] makes a disk.
//!
//! ```text
//! Pull::begin: manifest or index ─▶ nested indices ─▶ choice ─▶ manifest ─▶ configuration
//! Pull::fetch: layers, three at a time ─▶ cache of blobs ─▶ links in the layout
//! ```
//!
//! The layout is in a staging folder, which is removed with its [`Pull`], or after a kill by the
//! next sweep.

use crate::disk::pulled::Layout;
use crate::disk::{BuildError, Limits, Source};
use crate::staging::Staging;
use dayfly_registry::{
    Blob, BlobCache, BlobDigest, DigestError, Reference, Registry, RegistryError,
};
use dayfly_units::Bytes;
use futures::{StreamExt, TryStreamExt, stream};
use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicU64;

/// Layers that are fetched at a time.
const AT_ONCE: usize = 3;

/// Why an image was not pulled.
#[derive(Debug, thiserror::Error)]
pub enum PullError {
    /// The registry, the way to it, or the cache of blobs.
    #[error(transparent)]
    Registry(#[from] RegistryError),
    /// A document of the image.
    #[error(transparent)]
    Image(#[from] BuildError),
    /// A digest that no registry has.
    #[error("image {image}: {source}")]
    Digest {
        /// The reference.
        image: String,
        /// The cause.
        source: DigestError,
    },
    /// The layers are larger than an image may be, or than the free space of the disk.
    #[error("image {image}: expected layers of at most {most} ({why}), got {got}")]
    Room {
        /// The reference.
        image: String,
        /// The bound.
        most: Bytes,
        /// Where the bound comes from.
        why: &'static str,
        /// The layers together, compressed.
        got: Bytes,
    },
    /// A file of the layout cannot be made.
    #[error("{what} {path}: {source}", path = path.display())]
    Io {
        /// The operation that failed.
        what: &'static str,
        /// The file or folder.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
}

/// An image that is being pulled.
pub struct Pull<'a> {
    registry: &'a Registry,
    cache: BlobCache,
    staging: Staging,
    image: Reference,
    manifest_digest: BlobDigest,
    /// Each layer once, with its path in the layout.
    layers: BTreeMap<BlobDigest, (u64, PathBuf)>,
}

impl<'a> Pull<'a> {
    /// Fetches the documents of `image`, and chooses the image for guests whose CPUs have
    /// `cpu_level` (x86-64-v1 to v4: 1 to 4). `cache`: [`crate::cache::default_folder`] if `None`.
    ///
    /// # Errors
    /// [`PullError`]; nothing is left.
    pub async fn begin(
        registry: &'a Registry,
        image: &Reference,
        cpu_level: u8,
        cache: Option<&Path>,
    ) -> Result<Self, PullError> {
        let folder = cache.map_or_else(crate::cache::default_folder, Path::to_owned);
        let failed = |what, path: &Path| {
            let path = path.to_owned();
            move |source| PullError::Io { what, path, source }
        };
        std::fs::create_dir_all(&folder).map_err(failed("create", &folder))?;
        let staging = Staging::new(&folder).map_err(failed("make a staging folder in", &folder))?;
        let cache = BlobCache::new(folder.join("registry"), registry.config().cache);
        cache.sweep();
        let top = registry.manifest(image).await?;
        let image = image.pinned(top.digest.clone());
        let layout = Layout::new(staging.path().join("layout"), image.familiar())?;
        let (own, mut indices) = layout.add(&top.media_type, &top.bytes, 0)?;
        let mut seen = 0;
        while let Some(descriptor) = indices.pop() {
            seen += 1;
            let count = seen + indices.len();
            let below = document(registry, &image, &layout, &descriptor.digest, count).await?;
            indices.extend(below);
            layout.check(&descriptor)?;
        }
        let chosen = layout.choose(&own, cpu_level.max(1))?;
        if chosen.digest != own.digest {
            document(registry, &image, &layout, &chosen.digest, 0).await?;
        }
        let manifest = layout.select(&chosen)?;
        let digest = parsed(&image, &manifest.config.digest)?;
        let config = Blob { digest, size: manifest.config.size };
        registry.blob(&image, &config, &cache, &AtomicU64::new(0)).await?;
        let path = layout.path(&manifest.config)?;
        link(&cache, &config.digest, &path)?;
        layout.check_config(&manifest)?;
        let mut layers = BTreeMap::new();
        for layer in &manifest.layers {
            let digest = parsed(&image, &layer.digest)?;
            let path = layout.path(layer)?;
            // A layer that comes twice with two sizes is refused by the size that is kept.
            layers.entry(digest).or_insert((layer.size, path));
        }
        let manifest_digest = parsed(&image, &chosen.digest)?;
        let pull = Self { registry, cache, staging, image, manifest_digest, layers };
        pull.check_room()?;
        Ok(pull)
    }

    fn check_room(&self) -> Result<(), PullError> {
        let got = self.layer_bytes();
        let refused = |most, why| {
            Err(PullError::Room { image: self.image.familiar(), most, why, got: Bytes(got) })
        };
        let most = Limits::default().max_content_bytes;
        if got > most {
            return refused(Bytes(most), "the limit of an image");
        }
        let free = self.cache.free()?;
        if got > free.0 {
            return refused(free, "the free space of the cache's disk");
        }
        Ok(())
    }

    /// The image's reference, with the digest of what the registry has for it.
    #[must_use]
    pub const fn image(&self) -> &Reference {
        &self.image
    }

    /// The digest of the chosen manifest.
    #[must_use]
    pub const fn manifest_digest(&self) -> &BlobDigest {
        &self.manifest_digest
    }

    /// Bytes of all layers as they are sent.
    #[must_use]
    pub fn layer_bytes(&self) -> u64 {
        self.layers.values().fold(0, |sum, (size, _)| sum.saturating_add(*size))
    }

    /// Fetches the layers that the cache does not have. `done` grows to [`Self::layer_bytes`].
    ///
    /// # Errors
    /// [`PullError`]. Bytes that have arrived stay in the cache, unless they are wrong.
    pub async fn fetch(&self, done: &AtomicU64) -> Result<(), PullError> {
        let layers = stream::iter(&self.layers).map(Ok::<_, PullError>);
        let one = |(digest, (size, path)): (&BlobDigest, &(u64, PathBuf))| {
            let (blob, path) = (Blob { digest: digest.clone(), size: *size }, path.clone());
            async move {
                self.registry.blob(&self.image, &blob, &self.cache, done).await?;
                link(&self.cache, &blob.digest, &path)
            }
        };
        layers.map_ok(one).try_buffer_unordered(AT_ONCE).try_collect::<()>().await?;
        self.cache.sweep();
        Ok(())
    }

    /// The source for [`crate::build`], as long as this value lives.
    #[must_use]
    pub fn source(&self) -> Source {
        Source::Pulled {
            layout: self.staging.path().join("layout"),
            image: self.image.to_string(),
            manifest: self.manifest_digest.to_string(),
        }
    }

    /// Drops the layers from the cache, because one of them turned out to be damaged.
    pub fn forget(&self) {
        self.layers.keys().for_each(|digest| self.cache.forget(digest));
    }
}

/// Fetches a document by its digest. Returns the further indices that are needed.
async fn document(
    registry: &Registry,
    image: &Reference,
    layout: &Layout,
    digest: &str,
    indices: usize,
) -> Result<Vec<crate::disk::pulled::Descriptor>, PullError> {
    let named = image.pinned(parsed(image, digest)?);
    let found = registry.manifest(&named).await?;
    Ok(layout.add(&found.media_type, &found.bytes, indices)?.1)
}

fn parsed(image: &Reference, digest: &str) -> Result<BlobDigest, PullError> {
    digest.parse().map_err(|source| PullError::Digest { image: image.familiar(), source })
}

/// Links a blob of the cache that another process may sweep at any time.
fn link(cache: &BlobCache, digest: &BlobDigest, path: &Path) -> Result<(), PullError> {
    let failed = |source| PullError::Io { what: "link", path: path.to_owned(), source };
    match cache.link(digest, path).map_err(failed)? {
        true => Ok(()),
        false => Err(failed(io::Error::other("another process removed the blob; try again"))),
    }
}
