use super::*;
use proptest::prelude::*;
use std::collections::BTreeSet;

fn hash(n: u64) -> u64 {
    prefix(&Digest::of(&n.to_le_bytes()))
}

#[test]
fn an_entry_takes_less_than_24_bytes_at_any_size() {
    let mut index = Index::default();
    let mut most = 0;
    for n in 0..300_000_u64 {
        index.insert(hash(n), Place { pack: 1, page: 0 });
        if n > 1000 {
            most = most.max(index.bytes() * 100 / index.entries());
        }
    }
    assert!(most < 2200, "{most} hundredths of a byte an entry");
}

proptest! {
    /// Prefixes from a small set and from the ends of the range, so that many collide and probing
    /// wraps around.
    #[test]
    fn it_has_what_a_set_has(
        steps in prop::collection::vec((0_u64..40, 0_u32..4, 0_u32..5), 0..400),
    ) {
        let mut index = Index::default();
        let mut model: BTreeSet<(u64, Place)> = BTreeSet::new();
        for (n, pack, page) in steps {
            let prefix = match n {
                0..10 => n,
                10..20 => u64::MAX - n,
                _ => hash(n),
            };
            if page == 4 {
                index.remap(|place| Some(place).filter(|p| p.pack != pack));
                model.retain(|(_, place)| place.pack != pack);
            } else if model.insert((prefix, Place { pack, page })) {
                index.insert(prefix, Place { pack, page });
            }
            let found: BTreeSet<Place> = index.candidates(prefix).collect();
            let expected: BTreeSet<Place> =
                model.iter().filter(|(p, _)| *p == prefix).map(|(_, p)| *p).collect();
            prop_assert_eq!(found, expected);
            prop_assert_eq!(index.iter().collect::<BTreeSet<_>>(), model.clone());
        }
    }
}
