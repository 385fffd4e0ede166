use super::super::index::prefix;
use super::*;
use crate::fixture::name;
use crate::fixture_pages::{PAGE, file, flip, pack_files, ram};
use crate::memory::{Classified, FoundFrame, RamJob, RamSource, RamWork, TakeFrame};
use crate::pages::PagesError;
use crate::{MemorySpec, PutMemory, Store, Table, Tenant};
use std::os::unix::fs::FileExt;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU32, Ordering};

/// What a process that was taken over does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Does {
    /// Its work.
    Right,
    /// Writes other bytes than those of the hashes, in a pack that is sound otherwise.
    OtherBytes,
    /// Writes one page less.
    OneLess,
    /// Keeps the pack open.
    KeepsOpen,
    /// Writes each pack anew with one page less when it is to end.
    ChangesLate,
    /// Says that a pack is written that was not asked for.
    OtherNumber,
    /// Makes up hashes with the same prefix.
    AlikeHashes,
    /// Finds a block that no disk has.
    OtherBlock,
    /// Finds a frame twice.
    Twice,
    /// Finds a frame behind the last.
    Beyond,
    /// Reports that RAM has no data.
    NoData,
    /// Ends after the first pack.
    Ends,
}

/// The other process, as a part of this one.
#[derive(Debug)]
struct Worker {
    does: Does,
    source: Option<RamSource>,
    written: Vec<u32>,
    /// Packs that it keeps open, with their frames.
    kept: Vec<(Vec<u32>, File)>,
    packs: u32,
}

impl Worker {
    fn that(does: Does) -> Self {
        Self { does, source: None, written: Vec::new(), kept: Vec::new(), packs: 0 }
    }
}

impl RamWork for Worker {
    fn classify(
        &mut self,
        job: RamJob<'_>,
        found: &mut TakeFrame<'_>,
    ) -> Result<Classified, WorkError> {
        let (free, hints) = (job.free.to_vec(), job.hints.to_vec());
        let source = RamSource::open(job.tenant.clone(), job.memory, free, hints, job.disks);
        let source = source.map_err(|e| WorkError::new(e.to_string()))?;
        let frames = Mutex::new(Vec::new());
        let classified = source.classify(&|first, kinds| {
            let pairs = (first..).zip(kinds).filter_map(|(frame, kind)| Some((frame, (*kind)?)));
            frames.lock().unwrap().extend(pairs);
            Ok(())
        });
        let mut frames = frames.into_inner().unwrap();
        match self.does {
            Does::AlikeHashes => frames.iter_mut().for_each(|(frame, found)| {
                let mut hash = Digest([7; 32]);
                hash.0[8..12].copy_from_slice(&frame.to_le_bytes());
                *found = FoundFrame::Page(hash);
            }),
            Does::OtherBlock => {
                let at = crate::BlockHint { disk: 0, layer: 0, block: 1 << 20 };
                frames[0].1 = FoundFrame::Disk(at, Digest::of(b"x"));
            }
            Does::Twice => frames[1].0 = frames[0].0,
            Does::Beyond => frames[0].0 = u32::MAX,
            _ => {}
        }
        frames.into_iter().try_for_each(|(frame, kind)| found(frame, kind))?;
        self.source = Some(source);
        let mut classified = classified.map_err(|e| WorkError::new(e.to_string()))?;
        if self.does == Does::NoData {
            classified.data_bytes = 0;
        }
        Ok(classified)
    }
}

impl PackWork for Worker {
    fn threads(&self) -> usize {
        2
    }

    fn begin(&mut self, number: u32, frames: &[u32], into: File) -> Result<(), WorkError> {
        let source = self.source.as_ref().unwrap();
        let frames = if self.does == Does::OneLess { &frames[1..] } else { frames };
        source.write_pack(frames, &into).map_err(|e| WorkError::new(e.to_string()))?;
        if self.does == Does::OtherBytes {
            poison(&into);
        }
        if matches!(self.does, Does::KeepsOpen | Does::ChangesLate) {
            self.kept.push((frames.to_vec(), into));
        }
        self.written.push(number + u32::from(self.does == Does::OtherNumber) * 100);
        Ok(())
    }

    fn written(&mut self) -> Result<u32, WorkError> {
        self.packs += 1;
        if self.does == Does::Ends && self.packs > 1 {
            return Err(WorkError::new("it has ended".to_owned()));
        }
        Ok(self.written.pop().unwrap())
    }

    fn end(&mut self) -> Result<(), WorkError> {
        if self.does == Does::ChangesLate {
            let source = self.source.as_ref().unwrap();
            for (frames, into) in self.kept.drain(..) {
                into.set_len(0).unwrap();
                source.write_pack(&frames[1..], &into).unwrap();
            }
        }
        Ok(())
    }
}

/// Makes a pack whose footer names the same pages, and whose groups have other bytes and the sums
/// of these.
fn poison(into: &File) {
    static NUMBER: AtomicU32 = AtomicU32::new(0);
    let bytes = into.metadata().unwrap().len();
    let copy = tempfile::tempfile().unwrap();
    let mut all = vec![0; usize::try_from(bytes).unwrap()];
    into.read_exact_at(&mut all, 0).unwrap();
    copy.write_all_at(&all, 0).unwrap();
    let tenant = name("one");
    let pack = Pack::open(std::path::Path::new("p"), &copy, &tenant).unwrap();
    let hashes = pack.hashes(&copy, 0..pack.pages).unwrap();
    into.set_len(0).unwrap();
    let number = NUMBER.fetch_add(1, Ordering::Relaxed);
    let page = [u8::try_from(number % 200).unwrap() + 1; PAGE];
    writer::write_pack(into, &tenant, &mut |push| {
        hashes.iter().try_for_each(|hash| push(*hash, &page))
    })
    .unwrap();
}

pub(super) fn store() -> (tempfile::TempDir, Store) {
    let folder = tempfile::tempdir().unwrap();
    let store = Store::open(folder.path()).unwrap();
    (folder, store)
}

pub(super) fn put(store: &Store, memory: &File, does: Does) -> Result<PutMemory, PagesError> {
    let tenant = store.tenant(&name("one")).unwrap();
    let spec = MemorySpec { memory, known: Default::default(), disks: &[] };
    tenant.put_memory_by(&spec, Some(&mut Worker::that(does)))
}

pub(super) fn tenant(store: &Store) -> Tenant {
    store.tenant(&name("one")).unwrap()
}

/// Why a put was not refused with an error about `what`; `None` if it was.
fn unless_refused(put: Result<PutMemory, PagesError>, what: &str) -> Option<String> {
    match put {
        Err(PagesError::Work(e)) if e.text.contains(what) => None,
        Err(other) => Some(format!("{what}: {other}")),
        Ok(_) => Some(format!("{what}: it was stored")),
    }
}

pub(super) fn restored(store: &Store, table: &Table) -> Result<Vec<u8>, PagesError> {
    let to = tempfile::tempfile().unwrap();
    tenant(store).materialise(table, &[], &to)?;
    Ok(crate::fixture_pages::bytes(&to))
}

#[test]
fn another_process_stores_the_same_as_this_one() {
    let memory = ram((0..3000).chain(0..100));
    let (_folder, here) = store();
    let spec = MemorySpec { memory: &file(&memory), known: Default::default(), disks: &[] };
    let expected = tenant(&here).put_memory(&spec).unwrap();
    let (folder, there) = store();
    let got = put(&there, &file(&memory), Does::Right).unwrap();
    assert_eq!(got.table, expected.table);
    assert_eq!((got.stats, got.hints), (expected.stats, expected.hints));
    assert_eq!(restored(&there, &got.table).unwrap(), memory);
    assert!(pack_files(folder.path()).len() > 1);
    assert_eq!(put(&there, &file(&memory), Does::Right).unwrap().stats.new_pages, 0);
}

#[test]
fn what_no_sound_process_says_is_refused_and_leaves_nothing() {
    let mut wrong: Vec<String> = Vec::new();
    for (does, what) in [
        (Does::OneLess, "pages that were asked for"),
        (Does::KeepsOpen, "can still be written to"),
        (Does::ChangesLate, "pages that were asked for"),
        (Does::OtherNumber, "got number"),
        (Does::AlikeHashes, "the same first 8 bytes"),
        (Does::OtherBlock, "a block of the VM's disks"),
        (Does::Twice, "each once"),
        (Does::Beyond, "each once"),
        (Does::NoData, "bytes of data"),
        (Does::Ends, "it has ended"),
    ] {
        let (folder, store) = store();
        let put_it = put(&store, &file(&ram(1..3000)), does);
        wrong.extend(unless_refused(put_it, what).map(|why| format!("{does:?}: {why}")));
        let left = |of: &str| std::fs::read_dir(folder.path().join(of)).unwrap().count();
        let left = (left("pages/one"), left("staging"));
        wrong.extend((left != (0, 0)).then(|| format!("{does:?} leaves {left:?}")));
        put(&store, &file(&ram(1..3000)), Does::Right).unwrap();
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn wrong_bytes_under_a_hash_harm_only_the_snapshot_of_the_process_that_wrote_them() {
    let memory = ram(1..200);
    let (_folder, store) = store();
    let poisoned = put(&store, &file(&memory), Does::OtherBytes).unwrap();
    // Before anything was read: a put that finds the pages does not rely on them.
    let right = put(&store, &file(&memory), Does::Right).unwrap();
    assert_eq!(right.stats.new_pages, right.stats.pages, "pages of the poisoned pack were used");
    assert_eq!(restored(&store, &right.table).unwrap(), memory);
    // The same content, so the same hashes: now the sound copy serves it too.
    assert_eq!(restored(&store, &poisoned.table).unwrap(), memory);
}

#[test]
fn wrong_bytes_are_never_returned() {
    let (_folder, store) = store();
    let poisoned = put(&store, &file(&ram(1..200)), Does::OtherBytes).unwrap();
    assert!(matches!(restored(&store, &poisoned.table), Err(PagesError::Damage(_))));
    assert!(tenant(&store).fetch(&poisoned.table.hashes()[0]).is_err());
}

/// Runs `meanwhile` when the packs are written and before they are published.
struct Beside<'a>(Worker, &'a dyn Fn());

impl PackWork for Beside<'_> {
    fn threads(&self) -> usize {
        self.0.threads()
    }

    fn begin(&mut self, number: u32, frames: &[u32], into: File) -> Result<(), WorkError> {
        self.0.begin(number, frames, into)
    }

    fn written(&mut self) -> Result<u32, WorkError> {
        self.0.written()
    }

    fn end(&mut self) -> Result<(), WorkError> {
        (self.1)();
        self.0.end()
    }
}

impl RamWork for Beside<'_> {
    fn classify(
        &mut self,
        job: RamJob<'_>,
        found: &mut TakeFrame<'_>,
    ) -> Result<Classified, WorkError> {
        self.0.classify(job, found)
    }
}

/// A put by a process that does what `does` says. When its packs are written and before they are
/// published, `meanwhile` runs.
pub(super) fn put_beside(
    store: &Store,
    memory: &File,
    does: Does,
    meanwhile: &dyn Fn(),
) -> Result<PutMemory, PagesError> {
    let spec = MemorySpec { memory, known: Default::default(), disks: &[] };
    let mut work = Beside(Worker::that(does), meanwhile);
    tenant(store).put_memory_by(&spec, Some(&mut work))
}

#[test]
fn a_pack_that_is_published_second_is_hashed_and_hides_no_copy_of_the_first() {
    let memory = ram(1..200);
    for does in [Does::Right, Does::OtherBytes] {
        let (folder, store) = store();
        let first = std::cell::RefCell::new(None);
        let meanwhile = || {
            *first.borrow_mut() = Some(put(&store, &file(&memory), Does::Right).unwrap());
        };
        let second = put_beside(&store, &file(&memory), does, &meanwhile);
        let first = first.take().unwrap();
        assert_eq!(restored(&store, &first.table).unwrap(), memory, "{does:?}");
        match second {
            Ok(second) if does == Does::Right => {
                assert_eq!(restored(&store, &second.table).unwrap(), memory);
            }
            // Its first page has the wrong digest.
            second => assert_eq!(unless_refused(second, "digest of the page"), None),
        }
        assert_eq!(pack_files(folder.path()).len(), 1, "{does:?}");
        assert_eq!(store.gc_pages().unwrap().damage, [], "{does:?}");
        assert_eq!(restored(&store, &first.table).unwrap(), memory, "{does:?}, after a gc");
        drop(store);
        let store = Store::open(folder.path()).unwrap();
        assert_eq!(restored(&store, &first.table).unwrap(), memory, "{does:?}, after a restart");
    }
}

/// What happens to the right copy of a page between the put and the first read of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Then {
    Nothing,
    Collect,
    Restart,
    /// The record of the quarantine is lost.
    Lose,
    LoseAndCollect,
}

#[test]
fn a_wrong_copy_that_is_published_first_hides_no_right_one() {
    let mut first = std::collections::BTreeSet::new();
    for then in [Then::Nothing, Then::Collect, Then::Restart, Then::Lose, Then::LoseAndCollect] {
        for seed in 0..8_u64 {
            let case = format!("{then:?}, seed {seed}");
            let memory = ram(seed * 1000 + 1..seed * 1000 + 200);
            let (folder, mut store) = store();
            let meanwhile = || drop(put(&store, &file(&memory), Does::OtherBytes).unwrap());
            let right = put_beside(&store, &file(&memory), Does::Right, &meanwhile).unwrap();
            let packs = pack_files(folder.path());
            assert_eq!(packs.len(), 2, "{case}");
            if matches!(then, Then::Restart | Then::Lose | Then::LoseAndCollect) {
                drop(store);
                if then != Then::Restart {
                    std::fs::remove_file(folder.path().join("pages/one/quarantine")).unwrap();
                }
                store = Store::open(folder.path()).unwrap();
            }
            let _lease = tenant(&store).lease(right.table.hashes());
            if matches!(then, Then::Collect | Then::LoseAndCollect) {
                assert_eq!(store.gc_pages().unwrap().packs, 1, "{case}: the wrong copies go");
            }
            assert_eq!(restored(&store, &right.table).unwrap(), memory, "{case}");
            store.gc_pages().unwrap();
            let [left] = &pack_files(folder.path())[..] else { panic!("{case}: one pack") };
            first.insert(packs.iter().min() == Some(left));
            drop(store);
            let store = Store::open(folder.path()).unwrap();
            assert_eq!(restored(&store, &right.table).unwrap(), memory, "{case}: after a restart");
        }
    }
    assert_eq!(first.len(), 2, "the right pack is opened first, and second");
}

#[test]
fn a_wrong_pack_that_is_published_again_leaves_the_quarantine_and_hides_no_right_copy() {
    let memory = ram(1..200);
    let (_folder, store) = store();
    let wrong = put(&store, &file(&memory), Does::OtherBytes).unwrap();
    restored(&store, &wrong.table).unwrap_err();
    let space = tenant(&store).space;
    assert!(!space.read().quarantine.is_empty());
    let meanwhile = || {
        // The pack with the same footer keeps its number.
        let mut state = space.write();
        let path = state.packs.values().next().unwrap().path.clone();
        let again = Pack::open(&path, &File::open(&path).unwrap(), &space.tenant).unwrap();
        state.enter(again);
        assert!(state.quarantine.is_empty());
    };
    let right = put_beside(&store, &file(&memory), Does::Right, &meanwhile).unwrap();
    assert_eq!(restored(&store, &right.table).unwrap(), memory);
}

#[test]
fn a_pack_takes_the_place_of_a_damaged_one_only_if_it_has_its_sums() {
    let memory = ram(1..200);
    let (folder, store) = store();
    drop(put(&store, &file(&memory), Does::Right).unwrap());
    let [pack] = &pack_files(folder.path())[..] else { panic!("one pack") };
    flip(pack, 100);
    // The footer, and so the name, is that of the pack; the groups are not.
    struct Garbage(Worker);
    impl PackWork for Garbage {
        fn threads(&self) -> usize {
            1
        }
        fn begin(&mut self, number: u32, frames: &[u32], into: File) -> Result<(), WorkError> {
            let bytes = into.try_clone().unwrap();
            self.0.begin(number, frames, into)?;
            bytes.write_all_at(&[0; 4096], 5000).unwrap();
            Ok(())
        }
        fn written(&mut self) -> Result<u32, WorkError> {
            self.0.written()
        }
        fn end(&mut self) -> Result<(), WorkError> {
            Ok(())
        }
    }
    impl RamWork for Garbage {
        fn classify(
            &mut self,
            job: RamJob<'_>,
            found: &mut TakeFrame<'_>,
        ) -> Result<Classified, WorkError> {
            self.0.classify(job, found)
        }
    }
    let before = std::fs::read(pack).unwrap();
    // All pages are looked for anew, because the store was opened anew.
    drop(store);
    let store = Store::open(folder.path()).unwrap();
    let (space, ram) = (tenant(&store), file(&memory));
    let number = *space.space.read().packs.keys().next().unwrap();
    space.space.quarantine(&[(number, crate::pages::record::ALL)]);
    let spec = MemorySpec { memory: &ram, known: Default::default(), disks: &[] };
    let put = space.put_memory_by(&spec, Some(&mut Garbage(Worker::that(Does::Right))));
    assert!(matches!(put, Err(PagesError::Io(_))), "{put:?}");
    assert!(std::fs::read(pack).unwrap() == before, "the pack was replaced");
    let sound = space.put_memory_by(&spec, Some(&mut Worker::that(Does::Right))).unwrap();
    assert_eq!(restored(&store, &sound.table).unwrap(), memory);
}

#[test]
fn some_hashes_may_be_alike_and_many_may_not() {
    let hashes = |count: u8| -> Vec<(u32, Digest)> {
        let hash = |n| Digest(std::array::from_fn(|at| if at < 8 { 9 } else { n }));
        (0..count).map(|n| (u32::from(n), hash(n))).collect()
    };
    assert_eq!(prefix(&hashes(2)[0].1), prefix(&hashes(2)[1].1));
    check_prefixes(&hashes(MAX_ALIKE)).unwrap();
    check_prefixes(&hashes(MAX_ALIKE + 1)).unwrap_err();
    let sound: Vec<(u32, Digest)> =
        (0..100_000_u32).map(|n| (n, Digest::of(&n.to_le_bytes()))).collect();
    check_prefixes(&sound).unwrap();
}
