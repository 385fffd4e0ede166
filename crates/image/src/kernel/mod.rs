//! Kernels: Debian's packages fetched, the ELF inside a vmlinuz, and an initramfs with the agent and the modules that a
//! guest needs before its root disk is there.

mod cpio;
mod fetch;
mod modules;
mod vmlinux;

pub use fetch::{KernelTree, fetch_debian};
pub use modules::GUEST_MODULES;
pub use vmlinux::{VmlinuxError, release_of, unpack_vmlinux};

use crate::disk::MANIFEST_NAME;
use crate::manifest::{FileDigest, KernelManifest, ManifestError, Sealed};
use crate::tool::ToolError;
use crate::{cache, disk, staging};
use std::io;
use std::path::{Path, PathBuf};

/// Largest kernel or initramfs, packed or unpacked.
pub const MAX_KERNEL_BYTES: u64 = 512 << 20;
/// Name of the kernel in its folder.
pub const VMLINUX_NAME: &str = "vmlinux";
/// Name of the initramfs in its folder.
pub const INITRD_NAME: &str = "initrd";

/// Why a kernel was not fetched or built.
#[derive(Debug, thiserror::Error)]
pub enum KernelError {
    /// A file could not be read or written.
    #[error("{what} {path}: {source}", path = path.display())]
    Io {
        /// What was being done.
        what: &'static str,
        /// To which file.
        path: PathBuf,
        /// Why it failed.
        source: io::Error,
    },
    /// An external program failed.
    #[error(transparent)]
    Tool(#[from] ToolError),
    /// The kernel's file is damaged or of a kind that is not read.
    #[error("{path}: {source}", path = path.display())]
    Vmlinuz {
        /// The file.
        path: PathBuf,
        /// Why.
        source: VmlinuxError,
    },
    /// apt knows no such kernel.
    #[error(
        "no package for kernel {version}: expected {expected} in apt's lists, got none; run apt-get update, or add a \
         Debian mirror that has it to /etc/apt/sources.list"
    )]
    NoPackage {
        /// The version asked for.
        version: String,
        /// What was looked for.
        expected: String,
    },
    /// A version that is not one.
    #[error("kernel version {0:?}: expected two or three numbers with dots, such as 6.12")]
    Version(String),
    /// The tree does not look like an unpacked kernel package.
    #[error("{path}: expected {expected}, got {got}", path = path.display())]
    Tree {
        /// Where.
        path: PathBuf,
        /// What is accepted.
        expected: String,
        /// What was found.
        got: String,
    },
    /// A module that a guest needs is neither a file nor built in.
    #[error("{path}: module {module}: expected a file or an entry in modules.builtin, got neither", path = path.display())]
    MissingModule {
        /// The modules' folder.
        path: PathBuf,
        /// Its name.
        module: String,
    },
    /// The manifest cannot be written.
    #[error(transparent)]
    Manifest(#[from] ManifestError),
}

pub(crate) fn on<'p>(what: &'static str, path: &'p Path) -> impl FnOnce(io::Error) -> KernelError + 'p {
    move |source| KernelError::Io { what, path: path.to_owned(), source }
}

/// Reads a file, whole, if it is at most `cap` bytes long.
pub(crate) fn read_capped(path: &Path, cap: u64) -> Result<Vec<u8>, KernelError> {
    use std::io::Read;
    let file = std::fs::File::open(path).map_err(on("open", path))?;
    let mut bytes = Vec::new();
    file.take(cap + 1).read_to_end(&mut bytes).map_err(on("read", path))?;
    if bytes.len() as u64 > cap {
        return Err(KernelError::Tree {
            path: path.to_owned(),
            expected: format!("a file of at most {cap} bytes"),
            got: "more".to_owned(),
        });
    }
    Ok(bytes)
}

/// Where a kernel is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KernelSource {
    /// A vmlinuz or an ELF vmlinux.
    pub kernel: PathBuf,
    /// `lib/modules/<release>`; `None`: everything that a guest needs must be built in, and no list says so.
    pub modules: Option<PathBuf>,
}

impl KernelSource {
    /// In an unpacked package: `boot/vmlinuz-<release>` (or `boot/vmlinux-…`) and `lib/modules/<release>`.
    ///
    /// # Errors
    /// [`KernelError::Tree`] unless there is exactly one of each.
    pub fn in_tree(tree: &Path) -> Result<Self, KernelError> {
        let only = |folder: &Path, prefix: &str| {
            let mut found: Vec<PathBuf> = std::fs::read_dir(folder)
                .map_err(on("read", folder))?
                .flatten()
                .filter(|e| e.file_name().to_string_lossy().starts_with(prefix))
                .map(|e| e.path())
                .collect();
            match (found.pop(), found.len()) {
                (Some(path), 0) => Ok(path),
                (last, more) => Err(KernelError::Tree {
                    path: folder.to_owned(),
                    expected: format!("one {prefix}*"),
                    got: (more + usize::from(last.is_some())).to_string(),
                }),
            }
        };
        let kernel = only(&tree.join("boot"), "vmlinu")?;
        let folder = tree.join("lib/modules");
        let folder = if folder.is_dir() { folder } else { tree.join("usr/lib/modules") };
        Ok(Self { kernel, modules: Some(only(&folder, "")?) })
    }
}

/// A kernel ready to be booted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KernelArtefact {
    /// The ELF kernel; read-only, possibly a hard link into the cache.
    pub vmlinux: PathBuf,
    /// The initramfs; the same.
    pub initrd: PathBuf,
    /// What they are; also in the file `manifest` beside them.
    pub manifest: KernelManifest,
    /// Whether they came from the cache.
    pub cached: bool,
}

/// Makes `out_dir/vmlinux`, `out_dir/initrd` and `out_dir/manifest` of a kernel and the static `agent`.
///
/// The same inputs give the same bytes, and are not worked on twice: the result is kept in `cache` (the default folder
/// where none is given) under a digest of kernel, agent and modules.
///
/// # Errors
/// [`KernelError`]; nothing is left behind then.
pub fn build(
    source: &KernelSource,
    agent: &Path,
    cache: Option<&Path>,
    out_dir: &Path,
) -> Result<KernelArtefact, KernelError> {
    let cache = cache.map_or_else(cache::default_folder, Path::to_owned);
    let packed = read_capped(&source.kernel, MAX_KERNEL_BYTES)?;
    let agent_bytes = read_capped(agent, MAX_KERNEL_BYTES)?;
    vmlinux::check_agent(&agent_bytes)
        .map_err(|source| KernelError::Vmlinuz { path: agent.to_owned(), source })?;
    std::fs::create_dir_all(&cache).map_err(on("create", &cache))?;
    let work = staging::Staging::new(&cache).map_err(on("make a staging folder in", &cache))?;
    let found = match &source.modules {
        Some(folder) => modules::collect(folder, GUEST_MODULES, work.path())?,
        None => modules::Collected::default(),
    };
    let agent_digest = blake3::hash(&agent_bytes).to_hex().to_string();
    let entry = cache.join("kernels/built").join(key(&packed, &agent_digest, &found));
    let _lock =
        staging::lock_entry(&entry, || tracing::info!("waiting for another build of the same kernel"))
            .map_err(on("lock", &entry))?;
    if let Some(manifest) = cached(&entry) {
        return hand_out(&entry, manifest, out_dir, true);
    }
    let failed = |source_error| KernelError::Vmlinuz { path: source.kernel.clone(), source: source_error };
    let elf = unpack_vmlinux(&packed).map_err(failed)?;
    let release = release_of(&elf).map_err(failed)?;
    let initrd = initramfs(&agent_bytes, &found);
    let manifest = KernelManifest {
        release,
        vmlinux: digest(&elf),
        initrd: digest(&initrd),
        agent_digest,
        modules: found.files.iter().map(|m| m.place.clone()).collect(),
        builtin: found.builtin.clone(),
        source: source.kernel.display().to_string().chars().filter(|c| !c.is_control()).take(1000).collect(),
        created_s: disk::now_s(),
    };
    staging::deliver_bytes(&elf, work.path(), &entry, VMLINUX_NAME).map_err(on("write", &entry))?;
    staging::deliver_bytes(&initrd, work.path(), &entry, INITRD_NAME).map_err(on("write", &entry))?;
    staging::deliver_bytes(&manifest.to_bytes()?, work.path(), &entry, MANIFEST_NAME)
        .map_err(on("write", &entry))?;
    hand_out(&entry, manifest, out_dir, false)
}

fn digest(bytes: &[u8]) -> FileDigest {
    FileDigest { digest: blake3::hash(bytes).to_hex().to_string(), size_bytes: bytes.len() as u64 }
}

/// Everything that the result depends on; the number is that of the initramfs's layout.
fn key(packed: &[u8], agent_digest: &str, found: &modules::Collected) -> String {
    let mut hasher = blake3::Hasher::new();
    hasher
        .update(b"dayfly kernel 1\n")
        .update(blake3::hash(packed).as_bytes())
        .update(agent_digest.as_bytes());
    for module in &found.files {
        hasher.update(module.place.as_bytes()).update(b"\n").update(blake3::hash(&module.bytes).as_bytes());
    }
    for name in &found.builtin {
        hasher.update(name.as_bytes()).update(b"\n");
    }
    hasher.finalize().to_hex()[..32].to_owned()
}

/// The manifest of a cache entry, if its files are still what it says.
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
    let give =
        |name: &str| staging::deliver(&entry.join(name), out_dir, name, true).map_err(on("write", out_dir));
    let (vmlinux, initrd) = (give(VMLINUX_NAME)?, give(INITRD_NAME)?);
    give(MANIFEST_NAME)?;
    Ok(KernelArtefact { vmlinux, initrd, manifest, cached })
}

/// The initramfs: the agent as /init, modules with the order to load them in /etc/dayfly/modules, and the folders and
/// the console device that the kernel and the agent expect. Not compressed: see the measurement in `cpio`.
fn initramfs(agent: &[u8], found: &modules::Collected) -> Vec<u8> {
    let mut archive = cpio::Archive::default();
    for folder in ["dev", "proc", "sys", "newroot"] {
        archive.folder(folder);
    }
    archive.char_device("dev/console", 0o600, 5, 1);
    let list: String = found.files.iter().map(|m| format!("/{}\n", m.place)).collect();
    archive.file("etc/dayfly/modules", 0o644, list.as_bytes());
    for module in &found.files {
        archive.file(&module.place, 0o644, &module.bytes);
    }
    archive.file("init", 0o755, agent);
    archive.finish()
}

#[cfg(test)]
mod tests;
