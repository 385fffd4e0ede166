//! What a root disk is built from, and the result.

use super::error::{BuildError, on};
use crate::manifest::ImageManifest;
use dayfly_units::Bytes;
use std::io::IsTerminal;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};

/// The path that means standard input.
pub(super) const STDIN: &str = "-";

/// The source of a root disk.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Source {
    /// A folder of the host.
    Folder(PathBuf),
    /// An archive of `docker save`, old or new style, or an OCI layout in an archive. The archive
    /// may be compressed.
    Archive {
        /// Path of the archive, which may be a pipe; `-`: standard input.
        path: PathBuf,
        /// Selects an image if the archive holds several: a tag, or at least 12 digits of an image
        /// id.
        image: Option<String>,
    },
    /// An image of a [`super::Listing`].
    Loaded {
        /// Path of the uncompressed archive.
        path: PathBuf,
        /// Selects the image, as in an archive.
        image: Option<String>,
        /// Path of the archive as it was, for people.
        archive: PathBuf,
    },
    /// The folder of an OCI image layout.
    OciLayout {
        /// Path of the folder.
        path: PathBuf,
        /// Selects an image if the layout holds several: `org.opencontainers.image.ref.name`, or a
        /// digest.
        image: Option<String>,
    },
    /// An image that [`crate::Pull`] has fetched.
    Pulled {
        /// The folder of an OCI layout with this image only.
        layout: PathBuf,
        /// The image's reference, with the digest of what the registry has for it.
        image: String,
        /// The digest of the image's manifest.
        manifest: String,
    },
    /// A Debian system, bootstrapped from Debian's archive.
    Debian(Debian),
}

/// A Debian system to bootstrap.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Debian {
    /// Name of the suite, for instance `bookworm`.
    pub suite: String,
    /// Packages besides the essential ones and apt.
    pub include: Vec<String>,
    /// If set, the disk is built again although the cache holds it.
    pub refresh: bool,
}

impl Source {
    /// Detects the kind of `path`: a folder with `oci-layout` and `index.json` in it, another
    /// folder, or an archive, which may be a pipe; `-` is standard input.
    ///
    /// # Errors
    /// [`BuildError::Io`] if `path` cannot be read, [`BuildError::UnknownSource`] if it is neither
    /// a folder nor an archive.
    pub fn detect(path: &Path, image: Option<String>) -> Result<Self, BuildError> {
        let path = path.to_owned();
        if path.as_os_str() == STDIN {
            if std::io::stdin().is_terminal() {
                return Err(BuildError::UnknownSource { path, got: "a terminal".to_owned() });
            }
            return Ok(Self::Archive { path, image });
        }
        let kind = path.metadata().map_err(on("open", &path))?;
        if kind.is_dir() {
            let layout = path.join("oci-layout").is_file() && path.join("index.json").is_file();
            return Ok(if layout { Self::OciLayout { path, image } } else { Self::Folder(path) });
        }
        let file = kind.file_type();
        if file.is_file() || file.is_fifo() {
            return Ok(Self::Archive { path, image });
        }
        Err(BuildError::UnknownSource { path, got: "neither a file nor a folder".to_owned() })
    }

    /// Describes the source for the manifest.
    #[must_use]
    pub fn describe(&self) -> String {
        let named = |kind: &str, path: &Path, image: &Option<String>| {
            let image = image.as_ref().map(|i| format!(" {i}")).unwrap_or_default();
            format!("{kind} {}{image}", path.display())
        };
        let text = match self {
            Self::Folder(path) => format!("folder {}", path.display()),
            Self::Archive { path, image } | Self::Loaded { archive: path, image, .. } => {
                named("archive", path, image)
            }
            Self::OciLayout { path, image } => named("oci", path, image),
            Self::Pulled { image, manifest, .. } => format!("registry {image} {manifest}"),
            Self::Debian(d) => {
                format!("debian {} {}", d.suite, d.include.join(",")).trim_end().to_owned()
            }
        };
        text.chars().filter(|c| !c.is_control()).take(1000).collect()
    }
}

/// The size of a disk. The disk is sparse: blocks that are never written take no space.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Size {
    /// Twice the content, at least 2 GiB.
    #[default]
    Auto,
    /// The content, and this many free bytes.
    Free(Bytes),
    /// This many bytes in total, rounded up to 4 KiB.
    Total(Bytes),
}

/// Resource limits for an image. An image that exceeds one is refused, because an image may be
/// hostile.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Upper limit for the entries of all layers together.
    pub max_entries: u64,
    /// Upper limit for the bytes of all files together, counted in pages that are not zero.
    pub max_content_bytes: u64,
}

impl Default for Limits {
    fn default() -> Self {
        Self { max_entries: 2_000_000, max_content_bytes: 64 << 30 }
    }
}

/// A progress report of a build.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Progress<'a> {
    /// Name of the current step.
    pub step: &'a str,
    /// Bytes read in this step; 0 if the number is unknown.
    pub done_bytes: u64,
}

/// Options of [`build`].
#[derive(Debug, Clone, Default)]
pub struct BuildOptions {
    /// The highest level of x86-64 that guests' CPUs have, 1 to 4 (0: 1). Of an image for several
    /// levels, the highest up to this one is taken.
    pub cpu_level: u8,
    /// Size of the disk.
    pub size: Size,
    /// Resource limits for the image.
    pub limits: Limits,
    /// Folder for the cache and for staging; if `None`, [`crate::cache::default_folder`].
    pub cache: Option<PathBuf>,
}

/// A finished root disk.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BuiltImage {
    /// Path of the raw ext4 file, which is sparse and read-only. The file may be a hard link into
    /// the cache, so it must never be written.
    pub root_ext4: PathBuf,
    /// The manifest, which is also in the file `manifest` beside the disk.
    pub manifest: ImageManifest,
    /// Whether the disk comes from the cache.
    pub cached: bool,
}
