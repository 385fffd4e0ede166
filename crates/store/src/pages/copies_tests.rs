use super::super::index::{Place, prefix};
use super::super::record::ALL;
use crate::fixture::name;
use crate::fixture_pages::{file, flip, pack_files, page, ram};
use crate::{Digest, Meter, Store, Tenant};

fn tenant(store: &Store) -> Tenant {
    store.tenant(&name("one")).unwrap()
}

fn place(tenant: &Tenant, hash: &Digest) -> Place {
    let found = tenant.space.find(hash).unwrap().unwrap();
    Place { pack: found.number, page: found.page }
}

/// A guest can make a hash up whose first 8 bytes are those of another page.
#[test]
fn another_page_of_the_same_prefix_is_no_copy() {
    for is_readable in [true, false] {
        let root = tempfile::tempdir().unwrap();
        let store = Store::open(root.path()).unwrap();
        let tenant = tenant(&store);
        drop(tenant.put(&file(&ram(1..60)), &[]).unwrap());
        drop(tenant.put(&file(&ram(100..160)), &[]).unwrap());
        let (wanted, other) = (Digest::of(&page(5)), Digest::of(&page(101)));
        let (bad, made_up) = (place(&tenant, &wanted), place(&tenant, &other));
        tenant.space.write().index.insert(prefix(&wanted), made_up);
        tenant.space.quarantine(&[(bad.pack, ALL)]);
        let _lease = tenant.lease(&[wanted, other]);
        if is_readable {
            store.gc_pages().unwrap();
            assert_eq!(tenant.fetch(&wanted).unwrap(), page(5), "the only copy is gone");
        } else {
            // The footer of the only copy cannot be read, and the made-up page is wrong.
            let packs = tenant.space.read().packs.clone();
            flip(&packs[&made_up.pack].path, 30);
            let unreadable = crate::blob::fault::unreadable(&packs[&bad.pack].path);
            store.gc_pages().unwrap();
            drop(unreadable);
            assert_eq!(tenant.fetch(&wanted).unwrap(), page(5), "the only copy is gone");
        }
    }
}

/// Two packs with the same pages, both found when the folder was opened.
fn doubled() -> (tempfile::TempDir, Store) {
    let root = tempfile::tempdir().unwrap();
    let store = Store::open(root.path()).unwrap();
    drop(tenant(&store).put(&file(&ram(1..60)), &[]).unwrap());
    let first = pack_files(root.path()).remove(0);
    let aside = root.path().join("aside");
    std::fs::rename(&first, &aside).unwrap();
    drop(store);
    let store = Store::open(root.path()).unwrap();
    drop(tenant(&store).put(&file(&ram(1..61)), &[]).unwrap());
    drop(store);
    std::fs::rename(&aside, &first).unwrap();
    let store = Store::open(root.path()).unwrap();
    (root, store)
}

#[test]
fn of_two_copies_the_one_that_has_the_bytes_stays_whichever_is_damaged() {
    for damaged in 0..2 {
        let (root, store) = doubled();
        let mut packs = pack_files(root.path());
        packs.sort();
        flip(&packs[damaged], 30);
        let tenant = tenant(&store);
        let hash = Digest::of(&page(1));
        let _lease = tenant.lease(&[hash]);
        store.gc_pages().unwrap();
        assert_eq!(tenant.fetch(&hash).unwrap(), page(1), "pack {damaged} is damaged");
        assert!(tenant.space.read().quarantine.is_empty(), "pack {damaged} is still there");
        assert_eq!(store.gc_pages().unwrap(), crate::GcPagesReport::default());
    }
}

#[test]
fn a_reader_finds_the_second_copy_and_a_page_is_counted_once() {
    let (root, store) = doubled();
    let mut packs = pack_files(root.path());
    packs.sort();
    let tenant = tenant(&store);
    assert_eq!(tenant.stats().unwrap().unique, 52);
    flip(&packs[0], 30);
    assert_eq!(tenant.fetch(&Digest::of(&page(1))).unwrap(), page(1));
    drop((tenant, store));
    let store = Store::open(root.path()).unwrap();
    let all = store.verify(&crate::Scope::All, &Meter::default()).unwrap();
    assert_eq!(all.packs, 2);
}

/// What is in it may come back, for example by a repair of the file system.
#[test]
fn a_pack_that_cannot_be_opened_stays_until_another_copy_was_hashed() {
    for is_other_wrong in [true, false] {
        let (root, store) = doubled();
        drop(store);
        let mut packs = pack_files(root.path());
        packs.sort();
        let at = std::fs::metadata(&packs[0]).unwrap().len() - 60;
        flip(&packs[0], at);
        if is_other_wrong {
            flip(&packs[1], 30);
        }
        let store = Store::open(root.path()).unwrap();
        let hash = Digest::of(&page(1));
        let _lease = tenant(&store).lease(&[hash]);
        assert_eq!(tenant(&store).space.read().damaged.len(), 1);
        store.gc_pages().unwrap();
        assert_eq!(packs[0].exists(), is_other_wrong);
        drop(store);
        if is_other_wrong {
            flip(&packs[0], at);
        }
        let store = Store::open(root.path()).unwrap();
        assert_eq!(tenant(&store).fetch(&hash).unwrap(), page(1));
    }
}

/// A gc that has looked at the copies, and a reader that then finds the other copy damaged.
#[test]
fn a_copy_stays_if_the_other_one_goes_into_quarantine_meanwhile() {
    let (_root, store) = doubled();
    let space = tenant(&store).space;
    let hash = Digest::of(&page(1));
    let live = [prefix(&hash)];
    let superseded = space.superseded(&live, &Meter::default()).unwrap();
    assert_eq!(superseded.len(), 1);
    let (gone, proven) = superseded.iter().next().unwrap();
    let mut damage = Vec::new();
    let mut victims = space.victims(&live, &superseded, &mut damage, &Meter::default()).unwrap();
    victims.retain(|victim| victim.number == gone.pack);
    assert_eq!(victims.len(), 1);
    space.quarantine(&[(proven.pack, ALL)]);
    assert!(space.change_over(victims, Vec::new(), &superseded).is_empty());
    assert_eq!(space.fetch(&hash).unwrap(), page(1));
}

/// A process that was taken over may have stored a page anew while the disk could not read it.
#[test]
fn all_copies_in_quarantine_are_tried() {
    for damaged in 0..2 {
        let (root, store) = doubled();
        let mut packs = pack_files(root.path());
        packs.sort();
        flip(&packs[damaged], 30);
        let tenant = tenant(&store);
        let numbers: Vec<u32> = tenant.space.read().packs.keys().copied().collect();
        let all: Vec<(u32, u32)> = numbers.into_iter().map(|number| (number, ALL)).collect();
        tenant.space.quarantine(&all);
        let hash = Digest::of(&page(1));
        assert_eq!(tenant.fetch(&hash).unwrap(), page(1), "pack {damaged} is damaged");
        assert!(!tenant.has(&hash).unwrap(), "a put does not rely on it");
    }
}
