//! Root disks: from a folder, a docker archive, an OCI layout or Debian's archive to a raw ext4 file.

mod blobs;
mod debian;
mod error;
mod ext4;
mod folder;
mod layer;
mod oci;
mod prepare;
mod spool;
mod tarstream;
mod tree;

#[cfg(test)]
mod tests;

pub use error::BuildError;

use crate::manifest::{ImageManifest, RunConfig, Sealed};
use crate::{cache, sparse, staging};
use blobs::Blobs;
use dayfly_units::Bytes;
use error::on;
use spool::Spool;
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};
use tree::Tree;

/// Name of the disk in its folder.
pub const DISK_NAME: &str = "root.ext4";
/// Name of a manifest in its folder.
pub const MANIFEST_NAME: &str = "manifest";

/// Where a root disk comes from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Source {
    /// A folder of the host.
    Folder(PathBuf),
    /// What `docker save` wrote, old or new style, or an OCI layout in an archive; compressed or not.
    Archive {
        /// The archive.
        path: PathBuf,
        /// Which image, where it holds several: a tag, or an id of at least 12 digits.
        image: Option<String>,
    },
    /// The folder of an OCI image layout.
    OciLayout {
        /// The folder.
        path: PathBuf,
        /// Which image, where it holds several: `org.opencontainers.image.ref.name`, or a digest.
        image: Option<String>,
    },
    /// Debian's archive.
    Debian(Debian),
}

/// A Debian system to bootstrap.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Debian {
    /// `bookworm`, for instance.
    pub suite: String,
    /// Packages besides the essential ones and apt.
    pub include: Vec<String>,
    /// Whether to build anew although the cache has it.
    pub refresh: bool,
}

impl Source {
    /// What is at `path`: a folder with `oci-layout` in it, another folder, or an archive.
    ///
    /// # Errors
    /// [`BuildError::Io`] where there is nothing, [`BuildError::UnknownSource`] where there is something else.
    pub fn detect(path: &Path, image: Option<String>) -> Result<Self, BuildError> {
        let path = path.to_owned();
        let kind = path.metadata().map_err(on("open", &path))?;
        if kind.is_dir() {
            let layout = path.join("oci-layout").is_file() && path.join("index.json").is_file();
            return Ok(if layout { Self::OciLayout { path, image } } else { Self::Folder(path) });
        }
        if kind.is_file() {
            return Ok(Self::Archive { path, image });
        }
        Err(BuildError::UnknownSource { path, got: "neither a file nor a folder".to_owned() })
    }

    /// The source in words, for the manifest.
    #[must_use]
    pub fn describe(&self) -> String {
        let named = |kind: &str, path: &Path, image: &Option<String>| {
            let image = image.as_ref().map(|i| format!(" {i}")).unwrap_or_default();
            format!("{kind} {}{image}", path.display())
        };
        let text = match self {
            Self::Folder(path) => format!("folder {}", path.display()),
            Self::Archive { path, image } => named("archive", path, image),
            Self::OciLayout { path, image } => named("oci", path, image),
            Self::Debian(d) => format!("debian {} {}", d.suite, d.include.join(",")).trim_end().to_owned(),
        };
        text.chars().filter(|c| !c.is_control()).take(1000).collect()
    }
}

/// How large the disk is. It is sparse: what is not written takes no room.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Size {
    /// Twice the content, at least 2 GiB.
    #[default]
    Auto,
    /// The content and so much room for more.
    Free(Bytes),
    /// So much in all, rounded up to 4 KiB.
    Total(Bytes),
}

/// What a hostile image may use up before it is refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Entries of all layers together.
    pub max_entries: u64,
    /// Bytes of all files together, in pages that are not zero.
    pub max_content_bytes: u64,
}

impl Default for Limits {
    fn default() -> Self {
        Self { max_entries: 2_000_000, max_content_bytes: 64 << 30 }
    }
}

/// How far a build is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Progress<'a> {
    /// What is being done.
    pub step: &'a str,
    /// Bytes read in this step, where that is known; otherwise 0.
    pub done_bytes: u64,
}

/// How to build.
#[derive(Debug, Clone, Default)]
pub struct BuildOptions {
    /// How large the disk is.
    pub size: Size,
    /// What is too much.
    pub limits: Limits,
    /// Folder for the cache and for work in progress; [`crate::cache::default_folder`] where none is given.
    pub cache: Option<PathBuf>,
}

/// A finished root disk.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BuiltImage {
    /// The raw ext4 file: sparse, read-only, possibly a hard link into the cache. Never write to it.
    pub root_ext4: PathBuf,
    /// What it is; also in the file `manifest` beside it.
    pub manifest: ImageManifest,
    /// Whether it came from the cache.
    pub cached: bool,
}

/// Builds the root disk of `source` as `out_dir/root.ext4` and `out_dir/manifest`.
///
/// Nothing is mounted, no privilege is needed (but for mmdebstrap what it needs), and nothing of an image is made on
/// the host under a name that the image chose. Files in `out_dir` of those names are replaced when all is done.
///
/// # Errors
/// [`BuildError`]; nothing is left behind then.
pub fn build(
    source: &Source,
    options: &BuildOptions,
    out_dir: &Path,
    progress: &mut dyn FnMut(Progress<'_>),
) -> Result<BuiltImage, BuildError> {
    let cache_dir = options.cache.clone().unwrap_or_else(cache::default_folder);
    // The staging folder's path ends up in a script whose words may not break lines.
    std::fs::create_dir_all(&cache_dir).map_err(on("create", &cache_dir))?;
    let cache_dir = std::fs::canonicalize(&cache_dir).map_err(on("open", &cache_dir))?;
    let work = staging::Staging::new(&cache_dir).map_err(on("make a staging folder in", &cache_dir))?;
    let mut _lock = None;
    let keep = match source {
        Source::Debian(debian) => {
            debian::check(debian)?;
            let key = debian::cache_key(debian, options.size)?;
            let entry = cache_dir.join("images").join(&key);
            let waiting =
                || progress(Progress { step: "waiting for another build of the same image", done_bytes: 0 });
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
    let geometry = ext4::geometry(&tree, options.size)?;
    let scratch = work.path().join("script");
    std::fs::create_dir(&scratch).map_err(on("create", &scratch))?;
    ext4::write(&tree, geometry, &disk, &scratch, progress)?;
    progress(Progress { step: "hashing the disk", done_bytes: 0 });
    let summary = File::open(&disk).and_then(|f| sparse::summarise(&f)).map_err(on("read", &disk))?;
    let manifest = ImageManifest {
        digest: summary.digest.to_hex().to_string(),
        size_bytes: summary.size_bytes,
        content_bytes: summary.content_bytes,
        source: source.describe(),
        created_s: now_s(),
        run,
    };
    let folder = keep.as_deref().unwrap_or(out_dir);
    staging::deliver(&disk, folder, DISK_NAME, false).map_err(on("write", folder))?;
    write_manifest(&manifest, work.path(), folder)?;
    if keep.is_some() {
        return hand_out(folder, manifest, out_dir, false);
    }
    Ok(BuiltImage { root_ext4: out_dir.join(DISK_NAME), manifest, cached: false })
}

fn write_manifest<M: Sealed>(manifest: &M, staging: &Path, folder: &Path) -> Result<(), BuildError> {
    let bytes = manifest
        .to_bytes()
        .map_err(|e| BuildError::Verify { expected: "a manifest".to_owned(), got: e.to_string() })?;
    staging::deliver_bytes(&bytes, staging, folder, MANIFEST_NAME).map_err(on("write", folder))?;
    Ok(())
}

/// The manifest of a cache entry, if the entry is whole: its disk is read and hashed before it is used again.
fn cached(entry: &Path, progress: &mut dyn FnMut(Progress<'_>)) -> Option<ImageManifest> {
    let manifest = ImageManifest::load(&entry.join(MANIFEST_NAME)).ok()?;
    progress(Progress { step: "checking the cached disk", done_bytes: 0 });
    let now = File::open(entry.join(DISK_NAME)).and_then(|f| sparse::summarise(&f)).ok()?;
    let same = now.digest.to_hex().as_str() == manifest.digest && now.size_bytes == manifest.size_bytes;
    same.then_some(manifest)
}

fn hand_out(
    entry: &Path,
    manifest: ImageManifest,
    out_dir: &Path,
    cached: bool,
) -> Result<BuiltImage, BuildError> {
    let disk = entry.join(DISK_NAME);
    let root_ext4 = staging::deliver(&disk, out_dir, DISK_NAME, true).map_err(on("write", out_dir))?;
    let beside = entry.join(MANIFEST_NAME);
    staging::deliver(&beside, out_dir, MANIFEST_NAME, true).map_err(on("write", out_dir))?;
    Ok(BuiltImage { root_ext4, manifest, cached })
}

/// Seconds since 1970.
pub(crate) fn now_s() -> u64 {
    std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).map_or(0, |d| d.as_secs())
}

fn read(
    source: &Source,
    options: &BuildOptions,
    work: &Path,
    tree: &mut Tree,
    progress: &mut dyn FnMut(Progress<'_>),
) -> Result<RunConfig, BuildError> {
    let content = work.join("content");
    std::fs::create_dir(&content).map_err(on("create", &content))?;
    match source {
        Source::Folder(path) => {
            let mut spool = Spool::new(&content, options.limits, progress);
            folder::read(tree, &mut spool, path)?;
            Ok(RunConfig::default())
        }
        Source::OciLayout { path, image } => {
            let mut spool = Spool::new(&content, options.limits, progress);
            oci::layout(&Blobs::Folder(path.clone()), path, image.as_deref(), tree, &mut spool)
        }
        Source::Archive { path, image } => {
            let plain = plain_archive(path, work, options.limits, progress)?;
            let blobs = Blobs::archive(plain.as_deref().unwrap_or(path))?;
            let mut spool = Spool::new(&content, options.limits, progress);
            if blobs.has("manifest.json") {
                oci::docker(&blobs, path, image.as_deref(), tree, &mut spool)
            } else if blobs.has("index.json") {
                oci::layout(&blobs, path, image.as_deref(), tree, &mut spool)
            } else {
                let got = "an archive with neither manifest.json nor index.json".to_owned();
                Err(BuildError::UnknownSource { path: path.clone(), got })
            }
        }
        Source::Debian(debian) => {
            let (tar, tmp) = (work.join("debian.tar"), work.join("tmp"));
            std::fs::create_dir(&tmp).map_err(on("create", &tmp))?;
            debian::bootstrap(debian, &tar, &tmp, progress)?;
            let mut spool = Spool::new(&content, options.limits, progress);
            spool.begin("unpacking the bootstrapped system".to_owned());
            let file = File::open(&tar).map_err(on("open", &tar))?;
            let reader = std::io::BufReader::with_capacity(256 << 10, file);
            layer::apply(tree, &mut spool, reader, &tar.display().to_string())?;
            std::fs::remove_file(&tar).map_err(on("remove", &tar))?;
            Ok(RunConfig::default())
        }
    }
}

/// `docker save | gzip`: its members cannot be found without unpacking the whole, so that is done once.
fn plain_archive(
    path: &Path,
    work: &Path,
    limits: Limits,
    progress: &mut dyn FnMut(Progress<'_>),
) -> Result<Option<PathBuf>, BuildError> {
    let mut file = File::open(path).map_err(on("open", path))?;
    let mut head = [0; 6];
    let have = file.read(&mut head).map_err(on("read", path))?;
    let known: [&[u8]; 3] = [&[0x1f, 0x8b], &[0x28, 0xb5, 0x2f, 0xfd], &[0xfd, b'7', b'z', b'X', b'Z', 0]];
    if !known.iter().any(|magic| head[..have].starts_with(magic)) {
        return Ok(None);
    }
    progress(Progress { step: "uncompressing the archive", done_bytes: 0 });
    let file = File::open(path).map_err(on("open", path))?;
    let reader = blobs::decoder(std::io::BufReader::new(file)).map_err(on("read", path))?;
    let target = work.join("archive.tar");
    let mut to = File::create_new(&target).map_err(on("create", &target))?;
    let cap = limits.max_content_bytes.saturating_add(1);
    let bytes = std::io::copy(&mut reader.take(cap), &mut to).map_err(on("uncompress", path))?;
    if bytes == cap {
        return Err(BuildError::Refused {
            layer: path.display().to_string(),
            entry: String::new(),
            at: bytes,
            expected: format!("an archive of at most {} bytes", limits.max_content_bytes),
            got: "more".to_owned(),
        });
    }
    Ok(Some(target))
}
