//! The binary form of nf_tables requests: attributes, expressions and messages
//! (linux/netfilter/nf_tables.h).
//!
//! Values are big endian, except where the kernel compares a register that it filled itself:
//! interface names, protocol numbers and connection states are in the host's byte order.

use super::super::NetlinkError;
use super::super::netlink::{Batch, Raw};
use std::net::Ipv4Addr;

pub(super) const NETLINK_NETFILTER: isize = 12;
/// NFNL_SUBSYS_NFTABLES.
pub(super) const SUBSYSTEM: u16 = 10;
const BATCH_BEGIN: u16 = 0x10;
const BATCH_END: u16 = 0x11;
// enum nf_tables_msg_types
const NEW_TABLE: u16 = SUBSYSTEM << 8;
const DELETE_TABLE: u16 = SUBSYSTEM << 8 | 2;
const NEW_CHAIN: u16 = SUBSYSTEM << 8 | 3;
const DELETE_CHAIN: u16 = SUBSYSTEM << 8 | 5;
const NEW_RULE: u16 = SUBSYSTEM << 8 | 6;
const NEW_SET: u16 = SUBSYSTEM << 8 | 9;
const DELETE_SET: u16 = SUBSYSTEM << 8 | 11;
const NEW_ELEMENT: u16 = SUBSYSTEM << 8 | 12;
const DELETE_ELEMENT: u16 = SUBSYSTEM << 8 | 14;
const NLM_F_CREATE: u16 = 0x400;
const NLM_F_APPEND: u16 = 0x800;
const NLA_F_NESTED: u16 = 1 << 15;
/// NFT_REG_1, the only register that these rules use.
pub(super) const REGISTER: u32 = 1;
/// NFT_REG_VERDICT.
pub(super) const VERDICT: u32 = 0;
/// IFNAMSIZ.
const NAME_BYTES: usize = 16;
/// NFT_DATA_VERDICT: the value type of a verdict map.
const DATA_VERDICT: u32 = 0xffff_ff00;
// enum nft_set_flags
const SET_MAP: u32 = 0x8;
const SET_TIMEOUT: u32 = 0x10;
const SET_EVAL: u32 = 0x20;

/// The protocol family of a table: `NFPROTO_IPV4` or `NFPROTO_IPV6`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Family {
    V4 = 2,
    V6 = 10,
}

/// The decision about a packet.
#[derive(Debug, Clone, Copy)]
pub(super) enum Verdict<'a> {
    Drop,
    Accept,
    /// Continues with the rules of the named chain. If none of them decides, the rule after this
    /// one is next.
    Jump(&'a str),
    /// Continues after the rule that jumped to this chain.
    Return,
}

/// The point at which a chain sees packets (linux/netfilter.h).
#[derive(Debug, Clone, Copy)]
pub(super) enum Hook {
    Prerouting = 0,
    Input = 1,
    Forward = 2,
    Output = 3,
    Postrouting = 4,
}

/// `struct nlattr`, padded to four bytes.
pub(super) fn attribute(kind: u16, value: &[u8]) -> Vec<u8> {
    let length = u16::try_from(4 + value.len()).unwrap_or(u16::MAX);
    let mut bytes = [&length.to_ne_bytes()[..], &kind.to_ne_bytes(), value].concat();
    bytes.resize(bytes.len().next_multiple_of(4), 0);
    bytes
}

fn nested(kind: u16, inner: &[Vec<u8>]) -> Vec<u8> {
    attribute(kind | NLA_F_NESTED, &inner.concat())
}

pub(super) fn text(kind: u16, value: &str) -> Vec<u8> {
    attribute(kind, &[value.as_bytes(), &[0]].concat())
}

pub(super) fn number(kind: u16, value: u32) -> Vec<u8> {
    attribute(kind, &value.to_be_bytes())
}

/// NFTA_EXPR_NAME and NFTA_EXPR_DATA.
pub(super) fn bare_expression(name: &str, data: &[Vec<u8>]) -> Vec<u8> {
    [text(1, name), nested(2, data)].concat()
}

/// An expression as an entry of a list (NFTA_LIST_ELEM).
pub(super) fn expression(name: &str, data: &[Vec<u8>]) -> Vec<u8> {
    attribute(1 | NLA_F_NESTED, &bare_expression(name, data))
}

/// NFTA_DATA_VALUE in the attribute that holds it.
pub(super) fn value(kind: u16, bytes: &[u8]) -> Vec<u8> {
    nested(kind, &[attribute(1, bytes)])
}

/// NFTA_DATA_VERDICT in the attribute that holds it.
fn verdict_data(kind: u16, verdict: Verdict) -> Vec<u8> {
    // NFT_JUMP is -3 of enum nft_verdicts.
    const JUMP: u32 = (-3_i32).cast_unsigned();
    // NFT_RETURN is -5.
    const RETURN: u32 = (-5_i32).cast_unsigned();
    let inner = match verdict {
        Verdict::Drop => vec![number(1, 0)],
        Verdict::Accept => vec![number(1, 1)],
        Verdict::Jump(chain) => vec![number(1, JUMP), text(2, chain)],
        Verdict::Return => vec![number(1, RETURN)],
    };
    nested(kind, &[nested(2, &inner)])
}

fn padded(name: &str) -> Vec<u8> {
    let mut bytes = name.as_bytes().to_vec();
    bytes.resize(NAME_BYTES, 0);
    bytes
}

/// Matches if the register equals these bytes, or differs from them (NFT_CMP_EQ, NFT_CMP_NEQ).
pub(super) fn compare(equal: bool, bytes: &[u8]) -> Vec<u8> {
    expression("cmp", &[number(1, REGISTER), number(2, u32::from(!equal)), value(3, bytes)])
}

/// Keeps only the bits of `mask` in the register's four bytes.
pub(super) fn masked(mask: [u8; 4]) -> Vec<u8> {
    let data = [
        number(1, REGISTER),
        number(2, REGISTER),
        number(3, 4),
        value(4, &mask),
        value(5, &[0; 4]),
    ];
    expression("bitwise", &data)
}

fn meta(key: u32) -> Vec<u8> {
    expression("meta", &[number(1, REGISTER), number(2, key)])
}

/// Loads bytes of a packet into the register, from the network header (base 1) or the transport
/// header (base 2).
pub(super) fn payload(base: u32, offset: u32, bytes: u32) -> Vec<u8> {
    expression(
        "payload",
        &[number(1, REGISTER), number(2, base), number(3, offset), number(4, bytes)],
    )
}

/// NFT_META_IIFNAME: the interface by which a packet came.
pub(super) const IN: u32 = 6;
/// NFT_META_OIFNAME: the interface by which a packet leaves.
pub(super) const OUT: u32 = 7;

/// Matches if the interface has this name, or does not.
pub(super) fn interface(which: u32, is: bool, name: &str) -> Vec<u8> {
    [meta(which), compare(is, &padded(name))].concat()
}

/// NFT_META_IIFKIND: the kind of the interface by which a packet came. A network card has no kind
/// and does not match.
pub(super) const IN_KIND: u32 = 26;
/// NFT_META_OIFKIND: the kind of the interface by which a packet leaves.
pub(super) const OUT_KIND: u32 = 27;

/// Matches if the interface's name begins with `name`.
pub(super) fn interface_begins(which: u32, name: &str) -> Vec<u8> {
    [meta(which), compare(true, name.as_bytes())].concat()
}

/// Matches if the interface is in the set, or is not.
pub(super) fn interface_member(which: u32, is: bool, set: &str) -> Vec<u8> {
    // NFT_LOOKUP_F_INV is 1.
    let found = [text(1, set), number(2, REGISTER), number(5, u32::from(!is))];
    [meta(which), expression("lookup", &found)].concat()
}

/// Matches the protocol above IP (NFT_META_L4PROTO).
pub(super) fn protocol(number: u8) -> Vec<u8> {
    [meta(16), compare(true, &[number])].concat()
}

/// Matches the destination port of TCP or UDP. A later fragment has no port and does not match.
pub(super) fn port(number: u16) -> Vec<u8> {
    [payload(2, 2, 2), compare(true, &number.to_be_bytes())].concat()
}

/// Matches ICMP packets of this type and code, or all others.
pub(super) fn icmp(are: bool, kind: u8, code: u8) -> Vec<u8> {
    [payload(2, 0, 2), compare(are, &[kind, code])].concat()
}

/// Matches ICMP packets of this type.
pub(super) fn icmp_type(kind: u8) -> Vec<u8> {
    [payload(2, 0, 1), compare(true, &[kind])].concat()
}

/// The offset of an address in an IPv4 header.
#[derive(Debug, Clone, Copy)]
pub(super) enum Address {
    Source = 12,
    Destination = 16,
}

/// Loads the address into the register.
pub(super) fn load(address: Address) -> Vec<u8> {
    payload(1, address as u32, 4)
}

/// Matches if the address lies in the range.
pub(super) fn within(address: Address, range: ipnet::Ipv4Net) -> Vec<u8> {
    [load(address), masked(range.netmask().octets()), compare(true, &range.network().octets())]
        .concat()
}

/// Matches if the address is in the set.
pub(super) fn member(address: Address, set: &str) -> Vec<u8> {
    [load(address), lookup(set)].concat()
}

pub(super) fn lookup(set: &str) -> Vec<u8> {
    expression("lookup", &[text(1, set), number(2, REGISTER)])
}

/// Applies the map's verdict for the address, if the map has one.
pub(super) fn by_map(address: Address, map: &str) -> Vec<u8> {
    [load(address), expression("lookup", &[text(1, map), number(2, REGISTER), number(3, VERDICT)])]
        .concat()
}

/// NF_CT_STATE_BIT of IP_CT_ESTABLISHED and IP_CT_RELATED.
pub(super) const ESTABLISHED_OR_RELATED: u32 = 2 | 4;
/// NF_CT_STATE_BIT of IP_CT_NEW.
pub(super) const NEW: u32 = 8;

/// Matches connections in one of these states, or in none of them.
pub(super) fn state(one_of: bool, states: u32) -> Vec<u8> {
    // NFT_CT_STATE is 0.
    let load = expression("ct", &[number(1, REGISTER), number(2, 0)]);
    [load, masked(states.to_ne_bytes()), compare(!one_of, &[0; 4])].concat()
}

/// Matches if the address has more than `most` open connections. The set keeps the counts.
pub(super) fn connections_over(address: Address, set: &str, most: u32) -> Vec<u8> {
    // NFT_CONNLIMIT_F_INV matches counts above the limit.
    counted(address, set, &bare_expression("connlimit", &[number(1, most), number(2, 1)]))
}

/// Matches if the address has sent more than `rate` packets a second, after a burst of `burst`
/// packets. The set keeps the counts.
pub(super) fn packets_over(address: Address, set: &str, rate: u32, burst: u32) -> Vec<u8> {
    // NFT_LIMIT_PKTS is 0, the unit is one second, and NFT_LIMIT_F_INV matches rates above the
    // limit.
    let [rate, unit] = [u64::from(rate), 1].map(u64::to_be_bytes);
    let limit =
        [attribute(1, &rate), attribute(2, &unit), number(3, burst), number(4, 0), number(5, 1)];
    counted(address, set, &bare_expression("limit", &limit))
}

/// Adds the address to the set, with the counter `limit`.
fn counted(address: Address, set: &str, limit: &[u8]) -> Vec<u8> {
    [load(address), add_with(set, limit)].concat()
}

/// Adds the register's address to the set, with this counter.
pub(super) fn add_with(set: &str, counter: &[u8]) -> Vec<u8> {
    // NFT_DYNSET_OP_ADD is 0.
    let counter = attribute(7 | NLA_F_NESTED, counter);
    let add = [text(1, set), number(3, 0), number(4, REGISTER), counter];
    expression("dynset", &add)
}

/// Exempts the packet from connection tracking.
pub(super) fn no_track() -> Vec<u8> {
    expression("notrack", &[])
}

pub(super) fn masquerade() -> Vec<u8> {
    expression("masq", &[])
}

/// The verdict for packets that match all previous expressions of the rule.
pub(super) fn verdict(verdict: Verdict) -> Vec<u8> {
    expression("immediate", &[number(1, VERDICT), verdict_data(2, verdict)])
}

/// The kind of a set's elements.
#[derive(Debug, Clone, Copy)]
pub(super) enum SetOf {
    /// Addresses.
    Addresses,
    /// Addresses that the kernel removes after a time.
    Timed,
    /// Verdicts for addresses.
    Verdicts,
    /// Addresses with a counter of connections or packets.
    Counts,
    /// Names of interfaces.
    Interfaces,
}

/// The key of an element.
#[derive(Debug)]
pub(super) enum Key {
    Address(Ipv4Addr),
    Interface(String),
}

impl Key {
    fn bytes(&self) -> Vec<u8> {
        match self {
            Self::Address(address) => address.octets().to_vec(),
            Self::Interface(name) => padded(name),
        }
    }
}

impl From<Ipv4Addr> for Key {
    fn from(address: Ipv4Addr) -> Self {
        Self::Address(address)
    }
}

impl From<&String> for Key {
    fn from(name: &String) -> Self {
        Self::Interface(name.clone())
    }
}

/// Changes that become visible together or not at all.
pub(super) struct Transaction {
    family: Family,
    table: String,
    batch: Batch,
}

impl Transaction {
    pub(super) fn new(family: Family, table: &str) -> Self {
        let mut batch = Batch::default();
        batch.push(None, BATCH_BEGIN, 0, &Raw(head(Family::V4, SUBSYSTEM)));
        Self { family, table: table.to_owned(), batch }
    }

    fn ask(&mut self, what: &str, kind: u16, flags: u16, attributes: &[Vec<u8>]) {
        let body = [&[head(self.family, 0)][..], attributes].concat().concat();
        self.batch.push(Some(format!("nf_tables: {what}")), kind, flags, &Raw(body));
    }

    /// Creates an empty table, replacing an existing one.
    pub(super) fn replace_table(&mut self) {
        let table = [text(1, &self.table)];
        // Deleting a table that does not exist fails, so the table is created first.
        self.ask("making a table", NEW_TABLE, NLM_F_CREATE, &table);
        self.ask("removing the table before", DELETE_TABLE, 0, &table);
        self.ask("making a table", NEW_TABLE, NLM_F_CREATE, &table);
    }

    pub(super) fn remove_table(&mut self) {
        let table = [text(1, &self.table)];
        self.ask("removing a table", DELETE_TABLE, 0, &table);
    }

    /// Creates a chain of type `kind` at a hook. The policy decides about packets that no rule
    /// decides about.
    pub(super) fn base_chain(
        &mut self,
        name: &str,
        kind: &str,
        hook: Hook,
        priority: i32,
        drops: bool,
    ) {
        let at = nested(4, &[number(1, hook as u32), number(2, priority.cast_unsigned())]);
        let policy = number(5, u32::from(!drops));
        let attributes = [text(1, &self.table), text(3, name), at, policy, text(7, kind)];
        let what = format!("making the chain {name:?} ({kind}; module nft_chain_nat for nat)");
        self.ask(&what, NEW_CHAIN, NLM_F_CREATE, &attributes);
    }

    /// Creates a chain that is the target of jumps.
    pub(super) fn chain(&mut self, name: &str) {
        let attributes = [text(1, &self.table), text(3, name)];
        self.ask(&format!("making the chain {name:?}"), NEW_CHAIN, NLM_F_CREATE, &attributes);
    }

    pub(super) fn remove_chain(&mut self, name: &str) {
        let attributes = [text(1, &self.table), text(3, name)];
        self.ask(&format!("removing the chain {name:?}"), DELETE_CHAIN, 0, &attributes);
    }

    /// Appends a rule to a chain. `what` names the rule's purpose and the kernel module of its
    /// expressions.
    pub(super) fn rule(&mut self, what: &str, chain: &str, expressions: &[Vec<u8>]) {
        let attributes = [text(1, &self.table), text(2, chain), nested(4, expressions)];
        self.ask(&format!("a rule: {what}"), NEW_RULE, NLM_F_CREATE | NLM_F_APPEND, &attributes);
    }

    /// Creates a set of at most `most` elements. The number `id` is valid in this transaction only.
    pub(super) fn set(&mut self, name: &str, of: SetOf, most: u32, id: u32) {
        // The key type only serves programs that list the set: nft's TYPE_IPADDR and TYPE_IFNAME.
        let (kind, bytes) = if matches!(of, SetOf::Interfaces) { (41, 16) } else { (7, 4) };
        let flags = match of {
            SetOf::Addresses | SetOf::Interfaces => 0,
            SetOf::Timed => SET_TIMEOUT,
            SetOf::Verdicts => SET_MAP,
            SetOf::Counts => SET_EVAL,
        };
        let table = [text(1, &self.table), text(2, name), number(3, flags)];
        let mut attributes = [&table[..], &[number(4, kind), number(5, bytes)]].concat();
        if matches!(of, SetOf::Verdicts) {
            attributes.push(number(6, DATA_VERDICT));
        }
        attributes.extend([nested(9, &[number(1, most)]), number(10, id)]);
        self.ask(&format!("making the set {name:?}"), NEW_SET, NLM_F_CREATE, &attributes);
    }

    pub(super) fn remove_set(&mut self, name: &str) {
        let attributes = [text(1, &self.table), text(2, name)];
        self.ask(&format!("removing the set {name:?}"), DELETE_SET, 0, &attributes);
    }

    /// Requests a change of the set's element with this key; `data` are its other attributes.
    fn element(&mut self, what: &str, kind: u16, set: &str, key: &Key, data: Option<Vec<u8>>) {
        let element: Vec<Vec<u8>> = [value(1, &key.bytes())].into_iter().chain(data).collect();
        let attributes = [text(1, &self.table), text(2, set), nested(3, &[nested(1, &element)])];
        let flags = if kind == NEW_ELEMENT { NLM_F_CREATE } else { 0 };
        self.ask(&format!("{what} {set:?}: {key:?}"), kind, flags, &attributes);
    }

    /// Adds an element to a set, with its verdict if the set is a verdict map.
    pub(super) fn add(&mut self, set: &str, key: impl Into<Key>, verdict: Option<Verdict>) {
        let data = verdict.map(|verdict| verdict_data(2, verdict));
        self.element("adding to", NEW_ELEMENT, set, &key.into(), data);
    }

    /// Adds an address to a set of [`SetOf::Timed`] for `ms` milliseconds from now on, whether the
    /// set has the address already or not.
    pub(super) fn add_for(&mut self, set: &str, address: Ipv4Addr, ms: u64) {
        // Adding an element that exists leaves its time as it is (before Linux 6.12), and removing
        // one that does not exist fails.
        let time = || Some(attribute(4, &ms.to_be_bytes()));
        let key = Key::Address(address);
        self.element("adding to", NEW_ELEMENT, set, &key, time());
        self.element("removing from", DELETE_ELEMENT, set, &key, None);
        self.element("adding to", NEW_ELEMENT, set, &key, time());
    }

    pub(super) fn remove(&mut self, set: &str, key: impl Into<Key>, verdict: Option<Verdict>) {
        let data = verdict.map(|verdict| verdict_data(2, verdict));
        self.element("removing from", DELETE_ELEMENT, set, &key.into(), data);
    }

    /// Sends the transaction to the kernel, for the calling thread's namespace.
    pub(super) fn commit(mut self) -> Result<(), NetlinkError> {
        // The kernel answers after it has committed or refused the whole transaction: first with
        // the error of each refused message, then with this acknowledgement (nfnetlink_rcv_batch).
        self.batch.acknowledge_last();
        self.batch.push(None, BATCH_END, 0, &Raw(head(Family::V4, SUBSYSTEM)));
        self.batch.send(NETLINK_NETFILTER)
    }
}

/// `struct nfgenmsg`: the family, version 0, and in a batch the subsystem.
pub(super) fn head(family: Family, resource: u16) -> Vec<u8> {
    [&[family as u8, 0][..], &resource.to_be_bytes()].concat()
}
