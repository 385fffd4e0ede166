//! The packet filter's rules, sent to nf_tables over netlink. This module encodes the messages
//! because the machine has no `nft` program, and the crates that encode them are GPL or wrap C.
//!
//! In the host's namespace, `table ip <uplink>`:
//! ```text
//! chain out (nat, postrouting):
//!     ip saddr <prefix> oifname != <uplink> masquerade
//! chain host (filter, input):
//!     iifname <uplink> ct state established,related accept
//!     iifname <uplink> drop
//! chain in (filter, forward):
//!     oifname <uplink> ct state != established,related drop
//!     iifname <uplink> ct state established,related accept
//!     iifname <uplink> ip daddr <reach> accept
//!     iifname <uplink> ip daddr <not public> drop
//! chain router (filter, forward; only if the host forwarded nothing before):
//!     iifname dayfly* accept, and likewise for oifname
//!     iifname != @others iifkind { bridge, veth } accept, and likewise for oif…
//!     drop
//! chain says (filter, output):
//!     oifname <uplink> icmp other than echo-request and "fragmentation needed" drop
//! ```
//! In the VM network namespace, `table ip dayfly`:
//! ```text
//! chain asked (filter, raw prerouting):
//!     ip daddr <gateway> notrack
//! chain answered (filter, raw output):
//!     ip saddr <gateway> notrack
//! chain gateway (filter, input; policy drop):
//!     udp dport 53 add @questions { ip saddr limit rate over <rate> } drop
//!     iifname <uplink> drop
//!     ip daddr <gateway> udp dport 53 accept, and likewise for tcp
//! chain says (filter, output):
//!     icmp other than "fragmentation needed" drop
//! chain guests (filter, forward; policy drop):
//!     oifname <uplink> ct original saddr vmap @egress, and likewise for iifname
//!     ct state established,related accept
//!     ct state != new drop
//!     iifname <uplink> ip daddr @limited ip saddr != <host> drop
//!     iifname <uplink> accept
//!     add @connections { ip saddr ct count over <most> } drop
//!     ip daddr <host> drop
//!     oifname <uplink> accept
//!     ip saddr vmap @networks
//! chain net_NAME:
//!     ip daddr @in_NAME accept
//! ```
//! The chains of egress policies are in [`egress`]. There is also `table ip6 dayfly`, whose one
//! chain drops every packet. These rules may trust source addresses, because rp_filter has compared
//! them with the routes.

mod change;
mod egress;
mod encode;
mod query;

pub(super) use change::Change;
pub(super) use egress::{MAX_OPENED, refused, reopened};

use super::NetlinkError;
use change::{MOST_GUESTS, TABLE};
use encode::{Address, Family, Hook, SetOf, Transaction, Verdict};
use ipnet::Ipv4Net;
use rustix::io::Errno;
use std::collections::BTreeSet;
use std::net::Ipv4Addr;
use std::os::fd::OwnedFd;

/// Name prefix of every uplink.
const UPLINKS: &str = "dayfly";
const TCP: u8 = 6;
const UDP: u8 = 17;
const ICMP: u8 = 1;
/// ICMP type echo request (RFC 792).
const ECHO: u8 = 8;
/// The DNS port.
const DNS: u16 = 53;
/// DNS packets that reach the gateway from one guest: per second, and in a burst. The daemon
/// answers fewer; this limit bounds the cost of dropping the rest.
const DNS_PACKETS: (u32, u32) = (1000, 2000);
/// Priority of a chain that runs after destination NAT and before source NAT (NF_IP_PRI_FILTER).
const FILTER: i32 = 0;
/// Priority before connection tracking (NF_IP_PRI_RAW).
const RAW: i32 = -300;
/// Priority of source NAT (NF_IP_PRI_NAT_SRC).
const SOURCE: i32 = 100;
/// ICMP "fragmentation needed" (RFC 792: type 3, code 4), which path MTU discovery needs.
const TOO_BIG: (u8, u8) = (3, 4);

/// The parameters of the host's rules.
#[derive(Debug, Clone, Copy)]
pub(super) struct Host<'a> {
    /// The host's end of the uplink; the table has the same name.
    pub(super) uplink: &'a str,
    /// The guests' addresses.
    pub(super) guests: Ipv4Net,
    /// Ranges that guests reach although they are not public.
    pub(super) reach: &'a [Ipv4Net],
    /// The interfaces that the host had when it did not forward; `None` if the host forwarded
    /// before dayfly, and so stays a router.
    pub(super) others: Option<&'a BTreeSet<String>>,
}

/// Creates the host's table, replacing an existing one.
///
/// # Errors
/// The kernel has no nf_tables, or refuses.
pub(super) fn set_host(host: Host) -> Result<(), NetlinkError> {
    use encode::{ESTABLISHED_OR_RELATED, IN, OUT, interface, protocol, state, verdict, within};
    let mut all = Transaction::new(Family::V4, host.uplink);
    all.replace_table();
    let drop = || verdict(Verdict::Drop);
    let accept = || verdict(Verdict::Accept);
    let from_guests = || interface(IN, true, host.uplink);
    let answers = || state(true, ESTABLISHED_OR_RELATED);

    all.base_chain("out", "nat", Hook::Postrouting, SOURCE, false);
    let out = [within(Address::Source, host.guests), interface(OUT, false, host.uplink)];
    let masquerade = [&out[..], &[encode::masquerade()]].concat();
    all.rule("guests have the host's address outside (module nft_masq)", "out", &masquerade);

    all.base_chain("host", "filter", Hook::Input, FILTER, false);
    let what = "guests answer their host (module nft_ct)";
    all.rule(what, "host", &[from_guests(), answers(), accept()]);
    all.rule("guests do not reach their host", "host", &[from_guests(), drop()]);

    all.base_chain("in", "filter", Hook::Forward, FILTER, false);
    let unasked = [interface(OUT, true, host.uplink), state(false, ESTABLISHED_OR_RELATED), drop()];
    all.rule("no other machine reaches guests unasked", "in", &unasked);
    all.rule("guests' connections", "in", &[from_guests(), answers(), accept()]);
    for range in host.reach {
        let to = [from_guests(), within(Address::Destination, *range), accept()];
        all.rule(&format!("guests reach {range}"), "in", &to);
    }
    // The routes in the VM network namespace drop these already. The host's own rules may translate
    // a public destination into a private one, so the host drops them too.
    for range in super::ranges::NOT_PUBLIC {
        let to = [from_guests(), within(Address::Destination, *range), drop()];
        all.rule(&format!("guests do not reach {range}"), "in", &to);
    }
    if let Some(others) = host.others {
        no_router(&mut all, others);
    }

    // Guests get no ICMP errors, which would reveal what exists. Exceptions: path MTU discovery
    // needs one, and the host may ping guests.
    all.base_chain("says", "filter", Hook::Output, FILTER, false);
    let to_guests = || [interface(OUT, true, host.uplink), protocol(ICMP)];
    let lets = [encode::icmp_type(ECHO), encode::icmp(true, TOO_BIG.0, TOO_BIG.1)];
    for let_through in lets {
        all.rule(
            "what the host says to guests",
            "says",
            &[&to_guests()[..], &[let_through, accept()]].concat(),
        );
    }
    all.rule("the host says nothing else", "says", &[&to_guests()[..], &[drop()]].concat());
    all.commit()
}

/// The `router` chain, for a host that did not forward before. It lets pass only guests' packets,
/// and packets of a bridge or veth that appeared later. The program that made such an interface,
/// such as a container engine, expects forwarding, because it was on when the program started.
fn no_router(all: &mut Transaction, others: &BTreeSet<String>) {
    use encode::{
        IN, IN_KIND, OUT, OUT_KIND, interface, interface_begins, interface_member, verdict,
    };
    let most = u32::try_from(others.len()).unwrap_or(u32::MAX).max(1);
    all.set("others", SetOf::Interfaces, most, 1);
    others.iter().for_each(|name| all.add("others", name, None));
    all.base_chain("router", "filter", Hook::Forward, FILTER, false);
    for which in [IN, OUT] {
        let guests = [interface_begins(which, UPLINKS), verdict(Verdict::Accept)];
        all.rule("guests of any daemon", "router", &guests);
    }
    for (name, its_kind) in [(IN, IN_KIND), (OUT, OUT_KIND)] {
        for kind in ["bridge", "veth"] {
            let came_later = interface_member(name, false, "others");
            let containers =
                [came_later, interface(its_kind, true, kind), verdict(Verdict::Accept)];
            all.rule("programs that found forwarding on", "router", &containers);
        }
    }
    all.rule(
        "the host is no router between its other networks",
        "router",
        &[verdict(Verdict::Drop)],
    );
}

/// Removes the host's table, if it exists.
///
/// # Errors
/// The kernel refuses.
pub(super) fn remove_host(uplink: &str) -> Result<(), NetlinkError> {
    let mut all = Transaction::new(Family::V4, uplink);
    all.remove_table();
    match all.commit() {
        Err(NetlinkError { errno: Errno::NOENT, .. }) => Ok(()),
        removed => removed,
    }
}

/// The parameters of the rules in the VM network namespace.
#[derive(Debug, Clone, Copy)]
pub(super) struct Inside<'a> {
    /// The namespace's end of the uplink.
    pub(super) uplink: &'a str,
    /// The gateway's address.
    pub(super) gateway: Ipv4Addr,
    /// The host's address on the uplink, from which the host reaches guests.
    pub(super) host: Ipv4Addr,
    /// Maximum number of concurrent connections of one guest, those to the gateway excluded.
    pub(super) most_connections: u32,
}

/// Creates the table in the calling thread's namespace, replacing an existing one, with `changes`
/// applied.
///
/// # Errors
/// The kernel has no nf_tables, or refuses.
pub(super) fn set_inside(inside: Inside, changes: &[Change]) -> Result<(), NetlinkError> {
    use encode::{ESTABLISHED_OR_RELATED, IN, NEW, OUT, interface, port, protocol, state, verdict};
    let mut all = Transaction::new(Family::V4, TABLE);
    all.replace_table();
    let drop = || verdict(Verdict::Drop);
    let accept = || verdict(Verdict::Accept);
    let to_uplink = || interface(OUT, true, inside.uplink);

    // DNS packets are not tracked, because all guests share the connection table and one guest must
    // not fill it with questions.
    let own = || Ipv4Net::from(inside.gateway);
    for (chain, hook, address) in [
        ("asked", Hook::Prerouting, Address::Destination),
        ("answered", Hook::Output, Address::Source),
    ] {
        all.base_chain(chain, "filter", hook, RAW, false);
        let untracked = [encode::within(address, own()), encode::no_track()];
        all.rule("questions and answers are no connections (module nft_ct)", chain, &untracked);
    }
    all.set("questions", SetOf::Counts, MOST_GUESTS, 4);
    all.base_chain("gateway", "filter", Hook::Input, FILTER, true);
    let (rate, burst) = DNS_PACKETS;
    let many = encode::packets_over(Address::Source, "questions", rate, burst);
    all.rule(
        "questions of a guest (module nft_limit)",
        "gateway",
        &[protocol(UDP), port(DNS), many, drop()],
    );
    all.rule("the host asks nothing", "gateway", &[interface(IN, true, inside.uplink), drop()]);
    for of in [UDP, TCP] {
        let dns = [encode::within(Address::Destination, own()), protocol(of), port(DNS), accept()];
        all.rule("the gateway answers DNS", "gateway", &dns);
    }
    all.base_chain("says", "filter", Hook::Output, FILTER, false);
    let errors = [protocol(ICMP), encode::icmp(false, TOO_BIG.0, TOO_BIG.1), drop()];
    all.rule("the gateway says nothing else", "says", &errors);

    all.set("connections", SetOf::Counts, MOST_GUESTS, 1);
    egress::base(&mut all);
    all.set("networks", SetOf::Verdicts, MOST_GUESTS, 3);
    all.base_chain("guests", "filter", Hook::Forward, FILTER, true);
    egress::every_packet(&mut all, inside.uplink);
    let answers = [state(true, ESTABLISHED_OR_RELATED), accept()];
    all.rule("connections that were let through (module nft_ct)", "guests", &answers);
    all.rule("what belongs to no connection", "guests", &[state(false, NEW), drop()]);
    egress::only_the_host(&mut all, inside.uplink, inside.host);
    all.rule("the host reaches guests", "guests", &[interface(IN, true, inside.uplink), accept()]);
    let many = encode::connections_over(Address::Source, "connections", inside.most_connections);
    all.rule("connections of a guest (module nft_connlimit)", "guests", &[many, drop()]);
    // The host's own table drops these for all of the host's addresses, but another program may
    // remove that table.
    let host = [encode::within(Address::Destination, Ipv4Net::from(inside.host)), drop()];
    all.rule("guests do not reach their host", "guests", &host);
    all.rule("the way out", "guests", &[to_uplink(), accept()]);
    all.rule("networks", "guests", &[encode::by_map(Address::Source, "networks")]);
    for change in changes {
        apply(&mut all, change);
    }
    all.commit()?;
    close_ipv6()
}

/// Drops all IPv6 packets, in addition to the sysctl that disables IPv6 on every link.
fn close_ipv6() -> Result<(), NetlinkError> {
    let mut all = Transaction::new(Family::V6, TABLE);
    all.replace_table();
    all.base_chain("nothing", "filter", Hook::Prerouting, FILTER, true);
    match all.commit() {
        // A kernel without IPv6 has no such chains.
        Err(e) if !std::path::Path::new("/proc/sys/net/ipv6").exists() => {
            let _ = e;
            Ok(())
        }
        made => made,
    }
}

/// Applies the changes in one transaction, in the calling thread's namespace.
///
/// # Errors
/// The kernel refuses; nothing is changed.
pub(super) fn change(changes: &[Change]) -> Result<(), NetlinkError> {
    let mut all = Transaction::new(Family::V4, TABLE);
    for change in changes {
        apply(&mut all, change);
    }
    all.commit()
}

fn apply(all: &mut Transaction, change: &Change) {
    let (chain, set) = match change {
        Change::NewNetwork(name)
        | Change::Join(name, _)
        | Change::Leave(name, _)
        | Change::NoNetwork(name) => (format!("net_{name}"), format!("in_{name}")),
        Change::NewPolicy(..)
        | Change::Limit(..)
        | Change::Unlimit(..)
        | Change::Forget(_)
        | Change::Open(..)
        | Change::NoPolicy(..) => return egress::apply(all, change),
    };
    let jump = Some(Verdict::Jump(&chain));
    match change {
        Change::NewNetwork(_) => {
            // The set's number (5) is valid in this transaction only; rules refer to the set by
            // name.
            all.set(&set, SetOf::Addresses, MOST_GUESTS, 5);
            all.chain(&chain);
            let to = [encode::member(Address::Destination, &set), encode::verdict(Verdict::Accept)];
            all.rule("guests of one network reach each other", &chain, &to);
        }
        Change::Join(_, guest) => {
            all.add(&set, *guest, None);
            all.add("networks", *guest, jump);
        }
        Change::Leave(_, guest) => {
            all.remove("networks", *guest, jump);
            all.remove(&set, *guest, None);
        }
        Change::NoNetwork(_) => {
            all.remove_chain(&chain);
            all.remove_set(&set);
        }
        Change::NewPolicy(..)
        | Change::Limit(..)
        | Change::Unlimit(..)
        | Change::Forget(_)
        | Change::Open(..)
        | Change::NoPolicy(..) => {}
    }
}

/// Whether the host's table exists with its last chain.
///
/// # Errors
/// The kernel refuses the query.
pub(super) fn has_host(uplink: &str) -> Result<bool, NetlinkError> {
    query::has_chain(uplink, "says")
}

/// Whether the host's table has the chain that keeps the host from routing for others. Only a
/// daemon that switched forwarding on makes that chain.
///
/// # Errors
/// The kernel refuses the query.
pub(super) fn has_router(uplink: &str) -> Result<bool, NetlinkError> {
    query::has_chain(uplink, "router")
}

/// A non-blocking socket that becomes readable when any process changes the rules of the calling
/// thread's namespace.
///
/// # Errors
/// The kernel has no nf_tables.
pub(super) fn changes() -> Result<OwnedFd, NetlinkError> {
    query::changes()
}
