//! Opens the namespace of a tenant.

use super::lease::Lease;
use super::space::Space;
use crate::blob::Dir;
use crate::errors::{IoError, IoResult};
use crate::inner::{Inner, Store};
use dayfly_units::sync::lock;
use dayfly_units::{Digest, Name};
use std::sync::Arc;

/// The folder of the tenants' folders, created with the first page.
pub(crate) const PAGES: &str = "pages";

/// A tenant's namespace. Cheap to clone; every method may be called from any thread, and blocks.
#[derive(Debug, Clone)]
pub struct Tenant {
    pub(crate) inner: Arc<Inner>,
    pub(crate) space: Arc<Space>,
}

impl Tenant {
    /// The tenant's name.
    #[must_use]
    pub fn name(&self) -> &Name {
        &self.space.tenant
    }

    /// Takes a lease that keeps these pages, even if no table names them: for a caller that reads
    /// pages one by one.
    #[must_use]
    pub fn lease(&self, hashes: &[Digest]) -> Lease {
        self.space.lease(hashes.iter())
    }
}

impl Store {
    /// Opens the namespace of a tenant, which is empty if it is new. The first call in a process
    /// reads the footers of its packs: 32 bytes per page.
    ///
    /// # Errors
    /// The host cannot create or read the folder. A damaged pack is no error here;
    /// [`Store::verify`] reports it.
    pub fn tenant(&self, name: &Name) -> Result<Tenant, IoError> {
        Ok(Tenant { inner: Arc::clone(&self.0), space: self.0.space(name)? })
    }
}

impl Inner {
    pub(crate) fn space(&self, tenant: &Name) -> IoResult<Arc<Space>> {
        let mut tenants = lock(&self.tenants.0);
        if let Some(space) = tenants.get(tenant) {
            return Ok(Arc::clone(space));
        }
        // Synced even if the folder exists: an earlier process may have died between creating and
        // syncing it.
        let lasting = |parent: &Dir, name: &str| -> IoResult<Dir> {
            let made = parent.make_or_open(name)?;
            parent.sync()?;
            Ok(made)
        };
        let dir = lasting(&lasting(&self.root, PAGES)?, tenant.as_str())?;
        let space = Arc::new(Space::open(tenant, dir, self.writable().is_err())?);
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
