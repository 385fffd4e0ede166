//! Reads a source into a tree.

use super::blobs::{self, Blobs};
use super::choice::Wanted;
use super::error::{BuildError, on};
use super::spool::Spool;
use super::tree::Tree;
use super::types::{BuildOptions, Limits, Progress, STDIN, Source};
use super::{debian, folder, layer, oci};
use dayfly_units::ImageConfig;
use std::fs::File;
use std::io::{Read, Seek};
use std::path::{Path, PathBuf};

/// Reads `source` into `tree`. The contents of its files are kept below `work`. Returns the image's
/// start command.
pub(super) fn read(
    source: &Source,
    options: &BuildOptions,
    work: &Path,
    tree: &mut Tree,
    progress: &mut dyn FnMut(Progress<'_>),
) -> Result<ImageConfig, BuildError> {
    let content = work.join("content");
    std::fs::create_dir(&content).map_err(on("create", &content))?;
    let wanted =
        |image| Wanted { image: Option::as_deref(image), cpu_level: options.cpu_level.max(1) };
    match source {
        Source::Folder(path) => {
            let mut spool = Spool::new(&content, options.limits, progress);
            folder::read(tree, &mut spool, path)?;
            Ok(ImageConfig::default())
        }
        Source::OciLayout { path, image } => {
            let mut spool = Spool::new(&content, options.limits, progress);
            oci::layout(&Blobs::Folder(path.clone()), path, wanted(image), tree, &mut spool)
        }
        Source::Pulled { layout, image, .. } => {
            let mut spool = Spool::new(&content, options.limits, progress);
            let blobs = Blobs::Pulled(layout.clone(), image.clone());
            oci::layout(&blobs, Path::new(image), wanted(&None), tree, &mut spool)
        }
        Source::Archive { path, image } | Source::Loaded { path, image, .. } => {
            let plain = plain_archive(path, work, options.limits, progress)?;
            let blobs = Blobs::archive(plain.as_deref().unwrap_or(path))?;
            let mut spool = Spool::new(&content, options.limits, progress);
            if blobs.has("manifest.json") {
                oci::docker(&blobs, path, wanted(image), tree, &mut spool)
            } else if blobs.has("index.json") {
                oci::layout(&blobs, path, wanted(image), tree, &mut spool)
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
            Ok(ImageConfig::default())
        }
    }
}

/// Copies an archive that is compressed (`docker save | gzip`) or a stream. Without that, each
/// access to a member would decompress the whole archive, and a stream could be read only once.
/// Returns `None` if the archive can be read where it is.
pub(super) fn plain_archive(
    path: &Path,
    work: &Path,
    limits: Limits,
    progress: &mut dyn FnMut(Progress<'_>),
) -> Result<Option<PathBuf>, BuildError> {
    let input: Box<dyn Read> = if path.as_os_str() == STDIN {
        Box::new(std::io::stdin().lock())
    } else {
        let mut file = File::open(path).map_err(on("open", path))?;
        if file.metadata().map_err(on("read", path))?.is_file() {
            let mut head = [0; 6];
            let have = file.read(&mut head).map_err(on("read", path))?;
            let known: [&[u8]; 3] =
                [&[0x1f, 0x8b], &[0x28, 0xb5, 0x2f, 0xfd], &[0xfd, b'7', b'z', b'X', b'Z', 0]];
            if !known.iter().any(|magic| head[..have].starts_with(magic)) {
                return Ok(None);
            }
            file.rewind().map_err(on("read", path))?;
        }
        Box::new(file)
    };
    progress(Progress { step: "reading the archive", done_bytes: 0 });
    let reader = blobs::decoder(std::io::BufReader::new(input)).map_err(on("read", path))?;
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
