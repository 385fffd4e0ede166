//! A snapshot's RAM on this host: copied out of the daemon's store, opened as another store,
//! written to a file, compared, and measured.

use super::pages;
use crate::prelude::*;
use crate::stock::Stock;
use dayfly_store::{Store, sparse};
use std::fs::File;

/// What was found.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Outside {
    /// Whose RAM.
    pub snapshot: String,
    /// Its length.
    pub ram_bytes: u64,
    /// The sparse digest of RAM as the daemon recorded it before it was stored.
    pub recorded: String,
    /// The sparse digest of the file that was written from table, packs and disks.
    pub restored: String,
    /// Different pages in the whole store.
    pub unique_pages: u64,
    /// Bytes of memory that the index takes for each GiB of different pages.
    pub index_bytes_per_gib: u64,
    /// What the store costs with this RAM, on this host: see `pages`.
    pub costs: Value,
}

impl Outside {
    /// Whether nothing differs.
    pub fn holds(&self) -> bool {
        self.recorded == self.restored
    }
}

/// Copies `name` out and looks at it, in a folder below `parent` that goes again.
pub async fn look(stock: &Stock, name: &Name, parent: &Path) -> Result<Outside> {
    let folder = tempfile::tempdir_in(parent).context("a folder for the copy")?;
    stock.export(name, &folder.path().join("store")).await?;
    let name = name.clone();
    tokio::task::spawn_blocking(move || measured(&name, folder.path())).await?
}

fn measured(name: &Name, folder: &Path) -> Result<Outside> {
    let store = Store::open(&folder.join("store"))?;
    let tenant: Name = "default".parse()?;
    let ram = folder.join("ram");
    let pages = store.open_snapshot_pages(&tenant, name)?;
    let memory = pages.manifest.memory;
    let file = File::options().read(true).write(true).create_new(true).open(&ram)?;
    pages.materialise(&file)?;
    drop(pages);
    let restored = sparse::digest(&file)?.digest.to_string();
    let stats = store.tenant(&tenant)?.stats()?;
    drop(store);
    std::fs::remove_dir_all(folder.join("store"))?;
    let index = u128::from(stats.index_memory_bytes) * (1 << 30);
    Ok(Outside {
        snapshot: name.to_string(),
        ram_bytes: memory.bytes,
        recorded: memory.digest.to_string(),
        restored,
        unique_pages: stats.unique,
        index_bytes_per_gib: u64::try_from(index / u128::from(stats.raw_bytes.max(1)))?,
        costs: pages::measure(&ram, folder)?,
    })
}

impl std::fmt::Display for Outside {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let numbers = [
            "/fetch_one_page_cold/p50_us",
            "/fetch_one_page_cold/p99_us",
            "/fetch_one_page_warm/p50_us",
            "/fetch_one_page_warm/p99_us",
            "/materialise_cold/mb_per_s",
            "/materialise_warm/mb_per_s",
            "/copy_to_memfd_warm/mb_per_s",
            "/put/mb_per_core_s",
            "/cp_to_disk/mb_per_core_s",
            "/zstd_3/figures/mb_per_core_s",
        ];
        let [cold_50, cold_99, warm_50, warm_99, cold, warm, copy, put, cp, zstd] =
            numbers.map(|at| self.costs.pointer(at).and_then(Value::as_f64).unwrap_or(f64::NAN));
        write!(
            f,
            "RAM of {}, {}, from outside: {}; index: {} of memory for a GiB of pages\n  one page \
             from a cold pack: p50 {cold_50:.0} us, p99 {cold_99:.0} us; warm {warm_50:.0} us, \
             {warm_99:.0} us\n  all of it: cold {cold:.0} MB/s, warm {warm:.0} MB/s (a copy of the \
             raw file: {copy:.0} MB/s)\n  written: {put:.0} MB/s per core; cp {cp:.0}, zstd -3 \
             {zstd:.0}",
            self.snapshot,
            Bytes(self.ram_bytes),
            if self.holds() { "the same" } else { "DIFFERS" },
            Bytes(self.index_bytes_per_gib)
        )
    }
}
