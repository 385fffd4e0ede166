//! Egress policies of guests, in the table of the VM network namespace:
//! ```text
//! map egress: a guest's address -> jump egress_none or egress_NUMBER
//! set limited: the guests in that map
//! chain egress_none:
//!     add @refused { ct original saddr counter }
//!     drop
//! chain egress_NUMBER:
//!     ct mark NUMBER return
//!     <protocol and ports> ct original daddr <range> ct mark set NUMBER return
//!     <protocol and ports> ct original daddr @names_NUMBER_PLACE ct mark set NUMBER return
//!     add @refused { ct original saddr counter }
//!     drop
//! ```
//! Guests with equal policies share a chain. Every packet that enters or leaves by the uplink is
//! looked at, in either direction of its connection. The connection's mark says that the policy
//! with this number has permitted it. A guest that gets another policy jumps to another chain, so
//! each of its open connections is compared with that policy at its next packet. The number is
//! computed from the policy's text, so marks stay right when the table is made anew.
//!
//! A connection that was begun from outside has no guest as its original source, and passes.

use super::super::NetlinkError;
use super::change::{Change, MOST_GUESTS, TABLE};
use super::encode::{
    self, Address, IN, OUT, REGISTER, SetOf, Transaction, VERDICT, Verdict, compare, expression,
    interface, lookup, masked, member, number, value, verdict,
};
use super::query;
use dayfly_units::Egress;
use dayfly_units::egress::{Protocol, Service, Target};
use ipnet::Ipv4Net;
use std::collections::BTreeMap;
use std::net::Ipv4Addr;

/// The chain of guests without a way out.
const NONE: &str = "egress_none";
/// Maximum number of addresses that are open for a policy's service of names.
pub(in crate::net) const MAX_OPENED: u32 = 1024;

// enum nft_ct_keys
const MARK: u32 = 3;
const PROTOCOL: u32 = 10;
const PORT: u32 = 12;
const SOURCE: u32 = 19;
const DESTINATION: u32 = 20;

fn chain_of(policy: u32) -> String {
    format!("egress_{policy:08x}")
}

fn set_of(policy: u32, place: usize) -> String {
    format!("names_{policy:08x}_{place}")
}

/// Loads a property of the packet's connection; `original` for one that each direction has.
fn connection(key: u32, original: bool) -> Vec<u8> {
    // NFTA_CT_DIRECTION: IP_CT_DIR_ORIGINAL is 0.
    let direction = original.then(|| encode::attribute(3, &[0]));
    let attributes: Vec<Vec<u8>> =
        [number(1, REGISTER), number(2, key)].into_iter().chain(direction).collect();
    expression("ct", &attributes)
}

/// The sets, and the chain of guests without a way out.
pub(super) fn base(all: &mut Transaction) {
    all.set("limited", SetOf::Addresses, MOST_GUESTS, 2);
    all.set("egress", SetOf::Verdicts, MOST_GUESTS, 6);
    all.set("refused", SetOf::Counts, MOST_GUESTS, 7);
    all.chain(NONE);
    refuse(all, NONE);
}

fn refuse(all: &mut Transaction, chain: &str) {
    let counter = encode::bare_expression("counter", &[]);
    let count = [connection(SOURCE, true), encode::add_with("refused", &counter)];
    all.rule("refused packets of a guest", chain, &count);
    all.rule("what a policy does not permit", chain, &[verdict(Verdict::Drop)]);
}

/// Every packet to or from the outside belongs to a connection that its guest's policy permits.
pub(super) fn every_packet(all: &mut Transaction, uplink: &str) {
    for which in [OUT, IN] {
        let by_map = [encode::text(1, "egress"), number(2, REGISTER), number(3, VERDICT)];
        let policy = [
            interface(which, true, uplink),
            connection(SOURCE, true),
            expression("lookup", &by_map),
        ];
        all.rule("egress policies", "guests", &policy);
    }
}

/// Only the host begins connections with a guest that has a policy. Else a packet of a connection
/// that was cut could begin one in the other direction.
pub(super) fn only_the_host(all: &mut Transaction, uplink: &str, host: Ipv4Addr) {
    let others = [
        interface(IN, true, uplink),
        member(Address::Destination, "limited"),
        encode::load(Address::Source),
        compare(false, &host.octets()),
        verdict(Verdict::Drop),
    ];
    all.rule("only the host begins connections with guests", "guests", &others);
}

/// The conditions of a service: each alternative matches one protocol, or all.
fn conditions(service: Service) -> Vec<Vec<u8>> {
    let protocol = |of: Protocol| [connection(PROTOCOL, false), compare(true, &[of.number()])];
    let Some((first, last)) = service.ports else {
        return vec![service.protocol.map(|of| protocol(of).concat()).unwrap_or_default()];
    };
    // NFT_RANGE_EQ is 0.
    let range = [
        number(1, REGISTER),
        number(2, 0),
        value(3, &first.to_be_bytes()),
        value(4, &last.to_be_bytes()),
    ];
    let ports = [connection(PORT, true), expression("range", &range)].concat();
    let protocols = match service.protocol {
        Some(one) => vec![one],
        None => vec![Protocol::Tcp, Protocol::Udp],
    };
    protocols.into_iter().map(|of| [&protocol(of).concat()[..], &ports].concat()).collect()
}

/// Marks the connection and ends the chain.
fn permit(policy: u32) -> Vec<u8> {
    let load = [number(1, REGISTER), value(2, &policy.to_ne_bytes())];
    // NFTA_CT_SREG.
    let set = [number(2, MARK), number(4, REGISTER)];
    let mark = [expression("immediate", &load), expression("ct", &set)].concat();
    [mark, verdict(Verdict::Return)].concat()
}

fn new_policy(all: &mut Transaction, policy: u32, egress: &Egress) {
    let chain = chain_of(policy);
    all.chain(&chain);
    let known =
        [connection(MARK, false), compare(true, &policy.to_ne_bytes()), verdict(Verdict::Return)];
    all.rule("connections that the policy has permitted", &chain, &known);
    let ranges = egress.rules().iter().filter_map(|rule| match rule.target {
        Target::Range(range) => Some((range, rule.service)),
        Target::Name(_) => None,
    });
    for (range, service) in ranges {
        let to = to_range(range);
        for condition in conditions(service) {
            let what = format!("egress to {range}");
            all.rule(&what, &chain, &[condition, to.clone(), permit(policy)]);
        }
    }
    for (place, service) in egress.services_of_names().into_iter().enumerate() {
        let set = set_of(policy, place);
        // The kernel counts expired elements until its garbage collection.
        all.set(&set, SetOf::Timed, 2 * MAX_OPENED, 8);
        for condition in conditions(service) {
            let to = [connection(DESTINATION, true), lookup(&set)].concat();
            all.rule("egress to names", &chain, &[condition, to, permit(policy)]);
        }
    }
    refuse(all, &chain);
}

fn to_range(range: Ipv4Net) -> Vec<u8> {
    let mask = masked(range.netmask().octets());
    [connection(DESTINATION, true), mask, compare(true, &range.network().octets())].concat()
}

/// Applies a change of policies.
pub(super) fn apply(all: &mut Transaction, change: &Change) {
    let name = |policy: Option<u32>| policy.map_or_else(|| NONE.to_owned(), chain_of);
    match change {
        Change::NewPolicy(policy, egress) => new_policy(all, *policy, egress),
        Change::Limit(policy, guest) => {
            all.add("limited", *guest, None);
            all.add("egress", *guest, Some(Verdict::Jump(&name(*policy))));
        }
        Change::Unlimit(policy, guest) => {
            all.remove("egress", *guest, Some(Verdict::Jump(&name(*policy))));
            all.remove("limited", *guest, None);
        }
        Change::Forget(guest) => {
            // Removing an element that does not exist fails.
            all.add("refused", *guest, None);
            all.remove("refused", *guest, None);
        }
        Change::Open(policy, place, address, ms) => {
            all.add_for(&set_of(*policy, *place), *address, *ms);
        }
        Change::NoPolicy(policy, egress) => {
            all.remove_chain(&chain_of(*policy));
            for place in 0..egress.services_of_names().len() {
                all.remove_set(&set_of(*policy, place));
            }
        }
        Change::NewNetwork(_) | Change::Join(..) | Change::Leave(..) | Change::NoNetwork(_) => {}
    }
}

/// The number of packets that policies have refused, by guest, in the calling thread's namespace.
///
/// # Errors
/// The kernel refuses.
pub(in crate::net) fn refused() -> Result<BTreeMap<Ipv4Addr, u64>, NetlinkError> {
    let all = query::elements(TABLE, "refused")?;
    Ok(all.into_iter().map(|one| (one.address, one.packets.unwrap_or(0))).collect())
}

/// The addresses that are open for a policy's service of names, each with its milliseconds left, in
/// the calling thread's namespace.
///
/// # Errors
/// The kernel refuses.
pub(in crate::net) fn reopened(
    policy: u32,
    place: usize,
) -> Result<Vec<(Ipv4Addr, u64)>, NetlinkError> {
    let all = query::elements(TABLE, &set_of(policy, place))?;
    Ok(all.into_iter().filter_map(|one| Some((one.address, one.expires_ms?))).collect())
}
