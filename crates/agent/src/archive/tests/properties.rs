//! Any stream, and any bytes.

use super::{DIR, FILE, HARD, LINK, describe, sandbox, stream, unpack};
use proptest::collection::vec;
use proptest::prelude::*;
use std::fs;
use tar::{EntryType, Header};

/// Components of an entry's name.
fn names() -> impl Strategy<Value = Vec<String>> {
    vec(prop_oneof!["a", "b", "\\.\\.", "\\.", "abs", "rel", "inner", "real", ""], 1..5)
}

fn kinds() -> impl Strategy<Value = EntryType> {
    prop_oneof![Just(FILE), Just(LINK), Just(HARD), Just(DIR)]
}

/// Components of a link's target.
fn targets() -> impl Strategy<Value = Vec<String>> {
    vec(prop_oneof!["a", "b", "\\.\\.", "\\.", "", "outside", "secret", "real"], 1..5)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]
    /// Any entries, with names made of dangerous components.
    #[test]
    fn any_stream_stays_within(entries in vec((names(), kinds(), targets()), 1..8)) {
        let sandbox = sandbox();
        let before = describe(&sandbox.outside);
        let owned: Vec<_> = entries
            .iter()
            .map(|(name, kind, link)| (name.join("/"), *kind, link.join("/")))
            .collect();
        let refs: Vec<_> = owned
            .iter()
            .map(|(name, kind, link)| match *kind {
                FILE => (name.as_str(), FILE, "", b"evil".as_slice()),
                other => (name.as_str(), other, link.as_str(), b"".as_slice()),
            })
            .collect();
        let _ = unpack(&sandbox.target, &mut stream(&refs).as_slice());
        prop_assert_eq!(describe(&sandbox.outside), before);
    }

    #[test]
    fn any_bytes_are_refused_or_unpacked_without_a_panic(
        bytes in vec(any::<u8>(), 0..3000),
        at in 0..512_usize,
        flip in any::<u8>(),
    ) {
        let sandbox = sandbox();
        let _ = unpack(&sandbox.target, &mut bytes.as_slice());
        let mut near = stream(&[("a", FILE, "", b"x"), ("b", LINK, "a", b"")]);
        near[at] ^= flip;
        let mut header = Header::from_byte_slice(&near[..512]).clone();
        header.set_cksum();
        near[..512].copy_from_slice(header.as_bytes());
        let _ = unpack(&sandbox.target, &mut near.as_slice());
        prop_assert_eq!(fs::read(sandbox.outside.join("secret")).unwrap(), b"untouched");
    }
}
