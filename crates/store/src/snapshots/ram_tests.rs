use super::*;
use crate::fixture::{name, store};
use crate::fixture_pages::{PAGE, bake_paged, bake_paged_while, bytes, file, ram, restored, saved};
use crate::objects::types::FileRef;
use crate::{
    Classified, Known, PackWork, PagedSpec, RamJob, RamSource, RamWork, Store, TakeFrame, WorkError,
};
use rustix::mm::{MapFlags, ProtFlags};
use std::os::unix::fs::{FileExt, MetadataExt};

/// RAM whose frames 100 to 199 are free.
fn pages(tenant: &dayfly_units::Name) -> PagedSpec<'_> {
    PagedSpec { tenant, known: Known { free: &[100..200, 590..9000], ..Known::default() } }
}

#[test]
fn ram_that_was_just_saved_is_what_the_store_would_give() {
    let root = tempfile::tempdir().unwrap();
    let store = store(root.path());
    let tenant = name("one");
    let all = ram((0..600).map(|n| n % 250));
    let mut committed = bake_paged(&store, "s", 3, &all, &pages(&tenant)).unwrap();
    let resident = committed.resident.take().unwrap();
    assert_eq!(resident.data_bytes(), committed.manifest.memory.data_bytes);
    // Another process may have reported the size in the manifest.
    let mut of = resident.of.clone();
    of.memory = FileRef { data_bytes: 0, ..of.memory };
    let file = resident.file.try_clone().unwrap();
    let other = Resident { file, of, is_proven: true };
    assert_eq!(other.data_bytes(), resident.data_bytes());
    let open = store.open_resident(&name("s"), resident).unwrap();
    let again = store.open_snapshot(&name("s")).unwrap();
    let expected = restored(&store, &tenant, "s");
    assert!(expected[100 * PAGE..200 * PAGE].iter().all(|b| *b == 0));
    assert!(expected[..100 * PAGE] == all[..100 * PAGE]);
    assert!(bytes(&open.memory) == expected);
    assert!(bytes(&again.memory) == expected);
    assert_eq!(open.fingerprint, again.fingerprint);
    assert_eq!(open.memory.metadata().unwrap().blocks() * 512, open.manifest.memory.data_bytes);
}

#[test]
fn it_cannot_be_written_after_the_commit() {
    let root = tempfile::tempdir().unwrap();
    let store = store(root.path());
    let tenant = name("one");
    let mut vmm: Option<File> = None;
    let keep = |file: &File| vmm = Some(file.try_clone().unwrap());
    let all = ram(0..600);
    let mut committed = bake_paged_while(&store, "s", 3, &all, &pages(&tenant), keep).unwrap();
    let vmm = vmm.unwrap();
    assert!(vmm.write_all_at(b"x", 0).is_err());
    assert!(vmm.set_len(0).is_err() && vmm.set_len(1 << 30).is_err());
    let open = store.open_resident(&name("s"), committed.resident.take().unwrap()).unwrap();
    assert!(open.memory.write_all_at(b"x", 0).is_err());
    assert!(bytes(&open.memory) == restored(&store, &tenant, "s"));
}

/// Before the commit a holder can write to the memfd but not shorten it, so other mappings of it
/// cannot fault.
#[test]
fn while_a_process_can_write_to_it_there_is_no_snapshot() {
    let root = tempfile::tempdir().unwrap();
    let store = store(root.path());
    let tenant = name("one");
    let all = ram(0..600);
    let map = |file: &File| {
        assert!(file.set_len(PAGE as u64).is_err() && file.set_len(1 << 30).is_err());
        let flags = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping of a file that keeps its length; nothing reads or writes it.
        unsafe { rustix::mm::mmap(std::ptr::null_mut(), PAGE, flags, MapFlags::SHARED, file, 0) }
            .unwrap()
    };
    let Err(error) = bake_paged_while(&store, "s", 3, &all, &pages(&tenant), map) else {
        panic!("committed")
    };
    assert!(error.to_string().contains("expected no mapping to write"), "{error}");
    assert!(store.snapshot(&name("s")).is_err());
}

#[test]
fn ram_of_another_snapshot_of_that_name_is_not_taken() {
    let root = tempfile::tempdir().unwrap();
    let store: Store = store(root.path());
    let tenant = name("one");
    let mut old = bake_paged(&store, "s", 3, &ram(0..600), &pages(&tenant)).unwrap();
    let old = old.resident.take().unwrap();
    store.remove_snapshot(&name("s")).unwrap();
    bake_paged(&store, "s", 3, &ram(1..601), &pages(&tenant)).unwrap();
    let open = store.open_resident(&name("s"), old).unwrap();
    assert!(bytes(&open.memory) == restored(&store, &tenant, "s"));
}

#[test]
fn ram_is_not_read_again_when_another_file_has_changed() {
    let root = tempfile::tempdir().unwrap();
    let store = store(root.path());
    let tenant = name("one");
    bake_paged(&store, "s", 3, &ram(0..600), &pages(&tenant)).unwrap();
    let open = store.open_snapshot(&name("s")).unwrap();
    let record = dayfly_units::sealed::seal(b"DFworkse", 1, b"");
    std::fs::write(root.path().join("snapshots/s/working-set"), &record).unwrap();
    assert!(!open.is_current());
    let again = store.open_resident(&name("s"), open.resident().unwrap().unwrap()).unwrap();
    assert!(again.is_current() && again.working_set.is_some());
    let inode = |file: &File| file.metadata().unwrap().ino();
    assert_eq!(inode(&again.memory), inode(&open.memory));
    // A named file may change under its name, so it is no resident RAM.
    crate::fixture::bake(&store, "file", 4).unwrap();
    assert!(store.open_snapshot(&name("file")).unwrap().resident().unwrap().is_none());
}

/// A process that was taken over, and works on other RAM than that of its VM.
#[derive(Debug)]
struct Liar(File);

impl PackWork for Liar {
    fn threads(&self) -> usize {
        1
    }

    fn begin(&mut self, number: u32, _: &[u32], _: File) -> Result<(), WorkError> {
        Err(WorkError::new(format!("pack {number}: the store has all pages")))
    }

    fn written(&mut self) -> Result<u32, WorkError> {
        Err(WorkError::new("no pack was begun".to_owned()))
    }

    fn end(&mut self) -> Result<(), WorkError> {
        Ok(())
    }
}

impl RamWork for Liar {
    fn classify(
        &mut self,
        job: RamJob<'_>,
        found: &mut TakeFrame<'_>,
    ) -> Result<Classified, WorkError> {
        let (memory, none) = (self.0.try_clone().unwrap(), Vec::new());
        let source = RamSource::open(job.tenant.clone(), memory, none, Vec::new(), Vec::new());
        let frames = std::sync::Mutex::new(Vec::new());
        let classified = source.unwrap().classify(&|first, kinds| {
            let kinds = (first..).zip(kinds).filter_map(|(frame, kind)| Some((frame, (*kind)?)));
            frames.lock().unwrap().extend(kinds);
            Ok(())
        });
        let frames = frames.into_inner().unwrap();
        frames.into_iter().try_for_each(|(frame, kind)| found(frame, kind))?;
        Ok(classified.unwrap())
    }
}

#[test]
fn ram_whose_digest_another_process_has_reported_is_not_taken_for_that_of_another_snapshot() {
    let root = tempfile::tempdir().unwrap();
    let store = store(root.path());
    let (tenant, ours, theirs) = (name("one"), ram(0..600), ram(1000..1600));
    let pages = PagedSpec::of(&tenant);
    let one = bake_paged(&store, "one", 3, &ours, &pages).unwrap();
    let (other, spec) = saved(&store, "other", 3, &theirs, dayfly_units::VmId::random()).unwrap();
    let prepared = other.prepare(&spec, &[]).unwrap();
    let mut other = prepared.commit_paged_by(&pages, &mut Liar(file(&ours))).unwrap();
    assert_eq!(other.manifest.memory, one.manifest.memory, "it was believed");
    let resident = other.resident.take().unwrap();
    let resident = store.open_resident(&name("other"), resident).unwrap();
    assert!(bytes(&resident.memory) == theirs && !resident.is_proven());
    // As if the snapshot `one` had taken the name.
    let taken = resident.resident().unwrap().unwrap();
    let open = store.open_resident(&name("one"), taken).unwrap();
    assert!(bytes(&open.memory) == ours && open.is_proven());
    let again = resident.resident().unwrap().unwrap();
    let again = store.open_resident(&name("other"), again).unwrap();
    assert!(bytes(&again.memory) == theirs && !again.is_proven());
    // What is read from pages is what the table names.
    let read = store.open_snapshot(&name("other")).unwrap();
    assert!(bytes(&read.memory) == ours && read.is_proven());
    assert!(store.open_lazily(&name("other")).unwrap().0.is_proven());
}

#[test]
fn what_is_in_use_for_a_moment_is_sealed_afterwards() {
    let in_use = || {
        let file = create(1 << 20).unwrap();
        let (flags, len) = (ProtFlags::READ | ProtFlags::WRITE, 1 << 20);
        let (start, shared) = (std::ptr::null_mut(), MapFlags::SHARED);
        // SAFETY: a new mapping of a file that keeps its length; nothing reads or writes it.
        let mapped = unsafe { rustix::mm::mmap(start, len, flags, shared, &file, 0) };
        (file, mapped.unwrap() as usize, len)
    };
    let end = |mapped: usize, len: usize| {
        // SAFETY: a mapping that was made above, which nothing uses.
        unsafe { rustix::mm::munmap(mapped as *mut _, len) }.unwrap();
    };
    let (file, mapped, len) = in_use();
    assert_eq!(seal_content(&file), Err(Errno::BUSY));
    end(mapped, len);
    let waited = || {
        let (file, mapped, len) = in_use();
        let later = std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(100));
            end(mapped, len);
        });
        let sealed = seal_content(&file);
        later.join().unwrap();
        sealed.is_ok() && file.write_all_at(b"x", 0).is_err()
    };
    // On a busy host the thread may keep the mapping for longer than it is waited for.
    assert!((0..60).any(|_| waited()), "it was not waited for");
}
