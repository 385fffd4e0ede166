//! The file `format` of a store: the features that the store uses beyond those of its first
//! version, as in the superblock of ext4.
//!
//! | list | a dayfly that does not know one of its features |
//! |---|---|
//! | `incompat` | refuses to open the store |
//! | `ro_compat` | opens the store; it neither publishes nor removes an object |
//! | `compat` | ignores the feature |
//!
//! VMs run in a store that is open with unknown `ro_compat` features: their own layers in `vms/`
//! are no objects.
//!
//! The file is sealed JSON. It is read before any other file of the store except the lock, and
//! before anything is changed. A store without it is one of the first version; it gets the file
//! when it is opened. This version never changes an existing file. A version that adds a feature
//! replaces the file, and keeps what it does not know.

use crate::blob::{Dir, IfTaken, Stage};
use crate::errors::{Damage, IoError, IoResult};
use dayfly_units::sealed::{self, HEADER_BYTES, Magic, SealError};
use serde::{Deserialize, Serialize};
use std::io::{self, Read};
use std::path::{Path, PathBuf};

/// The name of the file.
pub(crate) const FILE: &str = "format";
const MAGIC: Magic = *b"DFstore\n";
const VERSION: u32 = 1;
/// The longest file without its seal, in bytes.
const MAX_BYTES: u64 = 64 << 10;
/// The longest name of a feature, in bytes.
const MAX_NAME_BYTES: usize = 64;

/// The features that this version knows. Each is added with the change that needs it.
const INCOMPAT: &[&str] = &[];
const RO_COMPAT: &[&str] = &[];

/// What the user can do about a store of a newer version.
const NEXT: &str =
    "start a dayflyd of the version that made it, or choose another folder (--state)";

/// The features of a store.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Format {
    incompat: Vec<String>,
    ro_compat: Vec<String>,
    compat: Vec<String>,
    /// The version of dayfly that wrote the file, for people.
    written_by: String,
}

/// Why a store's format does not allow to open it.
#[derive(Debug, thiserror::Error)]
pub enum FormatError {
    /// The store uses features without which its files mean something else.
    #[error(
        "{}: incompat: expected only features that dayfly {} knows ({}), got {}; {NEXT}",
        file.display(),
        env!("CARGO_PKG_VERSION"),
        listed(INCOMPAT),
        listed(got)
    )]
    Unknown {
        /// The file `format`.
        file: PathBuf,
        /// The unknown features.
        got: Vec<String>,
    },
    /// The file has another version.
    #[error("{}: {error}; {NEXT}", file.display())]
    Version {
        /// The file `format`.
        file: PathBuf,
        /// The version expected and the version found.
        error: SealError,
    },
    /// The file is damaged.
    #[error(
        "{0}; no other file of the store was opened; put the file back from a copy of the store, \
         or remove it if no newer dayfly has used the store"
    )]
    Damage(Damage),
    /// The host could not read or write the file.
    #[error(transparent)]
    Io(#[from] IoError),
}

/// Names for an error.
fn listed(names: &[impl AsRef<str>]) -> String {
    if names.is_empty() {
        return "none".to_owned();
    }
    names.iter().map(AsRef::as_ref).collect::<Vec<_>>().join(", ")
}

impl Format {
    /// The format of a store that this version makes.
    pub(crate) fn current() -> Self {
        let names = |known: &[&str]| known.iter().map(|&name| name.to_owned()).collect();
        Self {
            incompat: names(INCOMPAT),
            ro_compat: names(RO_COMPAT),
            compat: Vec::new(),
            written_by: env!("CARGO_PKG_VERSION").to_owned(),
        }
    }

    /// Reads the format of the store at `root`, which this version can open. `None` if the store
    /// has none.
    pub(crate) fn read(root: &Dir) -> Result<Option<Self>, FormatError> {
        let path = root.path().join(FILE);
        let file = match root.open(FILE) {
            Err(e) if e.is_not_found() => return Ok(None),
            other => other?,
        };
        let mut bytes = Vec::new();
        let most = MAX_BYTES + HEADER_BYTES as u64 + 1;
        file.take(most).read_to_end(&mut bytes).map_err(IoError::new("reading", &path))?;
        let format = Self::decode(&path, &bytes)?;
        let unknown = unknown(&format.incompat, INCOMPAT);
        if unknown.is_empty() {
            Ok(Some(format))
        } else {
            Err(FormatError::Unknown { file: path, got: unknown })
        }
    }

    pub(crate) fn decode(path: &Path, bytes: &[u8]) -> Result<Self, FormatError> {
        let file = || path.to_owned();
        let damage = |place: String, expected: &str, got: String| {
            let expected = expected.to_owned();
            FormatError::Damage(Damage::Content { file: file(), place, expected, got })
        };
        let (_, json) = match sealed::open(&MAGIC, VERSION..=VERSION, MAX_BYTES, bytes) {
            Err(error @ SealError::Version { .. }) => {
                return Err(FormatError::Version { file: file(), error });
            }
            other => {
                other.map_err(|error| FormatError::Damage(Damage::Seal { file: file(), error }))?
            }
        };
        let format: Self = serde_json::from_slice(json).map_err(|e| {
            let place = format!("line {}, column {}", e.line(), e.column());
            damage(place, "the JSON of a format", e.to_string())
        })?;
        let lists = [&format.incompat, &format.ro_compat, &format.compat];
        for (list, names) in ["incompat", "ro_compat", "compat"].into_iter().zip(lists) {
            if let Some(name) = names.iter().find(|name| !is_name(name)) {
                let expected = "names of at most 64 characters of a-z, 0-9, - and _";
                return Err(damage(list.to_owned(), expected, format!("{name:?}")));
            }
        }
        Ok(format)
    }

    pub(crate) fn encode(&self) -> io::Result<Vec<u8>> {
        Ok(sealed::seal(&MAGIC, VERSION, &serde_json::to_vec_pretty(self)?))
    }

    /// The features without which a daemon may only read the store.
    pub(crate) fn unknown_ro_compat(&self) -> Vec<String> {
        unknown(&self.ro_compat, RO_COMPAT)
    }

    /// Writes the format to a store that has none: whole, synced, or not at all.
    pub(crate) fn write(&self, stage: &Stage, root: &Dir) -> IoResult<()> {
        let bytes = self.encode().map_err(IoError::new("encoding", &root.path().join(FILE)))?;
        stage.write(FILE, &bytes)?;
        stage.rename(FILE, root, FILE, IfTaken::Refuse)?;
        root.sync()
    }
}

fn is_name(name: &str) -> bool {
    let of_a_name = |c: u8| c.is_ascii_lowercase() || c.is_ascii_digit() || c == b'-' || c == b'_';
    (1..=MAX_NAME_BYTES).contains(&name.len()) && name.bytes().all(of_a_name)
}

/// The features of a list that this version does not know.
fn unknown(list: &[String], known: &[&str]) -> Vec<String> {
    list.iter().filter(|name| !known.contains(&name.as_str())).cloned().collect()
}

/// The error of an operation that would change a store with these unknown `ro_compat` features.
pub(crate) fn read_only(root: &Path, unknown: &[String]) -> IoError {
    let text = format!(
        "ro_compat: expected only features that dayfly {} knows ({}), got {}, so this dayflyd only \
         reads the store; {NEXT}",
        env!("CARGO_PKG_VERSION"),
        listed(RO_COMPAT),
        listed(unknown)
    );
    let source = io::Error::new(io::ErrorKind::ReadOnlyFilesystem, text);
    IoError { doing: "changing the store, as allowed by", path: root.join(FILE), source }
}

#[cfg(test)]
#[path = "format_tests.rs"]
mod tests;
