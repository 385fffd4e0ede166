//! # scrub
//!
//! The room for the search for damage: everything that is stored is read and hashed, whatever was found right before, and all that is
//! damaged is named, not only the first.
//!
//! It goes on beside everything else. It never waits for, nor makes anybody wait for, the hashing that precedes a file's first use
//! (`verify.rs`); a file found damaged is forgotten there, so that its next use finds it too. What is removed or replaced while it is
//! read is not damaged: a finding counts if the folder is still the one that was opened. A snapshot's pages are leased and its layers
//! pinned for as long as that snapshot is read, and no longer.

mod files;
mod packs;
mod snapshots;

use crate::blob::Dir;
use crate::digest::Digest;
use crate::errors::{Damage, IoError};
use crate::layers::LayerId;
use crate::manifest::{ManifestError, SnapshotManifest};
use crate::meter::Meter;
use crate::pages::PagesError;
use crate::pages::pack::PackError;
use crate::pins::PinError;
use crate::publish::OpenError;
use crate::verify::VerifyError;
use crate::{Inner, Store};
use dayfly_units::Name;
use rustix::io::Errno;
use std::collections::{BTreeSet, HashMap, HashSet};
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// As many findings are listed; more are only counted.
pub const MAX_FINDINGS: usize = 1000;

/// What to search for damage.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Scope {
    /// Everything, of every tenant.
    All,
    /// What one tenant sees: every image, kernel and layer, and its own pages and snapshots. With `snapshots`, only these, and what
    /// they stand on.
    Tenant {
        /// Whose.
        tenant: Name,
        /// Which; none is all.
        snapshots: Vec<Name>,
    },
}

/// What a finding is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Object {
    /// An image, by name.
    Image,
    /// A kernel, by name.
    Kernel,
    /// A frozen layer, by id.
    Layer,
    /// A snapshot, by name.
    Snapshot,
    /// A pack of pages, by its file's name.
    Pack,
    /// An index of a disk's blocks, by the disk's digest: a cache.
    BlockIndex,
}

/// Something damaged.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Finding {
    /// What.
    pub object: Object,
    /// Which.
    pub name: String,
    /// File, place, expected and got.
    pub text: String,
    /// Snapshots that need it, by name. Those of an image, a layer or a pack; ascending.
    pub snapshots: Vec<String>,
}

impl std::fmt::Display for Finding {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.text)
    }
}

/// What a search found.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct VerifyReport {
    /// Images whose disks were read.
    pub images: u64,
    /// Kernels that were read.
    pub kernels: u64,
    /// Layers that were read.
    pub layers: u64,
    /// Snapshots whose files were read.
    pub snapshots: u64,
    /// Packs that were opened.
    pub packs: u64,
    /// Pages that were decompressed and hashed.
    pub pages: u64,
    /// Indexes of blocks that were read.
    pub block_indexes: u64,
    /// What is damaged or missing, at most [`MAX_FINDINGS`].
    pub damage: Vec<Finding>,
    /// What was found beyond that.
    pub more_damage: u64,
}

/// Why a search did not come to its end.
#[derive(Debug, thiserror::Error)]
pub enum SearchError {
    /// The tenant has no snapshot of that name.
    #[error("no snapshot named {name}")]
    NotFound {
        /// The name asked for.
        name: Name,
    },
    /// The host could not read something for a reason that is not in what is stored; or the search was stopped.
    #[error(transparent)]
    Io(#[from] IoError),
}

impl Store {
    /// Reads and hashes everything of `scope`, whatever was verified before, and tells all damage. Tells `meter` how far it is.
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

/// Why something that was read is not right, or could not be read.
enum Trouble {
    Damage(Damage),
    Io(IoError),
}

type Read<T> = Result<T, Trouble>;

/// A snapshot as it was when the search began.
struct Planned {
    name: Name,
    /// Unless it cannot be read.
    manifest: Option<SnapshotManifest>,
}

/// A search under way.
struct Scrub<'a> {
    store: &'a Store,
    inner: &'a Arc<Inner>,
    meter: &'a Meter,
    /// Of whom only, if anybody.
    tenant: Option<Name>,
    /// Only these snapshots and what they stand on.
    chosen: bool,
    planned: Vec<Planned>,
    /// Where snapshots are chosen: the first bytes of their pages' hashes, by tenant.
    wanted: HashMap<Name, HashSet<u64>>,
    report: VerifyReport,
    bad_images: BTreeSet<Name>,
    bad_layers: BTreeSet<LayerId>,
    /// Pages that are damaged where they are, by tenant and the first bytes of their hashes: which finding tells so.
    bad_pages: HashMap<Name, HashMap<u64, Option<usize>>>,
    /// Pages that were looked up and found.
    found: HashMap<Name, HashSet<Digest>>,
}

impl Scrub<'_> {
    /// Counts what is all right or tells what is not, and whether it was all right. `holder` is the folder that was open, in
    /// `parent`: one that is another by now was removed or replaced meanwhile.
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
            Err(Trouble::Io(e)) if !is_damage(&e) && !e.is_not_found() => return Err(e),
            Err(_) if !same_folder(parent, holder)? => return Ok(true),
            Err(Trouble::Io(e)) => crate::errors::told(&e),
            Err(Trouble::Damage(damage)) => damage.to_string(),
        };
        // Its next use must not be spared the hashing.
        self.inner.verifier.forget(holder.path());
        self.tell(Finding { object, name: name.to_owned(), text, snapshots });
        Ok(false)
    }

    /// Lists a finding, and gives its place in the list if there is room.
    fn tell(&mut self, finding: Finding) -> Option<usize> {
        if self.report.damage.len() >= MAX_FINDINGS {
            self.report.more_damage += 1;
            return None;
        }
        self.report.damage.push(finding);
        Some(self.report.damage.len() - 1)
    }

    /// Findings of packs that were removed meanwhile do not count.
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

/// Whether the disk gave up on a file, or something is not what the store puts there; any other error is the host's.
fn is_damage(e: &IoError) -> bool {
    matches!(
        errno(e),
        Some(Errno::IO | Errno::UCLEAN | Errno::BADMSG | Errno::NODATA | Errno::LOOP | Errno::NOTDIR)
    ) || matches!(e.source.kind(), ErrorKind::InvalidData | ErrorKind::UnexpectedEof)
}

/// Whether `holder` is still what `parent` has under its name.
fn same_folder(parent: &Dir, holder: &Dir) -> Result<bool, IoError> {
    let path = holder.path();
    let name = path.file_name().and_then(|n| n.to_str()).unwrap_or_default();
    let Some(now) = entry(parent, name)? else { return Ok(false) };
    let id = |dir: &Dir| {
        let stat = rustix::fs::fstat(dir).map_err(|e| IoError::new("looking at", path)(e.into()))?;
        Ok::<_, IoError>((stat.st_dev, stat.st_ino))
    };
    Ok(id(&now)? == id(holder)?)
}

/// The folder of that name; `None` where it has gone, or never was a folder: then it was not put here by us.
fn entry(parent: &Dir, name: &str) -> Result<Option<Dir>, IoError> {
    match parent.sub(name) {
        Err(e) if e.is_not_found() || matches!(errno(&e), Some(Errno::NOTDIR | Errno::LOOP)) => Ok(None),
        other => other.map(Some),
    }
}

/// Bytes of the file at `path`; 0 if it is not there.
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
            OpenError::NotFound { kind, name } => {
                missing(PathBuf::from(name.as_str()), format!("{kind} {name}"), "who asks".to_owned())
            }
        }
    }
}

impl Trouble {
    /// What is wrong with `file`, where a table and its disks do not fit together.
    fn of(e: PagesError, file: PathBuf) -> Self {
        match e {
            PagesError::Io(e) => Self::Io(e),
            PagesError::Damage(d) => Self::Damage(d),
            PagesError::Invalid { place, expected, got } => {
                Self::Damage(Damage::Content { file, place, expected, got })
            }
        }
    }
}

#[cfg(test)]
mod tests;
