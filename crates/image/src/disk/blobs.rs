//! Where an image's documents and layers are read from: an OCI layout's folder, or an archive without unpacking it.

use super::error::{BuildError, on};
use super::layer::tar_error;
use super::tarstream::TarStream;
use super::tree::{components, show};
use sha2::{Digest, Sha256};
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, BufReader, Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};

/// Most bytes of a JSON document.
const MAX_DOCUMENT_BYTES: u64 = 4 << 20;
/// Most members of an archive of an image.
const MAX_MEMBERS: usize = 100_000;

/// Named byte strings.
pub enum Blobs {
    /// Files of a folder.
    Folder(PathBuf),
    /// Members of a tar archive: where their data begins, and how long it is.
    Archive(PathBuf, BTreeMap<Vec<u8>, Member>),
}

/// A member of an archive.
pub enum Member {
    /// Offset and length of its data.
    Data(u64, u64),
    /// Another name (old `docker save` has links where two images share a layer).
    Link(Vec<u8>),
}

impl Blobs {
    /// Reads the table of contents of the uncompressed archive at `path`.
    pub fn archive(path: &Path) -> Result<Self, BuildError> {
        let file = File::open(path).map_err(on("open", path))?;
        let label = path.display().to_string();
        let mut stream = TarStream::new(BufReader::with_capacity(64 << 10, file));
        let mut members = BTreeMap::new();
        while let Some(entry) = stream.next().map_err(|e| tar_error(&label, 0, e))? {
            let name = normal(&entry.path);
            let folder = name.iter().rposition(|b| *b == b'/').map_or(&[][..], |i| &name[..i]);
            let member = match entry.kind {
                tar::EntryType::Regular | tar::EntryType::Continuous => {
                    Member::Data(stream.position(), entry.size_bytes)
                }
                tar::EntryType::Symlink => Member::Link(normal(&[folder, b"/", &entry.link].concat())),
                tar::EntryType::Link => Member::Link(normal(&entry.link)),
                _ => continue,
            };
            if members.len() >= MAX_MEMBERS {
                return Err(BuildError::Refused {
                    layer: label,
                    entry: show(&entry.path),
                    at: entry.at,
                    expected: format!("at most {MAX_MEMBERS} members"),
                    got: "more".to_owned(),
                });
            }
            members.insert(name, member);
        }
        Ok(Self::Archive(path.to_owned(), members))
    }

    /// What errors call the member `name`.
    pub fn label(&self, name: &str) -> String {
        match self {
            Self::Folder(path) => path.join(name).display().to_string(),
            Self::Archive(path, _) => format!("{}: {name}", path.display()),
        }
    }

    /// Whether there is a member `name`.
    pub fn has(&self, name: &str) -> bool {
        match self {
            Self::Folder(path) => path.join(name).is_file(),
            Self::Archive(_, members) => members.contains_key(name.as_bytes()),
        }
    }

    /// The bytes of `name`, and how many they are.
    pub fn open(&self, name: &str) -> Result<(Box<dyn Read>, u64), BuildError> {
        let missing = || BuildError::Io {
            what: "open",
            path: PathBuf::from(self.label(name)),
            source: io::Error::from(io::ErrorKind::NotFound),
        };
        match self {
            Self::Folder(folder) => {
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

    /// A JSON document, whole.
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
            return Err(document(&self.label(name), "length", format!("{bytes} bytes"), data.len()));
        }
        Ok(data)
    }
}

/// A [`BuildError::Document`].
pub fn document(file: &str, place: impl ToString, expected: impl ToString, got: impl ToString) -> BuildError {
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

/// A member's name without `.`, empty components, and with `..` undone; it names a member of the archive, not a file.
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

/// Counts and hashes what is read through it.
pub struct Sha<R> {
    inner: R,
    hasher: Sha256,
    bytes: u64,
}

impl<R: Read> Sha<R> {
    /// Over `inner`.
    pub fn new(inner: R) -> Self {
        Self { inner, hasher: Sha256::new(), bytes: 0 }
    }

    /// Reads what is left (at most `cap` bytes more), and gives the digest as `sha256:…` and the length.
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

/// `sha256:` and the digest of `bytes`.
pub fn sha256(bytes: &[u8]) -> String {
    format!("sha256:{}", hex::encode(Sha256::digest(bytes)))
}

/// Undoes gzip, zstd or xz, told by their first bytes as container runtimes do.
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
        [0xfd, b'7', b'z', b'X', b'Z', 0] => Box::new(liblzma::read::XzDecoder::new_multi_decoder(whole)),
        _ => Box::new(whole),
    })
}
