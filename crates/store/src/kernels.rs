//! Kernels: an ELF and an initramfs, with their manifest. Nothing refers to a kernel's files: a snapshot has its kernel in its memory.

use crate::digest::Digest;
use crate::errors::IoError;
use crate::manifest::{self, FileRef, KernelManifest, KernelRef, Listing};
use crate::publish::{OpenError, PutError, RemoveError, folder, needed, seal};
use crate::sparse::CopyError;
use crate::upload::Frame;
use crate::verify::Kind;
use crate::{Store, blob};
use dayfly_units::Name;
use std::fs::File;
use std::io::{self, Read, Write};

/// The largest vmlinux, and the largest initramfs: 1 GiB.
const MAX_FILE_BYTES: u64 = 1 << 30;
pub(crate) const VMLINUX: &str = "vmlinux";
pub(crate) const INITRD: &str = "initrd";

/// What is announced before a kernel's bytes.
#[derive(Debug, Clone)]
pub struct KernelSpec {
    /// `uname -r` in the guest.
    pub release: String,
    /// Length of vmlinux.
    pub vmlinux_bytes: u64,
    /// Length of the initramfs.
    pub initrd_bytes: u64,
    /// BLAKE3 of vmlinux followed by the initramfs.
    pub digest: Digest,
}

/// A kernel, verified and open.
#[derive(Debug)]
pub struct Kernel {
    /// What it is.
    pub manifest: KernelManifest,
    /// The ELF, read-only.
    pub vmlinux: File,
    /// The initramfs, read-only.
    pub initrd: File,
}

impl Kernel {
    /// How a snapshot refers to it.
    #[must_use]
    pub fn reference(&self) -> KernelRef {
        let KernelManifest { name, release, digest, .. } = &self.manifest;
        KernelRef { name: name.clone(), release: release.clone(), digest: *digest }
    }
}

impl Store {
    /// Stores a kernel from one zstd frame of vmlinux and initramfs, one after the other. One of the same name is replaced in one step.
    ///
    /// # Errors
    /// [`PutError`]; the store is as it was.
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
        let stage = inner.stage()?;
        let staged = stage.make("kernel")?;
        let stream = |what| move |source| PutError::Stream { what, source };
        let mut frame =
            Frame::new(body).map_err(|source| stream(VMLINUX)(CopyError::Read { at: 0, source }))?;
        let mut both = blake3::Hasher::new();
        let mut files = Vec::with_capacity(2);
        for (what, len) in [(VMLINUX, spec.vmlinux_bytes), (INITRD, spec.initrd_bytes)] {
            let file = staged.create(what)?;
            let path = staged.path().join(what);
            blob::fault::step("writing", &path).map_err(IoError::new("writing", &path))?;
            let digest = receive(&mut frame, &file, len, &mut both).map_err(stream(what))?;
            staged.finish(what, &file)?;
            files.push((FileRef { digest, bytes: len, data_bytes: len }, file));
        }
        let announced = spec.vmlinux_bytes + spec.initrd_bytes;
        match frame.ends_here() {
            Ok(true) => {}
            Ok(false) => return Err(PutError::Longer { announced }),
            Err(source) => return Err(stream(INITRD)(CopyError::Read { at: spec.initrd_bytes, source })),
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
            vmlinux: files[0].0,
            initrd: files[1].0,
            created_unix_ms: Self::now_unix_ms(),
        };
        seal(&staged, &manifest)?;
        let _publishing = inner.publishing();
        inner.replace(&stage, "kernel", &inner.kernels, name.as_str())?;
        let folder = inner.kernels.path().join(name.as_str());
        for (what, (content, file)) in [VMLINUX, INITRD].into_iter().zip(&files) {
            inner.verifier.remember(&folder.join(what), file, content.digest);
        }
        Ok(manifest)
    }

    /// The kernel `name`, verified and open.
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
        Ok(Kernel { manifest, vmlinux, initrd })
    }

    /// Every kernel.
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
        let _publishing = self.0.publishing();
        if self.0.retire(&self.0.kernels, name.as_str())? {
            Ok(())
        } else {
            Err(RemoveError::NotFound { kind: "kernel", name: name.clone() })
        }
    }
}

/// Copies `len` bytes, hashing them alone and together with what came before.
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
