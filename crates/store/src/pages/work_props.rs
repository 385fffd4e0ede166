//! Puts by processes of which some were taken over, in any order with gcs and restarts.

use super::tests::{Does, put, put_beside, restored, store, tenant};
use crate::fixture_pages::{file, ram};
use crate::pages::Lease;
use crate::{PutMemory, Store, Table};
use proptest::prelude::*;

/// The first page, and the number of pages.
type Pages = (u64, u64);

#[derive(Debug, Clone)]
enum Step {
    /// A process stores RAM; before its packs are published, another one may do so too.
    Put((Does, Pages), Option<(Does, Pages)>),
    /// The daemon stores RAM by itself.
    PutOwn(Pages),
    /// Nothing needs one of the puts any more.
    Remove(prop::sample::Index),
    Read,
    Collect,
    Reopen {
        is_record_lost: bool,
    },
}

fn put_by_a_process() -> impl Strategy<Value = (Does, Pages)> {
    let does = prop_oneof![3 => Just(Does::Right), 2 => Just(Does::OtherBytes)];
    (does, pages())
}

fn pages() -> impl Strategy<Value = Pages> {
    (0_u64..60, 1_u64..70)
}

fn step() -> impl Strategy<Value = Step> {
    let beside = prop::option::of(put_by_a_process());
    prop_oneof![
        5 => (put_by_a_process(), beside).prop_map(|(put, beside)| Step::Put(put, beside)),
        1 => pages().prop_map(Step::PutOwn),
        1 => any::<prop::sample::Index>().prop_map(Step::Remove),
        1 => Just(Step::Read),
        2 => Just(Step::Collect),
        2 => any::<bool>().prop_map(|is_record_lost| Step::Reopen { is_record_lost }),
    ]
}

/// RAM that was put, and is needed.
struct Stored {
    table: Table,
    memory: Vec<u8>,
    /// Whether the process that stored it was not taken over.
    is_right: bool,
    _lease: Lease,
}

fn memory((first, count): Pages) -> Vec<u8> {
    ram(first..first + count)
}

impl Stored {
    fn of(put: PutMemory, does: Does, pages: Pages) -> Self {
        let PutMemory { table, lease, .. } = put;
        let is_right = does == Does::Right;
        Self { table, memory: memory(pages), is_right, _lease: lease }
    }

    /// RAM of a right process comes back. That of one that was taken over may not, but it is never
    /// anything else.
    fn check(&self, store: &Store) {
        match restored(store, &self.table) {
            Ok(bytes) => assert!(bytes == self.memory, "other bytes"),
            Err(e) => assert!(!self.is_right, "{e}"),
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 60, ..ProptestConfig::default() })]
    #[test]
    fn what_right_processes_have_stored_comes_back_whatever_others_did(
        steps in prop::collection::vec(step(), 1..16),
    ) {
        let (folder, mut store) = store();
        let mut all: Vec<Stored> = Vec::new();
        for step in steps {
            match step {
                Step::Put((does, pages), beside) => {
                    let mut other = None;
                    let ran = std::cell::RefCell::new(&mut other);
                    let meanwhile = || {
                        if let Some((does, pages)) = beside {
                            **ran.borrow_mut() = put(&store, &file(&memory(pages)), does).ok();
                        }
                    };
                    let done = put_beside(&store, &file(&memory(pages)), does, &meanwhile);
                    prop_assert!(done.is_ok() || does != Does::Right, "{done:?}");
                    all.extend(done.ok().map(|put| Stored::of(put, does, pages)));
                    if let Some((does, pages)) = beside {
                        prop_assert!(other.is_some() || does != Does::Right);
                        all.extend(other.map(|put| Stored::of(put, does, pages)));
                    }
                }
                Step::PutOwn(pages) => {
                    let ram = file(&memory(pages));
                    let known = Default::default();
                    let spec = crate::MemorySpec { memory: &ram, known, disks: &[] };
                    let put = tenant(&store).put_memory(&spec).unwrap();
                    all.push(Stored::of(put, Does::Right, pages));
                }
                Step::Remove(_) if all.is_empty() => {}
                Step::Remove(at) => drop(all.swap_remove(at.index(all.len()))),
                Step::Read => all.iter().for_each(|stored| stored.check(&store)),
                Step::Collect => drop(store.gc_pages().unwrap()),
                Step::Reopen { is_record_lost } => {
                    drop(store);
                    if is_record_lost {
                        let _ = std::fs::remove_file(folder.path().join("pages/one/quarantine"));
                    }
                    store = Store::open(folder.path()).unwrap();
                    let tenant = tenant(&store);
                    for stored in &mut all {
                        stored._lease = tenant.lease(stored.table.hashes());
                    }
                }
            }
        }
        all.iter().for_each(|stored| stored.check(&store));
        store.gc_pages().unwrap();
        all.iter().for_each(|stored| stored.check(&store));
    }
}
