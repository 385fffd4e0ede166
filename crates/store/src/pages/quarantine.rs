//! The quarantine of a tenant: groups of pages whose bytes did not have their sum, and packs that
//! could not be read.
//!
//! A put does not find a page in quarantine, so it writes the page anew. Pages are addressed by
//! content, so this heals every older snapshot that has the page. A reader that finds no other
//! copy still tries the quarantined one, because a disk may read again what it could not read
//! before; the page's hash decides. A gc keeps a quarantined pack as long as a table needs a page
//! that has no other copy, and reads and hashes the other copy before the pack goes
//! ([`super::copies`]).
//!
//! The record is the file `quarantine` in the tenant's folder: sealed, its payload is 36 bytes per
//! entry, the pack's id and the group's number as u32 little-endian. If it cannot be written, it is
//! kept in memory, and the next change of the quarantine writes it. If it is damaged, it counts as
//! empty: the next reader finds the damaged groups again. No page depends on the record, because
//! all copies of a page stay findable until one of them was hashed.

use super::index::Place;
use super::pack::Pack;
use super::record::{ALL, ReadError, Record, read, write};
use super::space::{Space, State};
use crate::errors::IoResult;
use dayfly_units::error::chain;
use dayfly_units::sync::lock;

impl State {
    /// Whether the page at `place` in `pack` is in quarantine.
    pub(crate) fn is_bad(&self, place: Place, pack: &Pack) -> bool {
        !self.quarantine.is_empty()
            && (self.quarantine.contains(&(place.pack, ALL))
                || self.quarantine.contains(&(place.pack, place.page / pack.group_pages)))
    }

    /// Whether a group of the pack is in quarantine.
    pub(crate) fn is_pack_bad(&self, number: u32) -> bool {
        self.quarantine.range((number, 0)..=(number, ALL)).next().is_some()
    }

    /// The entries as they are recorded.
    fn record(&self) -> Record {
        let id = |&(number, group): &(u32, u32)| Some((self.packs.get(&number)?.id, group));
        self.quarantine.iter().filter_map(id).collect()
    }
}

impl Space {
    /// Puts groups in quarantine, and records it. Each is a pack's number and a group's number, or
    /// [`ALL`]. Returns whether one of them was not in quarantine.
    pub(crate) fn quarantine(&self, groups: &[(u32, u32)]) -> bool {
        let mut fresh = Vec::new();
        let mut state = self.write();
        for &(number, group) in groups {
            let Some(pack) = state.packs.get(&number).map(|pack| pack.id) else { continue };
            let known = state.quarantine.contains(&(number, ALL));
            if !known && state.quarantine.insert((number, group)) {
                fresh.push((pack, group));
            }
        }
        drop(state);
        for (pack, group) in &fresh {
            let group = if *group == ALL { "all groups".to_owned() } else { group.to_string() };
            tracing::warn!(%pack, group, "a put writes these damaged pages anew");
        }
        self.record();
        !fresh.is_empty()
    }

    /// Ends the quarantine of groups whose pages were all hashed just now. The caller holds
    /// `changing`.
    pub(crate) fn release(&self, groups: &[(u32, u32)]) {
        self.write().release(groups);
        self.record();
    }

    /// Writes the record, if it differs from the one on disk. An error is logged: the next change
    /// tries again.
    pub(super) fn record(&self) {
        let mut recorded = lock(&self.recorded);
        let now = self.read().record();
        if *recorded == now || self.is_read_only {
            return;
        }
        match write(&self.dir, &now) {
            Ok(()) => *recorded = now,
            Err(e) => tracing::warn!("the quarantine of pages is not recorded: {}", chain(&e)),
        }
    }

    /// Reads the record on disk; a damaged one counts as empty.
    pub(super) fn read_record(&self) -> IoResult<Record> {
        let record = match read(&self.dir) {
            Ok(record) => record,
            Err(ReadError::Io(e)) if e.is_not_found() => Record::new(),
            Err(ReadError::Io(e)) if !e.is_damage() => return Err(e),
            Err(e) => {
                tracing::warn!("the quarantine counts as empty: {}", chain(&e));
                Record::new()
            }
        };
        lock(&self.recorded).clone_from(&record);
        Ok(record)
    }
}

#[cfg(test)]
#[path = "quarantine_tests.rs"]
mod tests;
