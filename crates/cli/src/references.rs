//! The user's names for images: which image of the daemon's store a reference means.
//!
//! A name in the store has neither `/` nor `:`, so references are kept in one file of the user's
//! folder. The store decides what there is: a record whose image is gone, or was replaced by
//! another one, means nothing.

use crate::home::home;
use anyhow::{Context, Result};
use dayfly_api::types::Image;
use dayfly_registry::Reference;
use dayfly_units::sealed::{self, Magic};
use dayfly_units::{Name, NameError};
use rustix::fs::{FlockOperation, flock};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::str::FromStr;

const MAGIC: Magic = *b"DFrefs\r\n";
const VERSION: u32 = 1;
const FILE: &str = "references";
/// Upper limit for the bytes of the file: some 50,000 references.
const MAX_BYTES: u64 = 16 << 20;

/// An image as a command names it: by its name in the store, or by its reference.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ImageArg {
    text: String,
    /// The text as a name in the store, if it is one.
    pub name: Option<Name>,
    /// The text as a reference, if it is one.
    pub reference: Option<Reference>,
}

impl FromStr for ImageArg {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (name, reference) = (text.parse::<Name>(), text.parse::<Reference>());
        match (&name, &reference) {
            // Of a text like a reference, the part that is wrong.
            (Err(_), Err(e)) if text.contains(['/', ':', '@']) => Err(e.to_string()),
            (Err(NameError { .. }), Err(_)) => {
                Err(name.err().map_or_else(String::new, |e| e.to_string()))
            }
            _ => Ok(Self { text: text.to_owned(), name: name.ok(), reference: reference.ok() }),
        }
    }
}

impl std::fmt::Display for ImageArg {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.text)
    }
}

/// What a reference means.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Record {
    /// The image's name in the store.
    pub image: Name,
    /// The image's digest in the store.
    pub disk: String,
    /// The digest of what the registry had for the reference; `None` if it was not pulled.
    pub digest: Option<String>,
    /// The digest of the image's manifest; `None` if it was not pulled.
    pub manifest: Option<String>,
}

impl Record {
    /// Whether `image` is the image that was meant, or one that was built from its layers again.
    #[must_use]
    pub fn means(&self, image: &Image) -> bool {
        let pulled = self.manifest.as_deref();
        image.name == self.image
            && (image.digest == self.disk || pulled.is_some_and(|manifest| is_of(image, manifest)))
    }
}

/// Whether `image` was built from the pulled manifest of this digest.
#[must_use]
pub fn is_of(image: &Image, manifest: &str) -> bool {
    manifest_of(image).is_some_and(|own| own == manifest)
}

/// The digest of the manifest that `image` was built from, if it was pulled.
#[must_use]
pub fn manifest_of(image: &Image) -> Option<String> {
    let words = image.source.strip_prefix("registry ")?;
    words.rsplit(' ').next().filter(|word| word.starts_with("sha256:")).map(str::to_owned)
}

/// All records, by the canonical form of their references.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct References(BTreeMap<String, Record>);

/// The key of a reference. A digest decides, so a tag beside it is dropped, as in docker.
fn key(reference: &Reference) -> String {
    match reference.digest() {
        Some(digest) => format!("{}/{}@{digest}", reference.domain(), reference.path()),
        None => reference.to_string(),
    }
}

impl References {
    /// Reads the user's references.
    ///
    /// # Errors
    /// The file cannot be read.
    pub fn load() -> Result<Self> {
        Self::read(&home()?.join(FILE))
    }

    /// Changes the user's references, one process at a time.
    ///
    /// # Errors
    /// The file cannot be read or written.
    pub fn change<T>(act: impl FnOnce(&mut Self) -> T) -> Result<T> {
        Self::change_in(&home()?, act)
    }

    fn change_in<T>(folder: &Path, act: impl FnOnce(&mut Self) -> T) -> Result<T> {
        let path = folder.join(FILE);
        let shown = path.display().to_string();
        std::fs::create_dir_all(folder).with_context(|| folder.display().to_string())?;
        let lock = File::open(folder).with_context(|| shown.clone())?;
        flock(&lock, FlockOperation::LockExclusive).with_context(|| shown.clone())?;
        let mut all = Self::read(&path)?;
        let result = act(&mut all);
        let bytes = sealed::seal(&MAGIC, VERSION, &serde_json::to_vec(&all)?);
        // Under the lock there is one writer, so one name for the new file is enough, and a killed
        // process leaves at most that one.
        let fresh = path.with_extension("new");
        let write = || -> io::Result<()> {
            let mut file = File::create(&fresh)?;
            file.write_all(&bytes)?;
            file.sync_data()?;
            std::fs::rename(&fresh, &path)
        };
        write().with_context(|| shown)?;
        Ok(result)
    }

    fn read(path: &PathBuf) -> Result<Self> {
        let shown = || path.display().to_string();
        let file = match File::open(path) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(Self::default()),
            other => other.with_context(shown)?,
        };
        let mut bytes = Vec::new();
        file.take(MAX_BYTES + sealed::HEADER_BYTES as u64 + 1)
            .read_to_end(&mut bytes)
            .with_context(shown)?;
        let decode = || -> Result<Self> {
            let (_, json) = sealed::open(&MAGIC, VERSION..=VERSION, MAX_BYTES, &bytes)?;
            Ok(serde_json::from_slice(json)?)
        };
        decode().with_context(|| {
            format!(
                "{}: the references of pulled images: remove the file, and pull or tag again; \
                 images stay (dayfly image ls)",
                path.display()
            )
        })
    }

    /// What `reference` means. A digest is also found among what was pulled by a tag.
    #[must_use]
    pub fn find(&self, reference: &Reference) -> Option<&Record> {
        if let Some(record) = self.0.get(&key(reference)) {
            return Some(record);
        }
        let digest = reference.digest()?.to_string();
        let repository = format!("{}/{}", reference.domain(), reference.path());
        let same = |name: &str| {
            name.strip_prefix(&repository).is_some_and(|rest| rest.starts_with([':', '@']))
        };
        let has = |record: &Record| {
            [&record.digest, &record.manifest].into_iter().flatten().any(|own| *own == digest)
        };
        self.0.iter().find(|(name, record)| same(name) && has(record)).map(|(_, record)| record)
    }

    /// Lets `reference` mean `record`. Returns what it meant before.
    pub fn set(&mut self, reference: &Reference, record: Record) -> Option<Record> {
        self.0.insert(key(reference), record)
    }

    /// Forgets `reference`. Returns whether it was known.
    pub fn forget(&mut self, reference: &Reference) -> bool {
        self.0.remove(&key(reference)).is_some()
    }

    /// Forgets all references of the image `name`.
    pub fn forget_image(&mut self, name: &Name) {
        self.0.retain(|_, record| record.image != *name);
    }

    /// The references that mean `image`, with their records, in order.
    pub fn of<'a>(&'a self, image: &'a Image) -> impl Iterator<Item = (Reference, &'a Record)> {
        let meant = self.0.iter().filter(|(_, record)| record.means(image));
        meant.filter_map(|(name, record)| Some((name.parse().ok()?, record)))
    }

    /// Whether any reference is recorded for the image `name`.
    #[must_use]
    pub fn names(&self, name: &Name) -> bool {
        self.0.values().any(|record| record.image == *name)
    }
}

#[cfg(test)]
#[path = "references_tests.rs"]
mod tests;
