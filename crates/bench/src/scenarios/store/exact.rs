//! Bit for bit: what `dayfly-witness` sees in a guest before its snapshot, and in a clone.
//!
//! Covered from inside: all present private anonymous memory of all programs but the agent (they
//! are stopped, so it must not change); every file of the root disk but those that an identity
//! replaces, past the page cache, and what the page cache has of it: that came with the snapshot's
//! RAM. Not covered from inside: memory of the guest's kernel other than its page cache. All of RAM
//! is compared from outside (`outside`), and by the store at every first clone: its digest of all
//! frames.

use crate::prelude::*;
use crate::stock::Stock;

/// Memory of stopped programs.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Memory {
    /// Stopped programs.
    pub programs: u64,
    /// Bytes of their memory that were hashed.
    pub bytes: u64,
    /// Checksum of process ids, addresses and pages.
    pub digest: String,
}

/// Files of the root disk.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Files {
    /// How many.
    pub files: u64,
    /// Their bytes.
    pub bytes: u64,
    /// Checksum of names and contents, read past the page cache.
    pub direct: String,
    /// Bytes that the page cache has of them, and that were held against the disk's; none where
    /// only the disk was asked for.
    pub cached_bytes: u64,
    /// Of these, bytes of pages that are others than on the disk.
    pub cached_other_bytes: u64,
}

/// What was compared.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Exact {
    /// Whether the clone's RAM came out of the store: otherwise the daemon may have had it in
    /// memory still.
    pub from_store: bool,
    /// Programs whose memory was compared.
    pub programs: u64,
    /// Bytes of it.
    pub memory_bytes: u64,
    /// Whether it is the same in the clone.
    pub memory_same: bool,
    /// Files compared, and their bytes.
    pub files: u64,
    /// Bytes of them.
    pub files_bytes: u64,
    /// What the clone's page cache has of them.
    pub cached_bytes: u64,
    /// Whether the clone's disk is the original's; nothing where the original was gone.
    pub disk_same: Option<bool>,
    /// Whether the clone has something in its page cache, and its disk has the same.
    pub cache_same: bool,
}

impl Exact {
    /// Holds a clone against its original.
    pub fn new(
        before: &Memory,
        original: Option<&Files>,
        after: &Memory,
        clone: &Files,
        from_store: bool,
    ) -> Self {
        Self {
            from_store,
            programs: before.programs,
            memory_bytes: before.bytes,
            memory_same: before == after,
            files: clone.files,
            files_bytes: clone.bytes,
            cached_bytes: clone.cached_bytes,
            disk_same: original.map(|original| original.direct == clone.direct),
            cache_same: clone.cached_bytes > 0 && clone.cached_other_bytes == 0,
        }
    }

    /// Whether nothing differs.
    pub fn holds(&self) -> bool {
        self.memory_same && self.cache_same && self.disk_same != Some(false)
    }
}

/// A new clone of `snapshot`, and how it compares with what was seen in its original: the memory
/// of stopped programs, and the files if the original's disk was read.
pub async fn compared(
    stock: &Stock,
    snapshot: &Name,
    before: &Memory,
    original: Option<&Files>,
) -> Result<(VmId, Exact)> {
    let from_store = stock.forget().await?;
    stock.steps.begin(format!("reading memory and disk of a clone of {snapshot}"));
    let clone = stock.clone_of(snapshot).await?;
    let after = stock.witness(clone, "memory").await.context("memory of the clone")?;
    let files = stock.witness(clone, "files /").await.context("the clone's files")?;
    Ok((clone, Exact::new(before, original, &after, &files, from_store)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn memory(digest: &str) -> Memory {
        Memory { programs: 2, bytes: 8192, digest: digest.to_owned() }
    }

    fn files(direct: &str, cached_bytes: u64, cached_other_bytes: u64) -> Files {
        Files { files: 1, bytes: 2, direct: direct.to_owned(), cached_bytes, cached_other_bytes }
    }

    #[test]
    fn every_difference_counts() {
        let holds = |before, original: Option<&Files>, after, clone: &Files| {
            Exact::new(&memory(before), original, &memory(after), clone, true).holds()
        };
        assert!(holds("a", Some(&files("x", 0, 0)), "a", &files("x", 3, 0)));
        assert!(holds("a", None, "a", &files("x", 3, 0)));
        assert!(!holds("a", None, "b", &files("x", 3, 0)));
        assert!(!holds("a", None, "a", &files("x", 3, 1)));
        assert!(!holds("a", None, "a", &files("x", 0, 0)));
        assert!(!holds("a", Some(&files("x", 0, 0)), "a", &files("z", 3, 0)));
    }
}
