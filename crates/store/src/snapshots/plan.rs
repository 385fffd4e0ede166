//! A plan: what another process, the pager, needs to read a snapshot's RAM page by page. It
//! consists of descriptors and the place of each page in them.
//!
//! A pager outlives the daemon that started it, and must not depend on later gcs. So it gets open
//! files: a retired pack stays readable while a process has it open.
//!
//! The pager trusts no page because of its sender: it checks each group's sum, and compares each
//! page's hash with the table's. It checks each leaf of a disk file against the file's hash tree,
//! whenever it reads a part of the leaf. A disk file without a tree was verified whole before it
//! was sent.

use super::open::{OpenDisk, OpenSnapshot, Ram};
use super::ram;
use crate::errors::{Damage, IoError};
use crate::inner::Store;
use crate::memory::Table;
use crate::objects::tree::{CheckedFile, DiskFile, FileTree, trouble};
use crate::pages::PagesError;
use crate::pages::index::Place;
use crate::pages::pack::{PAGE, Pack, PackError};
use crate::pages::read::read_span;
use crate::pages::record::ALL;
use crate::pages::space::Space;
use crate::publish::OpenError;
use dayfly_units::tree::LeafError;
use dayfly_units::{Name, PAGE_SIZE};
use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};

/// How often packs are located again because a gc moved pages meanwhile.
const TRIES: u32 = 16;
const PLACE_BYTES: usize = 8;
/// The name of the places in errors.
const PLACES: &str = "places of pages";

/// The plan that a pager gets.
#[derive(Debug)]
pub struct Plan {
    /// The sealed table.
    pub table: Vec<u8>,
    /// For each of the table's hashes two u32 little-endian: index in `packs`, and number of the
    /// page in that pack.
    pub places: Vec<u8>,
    /// Packs, open for reading.
    pub packs: Vec<File>,
    /// For each of the snapshot's disks its files as the table numbers them: the image, then the
    /// layers' data.
    pub disks: Vec<Vec<DiskFile>>,
    /// RAM: an empty memfd with the length of RAM, its length sealed.
    pub memory: File,
}

impl Store {
    /// Opens the snapshot `name` with empty RAM, and the plan to fill it. If RAM is a file on disk,
    /// it is opened in full, without a plan. The same files are verified as by
    /// [`Store::open_snapshot`], except pages, which are verified when they are read.
    ///
    /// # Errors
    /// As [`Store::open_snapshot`].
    pub fn open_lazily(&self, name: &Name) -> Result<(OpenSnapshot, Option<Plan>), OpenError> {
        let parts = self.0.open_snapshot_parts(name)?;
        let failed = |e| {
            IoError::new("opening for a pager", &self.0.snapshots.path().join(name.as_str()))(e)
        };
        // The lease keeps the pages until their packs are open.
        let table = match &parts.ram {
            Ram::Table(table, _lease) => table,
            Ram::File(memory) => {
                let memory = memory.try_clone().map_err(failed)?;
                return Ok((parts.with(memory, true), None));
            }
        };
        let space = self.0.space(&table.tenant)?;
        let (packs, places) = located(&space, table)?;
        let disks = parts.disks.iter().map(files_of).collect::<io::Result<_>>().map_err(failed)?;
        let memory = ram::create(table.ram.bytes)?;
        let to_read = ram::to_read(&memory).map_err(failed)?;
        let plan = Plan { table: table.encode(), places, packs, disks, memory };
        // The pager hashes each page.
        Ok((parts.with(to_read, true), Some(plan)))
    }
}

fn files_of(disk: &OpenDisk) -> io::Result<Vec<DiskFile>> {
    // The pager gets descriptions that it shares with neither the daemon nor a VMM.
    let tree = |tree: &FileTree| {
        Ok::<_, io::Error>(FileTree { file: ram::to_read(&tree.file)?, root: tree.root })
    };
    std::iter::once((&disk.base, &disk.tree))
        .chain(disk.layers.iter().map(|l| (&l.data, &l.tree)))
        .map(|(file, of)| {
            let tree = of.as_ref().map(tree).transpose()?;
            Ok(DiskFile { file: ram::to_read(file)?, tree })
        })
        .collect::<io::Result<_>>()
}

/// Opens the packs that have the table's pages, and encodes the place of each page.
fn located(space: &Space, table: &Table) -> Result<(Vec<File>, Vec<u8>), OpenError> {
    'again: for _ in 0..TRIES {
        let mut packs: BTreeMap<u32, (u32, Vec<crate::Digest>)> = BTreeMap::new();
        let mut files = Vec::new();
        let mut places = Vec::with_capacity(table.hashes().len() * PLACE_BYTES);
        for hash in table.hashes() {
            let missing = || space.missing(hash, "who asks");
            let (mut place, mut pack) = space.guess(hash).ok_or_else(missing)?;
            let (at, hashes) = match packs.entry(place.pack) {
                std::collections::btree_map::Entry::Occupied(known) => known.into_mut(),
                std::collections::btree_map::Entry::Vacant(free) => {
                    let Some((file, hashes)) = opened(space, place.pack, &pack)? else {
                        continue 'again;
                    };
                    files.push(file);
                    free.insert((count(files.len() - 1), hashes))
                }
            };
            let mut at = *at;
            if hashes.get(place.page as usize) != Some(hash) {
                // Two pages share this prefix.
                let found = space.find_any(hash)?.ok_or_else(missing)?;
                (place, pack) = (Place { pack: found.number, page: found.page }, found.pack);
                at = match packs.get(&place.pack) {
                    Some((at, _)) => *at,
                    None => {
                        let Some((file, hashes)) = opened(space, place.pack, &pack)? else {
                            continue 'again;
                        };
                        files.push(file);
                        packs.insert(place.pack, (count(files.len() - 1), hashes));
                        count(files.len() - 1)
                    }
                };
            }
            places.extend_from_slice(&at.to_le_bytes());
            places.extend_from_slice(&place.page.to_le_bytes());
        }
        return Ok((files, places));
    }
    Err(Damage::Missing {
        file: space.dir.path().to_owned(),
        what: "a pack that stays".to_owned(),
        by: format!("a snapshot's table, {TRIES} times in a row,"),
    }
    .into())
}

fn count(n: usize) -> u32 {
    u32::try_from(n).unwrap_or(u32::MAX)
}

/// The file of a pack and its hashes; `None` if the pack was just retired, or cannot be read and is
/// in quarantine from now on: another pack may have its pages.
fn opened(
    space: &Space,
    number: u32,
    pack: &Pack,
) -> Result<Option<(File, Vec<crate::Digest>)>, IoError> {
    let read = || -> Result<_, IoError> {
        let file = space.dir.open(&pack.id.to_string())?;
        let hashes = pack.hashes(&file, 0..pack.pages)?;
        Ok((file, hashes))
    };
    match read() {
        Ok(read) => Ok(Some(read)),
        Err(e) if e.is_not_found() => Ok(None),
        Err(e) if e.is_damage() && space.quarantine(&[(number, ALL)]) => Ok(None),
        Err(e) => Err(e),
    }
}

/// A group of pages compressed together.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct GroupId {
    /// Index in the plan's packs.
    pub pack: u32,
    /// Number of the group in that pack.
    pub group: u32,
}

/// Buffers, reused for group after group.
#[derive(Debug, Default)]
pub struct GroupBuffer {
    stored: Vec<u8>,
    raw: Vec<u8>,
}

/// A plan on the side of the pager: it reads the pages and blocks of a snapshot's RAM. Every method
/// may be called from any thread, and blocks.
#[derive(Debug)]
pub struct PageReader {
    table: Table,
    packs: Vec<(Pack, File)>,
    places: Vec<Place>,
    disks: Vec<Vec<CheckedFile>>,
}

impl PageReader {
    /// Verifies table, packs and places.
    ///
    /// # Errors
    /// `Damage` or `Invalid` name the part that does not fit.
    pub fn open(
        table: &[u8],
        places: &[u8],
        packs: Vec<File>,
        disks: Vec<Vec<DiskFile>>,
    ) -> Result<Self, PagesError> {
        let table = Table::decode(Path::new("the table of a plan"), table)?;
        let invalid = |place: String, expected: String, got: String| PagesError::Invalid {
            place,
            expected,
            got,
        };
        let counts = |disks: &mut dyn Iterator<Item = usize>| disks.collect::<Vec<_>>();
        let (expected, got) = (
            counts(&mut table.disks.iter().map(Vec::len)),
            counts(&mut disks.iter().map(Vec::len)),
        );
        if expected != got {
            return Err(invalid(
                "files of disks".to_owned(),
                format!("{expected:?}"),
                format!("{got:?}"),
            ));
        }
        let mut opened = Vec::with_capacity(packs.len());
        for (n, file) in packs.into_iter().enumerate() {
            let path = PathBuf::from(format!("pack {n} of a plan"));
            let mut pack = Pack::open(&path, &file, &table.tenant).map_err(|e| match e {
                PackError::Io(e) => PagesError::Io(e),
                PackError::Damage(e) => PagesError::Damage(e),
            })?;
            pack.path = PathBuf::from(format!("pages/{}/{}", table.tenant, pack.id));
            opened.push((pack, file));
        }
        let (chunks, rest) = places.as_chunks::<PLACE_BYTES>();
        if chunks.len() != table.hashes().len() || !rest.is_empty() {
            let expected = (table.hashes().len() * PLACE_BYTES).to_string();
            return Err(invalid(format!("bytes of {PLACES}"), expected, places.len().to_string()));
        }
        let number = |bytes: &[u8]| u32::from_le_bytes(std::array::from_fn(|n| bytes[n]));
        let places: Vec<Place> =
            chunks.iter().map(|c| Place { pack: number(&c[..4]), page: number(&c[4..]) }).collect();
        for (n, place) in places.iter().enumerate() {
            let pages = opened.get(place.pack as usize).map_or(0, |(pack, _)| pack.pages);
            if place.page >= pages {
                let (expected, got) = (format!("below {pages}"), place.page.to_string());
                return Err(invalid(
                    format!("{PLACES}: page of number {n}, pack {}", place.pack),
                    expected,
                    got,
                ));
            }
        }
        let checked = |files: Vec<DiskFile>| files.into_iter().map(CheckedFile::new).collect();
        let disks = disks.into_iter().map(checked).collect::<io::Result<_>>();
        let disks =
            disks.map_err(IoError::new("looking at", Path::new("a disk file of a plan")))?;
        Ok(Self { table, packs: opened, places, disks })
    }

    /// The table of RAM.
    #[must_use]
    pub const fn table(&self) -> &Table {
        &self.table
    }

    /// The group of the page with the table's hash number `hash`.
    #[must_use]
    pub fn group_of(&self, hash: u32) -> Option<GroupId> {
        let place = self.places.get(hash as usize)?;
        let (pack, _) = self.packs.get(place.pack as usize)?;
        Some(GroupId { pack: place.pack, group: place.page / pack.group_pages })
    }

    /// Reads a group into `buffer`, and checks the sum of its stored bytes. Returns the number of
    /// stored bytes. The group's pages are not verified yet.
    ///
    /// # Errors
    /// `Damage` names pack and group; `Io` if the host cannot read; `Invalid` if the plan has no
    /// such group.
    pub fn read_group(&self, id: GroupId, buffer: &mut GroupBuffer) -> Result<usize, PagesError> {
        let group = id.group as usize;
        let known = self.packs.get(id.pack as usize).filter(|(pack, _)| group < pack.groups());
        let Some((pack, file)) = known else {
            let (expected, got) = ("one of the plan".to_owned(), format!("{id:?}"));
            return Err(PagesError::Invalid { place: "group".to_owned(), expected, got });
        };
        let stored = read_span(pack, file, group, group, &mut buffer.stored)?;
        pack.decode(group, pack.pages_of(group).start, stored, &mut buffer.raw)?;
        Ok(stored.len())
    }

    /// The page with the table's hash number `hash`, verified. `buffer` must have the page's group.
    ///
    /// # Errors
    /// `Damage` names pack, group and page; `Invalid` if the plan or the buffer has no such page.
    pub fn page<'a>(&self, hash: u32, buffer: &'a GroupBuffer) -> Result<&'a [u8], PagesError> {
        let found = self.places.get(hash as usize).zip(self.table.hashes().get(hash as usize));
        let found = found.and_then(|(place, digest)| {
            Some((place, digest, self.packs.get(place.pack as usize)?))
        });
        let page = found.and_then(|(place, digest, (pack, _))| {
            let at = (place.page % pack.group_pages) as usize * PAGE;
            Some((place.page, digest, pack, buffer.raw.get(at..at + PAGE)?))
        });
        let Some((page, digest, pack, bytes)) = page else {
            let (expected, got) = ("one of the group that was read".to_owned(), hash.to_string());
            return Err(PagesError::Invalid { place: "hash".to_owned(), expected, got });
        };
        pack.check(page, digest, bytes)?;
        Ok(bytes)
    }

    /// Reads blocks of a disk's file, from `block` on, until `bytes` is full, and checks the leaves
    /// that have them. After an error the content of `bytes` is not to be used.
    ///
    /// # Errors
    /// `Damage`: there is no such file, it ends before, or a leaf or the tree is damaged. `Io`: the
    /// host cannot read.
    pub fn read_blocks(
        &self,
        disk: u8,
        layer: u8,
        block: u32,
        bytes: &mut [u8],
    ) -> Result<(), PagesError> {
        let path = Path::new("the disks of a plan");
        let name = format!("layer {layer} of disk {disk}");
        let file =
            self.disks.get(usize::from(disk)).and_then(|layers| layers.get(usize::from(layer)));
        let length = bytes.len();
        let missing = || Damage::Missing {
            file: path.join(&name),
            what: format!("block {block} and {length} bytes from there"),
            by: "RAM".to_owned(),
        };
        let file = file.ok_or_else(missing)?;
        match file.read(u64::from(block) * PAGE_SIZE, bytes) {
            Ok(()) => Ok(()),
            Err(LeafError::Read { source, .. })
                if source.kind() == io::ErrorKind::UnexpectedEof =>
            {
                Err(missing().into())
            }
            Err(LeafError::Range { .. }) => Err(missing().into()),
            Err(error) => Err(trouble(path, &name, error).into()),
        }
    }
}

#[cfg(test)]
#[path = "plan_tests.rs"]
mod tests;
