//! Pages that a snapshot shares with other templates in the host's memory. Its clones map these
//! pages from there, and the pager does not fetch them (Kaleidoscope, section 5.2). Only complete
//! templates are used, and only those that [`may_map`] allows. Their pages were hashed
//! ([`OpenSnapshot::is_proven`]): otherwise a packer that a guest has taken over could report the
//! digest and the hashes of an ancestor of other snapshots, and so give them its own pages.

use crate::templates::open::OpenTemplate;
use crate::templates::shared::Shared;
use dayfly_store::{
    Comparable, Digest, MAX_ANCESTORS, OpenSnapshot, Plan, SnapshotManifest, Store, Table, alike,
};
use dayfly_units::Name;
use dayfly_vmm::memory::backing::Row;
use dayfly_vmm::memory::lazy;
use std::path::Path;
use std::sync::Arc;

/// The fewest consecutive pages that justify a separate mapping in each clone.
const LEAST_PAGES: u32 = 16;
/// The most such mappings.
const MOST_ROWS: usize = 1024;
/// The number of templates with which a snapshot is compared: its nearest ancestors.
const MOST_OTHERS: usize = 4;

/// Whether clones of `of` may map pages of `from`: only if `from` is an ancestor of `of`.
///
/// The VMM of a clone gets a descriptor of all RAM of `from`, and it may have been taken over by
/// its guest. The guest was once in the state of its ancestors, so their RAM is its own past. A
/// sibling or a descendant may have secrets of another party: two customers' snapshots often have
/// one parent.
fn may_map(of: &SnapshotManifest, from: &SnapshotManifest) -> bool {
    of.ancestors.contains(&from.memory.digest)
}

/// The ancestors of VMs that are cloned from this snapshot, and of their snapshots.
#[must_use]
pub fn descendant(of: &SnapshotManifest) -> Vec<Digest> {
    let all = of.ancestors.iter().chain([&of.memory.digest]);
    all.skip((of.ancestors.len() + 1).saturating_sub(MAX_ANCESTORS)).copied().collect()
}

/// The open snapshots with which `of` is compared, the nearest ancestor last.
fn others(open: &[Arc<OpenTemplate>], of: &SnapshotManifest) -> Vec<Arc<OpenTemplate>> {
    let usable = |other: &&Arc<OpenTemplate>| {
        other.is_proven() && may_map(of, &other.manifest) && lazy::is_whole(&other.memory)
    };
    let mut others: Vec<Arc<OpenTemplate>> = open.iter().filter(usable).cloned().collect();
    let place = |other: &OpenTemplate| {
        of.ancestors.iter().rposition(|digest| *digest == other.manifest.memory.digest)
    };
    others.sort_by_key(|other| place(other));
    others.split_off(others.len().saturating_sub(MOST_OTHERS))
}

/// The pages of `snapshot`, whose RAM `plan` loads, that templates in `open` have. Reads tables; a
/// template whose table cannot be read is not used.
pub(super) fn with(
    store: &Store,
    tenant: &Name,
    snapshot: &OpenSnapshot,
    plan: &Plan,
    open: &[Arc<OpenTemplate>],
) -> Option<Shared> {
    let others = others(open, &snapshot.manifest);
    let table_of = |other: &Arc<OpenTemplate>| {
        let (manifest, table) = store.snapshot_table(tenant, &other.manifest.name).ok()?;
        // The name may belong to another snapshot by now.
        (manifest == other.manifest).then(|| (other.clone(), table))
    };
    let others: Vec<(Arc<OpenTemplate>, Table)> = others.iter().filter_map(table_of).collect();
    if others.is_empty() {
        return None;
    }
    let table = Table::decode(Path::new("the table of a plan"), &plan.table).ok()?;
    let apart = |other: &OpenTemplate| {
        other.shared.as_ref().map(|shared| shared.frames()).unwrap_or_default()
    };
    let compared: Vec<Comparable<'_>> =
        others.iter().map(|(other, table)| Comparable::of(table, &apart(other))).collect();
    let found = alike(&Comparable::of(&table, &[]), &compared, LEAST_PAGES, MOST_ROWS);
    let (mut files, mut number_of) = (Vec::new(), vec![None; others.len()]);
    let mut rows = Vec::with_capacity(found.len());
    for row in found {
        let file = match number_of[row.other] {
            Some(number) => number,
            None => {
                files.push(others[row.other].0.memory.try_clone().ok()?);
                *number_of[row.other].insert(u32::try_from(files.len() - 1).ok()?)
            }
        };
        rows.push(Row { first: row.first, pages: row.frames, file, from: row.from });
    }
    if rows.is_empty() {
        return None;
    }
    let shared = Shared::new(rows, files)
        .inspect_err(|e| tracing::warn!("a list of shared pages: {e}"))
        .ok()?;
    let from: Vec<&str> = others
        .iter()
        .zip(&number_of)
        .filter(|(_, n)| n.is_some())
        .map(|((o, _), _)| o.manifest.name.as_str())
        .collect();
    tracing::info!(
        snapshot = %snapshot.manifest.name,
        rows = shared.rows.len(),
        bytes = shared.bytes(),
        "has pages of {}",
        from.join(", ")
    );
    Some(shared)
}

#[cfg(test)]
#[path = "sharing_tests.rs"]
mod tests;
