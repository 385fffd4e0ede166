//! Builds a kernel and its initramfs, or takes them from the cache.

use super::error::{KernelError, on};
use crate::manifest::{FileDigest, KernelManifest, MANIFEST_NAME, Sealed, now_s};
use crate::{cache, staging};
use dayfly_boot::modules::{self, Modules};
use dayfly_boot::{
    BootError, KernelSource, MAX_KERNEL_BYTES, elf, initramfs, read_capped, release_of,
    unpack_vmlinux,
};
use std::path::{Path, PathBuf};

/// The modules that a guest needs: drivers of its devices. Their dependencies are added
/// automatically.
pub const GUEST_MODULES: &[&str] = &[
    "virtio_mmio",
    "virtio_blk",
    "vmw_vsock_virtio_transport",
    "virtio-rng",
    "pvpanic-mmio",
    "virtio_net",
    "tcp_diag",
    "virtio_balloon",
];
/// File name of the kernel in its output folder.
pub const VMLINUX_NAME: &str = "vmlinux";
/// File name of the initramfs in its output folder.
pub const INITRD_NAME: &str = "initrd";

/// A kernel and its initramfs, ready to boot.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KernelArtefact {
    /// Path of the ELF kernel, which is read-only and possibly a hard link into the cache.
    pub vmlinux: PathBuf,
    /// Path of the initramfs, which is read-only and possibly a hard link into the cache.
    pub initrd: PathBuf,
    /// The manifest, which is also in the file `manifest` beside the two files.
    pub manifest: KernelManifest,
    /// Whether the files come from the cache.
    pub cached: bool,
}

/// Builds `out_dir/vmlinux`, `out_dir/initrd` and `out_dir/manifest` from a kernel and the static
/// program `agent`.
///
/// The same inputs give the same bytes. The result is kept in `cache` under a digest of kernel,
/// agent and modules, and is reused. If `cache` is `None`, the default folder is used.
///
/// # Errors
/// [`KernelError`]; a failed build leaves nothing behind.
pub fn build(
    source: &KernelSource,
    agent: &Path,
    cache: Option<&Path>,
    out_dir: &Path,
) -> Result<KernelArtefact, KernelError> {
    let cache = cache.map_or_else(cache::default_folder, Path::to_owned);
    let packed = read_capped(&source.kernel, MAX_KERNEL_BYTES)?;
    let agent_bytes = read_capped(agent, MAX_KERNEL_BYTES)?;
    elf::check_static(&agent_bytes, "agent")
        .map_err(|source| BootError::Format { path: agent.to_owned(), source })?;
    std::fs::create_dir_all(&cache).map_err(on("create", &cache))?;
    let work = staging::Staging::new(&cache).map_err(on("make a staging folder in", &cache))?;
    let found = match &source.modules {
        Some(folder) => modules::collect(folder, GUEST_MODULES, &[])?,
        None => Modules::default(),
    };
    let agent_digest = blake3::hash(&agent_bytes).to_hex().to_string();
    let entry = cache.join("kernels/built").join(key(&packed, &agent_digest, &found));
    let _lock = staging::lock_entry(&entry, || {
        tracing::info!("waiting for another build of the same kernel")
    })
    .map_err(on("lock", &entry))?;
    if let Some(manifest) = cached(&entry) {
        return hand_out(&entry, manifest, out_dir, true);
    }
    let failed = |error| BootError::Format { path: source.kernel.clone(), source: error };
    let elf = unpack_vmlinux(&packed).map_err(failed)?;
    let release = release_of(&elf).map_err(failed)?;
    let initrd = pack(&agent_bytes, &found)?;
    let manifest = KernelManifest {
        release,
        vmlinux: digest(&elf),
        initrd: digest(&initrd),
        agent_digest,
        modules: places(&found).collect(),
        builtin: found.builtin.clone(),
        source: source
            .kernel
            .display()
            .to_string()
            .chars()
            .filter(|c| !c.is_control())
            .take(1000)
            .collect(),
        created_s: now_s(),
    };
    staging::deliver_bytes(&elf, work.path(), &entry, VMLINUX_NAME).map_err(on("write", &entry))?;
    staging::deliver_bytes(&initrd, work.path(), &entry, INITRD_NAME)
        .map_err(on("write", &entry))?;
    staging::deliver_bytes(&manifest.to_bytes()?, work.path(), &entry, MANIFEST_NAME)
        .map_err(on("write", &entry))?;
    hand_out(&entry, manifest, out_dir, false)
}

fn digest(bytes: &[u8]) -> FileDigest {
    FileDigest { digest: blake3::hash(bytes).to_hex().to_string(), size_bytes: bytes.len() as u64 }
}

/// The cache key: a digest of everything that the result depends on. The number in it is the
/// version of the initramfs's layout.
fn key(packed: &[u8], agent_digest: &str, found: &Modules) -> String {
    let mut hasher = blake3::Hasher::new();
    hasher
        .update(b"dayfly kernel 1\n")
        .update(blake3::hash(packed).as_bytes())
        .update(agent_digest.as_bytes());
    for (module, place) in found.files.iter().zip(places(found)) {
        hasher
            .update(place.as_bytes())
            .update(b"\n")
            .update(blake3::hash(&module.bytes).as_bytes());
    }
    for name in &found.builtin {
        hasher.update(name.as_bytes()).update(b"\n");
    }
    hasher.finalize().to_hex()[..32].to_owned()
}

/// The manifest of a cache entry, if the entry's files still match it.
fn cached(entry: &Path) -> Option<KernelManifest> {
    let manifest = KernelManifest::load(&entry.join(MANIFEST_NAME)).ok()?;
    let is = |name: &str, want: &FileDigest| {
        read_capped(&entry.join(name), MAX_KERNEL_BYTES).is_ok_and(|bytes| digest(&bytes) == *want)
    };
    (is(VMLINUX_NAME, &manifest.vmlinux) && is(INITRD_NAME, &manifest.initrd)).then_some(manifest)
}

fn hand_out(
    entry: &Path,
    manifest: KernelManifest,
    out_dir: &Path,
    cached: bool,
) -> Result<KernelArtefact, KernelError> {
    let give = |name: &str| {
        staging::deliver(&entry.join(name), out_dir, name, true).map_err(on("write", out_dir))
    };
    let (vmlinux, initrd) = (give(VMLINUX_NAME)?, give(INITRD_NAME)?);
    give(MANIFEST_NAME)?;
    Ok(KernelArtefact { vmlinux, initrd, manifest, cached })
}

/// The paths of the modules in the initramfs.
fn places(found: &Modules) -> impl Iterator<Item = String> {
    found.files.iter().map(|m| format!("lib/modules/{}/{}", found.release, m.path))
}

/// Packs the initramfs: the agent as /init, the modules, and their load order in
/// /etc/dayfly/modules. It also holds the folders and the console device that the kernel and the
/// agent expect. The archive is not compressed, for the reason given at [`dayfly_boot::Archive`].
fn pack(agent: &[u8], found: &Modules) -> Result<Vec<u8>, BootError> {
    let mut archive = initramfs(&["dev", "proc", "sys", "newroot"]);
    let list: String = places(found).map(|place| format!("/{place}\n")).collect();
    archive.file("etc/dayfly/modules", 0o644, list.as_bytes());
    for (module, place) in found.files.iter().zip(places(found)) {
        archive.file(&place, 0o644, &module.bytes);
    }
    archive.file("init", 0o755, agent);
    archive.finish()
}

#[cfg(test)]
#[path = "tests.rs"]
mod tests;
