//! A tenant's namespace: its packs, and the place of each page.

use super::index::{Index, Place, prefix};
use super::lease::{Lease, Leases};
use super::pack::{Pack, PackError};
use crate::blob::Dir;
use crate::errors::{Damage, IoResult};
use dayfly_units::sync::lock;
use dayfly_units::{Digest, DigestError, Name};
use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

/// The most packs whose files are kept open.
const OPEN_FILES: usize = 64;

/// The namespaces that were opened in this process.
#[derive(Debug, Default)]
pub(crate) struct Tenants(pub(super) Mutex<BTreeMap<Name, Arc<Space>>>);

#[derive(Debug)]
pub(crate) struct Space {
    pub(crate) tenant: Name,
    pub(crate) dir: Dir,
    state: RwLock<State>,
    files: Mutex<Files>,
    leases: Arc<Leases>,
    /// Locked by the running gc, so that only one runs.
    pub(super) collecting: Mutex<()>,
    /// Taken while the packs in the folder and in the state differ. Without it, a put may make the
    /// very pack that a gc is about to retire.
    ///
    /// A put holds it from the rename into the folder until the index has the pack. A gc holds it
    /// from the change of the index until the files are out of the folder.
    changing: Mutex<()>,
}

/// The open files of packs.
#[derive(Debug, Default)]
struct Files {
    /// By number, the one opened first in front.
    open: Vec<(u32, Arc<File>)>,
    /// Numbers of packs that were removed. A reader that found such a pack before may still open
    /// its file; it is not kept, because it would take its space on disk until 64 others are open.
    gone: BTreeSet<u32>,
}

#[derive(Debug, Default)]
pub(crate) struct State {
    pub(crate) index: Index,
    pub(crate) packs: BTreeMap<u32, Arc<Pack>>,
    next: u32,
    /// Files of packs that are in no state any more, and could not be removed.
    pub(super) retired: Vec<Digest>,
    /// Packs that could not be opened, with the cause.
    pub(crate) damaged: Vec<Damage>,
}

impl State {
    /// Registers a pack in the folder and returns its number. A pack with a known id is the same
    /// file: it keeps its number, and is not retired any more.
    pub(super) fn enter(&mut self, pack: Pack) -> u32 {
        self.retired.retain(|id| *id != pack.id);
        if let Some((number, _)) = self.packs.iter().find(|(_, known)| known.id == pack.id) {
            return *number;
        }
        let number = self.next;
        self.next += 1;
        self.packs.insert(number, Arc::new(pack));
        number
    }
}

/// The pack and the page number of a page that was found.
#[derive(Debug, Clone)]
pub(crate) struct Found {
    pub(crate) number: u32,
    pub(crate) pack: Arc<Pack>,
    pub(crate) page: u32,
}

impl Space {
    /// Opens every pack in `dir`. A damaged pack makes only its own pages unavailable.
    pub(crate) fn open(tenant: &Name, dir: Dir) -> IoResult<Self> {
        let space = Self {
            tenant: tenant.clone(),
            dir,
            state: RwLock::default(),
            files: Mutex::default(),
            leases: Arc::default(),
            collecting: Mutex::default(),
            changing: Mutex::default(),
        };
        for name in space.dir.entries()? {
            let id: Result<Digest, DigestError> = name.parse();
            // Entries whose name is not a digest are not ours, and are skipped.
            let Ok(id) = id else { continue };
            match space.open_pack(&name, &id) {
                Ok((pack, hashes)) => space.add(vec![(pack, hashes)])?,
                Err(PackError::Io(e)) => return Err(e),
                Err(PackError::Damage(damage)) => {
                    tracing::warn!(%damage, "leaving a pack alone");
                    space.write().damaged.push(damage);
                }
            }
        }
        Ok(space)
    }

    fn open_pack(&self, name: &str, id: &Digest) -> Result<(Pack, Vec<Digest>), PackError> {
        let path = self.dir.path().join(name);
        let file = self.dir.open(name)?;
        let pack = Pack::open(&path, &file, &self.tenant)?;
        if pack.id != *id {
            let (expected, got) = (id.to_string(), pack.id.to_string());
            let place = "digest of the footer, which the file is named by".to_owned();
            return Err(Damage::Content { file: path, place, expected, got }.into());
        }
        let hashes = pack.hashes(&file, 0..pack.pages)?;
        Ok((pack, hashes))
    }

    /// Packs that could not be opened and still exist, with the cause.
    pub(crate) fn unopened(&self) -> IoResult<Vec<Damage>> {
        let mut damaged = self.read().damaged.clone();
        let present: BTreeSet<String> = self.dir.entries()?.into_iter().collect();
        damaged.retain(|d| {
            d.file().file_name().is_some_and(|n| n.to_str().is_some_and(|n| present.contains(n)))
        });
        Ok(damaged)
    }

    pub(crate) fn read(&self) -> RwLockReadGuard<'_, State> {
        self.state.read().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn write(&self) -> RwLockWriteGuard<'_, State> {
        self.state.write().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn changing(&self) -> MutexGuard<'_, ()> {
        lock(&self.changing)
    }

    fn files(&self) -> MutexGuard<'_, Files> {
        lock(&self.files)
    }

    pub(super) const fn leases(&self) -> &Arc<Leases> {
        &self.leases
    }

    /// Takes a lease of these pages; take it before you look them up.
    pub(crate) fn lease<'a>(&self, hashes: impl Iterator<Item = &'a Digest>) -> Lease {
        self.leases.take(hashes.map(prefix))
    }

    /// Adds packs to the index. A page that the index has already keeps its first place.
    pub(super) fn add(&self, packs: Vec<(Pack, Vec<Digest>)>) -> IoResult<()> {
        let mut state = self.write();
        packs.into_iter().try_for_each(|(pack, hashes)| self.add_pack(&mut state, pack, &hashes))
    }

    fn add_pack(&self, state: &mut State, pack: Pack, hashes: &[Digest]) -> IoResult<()> {
        let number = state.enter(pack);
        for (page, hash) in (0..).zip(hashes) {
            if self.find_in(state, hash)?.is_none() {
                state.index.insert(prefix(hash), Place { pack: number, page });
            }
        }
        Ok(())
    }

    /// Finds the page with this hash; all 32 bytes are compared with the footer on disk.
    pub(crate) fn find(&self, hash: &Digest) -> IoResult<Option<Found>> {
        self.find_in(&self.read(), hash)
    }

    fn find_in(&self, state: &State, hash: &Digest) -> IoResult<Option<Found>> {
        for place in state.index.candidates(prefix(hash)) {
            let Some(pack) = state.packs.get(&place.pack) else { continue };
            let file = match self.file(place.pack, pack) {
                Err(e) if e.is_not_found() => continue,
                other => other?,
            };
            if pack.hashes(&file, place.page..place.page + 1)?.first() == Some(hash) {
                return Ok(Some(Found {
                    number: place.pack,
                    pack: Arc::clone(pack),
                    page: place.page,
                }));
            }
        }
        Ok(None)
    }

    /// The likely place of the page with this hash. It is wrong if two hashes share 8 bytes, so
    /// verify the page before you use it.
    pub(crate) fn guess(&self, hash: &Digest) -> Option<(Place, Arc<Pack>)> {
        let state = self.read();
        let place = state.index.candidates(prefix(hash)).next()?;
        Some((place, Arc::clone(state.packs.get(&place.pack)?)))
    }

    /// The open file of a pack, from the cache or newly opened.
    pub(crate) fn file(&self, number: u32, pack: &Pack) -> IoResult<Arc<File>> {
        if let Some((_, file)) = self.files().open.iter().find(|(n, _)| *n == number) {
            return Ok(Arc::clone(file));
        }
        let file = Arc::new(self.dir.open(&pack.id.to_string())?);
        let mut files = self.files();
        if files.gone.contains(&number) {
            return Ok(file);
        }
        if files.open.len() >= OPEN_FILES {
            files.open.remove(0);
        }
        files.open.push((number, Arc::clone(&file)));
        Ok(file)
    }

    /// Closes the files of packs that were removed.
    pub(crate) fn close(&self, gone: &BTreeSet<u32>) {
        let mut files = self.files();
        files.open.retain(|(number, _)| !gone.contains(number));
        files.gone.extend(gone);
    }

    /// Whether the file of a pack is kept open.
    #[cfg(test)]
    pub(super) fn keeps_open(&self, number: u32) -> bool {
        self.files().open.iter().any(|(n, _)| *n == number)
    }

    /// The error for a missing page.
    pub(crate) fn missing(&self, hash: &Digest, by: &str) -> Damage {
        let what = format!("page {hash} of tenant {}", self.tenant);
        Damage::Missing { file: self.dir.path().to_owned(), what, by: by.to_owned() }
    }
}
