//! # pages
//!
//! The room for the bodies of pages: one namespace of unique 4 KiB pages for each tenant, in compressed packs, by hash. RAM and disk
//! blocks share it.
//!
//! | file | what |
//! |---|---|
//! | `pages/<tenant>/<pack>` | a pack: groups of compressed pages, and a sealed footer that names them ([`pack`]) |
//!
//! Prebaked uVMs, section III-C, shows that raw memory deduplicates where a hypervisor's own format does not, and IV-D keeps one
//! compressed, deduplicated volume for all snapshots of a host; here the unit is the page (its V-C pays for that with table entries, see
//! [`index`]), and the volume is one for each tenant: deduplication over tenants would tell one what another has.
//!
//! ```text
//! put: lease ─▶ look up ─▶ new pages, in the order given ─▶ packs in staging/ ─▶ rename, fsync ─▶ index
//! gc:  tables + leases ─▶ live ─▶ packs without: retire;  packs with few: live pages into new packs ─▶ index ─▶ retire
//! ```
//!
//! A pack never changes. One nobody needs is harmless: the next open finds its pages, the next gc that nobody names them.

pub(crate) mod gc;
pub(crate) mod index;
mod lease;
pub(crate) mod pack;
pub(crate) mod put;
pub(crate) mod read;
pub(crate) mod report;
pub(crate) mod space;
mod writer;

pub use lease::Lease;
pub use put::{Put, PutStats};
pub use read::Group;

use crate::digest::Digest;
use crate::errors::{Damage, IoError, IoResult};
use crate::{Inner, Store};
use dayfly_units::Name;
use space::Space;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

/// The folder of the tenants' folders; made when the first page is put.
pub(crate) const PAGES: &str = "pages";

/// Why pages were not put or not fetched.
#[derive(Debug, thiserror::Error)]
pub enum PagesError {
    /// What the caller gave does not fit together.
    #[error("{place}: expected {expected}, got {got}")]
    Invalid {
        /// Such as `bytes of the file`.
        place: String,
        /// What it may be.
        expected: String,
        /// What it is.
        got: String,
    },
    /// A pack, a table or a page is damaged, foreign or not there.
    #[error(transparent)]
    Damage(#[from] Damage),
    /// The host could not read or write.
    #[error(transparent)]
    Io(IoError),
}

/// The namespaces that were opened.
#[derive(Debug, Default)]
pub(crate) struct Tenants(Mutex<BTreeMap<Name, Arc<Space>>>);

/// A tenant's namespace. Cheap to clone; every method may be called from any thread, and blocks.
#[derive(Debug, Clone)]
pub struct Tenant {
    pub(crate) inner: Arc<Inner>,
    pub(crate) space: Arc<Space>,
}

impl Tenant {
    /// Whose it is.
    #[must_use]
    pub fn name(&self) -> &Name {
        &self.space.tenant
    }

    /// Keeps these pages while the lease lives, whatever tables say: for who serves them one by one.
    #[must_use]
    pub fn lease(&self, hashes: &[Digest]) -> Lease {
        self.space.lease(hashes.iter())
    }
}

impl Store {
    /// The namespace of a tenant, empty if it has none. The first call in a process reads the footers of its packs: 32 bytes a page.
    ///
    /// # Errors
    /// The host cannot make or read its folder. A damaged pack is no error here: [`Store::verify`] tells.
    pub fn tenant(&self, name: &Name) -> Result<Tenant, IoError> {
        Ok(Tenant { inner: Arc::clone(&self.0), space: self.0.space(name)? })
    }
}

impl Inner {
    pub(crate) fn space(&self, tenant: &Name) -> IoResult<Arc<Space>> {
        let mut tenants = self.tenants.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(space) = tenants.get(tenant) {
            return Ok(Arc::clone(space));
        }
        // Synced even where it is there: perhaps the one who made it died, or failed, before it did.
        let lasting = |parent: &crate::blob::Dir, name: &str| -> IoResult<crate::blob::Dir> {
            let made = parent.make_or_open(name)?;
            parent.sync()?;
            Ok(made)
        };
        let dir = lasting(&lasting(&self.root, PAGES)?, tenant.as_str())?;
        let space = Arc::new(Space::open(tenant, dir)?);
        tenants.insert(tenant.clone(), Arc::clone(&space));
        Ok(space)
    }

    /// Every tenant that has a namespace.
    pub(crate) fn tenant_names(&self) -> IoResult<Vec<Name>> {
        if !self.root.has(PAGES)? {
            return Ok(Vec::new());
        }
        Ok(self.root.sub(PAGES)?.entries()?.iter().filter_map(|name| name.parse().ok()).collect())
    }
}

#[cfg(test)]
mod tests;
