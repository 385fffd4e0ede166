//! Pages that a snapshot shares with other templates in the host's memory. Its clones map these
//! pages from there, and the pager does not fetch them (Kaleidoscope, section 5.2). Only complete
//! templates are used, and only those that [`may_map`] allows.

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
    let usable =
        |other: &&Arc<OpenTemplate>| may_map(of, &other.manifest) && lazy::is_whole(&other.memory);
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
mod tests {
    use super::*;
    use crate::fixture;
    use dayfly_units::PAGE_SIZE;
    use dayfly_vmm::memory::backing;
    use rustix::fs::SealFlags;
    use std::fs::File;
    use std::os::unix::fs::{FileExt, MetadataExt};

    fn name(text: &str) -> Name {
        text.parse().unwrap()
    }

    /// An open template with the pages `0..80` of its RAM, filled as a pager does.
    fn filled(store: &Store, tenant: &str, of: &str) -> OpenTemplate {
        let (snapshot, plan) = store.open_lazily(&name(of)).unwrap();
        let memory = plan.unwrap().memory;
        let pages = store.open_snapshot_pages(&name(tenant), &name(of)).unwrap();
        for n in 0..80 {
            memory.write_all_at(&pages.frame(n).unwrap(), u64::from(n) * PAGE_SIZE).unwrap();
        }
        rustix::fs::fcntl_add_seals(&memory, SealFlags::FUTURE_WRITE).unwrap();
        OpenTemplate::whole(snapshot)
    }

    fn page(memory: &File, page: u64) -> Vec<u8> {
        let mut bytes = vec![0; 4096];
        memory.read_exact_at(&mut bytes, page * PAGE_SIZE).unwrap();
        bytes
    }

    /// The digest of a stored snapshot's RAM.
    fn ram(store: &Store, of: &str) -> Digest {
        store.snapshot(&name(of)).unwrap().memory.digest
    }

    #[test]
    fn pages_of_another_template_are_what_the_snapshot_has() {
        let folder = tempfile::tempdir().unwrap();
        let store = Store::open(folder.path()).unwrap();
        fixture::snapshot(&store, "default", "first", 1..81);
        let ancestors = vec![ram(&store, "first")];
        fixture::descendant(&store, "default", "second", 31..111, ancestors);
        let first = Arc::new(filled(&store, "default", "first"));
        let expected = filled(&store, "default", "second");
        let (second, plan) = store.open_lazily(&name("second")).unwrap();
        let plan = plan.unwrap();
        let with =
            |open: &[Arc<OpenTemplate>]| with(&store, &name("default"), &second, &plan, open);
        let shared = with(std::slice::from_ref(&first)).unwrap();
        let frames: Vec<u32> = shared.frames().into_iter().flatten().collect();
        assert_eq!((frames, shared.bytes()), ((0..50).collect(), 50 * PAGE_SIZE));
        let list = shared.list.try_clone().unwrap();
        assert!(
            list.set_len(0).is_err() && list.write_all_at(&[0], 0).is_err(),
            "who has it reads only"
        );
        let own = second.memory.try_clone().unwrap();
        let backing = backing::Backing::sharing(own, &shared.list, shared.files).unwrap();
        let mut got = vec![0; 4096];
        for n in 0..80 {
            backing.read_page(u32::try_from(n).unwrap(), &mut got).unwrap();
            let wanted = if n < 50 { page(&expected.memory, n) } else { vec![0; 4096] };
            assert!(got == wanted, "page {n}: what is not shared is still to come");
        }
        assert!(with(&[]).is_none());
        let (lazy, _plan) = store.open_lazily(&name("first")).unwrap();
        assert!(with(&[Arc::new(OpenTemplate::whole(lazy))]).is_none(), "one that is not whole");
        // Pages that the other template itself maps from a third one are not used.
        let rows = vec![Row { first: 30, pages: 40, file: 0, from: 0 }];
        let third = Shared::new(rows, vec![first.memory.try_clone().unwrap()]).unwrap();
        let apart = Some(Arc::new(third));
        let partial = OpenTemplate { shared: apart, ..filled(&store, "default", "first") };
        assert_eq!(
            with(&[Arc::new(partial)]).map(|shared| shared.frames()),
            None,
            "10 pages are too few"
        );
    }

    /// All these snapshots have 50 pages in common, pair by pair; only their relation differs.
    #[test]
    fn only_pages_of_ancestors_are_mapped() {
        let folder = tempfile::tempdir().unwrap();
        let store = Store::open(folder.path()).unwrap();
        let descend = |tenant: &str, of: &str, pages, ancestors: &[&str]| {
            let ancestors = ancestors.iter().map(|of| ram(&store, of)).collect();
            fixture::descendant(&store, tenant, of, pages, ancestors);
        };
        descend("default", "root", 1..81, &[]);
        descend("default", "stranger", 11..91, &[]);
        descend("default", "child", 31..111, &["root"]);
        descend("default", "sibling", 21..101, &["root"]);
        descend("default", "grandchild", 41..121, &["root", "child"]);
        descend("other", "foreign", 1..81, &[]);
        // Another snapshot got the name of the parent, whose child is still there.
        descend("default", "parent", 51..131, &[]);
        descend("default", "orphan", 1..81, &["parent"]);
        store.remove_snapshot(&name("parent")).unwrap();
        descend("default", "parent", 5..85, &[]);
        let all = ["root", "stranger", "child", "sibling", "grandchild", "parent"];
        let mut open: Vec<_> =
            all.iter().map(|of| Arc::new(filled(&store, "default", of))).collect();
        open.push(Arc::new(filled(&store, "other", "foreign")));
        let files = |of: &str| -> Vec<&str> {
            let (snapshot, plan) = store.open_lazily(&name(of)).unwrap();
            let shared = with(&store, &name("default"), &snapshot, &plan.unwrap(), &open);
            let files = shared.map(|shared| shared.files).unwrap_or_default();
            let inode = |file: &File| file.metadata().unwrap().ino();
            let of = |file: &File| {
                open.iter().find(|other| inode(&other.memory) == inode(file)).unwrap()
            };
            let mut names: Vec<&str> =
                files.iter().map(|file| of(file).manifest.name.as_str()).collect();
            names.sort_unstable();
            names
        };
        assert_eq!(files("child"), ["root"]);
        assert_eq!(files("sibling"), ["root"]);
        assert!(files("grandchild").contains(&"child"));
        assert!(files("grandchild").iter().all(|of| ["child", "root"].contains(of)));
        for unrelated in ["root", "stranger", "orphan", "parent"] {
            assert_eq!(files(unrelated), [""; 0], "{unrelated}");
        }
    }

    #[test]
    fn the_nearest_ancestors_are_kept() {
        let folder = tempfile::tempdir().unwrap();
        let store = Store::open(folder.path()).unwrap();
        fixture::snapshot(&store, "default", "s", 1..3);
        let mut manifest = store.snapshot(&name("s")).unwrap();
        let mut all = Vec::new();
        for n in 0..20 {
            manifest.memory.digest = Digest([n; 32]);
            all.push(manifest.memory.digest);
            manifest.ancestors = descendant(&manifest);
            assert_eq!(manifest.ancestors, all[all.len().saturating_sub(MAX_ANCESTORS)..]);
        }
    }
}
