//! Figures about the namespaces.

use super::gc::GcPagesError;
use super::pack::PAGE;
use super::space::Space;
use super::tenant::Tenant;
use crate::inner::Store;
use crate::memory::{Kind, Table};
use dayfly_units::{Name, Pages};

impl Tenant {
    /// The namespace in numbers.
    ///
    /// # Errors
    /// A snapshot's table cannot be read.
    pub fn stats(&self) -> Result<Pages, GcPagesError> {
        let tables = self.inner.all_tables()?;
        Ok(self.space.stats(tables.iter()))
    }
}

impl Space {
    /// The namespace in numbers. `tables` may contain tables of other tenants, which are skipped.
    pub(crate) fn stats<'a>(&self, tables: impl Iterator<Item = &'a Table>) -> Pages {
        let referring_frames = tables.filter(|t| t.tenant == self.tenant).map(page_frames).sum();
        let state = self.read();
        let unique = state.index.entries() as u64;
        let group_tables: usize = state.packs.values().map(|pack| pack.memory_bytes()).sum();
        let stored_bytes = state.packs.values().map(|pack| pack.stored_bytes()).sum();
        let pack_bytes: u64 = state.packs.values().map(|pack| pack.bytes).sum();
        Pages {
            unique,
            raw_bytes: unique * PAGE as u64,
            stored_bytes,
            referring_frames,
            packs: state.packs.len() as u64,
            damaged_packs: state.damaged.len() as u64,
            index_disk_bytes: pack_bytes.saturating_sub(stored_bytes),
            index_memory_bytes: (state.index.bytes() + state.doubles.bytes() + group_tables) as u64,
        }
    }
}

fn page_frames(table: &Table) -> u64 {
    let pages = table.runs().iter().filter(|run| matches!(run.kind, Kind::Page { .. }));
    pages.map(|run| u64::from(run.frames)).sum()
}

impl Store {
    /// The namespaces in numbers, by tenant.
    ///
    /// # Errors
    /// A folder or a snapshot's table cannot be read.
    pub fn pages_stats(&self) -> Result<Vec<(Name, Pages)>, GcPagesError> {
        let names = self.0.tenant_names()?;
        names.into_iter().map(|name| Ok((name.clone(), self.tenant(&name)?.stats()?))).collect()
    }
}
