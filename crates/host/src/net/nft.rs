//! The two rules of the host's packet filter that a tenant needs, told to nf_tables over netlink (linux/netfilter/nf_tables.h).
//!
//! By hand, because what a machine carries for its daemon has no `nft`, and the crates that speak this are GPL or wrap C.
//!
//! ```text
//! table ip <uplink> {
//!     chain out { type nat hook postrouting priority 100; ip saddr <prefix> oifname != <uplink> masquerade }
//!     chain in { type filter hook forward priority 0; oifname <uplink> ct state != { established, related } drop }
//! }
//! ```

use super::NetlinkError;
use super::netlink::{Batch, Raw};
use rustix::io::Errno;
use std::net::Ipv4Addr;

const NETLINK_NETFILTER: isize = 12;
/// NFNL_SUBSYS_NFTABLES.
const SUBSYSTEM: u16 = 10;
const BATCH_BEGIN: u16 = 0x10;
const BATCH_END: u16 = 0x11;
// enum nf_tables_msg_types
const NEW_TABLE: u16 = SUBSYSTEM << 8;
#[cfg(test)]
const GET_TABLE: u16 = SUBSYSTEM << 8 | 1;
#[cfg(test)]
const GET_RULE: u16 = SUBSYSTEM << 8 | 7;
const DELETE_TABLE: u16 = SUBSYSTEM << 8 | 2;
const NEW_CHAIN: u16 = SUBSYSTEM << 8 | 3;
const NEW_RULE: u16 = SUBSYSTEM << 8 | 6;
const NLM_F_CREATE: u16 = 0x400;
const NLM_F_APPEND: u16 = 0x800;
const NLA_F_NESTED: u16 = 1 << 15;
const NFPROTO_IPV4: u8 = 2;
const REGISTER: u32 = 1;
/// IFNAMSIZ.
const NAME_BYTES: usize = 16;

/// `struct nfgenmsg`: IPv4, version 0, and for a batch whose it is.
fn head(resource: u16) -> Vec<u8> {
    [&[NFPROTO_IPV4, 0][..], &resource.to_be_bytes()].concat()
}

/// An attribute (`struct nlattr`), padded to four bytes.
fn attribute(kind: u16, value: &[u8]) -> Vec<u8> {
    let length = u16::try_from(4 + value.len()).unwrap_or(u16::MAX);
    let mut bytes = [&length.to_ne_bytes()[..], &kind.to_ne_bytes(), value].concat();
    bytes.resize(bytes.len().next_multiple_of(4), 0);
    bytes
}

fn nested(kind: u16, inner: &[Vec<u8>]) -> Vec<u8> {
    attribute(kind | NLA_F_NESTED, &inner.concat())
}

fn text(kind: u16, value: &str) -> Vec<u8> {
    attribute(kind, &[value.as_bytes(), &[0]].concat())
}

fn number(kind: u16, value: u32) -> Vec<u8> {
    attribute(kind, &value.to_be_bytes())
}

/// NFTA_LIST_ELEM with NFTA_EXPR_NAME and NFTA_EXPR_DATA.
fn expression(name: &str, data: &[Vec<u8>]) -> Vec<u8> {
    nested(1, &[text(1, name), nested(2, data)])
}

/// NFTA_DATA_VALUE in whatever holds it.
fn value(kind: u16, bytes: &[u8]) -> Vec<u8> {
    nested(kind, &[attribute(1, bytes)])
}

/// NFT_META_OIFNAME into the register.
fn interface(key: u32) -> Vec<u8> {
    expression("meta", &[number(1, REGISTER), number(2, key)])
}

const OIFNAME: u32 = 7;
/// NFT_CT_STATE, and bits of it (NF_CT_STATE_BIT of IP_CT_ESTABLISHED, IP_CT_RELATED), in the host's order of bytes.
const CT_STATE: u32 = 0;
const ESTABLISHED: u32 = 2;
const RELATED: u32 = 4;

/// The register against bytes; NFT_CMP_EQ or NFT_CMP_NEQ.
fn compare(equal: bool, bytes: &[u8]) -> Vec<u8> {
    expression("cmp", &[number(1, REGISTER), number(2, u32::from(!equal)), value(3, bytes)])
}

fn name(of: &str) -> Vec<u8> {
    let mut bytes = of.as_bytes().to_vec();
    bytes.resize(NAME_BYTES, 0);
    bytes
}

/// The register's four bytes, with only the bits of `mask`.
fn masked(mask: &[u8; 4]) -> Vec<u8> {
    let data = [number(1, REGISTER), number(2, REGISTER), number(3, 4), value(4, mask), value(5, &[0; 4])];
    expression("bitwise", &data)
}

/// The source address lies in the prefix: 4 bytes at 12 of the network header, masked.
fn source_in(first: Ipv4Addr, bits: u8) -> Vec<u8> {
    let mask = u32::MAX.checked_shl(32 - u32::from(bits)).unwrap_or(0).to_be_bytes();
    let load = expression("payload", &[number(1, REGISTER), number(2, 1), number(3, 12), number(4, 4)]);
    [load, masked(&mask), compare(true, &first.octets())].concat()
}

fn chain(table: &str, of: &str, kind: &str, hook: u32, priority: u32) -> Raw {
    let hook = nested(4, &[number(1, hook), number(2, priority)]);
    Raw([head(0), text(1, table), text(3, of), hook, text(7, kind)].concat())
}

fn rule(table: &str, chain: &str, expressions: &[Vec<u8>]) -> Raw {
    Raw([head(0), text(1, table), text(2, chain), nested(4, expressions)].concat())
}

fn table(of: &str) -> Raw {
    Raw([head(0), text(1, of)].concat())
}

fn batch(fill: impl FnOnce(&mut Batch)) -> Result<(), NetlinkError> {
    let mut batch = Batch::default();
    batch.push(None, BATCH_BEGIN, 0, &Raw(head(SUBSYSTEM)));
    fill(&mut batch);
    batch.push(None, BATCH_END, 0, &Raw(head(SUBSYSTEM)));
    batch.send(NETLINK_NETFILTER)
}

/// Makes the table, in place of one that is there.
///
/// # Errors
/// The kernel has no nf_tables, or refuses.
pub(super) fn set(uplink: &str, first: Ipv4Addr, bits: u8) -> Result<(), NetlinkError> {
    const FORWARD: u32 = 2;
    const POSTROUTING: u32 = 4;
    const SRCNAT: u32 = 100;
    let masquerade =
        [source_in(first, bits), interface(OIFNAME), compare(false, &name(uplink)), expression("masq", &[])];
    let drop = nested(2, &[nested(2, &[number(1, 0)])]);
    // Nobody but their host speaks to guests unasked: no other tenant, and no machine that sends their addresses here.
    let unasked = [
        interface(OIFNAME),
        compare(true, &name(uplink)),
        expression("ct", &[number(1, REGISTER), number(2, CT_STATE)]),
        masked(&(ESTABLISHED | RELATED).to_ne_bytes()),
        compare(true, &[0; 4]),
        // NF_DROP into NFT_REG_VERDICT.
        expression("immediate", &[number(1, 0), drop]),
    ];
    batch(|batch| {
        // So that there is one to be removed.
        batch.ask("nf_tables: table", NEW_TABLE, NLM_F_CREATE, &table(uplink));
        batch.ask("nf_tables: removing the table before", DELETE_TABLE, 0, &table(uplink));
        batch.ask("nf_tables: table", NEW_TABLE, NLM_F_CREATE, &table(uplink));
        let out = chain(uplink, "out", "nat", POSTROUTING, SRCNAT);
        batch.ask("nf_tables: chain for nat (module nft_chain_nat)", NEW_CHAIN, NLM_F_CREATE, &out);
        let filter = chain(uplink, "in", "filter", FORWARD, 0);
        batch.ask("nf_tables: chain for a filter", NEW_CHAIN, NLM_F_CREATE, &filter);
        let add = NLM_F_CREATE | NLM_F_APPEND;
        let rule_out = rule(uplink, "out", &masquerade);
        batch.ask("nf_tables: rule that masquerades (module nft_masq)", NEW_RULE, add, &rule_out);
        let rule_in = rule(uplink, "in", &unasked);
        batch.ask("nf_tables: rule against what nobody asked for (module nft_ct)", NEW_RULE, add, &rule_in);
    })
}

/// Removes the table, if it is there.
///
/// # Errors
/// The kernel refuses.
pub(super) fn remove(uplink: &str) -> Result<(), NetlinkError> {
    match batch(|batch| batch.ask("nf_tables: removing a table", DELETE_TABLE, 0, &table(uplink))) {
        Err(NetlinkError { errno: Errno::NOENT, .. }) => Ok(()),
        removed => removed,
    }
}

/// How many rules both chains of the table have; none where there is no table.
#[cfg(test)]
pub(super) fn rules(uplink: &str) -> usize {
    let mut batch = Batch::default();
    batch.ask("a table", GET_TABLE, 0, &table(uplink));
    match batch.send(NETLINK_NETFILTER) {
        Err(NetlinkError { errno: Errno::NOENT, .. }) => return 0,
        found => found.expect("a table, or none"),
    }
    // Handles of a table count from 1 through whatever is made in it: two chains, then rules.
    let there = |handle: u64| {
        ["out", "in"].iter().any(|chain| {
            let mut batch = Batch::default();
            let asked = [head(0), text(1, uplink), text(2, chain), attribute(3, &handle.to_be_bytes())];
            batch.ask("a rule", GET_RULE, 0, &Raw(asked.concat()));
            batch.send(NETLINK_NETFILTER).is_ok()
        })
    };
    (1..16).filter(|&handle| there(handle)).count()
}
