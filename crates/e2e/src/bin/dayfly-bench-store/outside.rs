//! A snapshot's RAM on this host: copied out of the daemon's store, opened as a store of its own, written to a file, compared, and measured.

use crate::pages;
use anyhow::{Context, Result};
use dayfly_e2e::bench::place::Place;
use dayfly_store::{Store, sparse};
use dayfly_units::{Bytes, Name};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::fs::File;
use std::path::Path;

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
    #[must_use]
    pub fn holds(&self) -> bool {
        self.recorded == self.restored
    }
}

/// Copies `name` out and looks at it, in a folder below `parent` that goes again.
pub async fn look(place: &Place, name: &Name, parent: &Path) -> Result<Outside> {
    std::fs::create_dir_all(parent).with_context(|| parent.display().to_string())?;
    let folder = tempfile::tempdir_in(parent).context("a folder for the copy")?;
    let copy = folder.path().join("store");
    std::fs::create_dir(&copy).with_context(|| copy.display().to_string())?;
    place.export(name, &copy).await?;
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
    let costs = pages::measure(&ram, folder).map_err(|e| anyhow::anyhow!("{e}"))?;
    Ok(Outside {
        snapshot: name.to_string(),
        ram_bytes: memory.bytes,
        recorded: memory.digest.to_string(),
        restored,
        unique_pages: stats.unique_pages,
        index_bytes_per_gib: u64::try_from(
            u128::from(stats.index_bytes) * (1 << 30) / u128::from(stats.raw_bytes.max(1)),
        )?,
        costs,
    })
}

impl std::fmt::Display for Outside {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let number = |path: &str| self.costs.pointer(path).and_then(Value::as_f64).unwrap_or(f64::NAN);
        writeln!(
            f,
            "RAM of {}, {}, from outside: {}; index: {} of memory for a GiB of pages",
            self.snapshot,
            Bytes(self.ram_bytes),
            if self.holds() { "the same" } else { "DIFFERS" },
            Bytes(self.index_bytes_per_gib)
        )?;
        writeln!(
            f,
            "  one page from a cold pack: p50 {:.0} us, p99 {:.0} us; warm {:.0} us, {:.0} us",
            number("/fetch_one_page_cold/p50_us"),
            number("/fetch_one_page_cold/p99_us"),
            number("/fetch_one_page_warm/p50_us"),
            number("/fetch_one_page_warm/p99_us")
        )?;
        writeln!(
            f,
            "  all of it: cold {:.0} MB/s, warm {:.0} MB/s (a copy of the raw file: {:.0} MB/s)",
            number("/materialise_cold/mb_per_s"),
            number("/materialise_warm/mb_per_s"),
            number("/copy_to_memfd_warm/mb_per_s")
        )?;
        write!(
            f,
            "  written: {:.0} MB/s per core; cp {:.0}, zstd -3 {:.0}",
            number("/put/mb_per_core_s"),
            number("/cp_to_disk/mb_per_core_s"),
            number("/zstd_3/figures/mb_per_core_s")
        )
    }
}
