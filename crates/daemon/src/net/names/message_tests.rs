//! Questions and answers: generated, truncated at each byte, randomly changed, of maximum size;
//! compared with `simple-dns`.

use crate::net::names::answer::{self, Bad, MAX_VISITS_PER_BYTE};
use crate::net::names::message::{
    self, HEADER_BYTES, Head, MAX_QUESTION_BYTES, Query, Unusable, kind, rcode,
};
use proptest::prelude::*;
use simple_dns::rdata::RData;
use simple_dns::{CLASS, OPCODE, Packet, PacketFlag, QCLASS, QTYPE, RCODE, TYPE};

pub(super) fn labels(name: &str) -> Vec<u8> {
    let mut bytes = Vec::new();
    for label in name.split('.').filter(|label| !label.is_empty()) {
        bytes.push(u8::try_from(label.len()).unwrap());
        bytes.extend(label.as_bytes());
    }
    bytes.push(0);
    bytes
}

/// A message of header words and further bytes.
pub(super) fn with_head(head: [u16; 6], rest: &[&[u8]]) -> Vec<u8> {
    [&head.iter().flat_map(|word| word.to_be_bytes()).collect::<Vec<u8>>(), &rest.concat()[..]]
        .concat()
}

/// A question for this name and type.
pub(super) fn question(id: u16, name: &str, of: u16) -> Vec<u8> {
    with_head([id, 0x0100, 1, 0, 0, 0], &[&labels(name), &of.to_be_bytes(), &[0, 1]])
}

/// A question with an OPT record.
pub(super) fn question_edns(id: u16, name: &str, of: u16, udp_bytes: u16) -> Vec<u8> {
    let mut bytes = question(id, name, of);
    bytes[11] = 1;
    bytes.extend([0, 0, 41]);
    bytes.extend(udp_bytes.to_be_bytes());
    bytes.extend([0; 6]);
    bytes
}

/// Parses a question and checks the number of reads.
fn read(bytes: &[u8]) -> Result<Query, Unusable> {
    let mut visits = 0;
    let read = message::parse(bytes, &mut visits);
    assert!(visits <= bytes.len(), "{visits} visits of {} bytes", bytes.len());
    if let Err(Unusable::Reply(reply)) = &read {
        assert!(
            reply.len() <= MAX_QUESTION_BYTES && reply[..2] == bytes[..2] && reply[2] & 0x80 != 0
        );
    }
    read
}

/// Parses an answer, writes it for a guest, and checks the number of reads.
fn answer(bytes: &[u8], query: &Query, id: u16) -> Result<Vec<u8>, Bad> {
    let mut visits = 0;
    let read = answer::parse(bytes, query, id, &[], &mut visits);
    assert!(
        visits <= bytes.len() * MAX_VISITS_PER_BYTE,
        "{visits} visits of {} bytes",
        bytes.len()
    );
    let read = read?;
    for limit in [512, query.udp_bytes(), answer::MAX_TCP_BYTES] {
        let written = read.write(query, limit);
        assert!(written.len() <= limit);
        // The result is an answer to the guest's question, and stays the same when it is parsed
        // again.
        let again = answer::parse(&written, query, query.id, &[], &mut 0).unwrap();
        assert_eq!(again.write(query, limit).len(), written.len() - blocked(&written));
    }
    Ok(read.write(query, answer::MAX_TCP_BYTES))
}

/// Bytes of the option for withheld addresses.
fn blocked(written: &[u8]) -> usize {
    if written.ends_with(&[0, 6, 0, 15, 0, 2, 0, 15]) { 6 } else { 0 }
}

fn code(result: &Result<Query, Unusable>) -> Option<u16> {
    match result {
        Err(Unusable::Reply(reply)) => Some(u16::from(reply[3] & 15)),
        _ => None,
    }
}

#[test]
fn a_question_is_read_whole_or_not_at_all() {
    let bytes = question_edns(7, "wWw.example.org", kind::A, 4096);
    let query = read(&bytes).unwrap();
    assert_eq!((query.id, query.question.kind, query.recursion_desired), (7, kind::A, true));
    assert_eq!(query.question.name.wire(), labels("wWw.example.org"));
    assert_eq!((query.edns.unwrap().udp_bytes, query.udp_bytes()), (4096, 1232));
    for length in 0..bytes.len() {
        let cut = read(&bytes[..length]);
        let expected = (length >= HEADER_BYTES).then_some(rcode::FORMERR);
        assert_eq!(code(&cut), expected, "{length} bytes: {cut:?}");
    }
    let more = [&bytes[..], &[0]].concat();
    assert_eq!(code(&read(&more)), Some(rcode::FORMERR));
}

#[test]
fn what_is_no_question_is_answered_as_such_or_not_at_all() {
    let good = question(7, "example.org", kind::A);
    let with = |at: usize, byte: u8| {
        let mut bytes = good.clone();
        bytes[at] = byte;
        read(&bytes)
    };
    // A response is never answered, because two servers could answer each other forever.
    assert_eq!(with(2, 0x81), Err(Unusable::Silence));
    assert_eq!(read(&good[..11]), Err(Unusable::Silence));
    // The opcodes IQUERY, STATUS, NOTIFY, UPDATE, and unassigned ones.
    for opcode in 1..16_u8 {
        assert_eq!(code(&with(2, opcode << 3)), Some(rcode::NOTIMP), "opcode {opcode}");
    }
    // Counts of questions, answers, authorities, additional records.
    for (at, byte) in [(5, 0), (5, 2), (4, 1), (7, 1), (9, 1), (10, 1), (11, 1), (11, 2)] {
        assert_eq!(code(&with(at, byte)), Some(rcode::FORMERR), "byte {at} is {byte}");
    }
    // A pointer (to itself or to the header), and unassigned label types.
    for byte in [0xc0, 0x40, 0x80, 0xff] {
        assert_eq!(code(&with(12, byte)), Some(rcode::FORMERR), "{byte:x}");
    }
    // An additional record that is no OPT record, or whose owner is not the root.
    for (at, byte) in [(good.len() + 2, 1), (good.len(), 1)] {
        let mut bytes = question_edns(7, "example.org", kind::A, 512);
        bytes[at] = byte;
        assert_eq!(code(&read(&bytes)), Some(rcode::FORMERR));
    }
    // A future version of EDNS (RFC 6891, 6.1.3).
    let mut bytes = question_edns(7, "example.org", kind::A, 512);
    bytes[good.len() + 6] = 1;
    let Err(Unusable::Reply(reply)) = read(&bytes) else { panic!("version 1 is known") };
    // The upper bits of the response code are the first byte of the OPT record's TTL.
    assert_eq!((reply[3] & 15, reply[reply.len() - 6]), (0, 1), "{reply:x?}");
    // A message longer than the maximum, and names that are too long.
    let long = vec!["a".repeat(63); 4].join(".");
    assert_eq!(code(&read(&question(7, &long, kind::A))), Some(rcode::FORMERR));
    assert!(read(&question(7, &long[3..], kind::A)).is_ok());
    let mut bytes = question_edns(7, "example.org", kind::A, 512);
    let padding = MAX_QUESTION_BYTES + 1 - bytes.len();
    let at = bytes.len() - 2;
    bytes[at..].copy_from_slice(&u16::try_from(padding).unwrap().to_be_bytes());
    bytes.resize(MAX_QUESTION_BYTES + 1, 0);
    assert_eq!(code(&read(&bytes)), Some(rcode::FORMERR));
}

#[test]
fn what_is_asked_of_a_server_is_made_anew() {
    let mut bytes = question_edns(7, "wWw.Example.ORG", kind::AAAA, 4096);
    // An option (such as a client subnet), which is not passed on.
    let at = bytes.len() - 2;
    bytes[at..].copy_from_slice(&[0, 8]);
    bytes.extend([0, 8, 0, 4, 1, 2, 3, 4]);
    let asked = read(&bytes).unwrap().forwarded(99);
    let expected = question_edns(99, "www.example.org", kind::AAAA, 1232);
    assert_eq!(asked, expected);
    // Without recursion, a guest could probe a server's cache.
    let mut bytes = question(7, "example.org", kind::A);
    bytes[2] = 0;
    assert_eq!(read(&bytes).unwrap().forwarded(99), question(99, "example.org", kind::A));
}

/// A message of about `total` bytes that requires a maximum of pointers: a chain of pointers, each
/// to the previous one, in an unread record, and then records of three names that begin at the
/// chain's end.
pub(super) fn bomb(head: [u16; 2], total: usize) -> Vec<u8> {
    let asked = [&labels("x.dayfly.internal")[..], &[0, 1, 0, 1]].concat();
    let word = |n: usize| u16::try_from(n).unwrap().to_be_bytes();
    let (name, start) = (HEADER_BYTES, HEADER_BYTES + asked.len() + 12);
    let end = (start + total.saturating_sub(start) / 2).min(0x3ffe);
    let mut chain = word(0xc000 | name).to_vec();
    for at in (start..end.saturating_sub(3)).step_by(2) {
        chain.extend(word(0xc000 | at));
    }
    let null =
        [&word(0xc000 | name)[..], &[0, 10, 0, 1, 0, 0, 0, 0], &word(chain.len()), &chain].concat();
    let last = word(0xc000 | (start + chain.len() - 2));
    let minfo = [&last[..], &[0, 14, 0, 1, 0, 0, 0, 0, 0, 4], &last, &last].concat();
    let room = total.saturating_sub(HEADER_BYTES + asked.len() + null.len());
    let count = room / minfo.len();
    let records = u16::try_from(count + 1).unwrap();
    let head = [head[0], head[1], 1, records, 0, 0];
    with_head(head, &[&asked, &null, &minfo.repeat(count)])
}

#[test]
fn a_chain_of_pointers_costs_no_more_than_its_bytes() {
    let query = read(&question(7, "x.dayfly.internal", kind::A)).unwrap();
    for total in 188..=answer::MAX_TCP_BYTES {
        let asked = bomb([7, 0x0100], total);
        assert!(asked.len() <= total && asked.len() > total - 16, "{total}: {}", asked.len());
        let mut visits = 0;
        let read = message::parse(&asked, &mut visits);
        assert_eq!((code(&read), visits), (Some(rcode::FORMERR), HEADER_BYTES), "{total}");
        // Parsing reads most of an answer's bytes, so of the large answers a sample is enough.
        if total > 4096 && total % 61 != 0 {
            continue;
        }
        let mut answer = asked;
        answer[2] |= 0x80;
        let mut visits = 0;
        let read = answer::parse(&answer, &query, 7, &[], &mut visits);
        assert!(visits <= answer.len() * MAX_VISITS_PER_BYTE, "{total}: {visits} visits");
        // The message is accepted too, because no valid message costs more.
        assert!(read.is_ok(), "{total}: {read:?}");
    }
    let largest = bomb([7, 0x8180], answer::MAX_TCP_BYTES);
    answer(&largest, &query, 7).unwrap();
}

#[test]
fn labels_that_lie_over_each_other_are_given_up() {
    // Each byte of a long stretch begins a label of 63 bytes, so each pointer leads to a new
    // overlapping label.
    let query = read(&question(7, "example.org", kind::A)).unwrap();
    let asked = [&labels("example.org")[..], &[0, 1, 0, 1]].concat();
    let stretch = vec![63; 16_000];
    let start = HEADER_BYTES + asked.len() + 11;
    let length = u16::try_from(stretch.len()).unwrap().to_be_bytes();
    let null = [&[0, 0, 10, 0, 1, 0, 0, 0, 0][..], &length, &stretch].concat();
    let mut records = Vec::new();
    let mut count = 1;
    for at in (start..start + 15_000).rev() {
        records.extend((0xc000 | u16::try_from(at).unwrap()).to_be_bytes());
        records.extend([0, 1, 0, 1, 0, 0, 0, 0, 0, 4, 1, 1, 1, 1]);
        count += 1;
    }
    let bytes = with_head([7, 0x8180, 1, count, 0, 0], &[&asked, &null, &records]);
    assert!(answer(&bytes, &query, 7).is_err());
}

/// Answers in the form that servers send: with compressed names, several types, and three sections.
pub(super) fn captured() -> Vec<(Query, Vec<u8>)> {
    let soa = |owner: &[u8]| {
        let data =
            [&labels("ns1.example.org")[..4], &[0xc0, 12], &[4, b'r', b'o', b'o', b't', 0xc0, 12]];
        let data = [&data.concat()[..], &[0; 20]].concat();
        let length = u16::try_from(data.len()).unwrap().to_be_bytes();
        [owner, &[0, 6, 0, 1, 0, 0, 14, 16], &length, &data].concat()
    };
    let a = |owner: &[u8], ip: [u8; 4]| [owner, &[0, 1, 0, 1, 0, 0, 1, 44, 0, 4], &ip].concat();
    let make = |name: &str, of: u16, counts: [u16; 3], records: &[&[u8]]| {
        let query = read(&question_edns(7, name, of, 1232)).unwrap();
        let asked = [&labels(name)[..], &of.to_be_bytes(), &[0, 1]].concat();
        let opt = [0, 0, 41, 4, 208, 0, 0, 0, 0, 0, 0];
        let [answers, authorities, additional] = counts;
        let head = [7, 0x8180, 1, answers, authorities, additional + 1];
        (query, with_head(head, &[&asked, &records.concat(), &opt]))
    };
    let own = &[0xc0, 12][..];
    // www.example.org CNAME web.example.org; web.example.org A A; example.org NS; ns A
    let cname = [own, &[0, 5, 0, 1, 0, 0, 0, 60, 0, 6, 3, b'w', b'e', b'b', 0xc0, 16]].concat();
    let at = u8::try_from(HEADER_BYTES + labels("www.example.org").len() + 4 + 12).unwrap();
    let ns = [&[0xc0, 16][..], &[0, 2, 0, 1, 0, 0, 0, 60, 0, 5, 2, b'n', b's', 0xc0, 16]].concat();
    let target = &[0xc0, at][..];
    let first = [&cname[..], &a(target, [1, 1, 1, 1]), &a(target, [8, 8, 8, 8])].concat();
    let mx = [own, &[0, 15, 0, 1, 0, 0, 0, 60, 0, 9, 0, 10, 4, b'm', b'a', b'i', b'l', 0xc0, 12]]
        .concat();
    let srv = [
        own,
        &[0, 33, 0, 1, 0, 0, 0, 60, 0, 12, 0, 1, 0, 2, 1, 187, 3, b'w', b'e', b'b', 0xc0, 12],
    ];
    let txt = [own, &[0, 16, 0, 1, 0, 0, 0, 60, 0, 6, 5, b'h', b'e', b'l', b'l', b'o']].concat();
    let many: Vec<u8> = (0..200).flat_map(|n| a(own, [9, 9, 9, n])).collect();
    let long = format!("{}.{}.example.org", "a".repeat(60), "b".repeat(60));
    vec![
        make("www.example.org", kind::A, [3, 1, 1], &[&first, &ns, &a(&[0xc0, 16], [1, 2, 3, 4])]),
        make("example.org", 15, [1, 0, 0], &[&mx]),
        make("example.org", 33, [1, 0, 0], &[&srv.concat()]),
        make("example.org", 16, [1, 0, 0], &[&txt]),
        make("example.org", kind::AAAA, [0, 1, 0], &[&soa(own)]),
        make(&long, kind::A, [200, 0, 0], &[&many]),
    ]
}

#[test]
fn an_answer_says_to_a_guest_what_it_said_to_us() {
    for (query, bytes) in captured() {
        let before = Packet::parse(&bytes).unwrap();
        let written = answer(&bytes, &query, 7).unwrap();
        let after = Packet::parse(&written).unwrap();
        assert_eq!((after.id(), after.rcode()), (7, RCODE::NoError));
        assert_eq!(after.questions[0].qname, before.questions[0].qname);
        assert_eq!(after.answers, before.answers);
        let of_soa =
            |record: &&simple_dns::ResourceRecord<'_>| matches!(record.rdata, RData::SOA(_));
        assert!(after.name_servers.iter().eq(before.name_servers.iter().filter(of_soa)));
        assert!(after.additional_records.is_empty() && after.opt().is_some());
        // The result grows only by names that may not be compressed.
        assert!(written.len() <= bytes.len() + 20, "{} of {}", written.len(), bytes.len());
        for length in 0..bytes.len() {
            assert!(answer(&bytes[..length], &query, 7).is_err(), "{length} bytes");
        }
        assert_eq!(answer(&bytes, &query, 8).unwrap_err(), Bad::Other);
        let other = read(&question(7, "example.net", kind::A)).unwrap();
        assert_eq!(answer(&bytes, &other, 7).unwrap_err(), Bad::Other);
    }
}

#[test]
fn what_does_not_fit_over_udp_is_asked_again_over_tcp() {
    let (query, bytes) = captured().pop().unwrap();
    let read = answer::parse(&bytes, &query, 7, &[], &mut 0).unwrap();
    let cut = read.write(&query, query.udp_bytes());
    let cut = Packet::parse(&cut).unwrap();
    assert!(
        cut.has_flags(PacketFlag::TRUNCATION) && cut.answers.is_empty() && cut.questions.len() == 1
    );
    // A server's truncated answer is passed on as truncated, wherever it was cut.
    let mut bytes = captured().swap_remove(0).1;
    bytes[2] |= 2;
    let query = captured().swap_remove(0).0;
    for length in HEADER_BYTES + query.question.bytes()..bytes.len() {
        let written = answer(&bytes[..length], &query, 7).unwrap();
        assert!(Packet::parse(&written).unwrap().has_flags(PacketFlag::TRUNCATION));
    }
}

#[test]
fn addresses_that_a_guest_may_not_reach_are_left_out() {
    let own = &[0xc0, 12][..];
    let record = |of: u16, data: &[u8]| {
        let length = u16::try_from(data.len()).unwrap().to_be_bytes();
        [own, &of.to_be_bytes(), &[0, 1, 0, 0, 0, 60], &length, data].concat()
    };
    let ask = |of: u16, records: &[Vec<u8>]| {
        let query = read(&question_edns(7, "example.org", of, 1232)).unwrap();
        let count = u16::try_from(records.len()).unwrap();
        let asked = [&labels("example.org")[..], &of.to_be_bytes(), &[0, 1]].concat();
        let bytes = with_head([7, 0x8180, 1, count, 0, 0], &[&asked, &records.concat()]);
        answer(&bytes, &query, 7)
    };
    let left = |written: &[u8]| Packet::parse(written).unwrap().answers.len();
    let (private, public) = (record(kind::A, &[192, 168, 1, 1]), record(kind::A, &[1, 1, 1, 1]));
    assert_eq!(left(&ask(kind::A, &[private.clone(), public.clone()]).unwrap()), 1);
    let none = ask(kind::A, std::slice::from_ref(&private)).unwrap();
    let shown = Packet::parse(&none).unwrap();
    assert_eq!((shown.rcode(), shown.answers.len()), (RCODE::NoError, 0));
    // The reason is given: RFC 8914, "blocked".
    assert!(none.ends_with(&[0, 6, 0, 15, 0, 2, 0, 15]), "{none:x?}");
    let v6 = |ip: &str| record(kind::AAAA, &ip.parse::<std::net::Ipv6Addr>().unwrap().octets());
    let three = [v6("2606:4700::1111"), v6("::ffff:10.0.0.1"), v6("fd00::1")];
    assert_eq!(left(&ask(kind::AAAA, &three).unwrap()), 1);
    // An HTTPS record: priority, the root as target, and a hint.
    let https = |ip: [u8; 4]| record(kind::HTTPS, &[&[0, 1, 0, 0, 4, 0, 4][..], &ip].concat());
    assert_eq!(left(&ask(kind::HTTPS, &[https([1, 1, 1, 1])]).unwrap()), 1);
    assert_eq!(left(&ask(kind::HTTPS, &[https([10, 0, 0, 1])]).unwrap()), 0);
    // A compressed target, followed by as many bytes as a label of that length would have.
    let compressed = record(kind::HTTPS, &[&[0, 1, 0xc0][..], &[0; 0xc0 + 1]].concat());
    for bad in [
        compressed,
        record(kind::A, &[1, 1, 1]),
        record(kind::HTTPS, &[0, 1, 0, 0, 4, 0, 5, 1, 1, 1, 1]),
    ] {
        assert_eq!(ask(kind::A, &[bad]).unwrap_err(), Bad::Form);
    }
}

#[test]
fn only_the_answer_to_this_question_is_taken() {
    let (query, good) = captured().swap_remove(1);
    let with = |at: usize, byte: u8| {
        let mut bytes = good.clone();
        bytes[at] = byte;
        answer(&bytes, &query, 7)
    };
    for (at, byte) in
        [(0, 1), (1, 8), (2, 0x01), (2, 0xa9), (5, 0), (5, 2), (13, b'x'), (26, 16), (28, 3)]
    {
        assert_eq!(with(at, byte).unwrap_err(), Bad::Other, "byte {at} is {byte}");
    }
    // A server may change the case of a name.
    assert!(with(13, b'E').is_ok());
    // A pointer forward, and one into the header.
    let at = HEADER_BYTES + query.question.bytes();
    assert_eq!(with(at + 1, 200).unwrap_err(), Bad::Form);
    assert_eq!(with(at + 1, 2).unwrap_err(), Bad::Form);
    assert_eq!(with(at + 1, u8::try_from(at).unwrap()).unwrap_err(), Bad::Form);
    // A failure may come without the question.
    let failure = with_head([7, 0x8182, 0, 0, 0, 0], &[]);
    let written = answer(&failure, &query, 7).unwrap();
    assert_eq!(Packet::parse(&written).unwrap().rcode(), RCODE::ServerFailure);
}

fn a_name() -> impl Strategy<Value = String> {
    proptest::collection::vec("[a-zA-Z0-9_-]{1,20}", 0..8).prop_map(|labels| labels.join("."))
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn a_question_is_what_another_parser_says(
        name in a_name(),
        of in prop::sample::select(vec![1_u16, 2, 5, 6, 12, 13, 15, 16, 28, 33, 255]),
        id: u16,
        rd: bool,
    ) {
        let mut bytes = question(id, &name, of);
        bytes[2] = u8::from(rd);
        let query = read(&bytes).unwrap();
        let packet = Packet::parse(&bytes).unwrap();
        prop_assert_eq!(packet.id(), query.id);
        prop_assert_eq!(packet.has_flags(PacketFlag::RECURSION_DESIRED), query.recursion_desired);
        let theirs = &packet.questions[0];
        let labels: Vec<String> =
            query.question.name.labels().map(|l| String::from_utf8(l.to_vec()).unwrap()).collect();
        prop_assert_eq!(theirs.qname.to_string(), labels.join("."));
        prop_assert_eq!(u16::from(theirs.qtype), query.question.kind);
        prop_assert_eq!(theirs.qclass, QCLASS::CLASS(CLASS::IN));
        // The answer matches the question.
        let answer = query.answer(Head::of(rcode::NXDOMAIN), &[]);
        let answer = Packet::parse(&answer).unwrap();
        prop_assert!(answer.has_flags(PacketFlag::RESPONSE | PacketFlag::RECURSION_AVAILABLE));
        let expected = (RCODE::NameError, OPCODE::StandardQuery);
        prop_assert_eq!((answer.rcode(), answer.opcode()), expected);
        prop_assert_eq!(&answer.questions[0].qname, &packet.questions[0].qname);
    }

    #[test]
    fn what_is_read_of_any_bytes_makes_sense(
        head in proptest::collection::vec(any::<u8>(), 0..4),
        rest in proptest::collection::vec(any::<u8>(), 0..600),
    ) {
        // Random bytes, alone and after the header of a question.
        for bytes in [[&head[..], &rest].concat(), with_head([7, 0x0100, 1, 0, 0, 0], &[&rest])] {
            if let Ok(query) = read(&bytes) {
                let asked = query.forwarded(9);
                // The other parser refuses types and classes that it does not know.
                let known = QTYPE::try_from(query.question.kind).is_ok()
                    && QCLASS::try_from(query.question.class).is_ok();
                prop_assert!(!known || Packet::parse(&asked).is_ok());
                prop_assert_eq!(read(&asked).unwrap().forwarded(9), asked);
            }
        }
        let query = read(&question(7, "example.org", kind::A)).unwrap();
        let asked = [&labels("example.org")[..], &[0, 1, 0, 1]].concat();
        let _ = answer(&with_head([7, 0x8180, 1, 3, 1, 1], &[&asked, &rest]), &query, 7);
    }

    #[test]
    fn an_answer_that_was_changed_is_read_or_refused(
        which in 0..6_usize,
        changes in proptest::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6),
    ) {
        let (query, mut bytes) = captured().swap_remove(which);
        for (at, byte) in &changes {
            let at = at.index(bytes.len());
            bytes[at] = *byte;
        }
        let _ = answer(&bytes, &query, 7);
        // The same bytes as a question.
        bytes.truncate(MAX_QUESTION_BYTES);
        let _ = read(&bytes);
    }

    #[test]
    fn records_of_any_names_say_the_same_afterwards(
        names in proptest::collection::vec(a_name(), 1..20),
        kinds in proptest::collection::vec(0..4_usize, 1..20),
    ) {
        // Built and compressed by `simple-dns`.
        let query = read(&question(7, "a.example.org", kind::A)).unwrap();
        let mut packet = Packet::new_reply(7);
        let name = simple_dns::Name::new("a.example.org").unwrap();
        packet.questions.push(simple_dns::Question::new(
            name, QTYPE::TYPE(TYPE::A), QCLASS::CLASS(CLASS::IN), false,
        ));
        for (name, of) in names.iter().zip(kinds.iter().cycle()) {
            let target = simple_dns::Name::new(name).unwrap();
            let data = match of {
                0 => RData::A(simple_dns::rdata::A { address: 0x0101_0101 }),
                1 => RData::CNAME(simple_dns::rdata::CNAME(target.clone())),
                2 => RData::MX(simple_dns::rdata::MX { preference: 5, exchange: target.clone() }),
                _ => RData::PTR(simple_dns::rdata::PTR(target.clone())),
            };
            packet.answers.push(simple_dns::ResourceRecord::new(target, CLASS::IN, 60, data));
        }
        let bytes = packet.build_bytes_vec_compressed().unwrap();
        let written = answer(&bytes, &query, 7).unwrap();
        prop_assert!(written.len() <= bytes.len() + 2 * names.len());
        prop_assert_eq!(&Packet::parse(&written).unwrap().answers, &packet.answers);
    }
}
