//! Kernels: an ELF and an initramfs, with their manifest. No snapshot depends on a kernel's files,
//! because a snapshot's RAM contains its kernel.

use crate::blob;
use crate::errors::IoError;
use crate::inner::{Inner, Store};
use crate::integrity::verify::Kind;
use crate::objects::images::Image;
use crate::objects::manifest::{self, ImageManifest, KernelManifest, KernelRef, Listing};
use crate::objects::types::FileRef;
use crate::objects::upload::Frame;
use crate::publish::{OpenError, PutError, RemoveError, folder, needed, seal};
use crate::sparse::CopyError;
use dayfly_units::{Digest, MODULES_SOURCE, Name};
use std::fs::File;
use std::io::{self, Read, Write};

/// The largest vmlinux, and the largest initramfs, in bytes: 1 GiB.
const MAX_FILE_BYTES: u64 = 1 << 30;
/// How long the upload of a kernel may come after that of its modules, in milliseconds.
const UPLOAD_MS: u64 = 3_600_000;
pub(crate) const VMLINUX: &str = "vmlinux";
pub(crate) const INITRD: &str = "initrd";

/// Announced properties of a kernel, sent before its bytes.
#[derive(Debug, Clone)]
pub struct KernelSpec {
    /// The output of `uname -r` in the guest.
    pub release: String,
    /// Length of vmlinux in bytes.
    pub vmlinux_bytes: u64,
    /// Length of the initramfs in bytes.
    pub initrd_bytes: u64,
    /// BLAKE3 of vmlinux followed by the initramfs.
    pub digest: Digest,
    /// The name of the stored image of the kernel's modules.
    pub modules: Option<Name>,
}

/// A kernel, verified and open.
#[derive(Debug)]
pub struct Kernel {
    /// The kernel's manifest.
    pub manifest: KernelManifest,
    /// The ELF, read-only.
    pub vmlinux: File,
    /// The initramfs, read-only.
    pub initrd: File,
    /// The image of its modules.
    pub modules: Option<Image>,
}

impl Kernel {
    /// The reference that a snapshot's manifest stores.
    #[must_use]
    pub fn reference(&self) -> KernelRef {
        let KernelManifest { name, release, digest, .. } = &self.manifest;
        KernelRef { name: name.clone(), release: release.clone(), digest: *digest }
    }
}

impl Store {
    /// Stores a kernel from one zstd frame that contains vmlinux and then the initramfs. A kernel
    /// with the same name is replaced atomically.
    ///
    /// # Errors
    /// [`PutError`]; the store is unchanged.
    pub fn put_kernel(
        &self,
        name: &Name,
        spec: &KernelSpec,
        body: &mut dyn Read,
    ) -> Result<KernelManifest, PutError> {
        for (what, got) in [(VMLINUX, spec.vmlinux_bytes), (INITRD, spec.initrd_bytes)] {
            if got > MAX_FILE_BYTES {
                return Err(PutError::TooLarge { what, max: MAX_FILE_BYTES, got });
            }
        }
        let inner = &self.0;
        inner.writable()?;
        // Pinned to the end, so that it is there when the kernel is.
        let modules = spec.modules.as_ref().map(|name| inner.modules(name)).transpose()?;
        let stage = inner.stage()?;
        let staged = stage.make("kernel")?;
        let stream = |what| move |source| PutError::Stream { what, source };
        let mut frame = Frame::new(body)
            .map_err(|source| stream(VMLINUX)(CopyError::Read { at: 0, source }))?;
        let mut both = blake3::Hasher::new();
        let mut files = Vec::with_capacity(2);
        for (what, len) in [(VMLINUX, spec.vmlinux_bytes), (INITRD, spec.initrd_bytes)] {
            let file = staged.create(what)?;
            let path = staged.path().join(what);
            blob::fault::step("writing", &path).map_err(IoError::new("writing", &path))?;
            let digest = receive(&mut frame, &file, len, &mut both).map_err(stream(what))?;
            staged.finish(what, &file)?;
            let content = FileRef { digest, bytes: len, data_bytes: len };
            files.push(content);
        }
        let announced = spec.vmlinux_bytes + spec.initrd_bytes;
        match frame.ends_here() {
            Ok(true) => {}
            Ok(false) => return Err(PutError::Longer { announced }),
            Err(source) => {
                return Err(stream(INITRD)(CopyError::Read { at: spec.initrd_bytes, source }));
            }
        }
        let got = Digest::from(both.finalize());
        if got != spec.digest {
            let (expected, got) = (spec.digest.to_string(), got.to_string());
            return Err(PutError::Digest { what: "vmlinux and initrd", expected, got });
        }
        let manifest = KernelManifest {
            name: name.clone(),
            release: spec.release.clone(),
            digest: got,
            vmlinux: files[0],
            initrd: files[1],
            modules: modules.as_ref().map(Image::reference),
            created_unix_ms: Self::now_unix_ms(),
        };
        seal(&staged, &manifest)?;
        let publishing = inner.publishing();
        let before = inner.modules_of(name);
        inner.replace(&stage, "kernel", &inner.kernels, name.as_str())?;
        drop((publishing, modules));
        self.remove_unused(before);
        Ok(manifest)
    }

    /// Opens and verifies the kernel `name`.
    ///
    /// # Errors
    /// [`OpenError`].
    pub fn kernel(&self, name: &Name) -> Result<Kernel, OpenError> {
        let by = format!("kernel {name}");
        let (manifest, vmlinux, initrd, dir) = {
            let _publishing = self.0.publishing();
            let dir = folder(&self.0.kernels, "kernel", name)?;
            let manifest: KernelManifest = manifest::read(&dir)?;
            (manifest, needed(&dir, VMLINUX, &by)?, needed(&dir, INITRD, &by)?, dir)
        };
        self.0.verify(&dir, VMLINUX, &vmlinux, &manifest.vmlinux, Kind::Plain)?;
        self.0.verify(&dir, INITRD, &initrd, &manifest.initrd, Kind::Plain)?;
        let modules = match &manifest.modules {
            Some(image) => {
                let _publishing = self.0.publishing();
                self.0.image_is(image, &by)?;
                Some(image)
            }
            None => None,
        };
        let modules = modules.map(|image| self.0.open_image(&image.name, &by)).transpose()?;
        Ok(Kernel { manifest, vmlinux, initrd, modules })
    }

    /// Lists every kernel.
    ///
    /// # Errors
    /// The folder cannot be listed.
    pub fn kernels(&self) -> Result<Listing<KernelManifest>, IoError> {
        manifest::list(&self.0.kernels)
    }

    /// Removes the kernel `name`, which may be damaged.
    ///
    /// # Errors
    /// [`RemoveError`].
    pub fn remove_kernel(&self, name: &Name) -> Result<(), RemoveError> {
        let publishing = self.0.publishing();
        let modules = self.0.modules_of(name);
        let retired = self.0.retire(&self.0.kernels, name.as_str())?;
        drop(publishing);
        match retired {
            Some(_deleted) => {
                self.remove_unused(modules);
                Ok(())
            }
            None => Err(RemoveError::NotFound { kind: "kernel", name: name.clone() }),
        }
    }

    /// Removes the images of modules that nothing uses. Those of the last hour stay, because the
    /// upload of their kernel follows.
    pub(crate) fn remove_unused_modules(&self) {
        let Ok(images) = self.images() else { return };
        let before = Self::now_unix_ms().saturating_sub(UPLOAD_MS);
        let old = |image: &ImageManifest| is_modules(image) && image.created_unix_ms < before;
        images.items.into_iter().filter(old).for_each(|image| self.remove_unused(Some(image.name)));
    }

    /// Removes an image of modules, unless something uses it. If it cannot be removed now,
    /// [`Self::gc`] removes it later.
    fn remove_unused(&self, modules: Option<Name>) {
        if let Some(name) = modules {
            let _in_use = self.remove_image(&name);
        }
    }
}

impl Inner {
    /// Opens and pins the image `name`, which must hold modules.
    fn modules(&self, name: &Name) -> Result<Image, PutError> {
        let image = self.open_image(name, "the upload of a kernel");
        let expected = "the name of a stored image of modules";
        match image {
            Ok(image) if is_modules(&image.manifest) => Ok(image),
            Ok(_) => {
                let got = format!("{name}, an image of another source");
                Err(PutError::Invalid { place: "modules", expected, got })
            }
            Err(error) => {
                Err(PutError::Invalid { place: "modules", expected, got: error.to_string() })
            }
        }
    }

    /// The image of the modules of the kernel `name`, if its manifest can be read.
    fn modules_of(&self, name: &Name) -> Option<Name> {
        let dir = self.kernels.sub(name.as_str()).ok()?;
        let manifest = manifest::read::<KernelManifest>(&dir).ok()?;
        manifest.modules.map(|image| image.name)
    }
}

/// Whether the image holds the modules of a kernel.
pub(crate) fn is_modules(image: &ImageManifest) -> bool {
    image.source.starts_with(MODULES_SOURCE)
}

/// Copies `len` bytes. Returns their digest, and adds the bytes to the hasher `both`.
fn receive(
    from: &mut dyn Read,
    mut to: &File,
    len: u64,
    both: &mut blake3::Hasher,
) -> Result<Digest, CopyError> {
    let mut hasher = blake3::Hasher::new();
    let mut buffer = vec![0; 1 << 20];
    let mut at = 0;
    while at < len {
        let want = usize::try_from(len - at).map_or(buffer.len(), |n| n.min(buffer.len()));
        let got = match from.read(&mut buffer[..want]) {
            Ok(0) => return Err(CopyError::Short { expected: len, got: at }),
            Ok(got) => got,
            Err(e) if e.kind() == io::ErrorKind::Interrupted => continue,
            Err(source) => return Err(CopyError::Read { at, source }),
        };
        hasher.update(&buffer[..got]);
        both.update(&buffer[..got]);
        to.write_all(&buffer[..got]).map_err(|source| CopyError::Write { at, source })?;
        at += got as u64;
    }
    Ok(hasher.finalize().into())
}
