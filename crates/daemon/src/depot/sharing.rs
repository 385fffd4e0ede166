//! Pages that a snapshot has in common with others that are in the host's memory: clones of it have them from there, and they are not fetched
//! (Kaleidoscope, section 5.2). Only from templates of the same tenant, and only from such as are whole.

use super::Loaded;
use dayfly_store::{Comparable, OpenSnapshot, Plan, Store, Table, alike};
use dayfly_units::{Name, PAGE_SIZE};
use dayfly_vmm::memory::backing::{self, Row};
use dayfly_vmm::memory::lazy;
use rustix::fs::{MemfdFlags, SealFlags};
use std::fs::File;
use std::io::{self, Write};
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

/// Pages in a row that are worth a mapping of their own in each clone.
const LEAST_PAGES: u32 = 16;
/// The most such mappings.
const MOST_ROWS: usize = 1024;
/// With so many templates a snapshot is compared: the one that it was made from, those on the same image, those that were used last.
const MOST_OTHERS: usize = 4;

/// What clones of a snapshot have from the memory of other templates.
#[derive(Debug)]
pub struct Shared {
    /// The sealed list of rows, for VMMs.
    pub list: File,
    /// The files of these rows.
    pub files: Vec<File>,
    rows: Vec<Row>,
}

impl Shared {
    fn new(rows: Vec<Row>, files: Vec<File>) -> io::Result<Self> {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let mut list = File::from(rustix::fs::memfd_create("shared-pages", flags)?);
        list.write_all(&backing::encode(&rows))?;
        // VMMs read it, and must not change what the next one reads.
        let seals = SealFlags::WRITE | SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
        rustix::fs::fcntl_add_seals(&list, seals)?;
        Ok(Self { list, files, rows })
    }

    /// `rows` of `file`, and what others have of the rest, laid over it. Nothing where these are more than a VMM takes.
    ///
    /// # Errors
    /// The host cannot make the list, or has too few descriptors.
    pub fn over(beneath: Option<&Self>, rows: &[Row], file: &File) -> io::Result<Option<Self>> {
        let (below, others) = beneath.map_or((&[][..], &[][..]), |shared| (&shared.rows, &shared.files));
        let number = u32::try_from(others.len()).unwrap_or(u32::MAX);
        let above: Vec<Row> = rows.iter().map(|row| Row { file: number, ..*row }).collect();
        let mut rows = backing::laid_over(below, &above);
        // Those of which nothing is left are not passed on.
        let (mut files, mut number_of) = (Vec::new(), vec![None; others.len() + 1]);
        for row in &mut rows {
            let was = row.file as usize;
            row.file = match number_of[was] {
                Some(number) => number,
                None => {
                    files.push(others.get(was).unwrap_or(file).try_clone()?);
                    *number_of[was].insert(u32::try_from(files.len() - 1).unwrap_or(u32::MAX))
                }
            };
        }
        if rows.len() > backing::MAX_ROWS || files.len() > backing::MAX_FILES {
            return Ok(None);
        }
        Self::new(rows, files).map(Some)
    }

    /// How many mappings they are.
    #[must_use]
    pub fn rows(&self) -> usize {
        self.rows.len()
    }

    /// The frames that are not in the snapshot's own memory file.
    #[must_use]
    pub fn frames(&self) -> Vec<Range<u32>> {
        self.rows.iter().map(|row| row.first..row.first + row.pages).collect()
    }

    /// How many bytes they are.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.rows.iter().map(|row| u64::from(row.pages) * PAGE_SIZE).sum()
    }
}

/// Snapshots that are open, the one that was used last at the end, of which `of` may have pages: the best last.
fn others(open: &[Arc<Loaded>], of: &OpenSnapshot) -> Vec<Arc<Loaded>> {
    let whole = |other: &&Arc<Loaded>| lazy::is_whole(&other.memory);
    let mut others: Vec<Arc<Loaded>> = open.iter().filter(whole).cloned().collect();
    let manifest = &of.manifest;
    let image = |disk: &[dayfly_store::DiskRef]| disk.first().map(|disk| disk.image.digest);
    others.sort_by_key(|other| {
        let parent = manifest.parent.as_ref() == Some(&other.manifest.name);
        // A sibling, or a child, of which the same is true.
        let family = manifest.parent.is_some() && manifest.parent == other.manifest.parent
            || other.manifest.parent.as_ref() == Some(&manifest.name);
        (parent, family, image(&other.manifest.disks) == image(&manifest.disks))
    });
    others.split_off(others.len().saturating_sub(MOST_OTHERS))
}

/// What clones of `snapshot`, whose RAM `plan` brings, can have from those in `open`. Reads tables; nothing is shared where one cannot be read.
pub(super) fn with(
    store: &Store,
    tenant: &Name,
    snapshot: &OpenSnapshot,
    plan: &Plan,
    open: &[Arc<Loaded>],
) -> Option<Shared> {
    let others = others(open, snapshot);
    let table_of = |other: &Arc<Loaded>| {
        let (manifest, table) = store.snapshot_table(tenant, &other.manifest.name).ok()?;
        // By now that name may be another's.
        (manifest == other.manifest).then(|| (other.clone(), table))
    };
    let others: Vec<(Arc<Loaded>, Table)> = others.iter().filter_map(table_of).collect();
    if others.is_empty() {
        return None;
    }
    let table = Table::decode(Path::new("the table of a plan"), &plan.table).ok()?;
    let apart = |other: &Loaded| other.shared.as_ref().map(|shared| shared.frames()).unwrap_or_default();
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
    let shared =
        Shared::new(rows, files).inspect_err(|e| tracing::warn!("a list of shared pages: {e}")).ok()?;
    let from: Vec<&str> = others
        .iter()
        .zip(&number_of)
        .filter(|(_, n)| n.is_some())
        .map(|((o, _), _)| o.manifest.name.as_str())
        .collect();
    tracing::info!(
        snapshot = %snapshot.manifest.name, rows = shared.rows.len(), bytes = shared.bytes(), "has pages of {}", from.join(", ")
    );
    Some(shared)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixture;
    use std::os::unix::fs::FileExt;

    fn name(text: &str) -> Name {
        text.parse().unwrap()
    }

    #[test]
    fn pages_of_another_template_are_what_the_snapshot_has() {
        let folder = tempfile::tempdir().unwrap();
        let store = Store::open(folder.path()).unwrap();
        fixture::snapshot(&store, "default", "first", 1..81);
        fixture::snapshot(&store, "default", "second", 31..111);
        fixture::snapshot(&store, "other", "foreign", 31..111);
        // As a pager would leave it.
        let filled = |of: &str| {
            let (snapshot, plan) = store.open_lazily(&name(of)).unwrap();
            let tenant = if of == "foreign" { "other" } else { "default" };
            let memory = plan.unwrap().memory;
            let pages = store.open_snapshot_pages(&name(tenant), &name(of)).unwrap();
            for n in 0..80 {
                memory.write_all_at(&pages.frame(n).unwrap(), u64::from(n) * PAGE_SIZE).unwrap();
            }
            rustix::fs::fcntl_add_seals(&memory, SealFlags::FUTURE_WRITE).unwrap();
            Loaded::whole(snapshot)
        };
        let whole = |of: &str| Arc::new(filled(of));
        let page = |memory: &File, page: u64| {
            let mut bytes = vec![0; 4096];
            memory.read_exact_at(&mut bytes, page * PAGE_SIZE).unwrap();
            bytes
        };
        let (first, expected) = (whole("first"), whole("second"));
        let (second, plan) = store.open_lazily(&name("second")).unwrap();
        let plan = plan.unwrap();
        let with = |open: &[Arc<Loaded>]| with(&store, &name("default"), &second, &plan, open);
        let shared = with(std::slice::from_ref(&first)).unwrap();
        let frames: Vec<u32> = shared.frames().into_iter().flatten().collect();
        assert_eq!((frames, shared.bytes()), ((0..50).collect(), 50 * PAGE_SIZE));
        let list = shared.list.try_clone().unwrap();
        assert!(list.set_len(0).is_err() && list.write_all_at(&[0], 0).is_err(), "who has it reads only");
        let own = second.memory.try_clone().unwrap();
        let backing = backing::Backing::sharing(own, &shared.list, shared.files).unwrap();
        let mut got = vec![0; 4096];
        for n in 0..80 {
            backing.read_page(u32::try_from(n).unwrap(), &mut got).unwrap();
            let wanted = if n < 50 { page(&expected.memory, n) } else { vec![0; 4096] };
            assert!(got == wanted, "page {n}: what is not shared is still to come");
        }
        // Nothing is had from who has nothing, or of what is another's.
        assert!(with(&[]).is_none() && with(&[whole("foreign")]).is_none());
        let (lazy, _plan) = store.open_lazily(&name("first")).unwrap();
        assert!(with(&[Arc::new(Loaded::whole(lazy))]).is_none(), "one that is not whole");
        // What the other has from a third it does not have.
        let rows = vec![Row { first: 30, pages: 40, file: 0, from: 0 }];
        let third = Shared::new(rows, vec![first.memory.try_clone().unwrap()]).unwrap();
        let part = Loaded { shared: Some(Arc::new(third)), ..filled("first") };
        assert_eq!(with(&[Arc::new(part)]).map(|shared| shared.frames()), None, "10 pages are too few");
    }
}
