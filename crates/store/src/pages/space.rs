//! A tenant's namespace: its packs, and the place of each page.

use super::index::{Index, Place, prefix};
use super::lease::{Lease, Leases};
use super::pack::{Pack, PackError};
use super::record::{ALL, Record};
use crate::blob::{Dir, interleave};
use crate::errors::{Damage, IoResult};
use dayfly_units::sync::lock;
use dayfly_units::{Digest, DigestError, Name};
use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::sync::atomic::{AtomicBool, Ordering};
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
    /// from the change of the index until the files are out of the folder. A verification holds it
    /// while it ends the quarantine of groups.
    changing: Mutex<()>,
    /// The quarantine as it is on disk.
    pub(super) recorded: Mutex<Record>,
    /// Whether nothing in the folder may be changed.
    pub(super) is_read_only: bool,
    /// Packs whose hashes could not be read by a lookup, and are not in quarantine yet.
    suspects: Mutex<BTreeSet<u32>>,
    has_suspects: AtomicBool,
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
    /// A place of each page.
    pub(crate) index: Index,
    /// Further places of pages that the index has already, of packs that were found when the folder
    /// was opened: which of the copies has the page's bytes is not known yet. Nearly always empty.
    pub(super) doubles: Index,
    pub(crate) packs: BTreeMap<u32, Arc<Pack>>,
    next: u32,
    /// How often pages became findable: a pack was registered, or a quarantine ended.
    changes: u64,
    /// Groups in quarantine: a pack's number and a group's number, or [`ALL`].
    pub(crate) quarantine: BTreeSet<(u32, u32)>,
    /// Files of packs that are in no state any more, and could not be removed.
    pub(super) retired: Vec<Digest>,
    /// Packs that could not be opened, with the cause.
    pub(crate) damaged: Vec<Damage>,
}

impl State {
    /// A number that grows whenever a page may have become findable.
    pub(super) const fn changes(&self) -> u64 {
        self.changes
    }

    /// Ends the quarantine of groups.
    pub(super) fn release(&mut self, groups: &[(u32, u32)]) {
        groups.iter().for_each(|group| _ = self.quarantine.remove(group));
        self.changes += 1;
    }

    /// The places of all pages with this hash prefix: nearly always none or one.
    pub(crate) fn candidates(&self, prefix: u64) -> impl Iterator<Item = Place> {
        self.index.candidates(prefix).chain(self.doubles.candidates(prefix))
    }

    /// All places: prefix and place.
    pub(crate) fn places(&self) -> impl Iterator<Item = (u64, Place)> {
        self.index.iter().chain(self.doubles.iter())
    }

    /// Registers a pack in the folder and returns its number. A pack with a known id has the same
    /// content: it keeps its number, and is neither retired nor damaged any more.
    pub(super) fn enter(&mut self, pack: Pack) -> u32 {
        self.changes += 1;
        self.retired.retain(|id| *id != pack.id);
        self.damaged.retain(|damage| damage.file() != pack.path);
        let known = self.packs.iter().find(|(_, known)| known.id == pack.id);
        if let Some(number) = known.map(|(number, _)| *number) {
            self.quarantine.retain(|(bad, _)| *bad != number);
            return number;
        }
        let number = self.next;
        self.next += 1;
        self.packs.insert(number, Arc::new(pack));
        number
    }
}

/// What is known of the copies of pages that a pack has too.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Copies {
    /// Their bytes were hashed just now, so the pack's own copies are not needed.
    Proven,
    /// Nothing. One of them may have been written by a process that a guest has taken over
    /// ([`super::work`]), so it must not hide the others.
    Unproven,
}

/// The pack and the page number of a page that was found.
#[derive(Debug, Clone)]
pub(crate) struct Found {
    pub(crate) number: u32,
    pub(crate) pack: Arc<Pack>,
    pub(crate) page: u32,
}

impl Space {
    /// Opens every pack in `dir`. A damaged pack, or one that the disk cannot read, makes only its
    /// own pages unavailable. If `is_read_only`, nothing in `dir` is changed.
    pub(crate) fn open(tenant: &Name, dir: Dir, is_read_only: bool) -> IoResult<Self> {
        let space = Self {
            tenant: tenant.clone(),
            dir,
            state: RwLock::default(),
            files: Mutex::default(),
            leases: Arc::default(),
            collecting: Mutex::default(),
            changing: Mutex::default(),
            recorded: Mutex::default(),
            is_read_only,
            suspects: Mutex::default(),
            has_suspects: AtomicBool::new(false),
        };
        let record = space.read_record()?;
        for name in space.dir.entries()? {
            let id: Result<Digest, DigestError> = name.parse();
            // Entries whose name is not a digest are not ours, and are skipped.
            let Ok(id) = id else { continue };
            match space.open_pack(&name, &id) {
                Ok((pack, hashes)) => {
                    let bad = record.range((pack.id, 0)..=(pack.id, ALL));
                    let bad: Vec<u32> = bad.map(|(_, group)| *group).collect();
                    space.add_pack(&mut space.write(), pack, &hashes, Copies::Unproven, &bad)?;
                }
                Err(PackError::Io(e)) if !e.is_damage() => return Err(e),
                Err(e) => {
                    let damage = e.into_damage();
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

    pub(crate) fn changing(&self) -> MutexGuard<'_, ()> {
        interleave::lock(&self.changing)
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

    /// Adds packs to the index. A page that the index has already keeps its first place, unless
    /// that is in quarantine: the caller holds `changing`, and has read and hashed the copies that
    /// [`Self::find`] finds. The footers of `packs` name these hashes.
    pub(super) fn add(&self, packs: Vec<(Pack, Vec<Digest>)>) -> IoResult<()> {
        let mut state = self.write();
        state.index.reserve(packs.iter().map(|(_, hashes)| hashes.len()).sum());
        packs.into_iter().try_for_each(|(pack, hashes)| {
            self.add_pack(&mut state, pack, &hashes, Copies::Proven, &[])
        })?;
        drop(state);
        self.record();
        Ok(())
    }

    /// Adds a pack to the index, with the groups `bad` in quarantine. `others` says what is known
    /// of copies of its pages that are found.
    fn add_pack(
        &self,
        state: &mut State,
        pack: Pack,
        hashes: &[Digest],
        others: Copies,
        bad: &[u32],
    ) -> IoResult<()> {
        let number = state.enter(pack);
        state.quarantine.extend(bad.iter().map(|group| (number, *group)));
        // A damaged file that had the name may be open.
        self.reopen(number);
        for (page, hash) in (0..).zip(hashes) {
            let place = Place { pack: number, page };
            if state.candidates(prefix(hash)).any(|known| known == place) {
                continue;
            }
            match self.find_in(state, hash, false)? {
                None => state.index.insert(prefix(hash), place),
                Some(_) if others == Copies::Proven => {}
                Some(_) => state.doubles.insert(prefix(hash), place),
            }
        }
        Ok(())
    }

    /// Finds the page with this hash, unless it is in quarantine; all 32 bytes are compared with
    /// the footer on disk.
    pub(crate) fn find(&self, hash: &Digest) -> IoResult<Option<Found>> {
        let found = self.find_in(&self.read(), hash, false);
        self.quarantine_suspects();
        found
    }

    /// As [`Self::find`], for a page in quarantine.
    fn find_bad(&self, hash: &Digest) -> IoResult<Option<Found>> {
        self.find_in(&self.read(), hash, true)
    }

    /// All copies of the page that are in quarantine. If the disk can read the hashes of none of
    /// them, its error.
    pub(super) fn find_all_bad(&self, hash: &Digest) -> IoResult<Vec<Found>> {
        let state = self.read();
        let (mut all, mut unreadable) = (Vec::new(), None);
        for place in state.candidates(prefix(hash)) {
            let bad = state.packs.get(&place.pack).filter(|pack| state.is_bad(place, pack));
            let Some(pack) = bad else { continue };
            match self.is_named(place, pack, hash) {
                Ok(true) => {
                    let (number, page) = (place.pack, place.page);
                    all.push(Found { number, pack: Arc::clone(pack), page });
                }
                Ok(false) => {}
                Err(e) if e.is_not_found() => {}
                Err(e) if e.is_damage() => unreadable = Some(e),
                Err(e) => return Err(e),
            }
        }
        match unreadable {
            Some(e) if all.is_empty() => Err(e),
            _ => Ok(all),
        }
    }

    /// Finds the page, in quarantine or not, as `bad` says. A pack that the disk cannot read is
    /// passed over; if it is in quarantine already, its error is returned if there is no other.
    fn find_in(&self, state: &State, hash: &Digest, bad: bool) -> IoResult<Option<Found>> {
        let mut unreadable = None;
        for place in state.candidates(prefix(hash)) {
            let Some(pack) = state.packs.get(&place.pack) else { continue };
            if state.is_bad(place, pack) != bad {
                continue;
            }
            match self.is_named(place, pack, hash) {
                Ok(true) => {
                    let (number, page) = (place.pack, place.page);
                    return Ok(Some(Found { number, pack: Arc::clone(pack), page }));
                }
                Ok(false) => {}
                Err(e) if e.is_not_found() => {}
                Err(e) if e.is_damage() && bad => unreadable = Some(e),
                Err(e) if e.is_damage() => {
                    lock(&self.suspects).insert(place.pack);
                    self.has_suspects.store(true, Ordering::Release);
                }
                Err(e) => return Err(e),
            }
        }
        unreadable.map_or(Ok(None), Err)
    }

    /// Whether the footer on disk has this hash at this place.
    fn is_named(&self, place: Place, pack: &Pack, hash: &Digest) -> IoResult<bool> {
        let file = self.file(place.pack, pack)?;
        Ok(pack.hashes(&file, place.page..place.page + 1)?.first() == Some(hash))
    }

    /// Puts packs in quarantine whose hashes a lookup could not read. A lookup holds the lock that
    /// this needs.
    fn quarantine_suspects(&self) {
        if self.has_suspects.swap(false, Ordering::Acquire) {
            let suspects = std::mem::take(&mut *lock(&self.suspects));
            let all: Vec<(u32, u32)> = suspects.into_iter().map(|number| (number, ALL)).collect();
            self.quarantine(&all);
        }
    }

    /// The likely place of the page with this hash; one in quarantine only if there is no other. It
    /// is wrong if two hashes share 8 bytes, so verify the page before you use it.
    pub(crate) fn guess(&self, hash: &Digest) -> Option<(Place, Arc<Pack>)> {
        let state = self.read();
        let mut bad = None;
        for place in state.candidates(prefix(hash)) {
            let Some(pack) = state.packs.get(&place.pack) else { continue };
            if !state.is_bad(place, pack) {
                return Some((place, Arc::clone(pack)));
            }
            bad = bad.or_else(|| Some((place, Arc::clone(pack))));
        }
        bad
    }

    /// Finds the page with this hash: a copy in quarantine only if there is no other.
    pub(crate) fn find_any(&self, hash: &Digest) -> IoResult<Option<Found>> {
        Ok(match self.find(hash)? {
            Some(found) => Some(found),
            None => self.find_bad(hash)?,
        })
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

    /// Closes the file of a pack, whose name another file may have now.
    fn reopen(&self, number: u32) {
        self.files().open.retain(|(open, _)| *open != number);
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
