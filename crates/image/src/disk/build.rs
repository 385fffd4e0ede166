//! Builds a root disk from the tree of its source, or takes it from the cache.

use super::error::{BuildError, on};
use super::read::read;
use super::tree::Tree;
use super::types::{BuildOptions, BuiltImage, Progress, Size, Source};
use super::{debian, ext4, prepare};
use crate::manifest::{ImageManifest, MANIFEST_NAME, Sealed, now_s};
use crate::{cache, staging};
use dayfly_units::{Bytes, ImageConfig, sparse};
use std::fs::File;
use std::path::Path;

/// File name of the disk in its output folder.
pub const DISK_NAME: &str = "root.ext4";

/// Bytes without content on a disk that nothing is written to: the estimate of what content needs
/// is not exact.
const ROOM_BYTES: u64 = 16 << 20;

/// Builds the root disk of `source` as `out_dir/root.ext4` and `out_dir/manifest`.
///
/// The build mounts nothing and needs no privilege, except those that mmdebstrap needs. It creates
/// no file on the host under a name that the image chose. Existing files with the two output names
/// are replaced when the build is complete.
///
/// # Errors
/// [`BuildError`]; a failed build leaves nothing behind.
pub fn build(
    source: &Source,
    options: &BuildOptions,
    out_dir: &Path,
    progress: &mut dyn FnMut(Progress<'_>),
) -> Result<BuiltImage, BuildError> {
    let cache_dir = options.cache.clone().unwrap_or_else(cache::default_folder);
    // The path of the staging folder appears in the debugfs script, whose words must not contain
    // line breaks.
    std::fs::create_dir_all(&cache_dir).map_err(on("create", &cache_dir))?;
    let cache_dir = std::fs::canonicalize(&cache_dir).map_err(on("open", &cache_dir))?;
    let work =
        staging::Staging::new(&cache_dir).map_err(on("make a staging folder in", &cache_dir))?;
    let mut _lock = None;
    let keep = match source {
        Source::Debian(debian) => {
            debian::check(debian)?;
            let key = debian::cache_key(debian, options.size)?;
            let entry = cache_dir.join("images").join(&key);
            let waiting = || {
                progress(Progress {
                    step: "waiting for another build of the same image",
                    done_bytes: 0,
                })
            };
            _lock = Some(staging::lock_entry(&entry, waiting).map_err(on("lock", &entry))?);
            if !debian.refresh
                && let Some(manifest) = cached(&entry, progress)
            {
                return hand_out(&entry, manifest, out_dir, true);
            }
            Some(entry)
        }
        _ => None,
    };
    let mut tree = Tree::new(usize::try_from(options.limits.max_entries).unwrap_or(usize::MAX));
    let run = read(source, options, work.path(), &mut tree, progress)?;
    prepare::prepare(&mut tree, work.path(), matches!(source, Source::Debian(_)))?;

    let disk = work.path().join(DISK_NAME);
    let manifest = write(&tree, options.size, source.describe(), run, &disk, progress)?;
    let folder = keep.as_deref().unwrap_or(out_dir);
    staging::deliver(&disk, folder, DISK_NAME, false).map_err(on("write", folder))?;
    write_manifest(&manifest, work.path(), folder)?;
    if keep.is_some() {
        return hand_out(folder, manifest, out_dir, false);
    }
    Ok(BuiltImage { root_ext4: out_dir.join(DISK_NAME), manifest, cached: false })
}

/// Writes `tree` into the new file `disk`, and makes its manifest. `disk`'s folder takes scripts.
fn write(
    tree: &Tree,
    size: Size,
    source: String,
    run: ImageConfig,
    disk: &Path,
    progress: &mut dyn FnMut(Progress<'_>),
) -> Result<ImageManifest, BuildError> {
    let geometry = ext4::geometry(tree, size)?;
    let scratch = disk.with_file_name("script");
    std::fs::create_dir(&scratch).map_err(on("create", &scratch))?;
    ext4::write(tree, geometry, disk, &scratch, progress)?;
    progress(Progress { step: "hashing the disk", done_bytes: 0 });
    let summary = File::open(disk).and_then(|f| sparse::digest(&f)).map_err(on("read", disk))?;
    Ok(ImageManifest {
        digest: summary.digest.to_string(),
        size_bytes: summary.bytes,
        content_bytes: summary.data_bytes,
        source,
        created_s: now_s(),
        run,
    })
}

/// Takes the disk of the cache entry `entry` if it is intact. Otherwise writes the tree that `make`
/// returns into it. Unlike [`build`], adds no folder to the tree. `work` is an empty folder.
pub(crate) fn plain<E: From<BuildError>>(
    entry: &Path,
    work: &Path,
    source: String,
    out_dir: &Path,
    make: impl FnOnce() -> Result<Tree, E>,
) -> Result<BuiltImage, E> {
    if let Some(manifest) = cached(entry, &mut |_| ()) {
        return Ok(hand_out(entry, manifest, out_dir, true)?);
    }
    let disk = work.join(DISK_NAME);
    let (run, size) = (ImageConfig::default(), Size::Free(Bytes(ROOM_BYTES)));
    let manifest = write(&make()?, size, source, run, &disk, &mut |_| ())?;
    staging::deliver(&disk, entry, DISK_NAME, false).map_err(on("write", entry))?;
    write_manifest(&manifest, work, entry)?;
    Ok(hand_out(entry, manifest, out_dir, false)?)
}

fn write_manifest<M: Sealed>(
    manifest: &M,
    staging: &Path,
    folder: &Path,
) -> Result<(), BuildError> {
    let bytes = manifest.to_bytes().map_err(|e| BuildError::Verify {
        expected: "a manifest".to_owned(),
        got: e.to_string(),
    })?;
    staging::deliver_bytes(&bytes, staging, folder, MANIFEST_NAME).map_err(on("write", folder))?;
    Ok(())
}

/// The manifest of a cache entry, if the entry is intact. The cached disk is read and hashed on
/// each use.
fn cached(entry: &Path, progress: &mut dyn FnMut(Progress<'_>)) -> Option<ImageManifest> {
    let manifest = ImageManifest::load(&entry.join(MANIFEST_NAME)).ok()?;
    progress(Progress { step: "checking the cached disk", done_bytes: 0 });
    let now = File::open(entry.join(DISK_NAME)).and_then(|f| sparse::digest(&f)).ok()?;
    let same = now.digest.to_string() == manifest.digest && now.bytes == manifest.size_bytes;
    same.then_some(manifest)
}

fn hand_out(
    entry: &Path,
    manifest: ImageManifest,
    out_dir: &Path,
    cached: bool,
) -> Result<BuiltImage, BuildError> {
    let disk = entry.join(DISK_NAME);
    let root_ext4 =
        staging::deliver(&disk, out_dir, DISK_NAME, true).map_err(on("write", out_dir))?;
    let beside = entry.join(MANIFEST_NAME);
    staging::deliver(&beside, out_dir, MANIFEST_NAME, true).map_err(on("write", out_dir))?;
    Ok(BuiltImage { root_ext4, manifest, cached })
}
