use crate::fixture::name;
use crate::fixture_pages::{PAGE, file, page, ram};
use crate::{Digest, PagesError, Store, Tenant};
use std::collections::BTreeMap;
use std::os::unix::fs::FileExt;
use std::sync::Mutex;

fn tenant(store: &Store) -> Tenant {
    store.tenant(&name("one")).unwrap()
}

fn numbers(count: u64) -> impl Iterator<Item = u64> {
    (0..count).filter(|n| !n.is_multiple_of(7))
}

#[test]
fn what_was_put_is_fetched_alone_in_groups_and_in_many() {
    let root = tempfile::tempdir().unwrap();
    let store = Store::open(root.path()).unwrap();
    let tenant = tenant(&store);
    let put = tenant.put(&file(&ram(0..3000)), &[]).unwrap();
    assert_eq!(put.stats.pages, numbers(3000).count() as u64);
    assert_eq!(put.stats.new_pages, put.stats.pages);
    let hashes: Vec<Digest> = numbers(3000).map(|n| Digest::of(&page(n))).collect();
    assert_eq!(put.pages.iter().map(|(_, hash)| *hash).collect::<Vec<_>>(), hashes);
    for n in numbers(200) {
        assert_eq!(tenant.fetch(&Digest::of(&page(n))).unwrap(), page(n));
    }
    let mut shuffled = hashes.clone();
    shuffled.sort();
    shuffled.push(shuffled[0]);
    let got = Mutex::new(BTreeMap::new());
    tenant
        .fetch_many(&shuffled, &|n, bytes| {
            assert!(got.lock().unwrap().insert(n, Digest::of(bytes)).is_none());
        })
        .unwrap();
    assert_eq!(got.into_inner().unwrap().into_values().collect::<Vec<_>>(), shuffled);
    let group = tenant.group(&hashes[20]).unwrap();
    assert_eq!((group.number, group.hashes.as_slice()), (1, &hashes[16..32]));
    assert_eq!(group.bytes.chunks(PAGE).map(Digest::of).collect::<Vec<_>>(), group.hashes);
}

#[test]
fn a_second_put_stores_only_what_is_new_and_a_reopened_store_knows_all() {
    let root = tempfile::tempdir().unwrap();
    let store = Store::open(root.path()).unwrap();
    tenant(&store).put(&file(&ram(0..1000)), &[]).unwrap();
    let stats = tenant(&store).put(&file(&ram(500..1500)), &[]).unwrap().stats;
    assert_eq!(stats.new_pages, numbers(1500).count() as u64 - numbers(1000).count() as u64);
    let before = tenant(&store).stats().unwrap();
    drop(store);
    let store = Store::open(root.path()).unwrap();
    let after = tenant(&store).stats().unwrap();
    assert_eq!((before.unique, before.stored_bytes), (after.unique, after.stored_bytes));
    assert_eq!(tenant(&store).put(&file(&ram(0..1500)), &[]).unwrap().stats.new_pages, 0);
    assert_eq!(tenant(&store).fetch(&Digest::of(&page(1234))).unwrap(), page(1234));
}

#[test]
fn pages_lie_in_the_order_asked_for() {
    let root = tempfile::tempdir().unwrap();
    let store = Store::open(root.path()).unwrap();
    let order: Vec<u32> = (0..64).map(|n| 900 - 13 * n).collect();
    tenant(&store).put(&file(&ram(0..1000)), &order).unwrap();
    let first = order.iter().map(|&n| u64::from(n)).find(|n| !n.is_multiple_of(7)).unwrap();
    let group = tenant(&store).group(&Digest::of(&page(first))).unwrap();
    let expected: Vec<Digest> = order
        .iter()
        .filter(|n| !n.is_multiple_of(7))
        .map(|&n| Digest::of(&page(n.into())))
        .collect();
    assert_eq!((group.number, group.hashes.as_slice()), (0, &expected[..16]));
}

#[test]
fn a_page_is_found_by_all_of_its_hash() {
    let root = tempfile::tempdir().unwrap();
    let store = Store::open(root.path()).unwrap();
    tenant(&store).put(&file(&ram(0..100)), &[]).unwrap();
    let mut alike = Digest::of(&page(5));
    for byte in 8..32 {
        alike.0[byte] ^= 1;
        assert!(!tenant(&store).has(&alike).unwrap(), "only byte {byte} differs");
        let error = tenant(&store).fetch(&alike).unwrap_err().to_string();
        assert!(error.contains(&format!("page {alike} of tenant one")), "{error}");
        let error = tenant(&store).fetch_many(&[alike], &|_, _| panic!("given")).unwrap_err();
        assert!(matches!(error, PagesError::Damage(_)), "{error}");
        alike.0[byte] ^= 1;
    }
    assert!(tenant(&store).has(&alike).unwrap());
}

/// Two pages whose hashes share 8 bytes cannot be made, but an index with two such entries can.
#[test]
fn a_second_page_of_the_same_prefix_is_another_page() {
    let root = tempfile::tempdir().unwrap();
    let store = Store::open(root.path()).unwrap();
    let tenant = tenant(&store);
    tenant.put(&file(&ram(1..60)), &[]).unwrap();
    let (wanted, other) = (Digest::of(&page(50)), Digest::of(&page(5)));
    let place = |hash| {
        let found = tenant.space.find(hash).unwrap().unwrap();
        super::index::Place { pack: found.number, page: found.page }
    };
    let (right, wrong) = (place(&wanted), place(&other));
    {
        let mut state = tenant.space.write();
        state.index.remap(|p| Some(p).filter(|p| *p != right));
        state.index.insert(super::index::prefix(&wanted), wrong);
        state.index.insert(super::index::prefix(&wanted), right);
    }
    assert_eq!(place(&wanted), right);
    assert_eq!(tenant.fetch(&wanted).unwrap(), page(50));
    tenant.fetch_many(&[wanted], &|_, bytes| assert_eq!(bytes, page(50))).unwrap();
    {
        // With only the wrong entry left, the page counts as missing and would be stored again.
        tenant.space.write().index.remap(|p| Some(p).filter(|p| *p != right));
        assert!(!tenant.has(&wanted).unwrap());
        assert_eq!(tenant.put(&file(&page(50)), &[]).unwrap().stats.new_pages, 1);
        assert_eq!(tenant.fetch(&wanted).unwrap(), page(50));
    }
}

#[test]
fn a_file_that_changes_while_it_is_put_brings_no_page_under_a_wrong_hash() {
    let root = tempfile::tempdir().unwrap();
    let store = Store::open(root.path()).unwrap();
    let tenant = tenant(&store);
    let memory = file(&ram(1..6));
    let hash = Digest::of(&page(1));
    memory.write_all_at(&page(99), 0).unwrap();
    let error = tenant
        .space
        .store(&tenant.inner, &memory, [(0, hash)].into_iter(), None, &crate::Meter::default())
        .unwrap_err();
    assert!(
        error.to_string().contains(&format!("page 0, while it was put: expected {hash}")),
        "{error}"
    );
    assert!(!tenant.has(&hash).unwrap());
    assert_eq!(store.staged().unwrap(), Vec::<std::path::PathBuf>::new());
}

#[test]
fn many_put_and_fetch_at_once() {
    let root = tempfile::tempdir().unwrap();
    let store = Store::open(root.path()).unwrap();
    std::thread::scope(|scope| {
        for n in 0..8 {
            let store = store.clone();
            scope.spawn(move || {
                let range = n * 100..n * 100 + 300;
                let put = tenant(&store).put(&file(&ram(range.clone())), &[]).unwrap();
                let hashes: Vec<Digest> = put.pages.iter().map(|(_, hash)| *hash).collect();
                tenant(&store)
                    .fetch_many(&hashes, &|at, bytes| assert_eq!(Digest::of(bytes), hashes[at]))
                    .unwrap();
            });
        }
    });
    let live = tenant(&store).put(&file(&ram(0..1000)), &[]).unwrap();
    assert_eq!(live.stats.new_pages, 0);
    assert_eq!(tenant(&store).stats().unwrap().unique, numbers(1000).count() as u64);
    drop(live);
}

#[test]
fn the_index_takes_less_than_24_bytes_a_page() {
    let root = tempfile::tempdir().unwrap();
    let store = Store::open(root.path()).unwrap();
    let put = tenant(&store).put(&file(&ram((0..30_000).map(|n| n * 7 + 1))), &[]).unwrap();
    let stats = tenant(&store).stats().unwrap();
    assert_eq!(stats.unique, put.stats.new_pages);
    let each = stats.index_memory_bytes * 100 / stats.unique;
    assert!(each < 2400, "{each} hundredths of a byte a page");
}

#[test]
fn a_length_that_is_no_multiple_of_a_page_is_refused() {
    let root = tempfile::tempdir().unwrap();
    let store = Store::open(root.path()).unwrap();
    let odd = file(&[1; 5000]);
    assert!(matches!(tenant(&store).put(&odd, &[]), Err(PagesError::Invalid { .. })));
}
