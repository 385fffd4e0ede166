//! Names for VMs with an egress policy: which are answered, and what their answers open.

use crate::net::names::answer::{self, Answer};
use crate::net::names::index::Policy;
use crate::net::names::message::{self, Query, kind};
use crate::net::names::message_tests::{labels, question, question_edns, with_head};
use crate::net::names::server_world::*;
use dayfly_units::{Egress, VmId};
use proptest::prelude::*;
use simple_dns::RCODE;
use std::net::Ipv4Addr;
use std::sync::Arc;
use std::time::Duration;

const CNAME: u16 = kind::CNAME;

fn query(name: &str) -> Query {
    message::parse(&question(7, name, kind::A), &mut 0).unwrap()
}

fn record(owner: &str, of: u16, ttl_seconds: u32, data: &[u8]) -> Vec<u8> {
    let length = u16::try_from(data.len()).unwrap().to_be_bytes();
    let fixed = [&of.to_be_bytes()[..], &[0, 1], &ttl_seconds.to_be_bytes(), &length].concat();
    [labels(owner), fixed, data.to_vec()].concat()
}

/// An answer to a question for `name` with these records, whose names are not compressed.
fn made(name: &str, records: &[Vec<u8>]) -> Vec<u8> {
    let asked = [&labels(name)[..], &[0, 1, 0, 1]].concat();
    let count = u16::try_from(records.len()).unwrap();
    with_head([7, 0x8180, 1, count, 0, 0], &[&asked, &records.concat()])
}

fn parsed<'a>(bytes: &'a [u8], name: &str) -> Answer<'a> {
    answer::parse(bytes, &query(name), 7, &[], &mut 0).unwrap()
}

fn addresses(name: &str, records: &[Vec<u8>]) -> Vec<(String, u32)> {
    let bytes = made(name, records);
    let all = parsed(&bytes, name).addresses();
    all.into_iter().map(|(ip, ttl)| (ip.to_string(), ttl)).collect()
}

#[test]
fn aliases_have_addresses_and_other_records_have_none() {
    let a = |owner: &str, last: u8, ttl| record(owner, kind::A, ttl, &[198, 51, 100, last]);
    let alias = |owner: &str, to: &str, ttl| record(owner, CNAME, ttl, &labels(to));
    let ip = |last: u8, ttl: u32| (format!("198.51.100.{last}"), ttl);
    // In any order, in any case, with the shortest time of the way.
    let records = [
        a("C.example", 1, 300),
        a("other.example", 2, 300),
        alias("b.example", "c.EXAMPLE", 20),
        alias("A.example", "b.example", 600),
        a("c.example", 3, 10),
    ];
    assert_eq!(addresses("a.example", &records), [ip(1, 20), ip(3, 10)]);
    assert_eq!(addresses("x.example", &records), []);
    // Addresses and an alias of one name contradict each other: the addresses count.
    let both = [alias("a.example", "b.example", 60), a("a.example", 1, 60), a("b.example", 2, 60)];
    assert_eq!(addresses("a.example", &both), [ip(1, 60)]);
    // A loop, and an alias to nothing.
    let circle = [alias("a.example", "b.example", 60), alias("b.example", "a.example", 60)];
    assert_eq!(addresses("a.example", &circle), []);
    assert_eq!(addresses("a.example", &circle[..1]), []);
    // A private address is left out before.
    assert_eq!(addresses("a.example", &[record("a.example", kind::A, 60, &[10, 0, 0, 1])]), []);
    // Chains of 16 aliases, and of 17.
    for (count, found) in [(16, 1), (17, 0)] {
        let name = |n: usize| format!("n{n}.example");
        let mut chain: Vec<Vec<u8>> =
            (0..count).map(|n| alias(&name(n), &name(n + 1), 60)).collect();
        chain.push(a(&name(count), 1, 60));
        assert_eq!(addresses("n0.example", &chain).len(), found, "{count}");
    }
    let many: Vec<Vec<u8>> = (0..300).map(|_| a("a.example", 1, 60)).collect();
    assert_eq!(addresses("a.example", &many).len(), 256);
}

proptest! {
    /// Any chain of records, compared with a search by names.
    #[test]
    fn addresses_are_those_that_a_search_by_names_finds(
        records in proptest::collection::vec(
            (0..6_usize, prop::option::of(0..6_usize), 1..5_u8),
            0..12,
        )
    ) {
        let name = |n: usize| format!("n{n}.example");
        let bytes: Vec<Vec<u8>> = records.iter().map(|(owner, alias, last)| match alias {
            Some(to) => record(&name(*owner), CNAME, 60, &labels(&name(*to))),
            None => record(&name(*owner), kind::A, 60, &[198, 51, 100, *last]),
        }).collect();
        let mut expected = Vec::new();
        let mut at = 0;
        for _ in 0..=16 {
            let of = |record: &&(usize, Option<usize>, u8)| record.0 == at;
            let found = records.iter().filter(of).filter(|record| record.1.is_none());
            expected = found.map(|record| format!("198.51.100.{}", record.2)).collect();
            let alias = records.iter().filter(of).find_map(|record| record.1);
            match alias {
                Some(to) if expected.is_empty() => at = to,
                _ => break,
            }
        }
        let got = addresses("n0.example", &bytes).into_iter().map(|one| one.0);
        let got: Vec<String> = got.collect();
        prop_assert_eq!(got, expected);
    }
}

#[test]
fn only_names_of_the_policy_are_answered_and_opened() {
    alone(|| {
        let world = world();
        let (at, asked) = server(|question| Some(with_address(question, [198, 51, 100, 7])));
        world.servers.send(Arc::from([at])).unwrap();
        let policy = Policy {
            group: None,
            egress: "example.org:443,*.example.net,192.0.2.0/24".parse().unwrap(),
        };
        let name = "limited".parse().unwrap();
        let entry = world.index.insert(ip(6), VmId::random(), &name, policy);
        let (limited, free) = (udp(6), udp(2));
        let code = |name: &str, of| code_of(&ask(&limited, &question(7, name, of)));
        for name in ["example.org", "EXAMPLE.org", "a.b.example.net"] {
            assert_eq!(code(name, kind::A), RCODE::NoError, "{name}");
        }
        assert_eq!(asked.lock().unwrap().len(), 3);
        let opened = std::mem::take(&mut *world.opened.lock().unwrap());
        let first = &opened[0];
        assert_eq!((opened.len(), first.0), (3, ip(6)));
        let expected: Vec<Box<[u8]>> = vec![b"org"[..].into(), b"example"[..].into()];
        assert_eq!((&first.1.name, &opened[1].1.name), (&expected, &expected));
        let seconds = Duration::from_secs(9);
        assert_eq!(first.1.addresses, [(Ipv4Addr::new(198, 51, 100, 7), seconds)]);
        // Neither other names nor other types of them are forwarded: no name carries data out.
        for name in
            ["example.net", "www.example.org", "data.evil.example", "7.100.51.198.in-addr.arpa"]
        {
            for of in [kind::A, 16, kind::ANY] {
                assert_eq!(code(name, of), RCODE::Refused, "{name}");
            }
        }
        let edns = ask(&limited, &question_edns(7, "evil.example", kind::A, 1232));
        assert!(edns.ends_with(&[0, 15, 0, 2, 0, 15]), "the reason is given (RFC 8914)");
        assert_eq!((entry.guest().refused(), asked.lock().unwrap().len()), (13, 3));
        assert_eq!(code("limited.dayfly.internal", kind::A), RCODE::NoError);
        // A policy that changes holds for the next question, over an open connection too.
        let mut stream = tcp(6);
        let mut over_tcp = |name: &str| {
            say(&mut stream, &question(7, name, kind::A));
            code_of(&hear(&mut stream).unwrap())
        };
        assert_eq!(over_tcp("example.org"), RCODE::NoError);
        entry.guest().set_egress(Egress::none());
        assert_eq!(
            (over_tcp("example.org"), code("example.org", kind::A)),
            (RCODE::Refused, RCODE::Refused)
        );
        assert_eq!(asked.lock().unwrap().len(), 4);
        entry.guest().set_egress(Egress::internet());
        assert_eq!(over_tcp("evil.example"), RCODE::NoError);
        // A VM without rules opens nothing.
        world.opened.lock().unwrap().clear();
        assert_eq!(code_of(&ask(&free, &question(7, "example.org", kind::A))), RCODE::NoError);
        assert_eq!(world.opened.lock().unwrap().len(), 0);
    });
}
