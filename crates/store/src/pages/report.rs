//! What is in the namespaces, in numbers.

use super::Tenant;
use super::pack::PAGE;
use super::space::Space;
use crate::Store;
use crate::memory::{Kind, Table};
use crate::pages::gc::GcPagesError;
use dayfly_units::Name;

/// A tenant's namespace in numbers.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct PagesStats {
    /// Different pages.
    pub unique_pages: u64,
    /// Their bytes.
    pub raw_bytes: u64,
    /// Bytes of all groups as stored, pages that nobody needs included.
    pub compressed_bytes: u64,
    /// Bytes of the packs' files: `compressed_bytes` and the footers, which are the index on disk.
    pub pack_bytes: u64,
    /// Bytes of memory that the index takes, packs' tables of groups included.
    pub index_bytes: u64,
    /// Packs.
    pub packs: u64,
    /// Packs that could not be opened.
    pub damaged_packs: u64,
    /// Frames of all snapshots of the tenant that are pages of the namespace.
    pub referring_frames: u64,
    /// `referring_frames` for each unique page; 0 without pages.
    pub dedupe_ratio: f64,
}

impl Tenant {
    /// The namespace in numbers.
    ///
    /// # Errors
    /// A snapshot's table cannot be read.
    pub fn stats(&self) -> Result<PagesStats, GcPagesError> {
        let tables = self.inner.tables()?;
        Ok(self.space.stats(tables.iter().map(|(_, table)| table)))
    }
}

impl Space {
    /// The namespace in numbers, and how often those of these tables that are the tenant's refer to it.
    pub(crate) fn stats<'a>(&self, tables: impl Iterator<Item = &'a Table>) -> PagesStats {
        let referring_frames = tables.filter(|t| t.tenant == self.tenant).map(page_frames).sum();
        let state = self.read();
        let unique_pages = state.index.entries() as u64;
        let group_tables: usize = state.packs.values().map(|pack| pack.memory_bytes()).sum();
        #[expect(clippy::cast_precision_loss, reason = "a ratio for people")]
        let dedupe_ratio =
            if unique_pages == 0 { 0.0 } else { referring_frames as f64 / unique_pages as f64 };
        PagesStats {
            unique_pages,
            raw_bytes: unique_pages * PAGE as u64,
            compressed_bytes: state.packs.values().map(|pack| pack.stored_bytes()).sum(),
            pack_bytes: state.packs.values().map(|pack| pack.bytes).sum(),
            index_bytes: (state.index.bytes() + group_tables) as u64,
            packs: state.packs.len() as u64,
            damaged_packs: state.damaged.len() as u64,
            referring_frames,
            dedupe_ratio,
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
    pub fn pages_stats(&self) -> Result<Vec<(Name, PagesStats)>, GcPagesError> {
        let names = self.0.tenant_names()?;
        names.into_iter().map(|name| Ok((name.clone(), self.tenant(&name)?.stats()?))).collect()
    }
}
