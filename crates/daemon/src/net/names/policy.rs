//! Decides which questions are answered here, forwarded to the host's servers, or refused. No I/O.
//!
//! | question | decision |
//! |---|---|
//! | a class other than IN, a transfer, or a type that is no type of records | REFUSED |
//! | below `dayfly.internal` | answered: a VM that the asker may resolve, or NXDOMAIN |
//! | an address of the network, reversed | likewise |
//! | another private address, reversed; a name of local use (`localhost`, `local`, …) | NXDOMAIN |
//! | one label | NXDOMAIN: search lists lead to `dayfly.internal`, and no label is the host's |
//! | anything else | forwarded; REFUSED for a VM whose egress policy does not resolve the name |

use crate::net::names::addresses::{refused_v4, refused_v6};
use crate::net::names::forward::Reach;
use crate::net::names::index::{Guest, Index};
use crate::net::names::message::{Head, IN, Name, Query, kind, rcode, record};
use crate::net::names::{DOMAIN, Prefix};
use std::net::{Ipv4Addr, Ipv6Addr};

/// TTL of own answers: short, because VMs start and end often.
const TTL_SECONDS: u32 = 1;
/// Names of local use, which no public server knows (RFC 6761, 6762, 8375, 7686; ICANN, SAC113).
const LOCAL: [&[&str]; 6] =
    [&["internal"], &["local"], &["localhost"], &["home", "arpa"], &["invalid"], &["onion"]];

/// The address ranges that the decision depends on.
#[derive(Debug, Clone)]
pub struct Scope {
    /// The VMs' addresses.
    pub prefix: Prefix,
    /// Ranges that VMs reach although they are not public.
    pub reach: Reach,
}

/// How a question is handled.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Decision {
    /// This answer is sent.
    Answer(Vec<u8>),
    /// The VM's egress policy does not resolve the name; this answer is sent.
    Refuse(Vec<u8>),
    /// The question goes to the host's servers.
    Forward,
}

/// Decides how `guest`'s question is handled.
#[must_use]
pub fn decide(index: &Index, scope: &Scope, guest: &Guest, query: &Query) -> Decision {
    let question = &query.question;
    if question.class != IN || !is_of_records(question.kind) {
        return Decision::Answer(query.answer(Head::of(rcode::REFUSED), &[]));
    }
    let asks = |of: u16| [of, kind::ANY].contains(&question.kind);
    let lower = question.name.wire().to_ascii_lowercase();
    // The labels from the root; a name has at most 127.
    let labels: Vec<&[u8]> = labels_from_root(&lower);
    let known = match labels.as_slice() {
        [b"internal", b"dayfly"] => Some(Known::Nothing),
        [b"internal", b"dayfly", label] => Some(
            match std::str::from_utf8(label)
                .ok()
                .and_then(|label| index.resolve(guest.address, label))
            {
                Some(ip) if asks(kind::A) => Known::Record(kind::A, ip.octets().to_vec()),
                Some(_) => Known::Nothing,
                None => Known::Unknown,
            },
        ),
        [b"arpa", b"in-addr", octets @ ..] => {
            let (first, last) = reversed_v4(octets);
            match index.name_of(guest.address, first) {
                _ if first != last || octets.len() != 4 || scope.prefix.index(first).is_none() => {
                    (refused_v4(first, &scope.reach) && refused_v4(last, &scope.reach))
                        .then_some(Known::Unknown)
                }
                Some(label) if asks(kind::PTR) => {
                    Some(Known::Record(kind::PTR, wire(&format!("{label}.{DOMAIN}"))))
                }
                Some(_) => Some(Known::Nothing),
                None => Some(Known::Unknown),
            }
        }
        [b"arpa", b"ip6", nibbles @ ..] => {
            let (first, last) = reversed_v6(nibbles);
            (refused_v6(first) && refused_v6(last)).then_some(Known::Unknown)
        }
        // A guest that validates answers asks for keys of top-level domains, which no VM has.
        [_] if ![kind::DS, kind::DNSKEY].contains(&question.kind) => Some(Known::Unknown),
        labels if LOCAL.iter().any(|local| is_below(labels, local)) => Some(Known::Unknown),
        _ => None,
    };
    let own = |rcode, records: &[u8]| {
        let answers = u16::from(!records.is_empty());
        let head = Head { authoritative: true, answers, ..Head::of(rcode) };
        Decision::Answer(query.answer(head, records))
    };
    match known {
        Some(Known::Record(kind, data)) => own(rcode::NOERROR, &record(kind, TTL_SECONDS, &data)),
        Some(Known::Nothing) => own(rcode::NOERROR, &[]),
        Some(Known::Unknown) => own(rcode::NXDOMAIN, &[]),
        None if !guest.egress().resolves(&labels) => {
            let head = Head { blocked: true, ..Head::of(rcode::REFUSED) };
            Decision::Refuse(query.answer(head, &[]))
        }
        None => Decision::Forward,
    }
}

/// The result for a name of this service.
enum Known {
    /// One record of this type.
    Record(u16, Vec<u8>),
    /// The name exists, but has no record of the type.
    Nothing,
    /// The name does not exist, or the asker may not resolve it.
    Unknown,
}

/// Whether a type is a data type, or ANY: not reserved, and not for transfers, transaction keys or
/// other meta types (RFC 6895, 3.1).
const fn is_of_records(kind: u16) -> bool {
    matches!(kind, 1..=127 | kind::ANY | 256..=61_439 | 65_280..=65_534) && kind != kind::OPT
}

fn labels_from_root(wire: &[u8]) -> Vec<&[u8]> {
    let mut labels: Vec<&[u8]> = Name::labels_of(wire).collect();
    labels.reverse();
    labels
}

fn is_below(labels: &[&[u8]], local: &[&str]) -> bool {
    labels.len() >= local.len()
        && labels.iter().zip(local.iter().rev()).all(|(label, local)| *label == local.as_bytes())
}

/// The first and last address that begin with these octets. An invalid label and everything after
/// it are ignored.
fn reversed_v4(labels: &[&[u8]]) -> (Ipv4Addr, Ipv4Addr) {
    let octet = |label: &&[u8]| std::str::from_utf8(label).ok()?.parse::<u8>().ok();
    let (mut first, mut last) = ([0; 4], [255; 4]);
    for (place, octet) in labels.iter().map_while(octet).take(4).enumerate() {
        (first[place], last[place]) = (octet, octet);
    }
    (first.into(), last.into())
}

/// [`reversed_v4`] for IPv6, whose labels are half bytes (RFC 3596, 2.5).
fn reversed_v6(labels: &[&[u8]]) -> (Ipv6Addr, Ipv6Addr) {
    let nibble = |label: &&[u8]| match label {
        [digit] => char::from(*digit).to_digit(16),
        _ => None,
    };
    let (mut first, mut left) = (0_u128, 128);
    for nibble in labels.iter().map_while(nibble).take(32) {
        left -= 4;
        first |= u128::from(nibble) << left;
    }
    let rest = u128::MAX.checked_shr(128 - left).unwrap_or(0);
    (Ipv6Addr::from(first), Ipv6Addr::from(first | rest))
}

/// One of this service's names in wire form.
fn wire(name: &str) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(name.len() + 2);
    for label in name.split('.') {
        // The labels come from VmName, VmId and DOMAIN, so they have at most 63 bytes.
        bytes.push(u8::try_from(label.len()).unwrap_or(63));
        bytes.extend(label.bytes().take(63));
    }
    bytes.push(0);
    bytes
}
