use super::*;
use crate::fixture;
use dayfly_store::{
    Classified, PackWork, PagedSpec, RamJob, RamSource, RamWork, TakeFrame, WorkError,
};
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
    let with = |open: &[Arc<OpenTemplate>]| with(&store, &name("default"), &second, &plan, open);
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
    let mut open: Vec<_> = all.iter().map(|of| Arc::new(filled(&store, "default", of))).collect();
    open.push(Arc::new(filled(&store, "other", "foreign")));
    let files = |of: &str| -> Vec<&str> {
        let (snapshot, plan) = store.open_lazily(&name(of)).unwrap();
        let shared = with(&store, &name("default"), &snapshot, &plan.unwrap(), &open);
        let files = shared.map(|shared| shared.files).unwrap_or_default();
        let inode = |file: &File| file.metadata().unwrap().ino();
        let of =
            |file: &File| open.iter().find(|other| inode(&other.memory) == inode(file)).unwrap();
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

/// A packer that a guest has taken over: it reports the hashes and the digest of other RAM than
/// that of its VM.
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

/// The RAM that a packer's VM had stays in the host's memory, whatever the packer has reported.
#[test]
fn pages_with_hashes_that_a_packer_has_reported_are_not_mapped() {
    let folder = tempfile::tempdir().unwrap();
    let store = Store::open(folder.path()).unwrap();
    fixture::snapshot(&store, "default", "first", 1..81);
    let ancestors = vec![ram(&store, "first")];
    fixture::descendant(&store, "default", "second", 31..111, ancestors);
    let first = store.open_snapshot(&name("first")).unwrap().memory;
    let (vm, saved, spec) = fixture::saved(&store, "liar", 1001..1081, Vec::new());
    let prepared = saved.prepare(&spec, &[]).unwrap();
    let tenant = name("default");
    let pages = PagedSpec::of(&tenant);
    let mut liar = prepared.commit_paged_by(&pages, &mut Liar(first)).unwrap();
    store.remove_vm(vm).unwrap();
    assert_eq!(ram(&store, "liar"), ram(&store, "first"), "it was believed");
    let resident = liar.resident.take().unwrap();
    let liar = OpenTemplate::whole(store.open_resident(&name("liar"), resident).unwrap());
    let (second, plan) = store.open_lazily(&name("second")).unwrap();
    let plan = plan.unwrap();
    let with = |open| with(&store, &tenant, &second, &plan, &[Arc::new(open)]);
    assert!(with(liar).is_none(), "its pages are in clones of another snapshot");
    // A pager has hashed these.
    assert!(with(filled(&store, "default", "liar")).is_some());
}
