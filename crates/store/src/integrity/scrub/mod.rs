//! # scrub
//!
//! The search for damage. It reads and hashes everything that is stored, including files verified
//! before, and reports all damage, not only the first.
//!
//! It runs beside all other operations. It neither waits for nor delays the hashing before a file's
//! first use (`integrity/verify.rs`). A damaged file is forgotten there, so that its next use finds
//! the damage too.
//!
//! An object that is removed or replaced during the search is not damage: a finding counts only if
//! the folder is still the one that was opened. A snapshot's pages are leased and its layers pinned
//! only while that snapshot is read.

mod files;
mod packs;
mod snapshots;

use crate::blob::Dir;
use crate::errors::{Damage, IoError};
use crate::inner::{Inner, Store};
use crate::integrity::verify::VerifyError;
use crate::meter::Meter;
use crate::objects::manifest::{ManifestError, SnapshotManifest};
use crate::objects::types::LayerId;
use crate::pages::PagesError;
use crate::pages::pack::PackError;
use crate::publish::OpenError;
use crate::vms::pins::PinError;
use dayfly_units::error::chain;
use dayfly_units::{Digest, Name};
use rustix::io::Errno;
use std::collections::{BTreeSet, HashMap, HashSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The most findings in a report; further findings are only counted.
pub const MAX_FINDINGS: usize = 1000;

/// The objects to search.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Scope {
    /// Everything, of every tenant.
    All,
    /// Everything that one tenant sees: every image, kernel and layer, and its own pages and
    /// snapshots. With `snapshots`, only those and what they depend on.
    Tenant {
        /// The tenant.
        tenant: Name,
        /// The snapshots to search; empty means all.
        snapshots: Vec<Name>,
    },
}

/// The object of a finding.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Object {
    /// An image, by name.
    Image,
    /// A kernel, by name.
    Kernel,
    /// A stored layer, by id.
    Layer,
    /// A snapshot, by name.
    Snapshot,
    /// A pack of pages, by its file's name.
    Pack,
    /// A block index of a disk file, by the file's digest: a cache.
    BlockIndex,
    /// The hash tree of a disk file, by `images/` or `layers/` and the name of the image or layer.
    HashTree,
}

/// A damaged or missing object.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Finding {
    /// Kind of the object.
    pub object: Object,
    /// Name of the object.
    pub name: String,
    /// File, place, expected value and value found.
    pub text: String,
    /// Names of the snapshots that need the image, the layer or the pack, in ascending order;
    /// otherwise empty.
    pub snapshots: Vec<String>,
}

impl std::fmt::Display for Finding {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.text)
    }
}

/// The result of a search.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct VerifyReport {
    /// Images read.
    pub images: u64,
    /// Kernels read.
    pub kernels: u64,
    /// Layers read.
    pub layers: u64,
    /// Snapshots read.
    pub snapshots: u64,
    /// Packs opened.
    pub packs: u64,
    /// Pages decompressed and hashed.
    pub pages: u64,
    /// Block indexes read.
    pub block_indexes: u64,
    /// Damage found, at most [`MAX_FINDINGS`] entries.
    pub damage: Vec<Finding>,
    /// Number of further findings.
    pub more_damage: u64,
}

/// Why a search did not finish.
#[derive(Debug, thiserror::Error)]
pub enum SearchError {
    /// The tenant has no snapshot of that name.
    #[error("no snapshot named {name}")]
    NotFound {
        /// The name in the request.
        name: Name,
    },
    /// The host could not read a file for a reason other than damage, or the search was stopped.
    #[error(transparent)]
    Io(#[from] IoError),
}

impl Store {
    /// Reads and hashes everything in `scope`, including files verified before, and reports all
    /// damage. `meter` shows the progress.
    ///
    /// # Errors
    /// [`SearchError`].
    pub fn verify(&self, scope: &Scope, meter: &Meter) -> Result<VerifyReport, SearchError> {
        let mut scrub = Scrub::plan(self, scope, meter)?;
        scrub.images()?;
        scrub.kernels()?;
        scrub.layers()?;
        scrub.packs()?;
        scrub.snapshots()?;
        scrub.block_indexes()?;
        Ok(scrub.finish())
    }
}

/// Damage, or an I/O error.
enum Trouble {
    Damage(Damage),
    Io(IoError),
}

type Read<T> = Result<T, Trouble>;

/// A snapshot that existed when the search began.
struct Planned {
    name: Name,
    /// `None` if the manifest cannot be read.
    manifest: Option<SnapshotManifest>,
}

/// The state of a search.
struct Scrub<'a> {
    store: &'a Store,
    inner: &'a Arc<Inner>,
    meter: &'a Meter,
    /// The only tenant to search; `None` for all.
    tenant: Option<Name>,
    /// Whether only chosen snapshots, and what they depend on, are searched.
    chosen: bool,
    planned: Vec<Planned>,
    /// If snapshots are chosen: the hash prefixes of their pages, by tenant.
    wanted: HashMap<Name, HashSet<u64>>,
    report: VerifyReport,
    bad_images: BTreeSet<Name>,
    bad_layers: BTreeSet<LayerId>,
    /// Damaged pages, by tenant and hash prefix, with the index of their finding, if it is listed.
    bad_pages: HashMap<Name, HashMap<u64, Option<usize>>>,
    /// Pages that were looked up and found, by tenant.
    found: HashMap<Name, HashSet<Digest>>,
}

impl Scrub<'_> {
    /// Lists a finding if `result` is an error; returns whether the object is sound. `holder` is
    /// the folder that was opened in `parent`. If `parent` has another folder there now, the object
    /// was removed or replaced meanwhile, and counts as sound.
    fn judge(
        &mut self,
        object: Object,
        name: &str,
        (parent, holder): (&Dir, &Dir),
        result: Read<()>,
        snapshots: Vec<String>,
    ) -> Result<bool, IoError> {
        let text = match result {
            Ok(()) => return Ok(true),
            Err(Trouble::Io(e)) if !e.is_damage() && !e.is_not_found() => return Err(e),
            Err(_) if !same_folder(parent, holder)? => return Ok(true),
            Err(Trouble::Io(e)) => chain(&e),
            Err(Trouble::Damage(damage)) => damage.to_string(),
        };
        // The next use must hash the file again.
        self.inner.verifier.forget(holder.path());
        self.list(Finding { object, name: name.to_owned(), text, snapshots });
        Ok(false)
    }

    /// Opens the folder of an object. `None` if it is gone or not ours, or cannot be read, which is
    /// listed.
    fn folder(&mut self, object: Object, parent: &Dir, name: &str) -> Result<Option<Dir>, IoError> {
        match entry(parent, name) {
            Err(e) if e.is_damage() => {
                self.list(Finding {
                    object,
                    name: name.to_owned(),
                    text: chain(&e),
                    snapshots: Vec::new(),
                });
                Ok(None)
            }
            other => other,
        }
    }

    /// Lists a finding, and returns its index; `None` if the list is full.
    fn list(&mut self, finding: Finding) -> Option<usize> {
        if self.report.damage.len() >= MAX_FINDINGS {
            self.report.more_damage += 1;
            return None;
        }
        self.report.damage.push(finding);
        Some(self.report.damage.len() - 1)
    }

    /// Returns the report, without findings of packs that were removed meanwhile.
    fn finish(mut self) -> VerifyReport {
        let there = |finding: &Finding, tenant: &Name| {
            self.store.tenant(tenant).is_ok_and(|t| t.space.dir.has(&finding.name).unwrap_or(true))
        };
        let tenants: Vec<Name> = match &self.tenant {
            Some(tenant) => vec![tenant.clone()],
            None => self.inner.tenant_names().unwrap_or_default(),
        };
        let stays = |finding: &Finding| {
            finding.object != Object::Pack || tenants.iter().any(|tenant| there(finding, tenant))
        };
        let mut damage = std::mem::take(&mut self.report.damage);
        damage.retain(stays);
        self.report.damage = damage;
        self.report
    }
}

fn errno(e: &IoError) -> Option<Errno> {
    e.source.raw_os_error().map(Errno::from_raw_os_error)
}

/// Whether `parent` still has the folder `holder` under its name.
fn same_folder(parent: &Dir, holder: &Dir) -> Result<bool, IoError> {
    let path = holder.path();
    let name = path.file_name().and_then(|n| n.to_str()).unwrap_or_default();
    let Some(now) = entry(parent, name)? else { return Ok(false) };
    let id = |dir: &Dir| {
        let stat =
            rustix::fs::fstat(dir).map_err(|e| IoError::new("looking at", path)(e.into()))?;
        Ok::<_, IoError>((stat.st_dev, stat.st_ino))
    };
    Ok(id(&now)? == id(holder)?)
}

/// Opens the folder of that name. `None` if it is gone, or is not a folder and so not ours.
fn entry(parent: &Dir, name: &str) -> Result<Option<Dir>, IoError> {
    match parent.sub(name) {
        Err(e) if e.is_not_found() || matches!(errno(&e), Some(Errno::NOTDIR | Errno::LOOP)) => {
            Ok(None)
        }
        other => other.map(Some),
    }
}

/// Length in bytes of the file at `path`; 0 if it does not exist.
fn length(path: &Path) -> u64 {
    std::fs::symlink_metadata(path).map_or(0, |meta| meta.len())
}

fn missing(file: PathBuf, what: String, by: String) -> Trouble {
    Trouble::Damage(Damage::Missing { file, what, by })
}

macro_rules! trouble {
    ($($error:ident),*) => { $(
        impl From<$error> for Trouble {
            fn from(e: $error) -> Self {
                match e {
                    $error::Io(e) => Self::Io(e),
                    $error::Damage(d) => Self::Damage(d),
                }
            }
        }
    )* };
}

trouble!(ManifestError, VerifyError, PinError, PackError);

impl From<IoError> for Trouble {
    fn from(e: IoError) -> Self {
        Self::Io(e)
    }
}

impl From<Damage> for Trouble {
    fn from(d: Damage) -> Self {
        Self::Damage(d)
    }
}

impl From<OpenError> for Trouble {
    fn from(e: OpenError) -> Self {
        match e {
            OpenError::Io(e) => Self::Io(e),
            OpenError::Damage(d) => Self::Damage(d),
            OpenError::NotFound { kind, name } => missing(
                PathBuf::from(name.as_str()),
                format!("{kind} {name}"),
                "who asks".to_owned(),
            ),
        }
    }
}

impl Trouble {
    /// The trouble of a table and disks that do not fit together; `file` is the table.
    fn of(e: PagesError, file: PathBuf) -> Self {
        match e {
            PagesError::Io(e) => Self::Io(e),
            PagesError::Damage(d) => Self::Damage(d),
            PagesError::Invalid { place, expected, got } => {
                Self::Damage(Damage::Content { file, place, expected, got })
            }
            // Only a put has another process.
            PagesError::Work(e) => {
                Self::Io(IoError::new("reading", &file)(std::io::Error::other(e)))
            }
        }
    }
}

#[cfg(test)]
mod tests;
