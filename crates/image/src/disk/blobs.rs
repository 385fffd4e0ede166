//! Reads an image's documents and layers from the folder of an OCI layout, or from an archive
//! without unpacking the archive.

use super::error::{BuildError, on};
use super::layer::archive_error;
use dayfly_archive::path::components;
use dayfly_archive::{Kind, Limits, Reader, Refusal};
use sha2::{Digest, Sha256};
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, BufReader, Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};

/// Upper limit for the bytes of a JSON document.
const MAX_DOCUMENT_BYTES: u64 = 4 << 20;
/// Upper limit for the entries of an image's archive.
const MAX_MEMBERS: u64 = 100_000;

/// A source of named byte strings.
pub enum Blobs {
    /// Files of a folder.
    Folder(PathBuf),
    /// Files of a folder that were pulled, and the image's name for errors.
    Pulled(PathBuf, String),
    /// Members of a tar archive: the archive's path, and each member by its normalised name.
    Archive(PathBuf, BTreeMap<Vec<u8>, Member>),
}

/// A member of an archive.
pub enum Member {
    /// Offset and length of the member's data, in bytes of the archive.
    Data(u64, u64),
    /// The name of another member. Archives of old `docker save` hold links if two images share a
    /// layer.
    Link(Vec<u8>),
}

impl Blobs {
    /// Reads the table of contents of the uncompressed archive at `path`.
    pub fn archive(path: &Path) -> Result<Self, BuildError> {
        let file = File::open(path).map_err(on("open", path))?;
        let label = path.display().to_string();
        let limits = Limits { max_entries: MAX_MEMBERS, ..Limits::NONE };
        let mut archive = Reader::new(BufReader::with_capacity(64 << 10, file), limits);
        let mut members = BTreeMap::new();
        while let Some(entry) = archive.next_entry().map_err(|e| archive_error(&label, e))? {
            let name = normal(&entry.head.path);
            let folder = name.iter().rposition(|b| *b == b'/').map_or(&[][..], |i| &name[..i]);
            let link = &entry.head.link;
            let member = match (entry.head.kind, entry.plain_bytes()) {
                (Kind::File, Some(bytes)) => Member::Data(archive.position(), bytes),
                (Kind::File, None) => {
                    let (expected, got) =
                        ("a file as it is".to_owned(), "a sparse file".to_owned());
                    return Err(archive_error(&label, entry.refused(Refusal { expected, got })));
                }
                (Kind::Symlink, _) => Member::Link(normal(&[folder, b"/", link].concat())),
                (Kind::HardLink, _) => Member::Link(normal(link)),
                _ => continue,
            };
            members.insert(name, member);
        }
        Ok(Self::Archive(path.to_owned(), members))
    }

    /// The member's name for error messages, with the path of its folder or archive.
    pub fn label(&self, name: &str) -> String {
        match self {
            Self::Folder(path) => path.join(name).display().to_string(),
            Self::Pulled(_, image) => format!("{image}: {name}"),
            Self::Archive(path, _) => format!("{}: {name}", path.display()),
        }
    }

    /// Whether a member is called `name`.
    pub fn has(&self, name: &str) -> bool {
        match self {
            Self::Folder(path) | Self::Pulled(path, _) => path.join(name).is_file(),
            Self::Archive(_, members) => members.contains_key(name.as_bytes()),
        }
    }

    /// A reader of the member `name`, and the member's length in bytes.
    pub fn open(&self, name: &str) -> Result<(Box<dyn Read>, u64), BuildError> {
        let missing = || BuildError::Io {
            what: "open",
            path: PathBuf::from(self.label(name)),
            source: io::Error::from(io::ErrorKind::NotFound),
        };
        match self {
            Self::Folder(folder) | Self::Pulled(folder, _) => {
                let path = folder.join(name);
                let file = File::open(&path).map_err(on("open", &path))?;
                let bytes = file.metadata().map_err(on("stat", &path))?;
                if !bytes.is_file() {
                    return Err(missing());
                }
                Ok((Box::new(BufReader::with_capacity(256 << 10, file)), bytes.len()))
            }
            Self::Archive(path, members) => {
                let mut at = normal(name.as_bytes());
                for _ in 0..8 {
                    match members.get(&at) {
                        Some(Member::Data(offset, bytes)) => {
                            let mut file = File::open(path).map_err(on("open", path))?;
                            file.seek(SeekFrom::Start(*offset)).map_err(on("read", path))?;
                            let reader = BufReader::with_capacity(256 << 10, file.take(*bytes));
                            return Ok((Box::new(reader), *bytes));
                        }
                        Some(Member::Link(to)) => at.clone_from(to),
                        None => break,
                    }
                }
                Err(missing())
            }
        }
    }

    /// Reads a JSON document of at most 4 MiB ([`MAX_DOCUMENT_BYTES`]).
    pub fn document(&self, name: &str) -> Result<Vec<u8>, BuildError> {
        let (reader, bytes) = self.open(name)?;
        if bytes > MAX_DOCUMENT_BYTES {
            return Err(document(
                &self.label(name),
                "length",
                format!("at most {MAX_DOCUMENT_BYTES} bytes"),
                bytes,
            ));
        }
        let mut data = Vec::new();
        reader
            .take(MAX_DOCUMENT_BYTES)
            .read_to_end(&mut data)
            .map_err(on("read", Path::new(&self.label(name))))?;
        if data.len() as u64 != bytes {
            return Err(document(
                &self.label(name),
                "length",
                format!("{bytes} bytes"),
                data.len(),
            ));
        }
        Ok(data)
    }
}

/// Makes a [`BuildError::Document`].
pub fn document(
    file: &str,
    place: impl ToString,
    expected: impl ToString,
    got: impl ToString,
) -> BuildError {
    BuildError::Document {
        file: file.to_owned(),
        place: place.to_string(),
        expected: expected.to_string(),
        got: got.to_string(),
    }
}

/// Decodes a JSON document.
pub fn json<T: serde::de::DeserializeOwned>(file: &str, bytes: &[u8]) -> Result<T, BuildError> {
    serde_json::from_slice(bytes).map_err(|e| {
        document(file, format!("line {} column {}", e.line(), e.column()), "an image document", e)
    })
}

/// A member's name without `.` and empty components, and with `..` resolved. The name selects a
/// member of the archive, never a file of the host.
fn normal(path: &[u8]) -> Vec<u8> {
    let mut parts: Vec<&[u8]> = Vec::new();
    for part in components(path) {
        if part == b".." {
            parts.pop();
        } else {
            parts.push(part);
        }
    }
    parts.join(&b'/')
}

/// A reader that counts and hashes (SHA-256) the bytes that pass through it.
pub struct Sha<R> {
    inner: R,
    hasher: Sha256,
    bytes: u64,
}

impl<R: Read> Sha<R> {
    /// Wraps `inner`, with nothing counted yet.
    pub fn new(inner: R) -> Self {
        Self { inner, hasher: Sha256::new(), bytes: 0 }
    }

    /// Reads the rest, at most `cap` bytes. Returns the digest as `sha256:…`, and the length of the
    /// whole in bytes.
    pub fn finish(mut self, cap: u64) -> io::Result<(String, u64)> {
        let mut buffer = vec![0; 64 << 10];
        let end = self.bytes.saturating_add(cap);
        while self.read(&mut buffer)? > 0 {
            if self.bytes > end {
                return Err(io::Error::other(format!(
                    "expected its end, got more than {cap} bytes after it"
                )));
            }
        }
        Ok((format!("sha256:{}", hex::encode(self.hasher.finalize())), self.bytes))
    }
}

impl<R: Read> Read for Sha<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let n = self.inner.read(buffer)?;
        self.hasher.update(&buffer[..n]);
        self.bytes += n as u64;
        Ok(n)
    }
}

/// The SHA-256 digest of `bytes`, as `sha256:…`.
pub fn sha256(bytes: &[u8]) -> String {
    format!("sha256:{}", hex::encode(Sha256::digest(bytes)))
}

/// Decompresses gzip, zstd or xz. The first bytes select the format, as in container runtimes; the
/// media type does not.
pub fn decoder<'r, R: Read + 'r>(mut reader: R) -> io::Result<Box<dyn Read + 'r>> {
    let mut head = [0; 6];
    let mut have = 0;
    while have < head.len() {
        match reader.read(&mut head[have..])? {
            0 => break,
            n => have += n,
        }
    }
    let whole = io::Cursor::new(head).take(have as u64).chain(reader);
    Ok(match &head[..have] {
        [0x1f, 0x8b, ..] => Box::new(flate2::read::MultiGzDecoder::new(whole)),
        [0x28, 0xb5, 0x2f, 0xfd, ..] => Box::new(zstd::Decoder::new(whole)?),
        [0xfd, b'7', b'z', b'X', b'Z', 0] => {
            Box::new(liblzma::read::XzDecoder::new_multi_decoder(whole))
        }
        _ => Box::new(whole),
    })
}
