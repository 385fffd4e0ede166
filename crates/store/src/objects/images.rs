//! Images: a raw root disk with its manifest.

use crate::blob;
use crate::errors::{IoError, IoResult};
use crate::inner::{Inner, Store};
use crate::objects::manifest::{self, ImageManifest, ImageRef, KernelManifest, Listing};
use crate::objects::refs;
use crate::objects::tree::{self, FileTree};
use crate::objects::types::FileRef;
use crate::objects::upload::Frame;
use crate::publish::{OpenError, PutError, RemoveError, folder, needed, seal};
use crate::sparse::{self, Piece};
use crate::vms::pins::{Pin, Pinned};
use dayfly_units::{Digest, ImageConfig, Name};
use std::fs::File;
use std::io::Read;
use std::path::Path;

/// The largest disk, in bytes: 1 TiB.
pub(crate) const MAX_DISK_BYTES: u64 = 1 << 40;
pub(crate) const DISK: &str = "disk";

/// Announced properties of an image, sent before its bytes.
#[derive(Debug, Clone)]
pub struct ImageSpec {
    /// Length of the raw disk in bytes: a multiple of 4096, at most 1 TiB.
    pub size_bytes: u64,
    /// Its sparse digest ([`crate::sparse`]).
    pub digest: Digest,
    /// The image's origin, for people.
    pub source: String,
    /// How to start the image's program.
    pub config: ImageConfig,
}

/// An image, verified and open.
#[derive(Debug)]
pub struct Image {
    /// The image's manifest.
    pub manifest: ImageManifest,
    /// The raw disk, read-only.
    pub disk: File,
    /// The disk's hash tree; `None`: the disk was verified whole.
    pub tree: Option<FileTree>,
    /// Retains the image in the store.
    pub pin: Pin,
}

impl Image {
    /// The reference that a snapshot's manifest stores.
    #[must_use]
    pub fn reference(&self) -> ImageRef {
        ImageRef { name: self.manifest.name.clone(), digest: self.manifest.disk.digest }
    }
}

impl Store {
    /// Stores an image from one zstd frame of its raw disk. An image with the same name is replaced
    /// atomically, unless it has other content and is in use.
    ///
    /// # Errors
    /// [`PutError`]; the store is unchanged.
    pub fn put_image(
        &self,
        name: &Name,
        spec: &ImageSpec,
        body: &mut dyn Read,
    ) -> Result<ImageManifest, PutError> {
        self.put_image_from(name, spec, body, |body, to, on| {
            let stream = |source| PutError::Stream { what: DISK, source };
            let mut frame = Frame::new(body)
                .map_err(|source| stream(sparse::CopyError::Read { at: 0, source }))?;
            let disk = sparse::copy_with(&mut frame, to, spec.size_bytes, on).map_err(stream)?;
            match frame.ends_here() {
                Ok(true) => Ok(disk),
                Ok(false) => Err(PutError::Longer { announced: spec.size_bytes }),
                Err(source) => Err(stream(sparse::CopyError::Read { at: spec.size_bytes, source })),
            }
        })
    }

    /// As [`Self::put_image`], from the uncompressed bytes of the disk.
    ///
    /// # Errors
    /// [`PutError`]; the store is unchanged.
    pub fn put_image_raw(
        &self,
        name: &Name,
        spec: &ImageSpec,
        disk: &mut dyn Read,
    ) -> Result<ImageManifest, PutError> {
        self.put_image_from(name, spec, disk, |disk, to, on| {
            sparse::copy_with(disk, to, spec.size_bytes, on)
                .map_err(|source| PutError::Stream { what: DISK, source })
        })
    }

    fn put_image_from(
        &self,
        name: &Name,
        spec: &ImageSpec,
        body: &mut dyn Read,
        receive: impl FnOnce(&mut dyn Read, &File, Piece<'_>) -> Result<sparse::Sparse, PutError>,
    ) -> Result<ImageManifest, PutError> {
        if spec.size_bytes > MAX_DISK_BYTES {
            return Err(PutError::TooLarge {
                what: DISK,
                max: MAX_DISK_BYTES,
                got: spec.size_bytes,
            });
        }
        if spec.size_bytes == 0 || !spec.size_bytes.is_multiple_of(dayfly_units::PAGE_SIZE) {
            let (expected, got) = ("a multiple of 4096, not 0", spec.size_bytes.to_string());
            return Err(PutError::Invalid { place: "size of the disk in bytes", expected, got });
        }
        let inner = &self.0;
        inner.writable()?;
        let stage = inner.stage()?;
        let staged = stage.make("image")?;
        let file = staged.create(DISK)?;
        let path = staged.path().join(DISK);
        blob::fault::step("writing", &path).map_err(IoError::new("writing", &path))?;
        let mut tree = tree::begin(&staged, spec.size_bytes)?;
        let got = receive(body, &file, &mut |at, piece| tree.update(at, piece))?;
        if got.digest != spec.digest {
            let (expected, got) = (spec.digest.to_string(), got.digest.to_string());
            return Err(PutError::Digest { what: "the disk", expected, got });
        }
        staged.finish(DISK, &file)?;
        tree::end(&staged, tree, got.digest)?;
        let manifest = ImageManifest {
            name: name.clone(),
            disk: FileRef { digest: got.digest, bytes: got.bytes, data_bytes: got.data_bytes },
            created_unix_ms: Self::now_unix_ms(),
            source: spec.source.clone(),
            config: spec.config.clone(),
        };
        seal(&staged, &manifest)?;
        let publishing = inner.publishing();
        let by = inner.image_users(name, Some(spec.digest))?;
        if !by.is_empty() {
            return Err(PutError::InUse { kind: "image", name: name.clone(), by });
        }
        inner.replace(&stage, "image", &inner.images, name.as_str())?;
        drop(publishing);
        Ok(manifest)
    }

    /// Opens, verifies and pins the image `name`.
    ///
    /// # Errors
    /// [`OpenError`].
    pub fn image(&self, name: &Name) -> Result<Image, OpenError> {
        self.0.open_image(name, &format!("image {name}"))
    }

    /// Lists every image.
    ///
    /// # Errors
    /// The folder cannot be listed.
    pub fn images(&self) -> Result<Listing<ImageManifest>, IoError> {
        manifest::list(&self.0.images)
    }

    /// Removes the image `name`, which may be damaged.
    ///
    /// # Errors
    /// [`RemoveError`]: `InUse` names every snapshot and VM that depends on the image.
    pub fn remove_image(&self, name: &Name) -> Result<(), RemoveError> {
        let publishing = self.0.publishing();
        let by = self.0.image_users(name, None)?;
        if !by.is_empty() {
            return Err(RemoveError::InUse { kind: "image", name: name.clone(), by });
        }
        let retired = self.0.retire(&self.0.images, name.as_str())?;
        drop(publishing);
        match retired {
            Some(_deleted) => Ok(()),
            None => Err(RemoveError::NotFound { kind: "image", name: name.clone() }),
        }
    }
}

impl Inner {
    pub(crate) fn open_image(&self, name: &Name, holder: &str) -> Result<Image, OpenError> {
        let (manifest, disk, pin, dir) = {
            let _publishing = self.publishing();
            let dir = folder(&self.images, "image", name)?;
            let manifest: ImageManifest = manifest::read(&dir)?;
            let disk = needed(&dir, DISK, &format!("image {name}"))?;
            let images = [name.clone()].into();
            (
                manifest,
                disk,
                self.pins.pin(Pinned { holder: holder.to_owned(), images, ..Pinned::default() }),
                dir,
            )
        };
        let tree = self.verify_disk(&dir, DISK, &disk, &manifest.disk, None)?;
        Ok(Image { manifest, disk, tree, pin })
    }

    /// The snapshots and VMs that use the image `name`; with `replacement`, only those that need a
    /// disk with another digest. A snapshot that another version of dayfly made may use each image.
    fn image_users(&self, name: &Name, replacement: Option<Digest>) -> IoResult<Vec<String>> {
        let mut by = Vec::new();
        let snapshots = manifest::list(&self.snapshots)?;
        for snapshot in refs::users_of_image(&snapshots.items, name, replacement) {
            by.push(format!("snapshot {snapshot}"));
        }
        for kernel in manifest::list::<KernelManifest>(&self.kernels)?.items {
            let uses = |i: &&ImageRef| &i.name == name && replacement != Some(i.digest);
            if kernel.modules.as_ref().filter(uses).is_some() {
                by.push(format!("kernel {}", kernel.name));
            }
        }
        let now = self.current_digest(name)?;
        if replacement.is_none() || now != replacement {
            let holders = self.pins.all().into_iter().filter(|p| p.images.contains(name));
            by.extend(holders.map(|p| p.holder));
            for (snapshot, error) in &snapshots.damaged {
                if error.is_version() {
                    by.push(format!("snapshot {snapshot} (perhaps: another version made it)"));
                } else if now.is_some() {
                    by.push(format!("snapshot {snapshot} (perhaps: its manifest cannot be read)"));
                }
            }
        }
        Ok(by)
    }

    fn current_digest(&self, name: &Name) -> IoResult<Option<Digest>> {
        if !self.images.has(name.as_str())? {
            return Ok(None);
        }
        let read = self
            .images
            .sub(name.as_str())
            .ok()
            .and_then(|d| manifest::read::<ImageManifest>(&d).ok());
        Ok(read.map(|m| m.disk.digest))
    }

    /// The path of an image's disk.
    pub(crate) fn image_path(&self, name: &Name) -> std::path::PathBuf {
        self.images.path().join(Path::new(name.as_str())).join(DISK)
    }
}
