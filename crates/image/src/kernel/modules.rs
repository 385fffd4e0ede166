//! The disk with all modules of a kernel.
//!
//! ```text
//!  lib/modules/<release> ── copied ──▶ staging ── depmod ──▶ modules.dep, modules.alias, …
//!                                                                │
//!                    read-only ext4 without anything else ◀──────╯
//! ```
//!
//! The root of the disk is what a guest has in `/lib/modules/<release>`. Modules stay
//! compressed as in the kernel's package, a fifth of their size; modprobe(8) of kmod unpacks them.

use super::error::{KernelError, on};
use crate::disk::tree::{Content, Kind, Meta, Tree};
use crate::disk::{BuildError, BuiltImage, plain};
use crate::{cache, staging, tool};
use dayfly_archive::Refusal;
use dayfly_boot::modules::{files, lists, packed};
use dayfly_boot::{BootError, KernelSource};
use dayfly_units::MODULES_SOURCE;
use std::collections::BTreeSet;
use std::path::Path;

/// The largest module, packed as in the kernel's package, in bytes.
const MAX_FILE_BYTES: u64 = 64 << 20;
/// The most bytes of all modules together, packed.
const MAX_BYTES: u64 = 2 << 30;
/// The most names on a disk: 65,536 modules, and as many folders.
const MAX_NAMES: usize = 1 << 17;

/// Builds `out_dir/root.ext4` and `out_dir/manifest` with all modules of the kernel; `None` if it
/// has none.
///
/// The same modules give the same bytes. The result is kept in `cache` under a digest of the
/// modules, and is reused. If `cache` is `None`, the default folder is used.
///
/// # Errors
/// [`KernelError`]; also if depmod (Debian's package kmod) is missing. A failed build leaves
/// nothing behind.
pub fn build_modules(
    source: &KernelSource,
    cache: Option<&Path>,
    out_dir: &Path,
) -> Result<Option<BuiltImage>, KernelError> {
    let Some(folder) = &source.modules else { return Ok(None) };
    let modules = files(folder)?;
    if modules.is_empty() {
        return Ok(None);
    }
    let cache = cache.map_or_else(cache::default_folder, Path::to_owned);
    std::fs::create_dir_all(&cache).map_err(on("create", &cache))?;
    let cache = std::fs::canonicalize(&cache).map_err(on("open", &cache))?;
    let work = staging::Staging::new(&cache).map_err(on("make a staging folder in", &cache))?;
    let name = std::fs::canonicalize(folder).map_err(on("open", folder))?;
    let release = name.file_name().unwrap_or_default().to_string_lossy().into_owned();
    if !is_release(&release) {
        let expected = "a kernel's release as the folder's name, such as 6.12.1-amd64 (rename it \
                        to what uname -r prints in a guest)";
        let (path, expected) = (folder.clone(), expected.to_owned());
        return Err(BootError::Tree { path, expected, got: format!("{release:?}") }.into());
    }
    let entry = cache.join("kernels/modules").join(key(folder, &release, &modules)?);
    let _lock = staging::lock_entry(&entry, || {
        tracing::info!("waiting for another build of the same modules")
    })
    .map_err(on("lock", &entry))?;
    let about: String =
        format!("{MODULES_SOURCE}{release}").chars().filter(|c| !c.is_control()).collect();
    let make = || tree(folder, &release, &modules, work.path());
    plain(&entry, work.path(), about, out_dir, make).map(Some)
}

/// Whether the text begins with two numbers and a dot between them, which depmod requires.
fn is_release(text: &str) -> bool {
    let digit = |text: &str| text.starts_with(|c: char| c.is_ascii_digit());
    let rest = text.trim_start_matches(|c: char| c.is_ascii_digit());
    digit(text) && rest.strip_prefix('.').is_some_and(digit)
}

/// The cache key: a digest of everything that the disk depends on. The number in it is the version
/// of the disk's layout.
fn key(folder: &Path, release: &str, modules: &BTreeSet<String>) -> Result<String, KernelError> {
    let mut hasher = blake3::Hasher::new();
    let mut add = |name: &str, bytes: &[u8]| {
        hasher.update(name.as_bytes()).update(b"\n").update(blake3::hash(bytes).as_bytes());
    };
    add("dayfly modules 3", release.as_bytes());
    let mut all_bytes = 0;
    for path in modules {
        let bytes = packed(folder, path, MAX_FILE_BYTES)?;
        all_bytes += bytes.len() as u64;
        if all_bytes > MAX_BYTES {
            let expected = format!("modules of at most {MAX_BYTES} bytes in all");
            let (path, got) = (folder.to_owned(), format!("more at {path:?}"));
            return Err(BootError::Tree { path, expected, got }.into());
        }
        add(path, &bytes);
    }
    for (name, bytes) in lists(folder)? {
        add(name, &bytes);
    }
    Ok(hasher.finalize().to_hex()[..32].to_owned())
}

/// Copies the modules below `work`, has depmod make its lists, and returns all of it as a tree.
fn tree(
    folder: &Path,
    release: &str,
    modules: &BTreeSet<String>,
    work: &Path,
) -> Result<Tree, KernelError> {
    let base = work.join("copied");
    let place = base.join("lib/modules").join(release);
    let mut tree = Tree::new(MAX_NAMES);
    for path in modules {
        put(&mut tree, &place, path, Some(&packed(folder, path, MAX_FILE_BYTES)?))?;
    }
    for (name, bytes) in lists(folder)? {
        put(&mut tree, &place, name, Some(&bytes))?;
    }
    let mut depmod = tool::tool("depmod");
    // The host's depmod.d would change the lists, and is not part of the cache key.
    depmod.arg("-b").arg(&base).args(["-C", "/dev/null", release]);
    tool::run(depmod, "kmod", |_| ())?;
    let mut made = BTreeSet::new();
    for entry in std::fs::read_dir(&place).map_err(on("read", &place))? {
        let entry = entry.map_err(on("read", &place))?;
        let is_file = entry.file_type().map_err(on("read", &place))?.is_file();
        made.extend(is_file.then(|| entry.file_name().to_string_lossy().into_owned()));
    }
    for name in made {
        put(&mut tree, &place, &name, None)?;
    }
    Ok(tree)
}

/// Puts the file `place`/`path` into the tree; writes its `bytes` first, if there are any.
fn put(tree: &mut Tree, place: &Path, path: &str, bytes: Option<&[u8]>) -> Result<(), KernelError> {
    let file = place.join(path);
    if let Some(bytes) = bytes {
        let parent = file.parent().unwrap_or(place);
        std::fs::create_dir_all(parent).map_err(on("create", parent))?;
        std::fs::write(&file, bytes).map_err(on("write", &file))?;
    }
    let size_bytes = std::fs::metadata(&file).map_err(on("read", &file))?.len();
    let content = Content {
        path: (size_bytes > 0).then_some(file),
        size_bytes,
        data_bytes: size_bytes.next_multiple_of(4096),
    };
    let refused = |why: Refusal| BuildError::Verify { expected: why.expected, got: why.got };
    tree.put_at(path.as_bytes(), Kind::File(content), Meta::root(0o644)).map_err(refused)?;
    Ok(())
}
