//! What a snapshot's RAM consists of, and what the store has more because of it.

use crate::prelude::*;
use dayfly_api::client::Client;
use dayfly_api::types::StoreStats;
use std::collections::BTreeMap;

/// RAM by what its frames are, and what the store grew by. All in bytes.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct Split {
    /// All of RAM.
    pub ram_bytes: u64,
    /// Frames of zeroes.
    pub zero_bytes: u64,
    /// Frames that the guest did not use.
    pub free_bytes: u64,
    /// Frames that are blocks of the snapshot's disks.
    pub disk_bytes: u64,
    /// Frames that are pages of the store.
    pub page_bytes: u64,
    /// Of these, contents that the store did not have before, each once.
    pub new_bytes: u64,
    /// The packs' growth: these pages compressed, and footers.
    pub packs_bytes: u64,
    /// The growth of snapshots' own files: the table, and devices, manifest, working set.
    pub files_bytes: u64,
    /// Frames that are pages, by what the guest uses them for.
    pub page_bytes_by_colour: BTreeMap<String, u64>,
}

impl Split {
    /// Of the snapshot `name`, since the store was as `before`.
    ///
    /// # Errors
    /// The daemon does not know it, or the store has shrunk meanwhile.
    pub async fn since(client: &Client, before: &StoreStats, name: &Name) -> Result<Self> {
        let (now, usage) = (client.store_stats().await?, client.store_usage().await?);
        let of = usage.snapshots.iter().find(|snapshot| snapshot.name == *name);
        let of =
            of.with_context(|| format!("what snapshot {name} takes: the daemon does not say"))?;
        let colours = client.snapshot_colours(name).await?.colours.into_iter();
        let grown = |what: &str, before: u64, now: u64| {
            let grown = now.checked_sub(before);
            grown.with_context(|| format!("{what} shrank from {before} to {now} because of {name}"))
        };
        let packs = |stats: &StoreStats| stats.pages.stored_bytes + stats.pages.index_disk_bytes;
        Ok(Self {
            ram_bytes: of.memory_bytes,
            zero_bytes: of.memory.zero_bytes,
            free_bytes: of.memory.free_bytes,
            disk_bytes: of.memory.disk_bytes,
            page_bytes: of.memory.shared_bytes + of.memory.own_bytes,
            new_bytes: PAGE_SIZE
                * grown("the number of pages", before.pages.unique, now.pages.unique)?,
            packs_bytes: grown("packs", packs(before), packs(&now))?,
            files_bytes: grown(
                "files",
                before.snapshots.apparent_bytes,
                now.snapshots.apparent_bytes,
            )?,
            page_bytes_by_colour: colours
                .filter(|colour| colour.page_bytes > 0)
                .map(|colour| (colour.colour, colour.page_bytes))
                .collect(),
        })
    }

    /// What the store has more because of this memory.
    pub const fn stored_bytes(&self) -> u64 {
        self.packs_bytes + self.files_bytes
    }

    /// Frames that are restored as something else than zeroes.
    pub const fn data_bytes(&self) -> u64 {
        self.disk_bytes + self.page_bytes
    }
}
