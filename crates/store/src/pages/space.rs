//! A tenant's namespace: its packs and where each of its pages is.

use super::index::{Index, Place, prefix};
use super::lease::{Lease, Leases};
use super::pack::{Pack, PackError};
use crate::blob::Dir;
use crate::digest::{Digest, DigestError};
use crate::errors::{Damage, IoError, IoResult};
use dayfly_units::Name;
use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

/// Packs that are kept open.
const OPEN_FILES: usize = 64;

#[derive(Debug)]
pub(crate) struct Space {
    pub(crate) tenant: Name,
    pub(crate) dir: Dir,
    state: RwLock<State>,
    files: Mutex<Vec<(u32, Arc<File>)>>,
    leases: Arc<Leases>,
    /// Held by the one gc.
    pub(super) collecting: Mutex<()>,
    /// Held while the packs in the folder and those in the state differ: from a rename into the folder until the index has the pack, and
    /// from the change of the index until the files are out of the folder. A put may make the very pack that a gc is about to retire.
    changing: Mutex<()>,
}

#[derive(Debug, Default)]
pub(crate) struct State {
    pub(crate) index: Index,
    pub(crate) packs: BTreeMap<u32, Arc<Pack>>,
    next: u32,
    /// Files of packs that are in no state any more, and could not be removed.
    pub(super) retired: Vec<Digest>,
    /// Packs that could not be opened, and why.
    pub(crate) damaged: Vec<Damage>,
}

impl State {
    /// Numbers a pack that is in the folder. One with the same id is the same file, and must be known once, whatever was to become of it.
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

/// A page found: in which pack, and which of its pages.
#[derive(Debug, Clone)]
pub(crate) struct Found {
    pub(crate) number: u32,
    pub(crate) pack: Arc<Pack>,
    pub(crate) page: u32,
}

impl Space {
    /// Opens every pack in `dir`. A damaged one hides its own pages only.
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
            // What is not named like a pack was not put here by us.
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

    /// Packs that could not be opened and are still there, and why.
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
        self.changing.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn files(&self) -> MutexGuard<'_, Vec<(u32, Arc<File>)>> {
        self.files.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) const fn leases(&self) -> &Arc<Leases> {
        &self.leases
    }

    /// A lease of these pages; take it before you look them up.
    pub(crate) fn lease<'a>(&self, hashes: impl Iterator<Item = &'a Digest>) -> Lease {
        self.leases.take(hashes.map(prefix))
    }

    /// Makes packs findable. A page that is there already keeps its first place.
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

    /// Where the page with this hash is. All 32 bytes are compared with the footer on disk.
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
                return Ok(Some(Found { number: place.pack, pack: Arc::clone(pack), page: place.page }));
            }
        }
        Ok(None)
    }

    /// Where the page with this hash is likely to be: right unless two hashes share 8 bytes, so look at the page before you believe it.
    pub(crate) fn guess(&self, hash: &Digest) -> Option<(Place, Arc<Pack>)> {
        let state = self.read();
        let place = state.index.candidates(prefix(hash)).next()?;
        Some((place, Arc::clone(state.packs.get(&place.pack)?)))
    }

    /// The file of a pack.
    pub(crate) fn file(&self, number: u32, pack: &Pack) -> IoResult<Arc<File>> {
        if let Some((_, file)) = self.files().iter().find(|(n, _)| *n == number) {
            return Ok(Arc::clone(file));
        }
        let file = Arc::new(self.dir.open(&pack.id.to_string())?);
        let mut files = self.files();
        if files.len() >= OPEN_FILES {
            files.remove(0);
        }
        files.push((number, Arc::clone(&file)));
        Ok(file)
    }

    /// Closes the files of packs that are gone.
    pub(crate) fn close(&self, gone: &BTreeSet<u32>) {
        self.files().retain(|(number, _)| !gone.contains(number));
    }

    /// What a missing page is called.
    pub(crate) fn missing(&self, hash: &Digest, by: &str) -> Damage {
        let what = format!("page {hash} of tenant {}", self.tenant);
        Damage::Missing { file: self.dir.path().to_owned(), what, by: by.to_owned() }
    }
}

impl From<PackError> for super::PagesError {
    fn from(e: PackError) -> Self {
        match e {
            PackError::Io(e) => Self::Io(e),
            PackError::Damage(d) => Self::Damage(d),
        }
    }
}

impl From<IoError> for super::PagesError {
    fn from(e: IoError) -> Self {
        Self::Io(e)
    }
}
