//! Counts or removes the nftables tables of this network namespace, as `nft list tables` and
//! `nft flush ruleset` do. The machine has no `nft`.
//!
//! `dayfly-unfilter count` prints a number, `dayfly-unfilter flush` removes all.

use anyhow::{Context, Result, bail, ensure};
use rustix::net::{AddressFamily, SendFlags, SocketFlags, SocketType, netlink, send, socket_with};

/// linux/netfilter/nfnetlink.h: the subsystem, and the two messages around a transaction.
const NFTABLES: u16 = 10;
const BATCH_BEGIN: u16 = 16;
const BATCH_END: u16 = 17;
/// linux/netfilter/nf_tables.h
const NEW_TABLE: u16 = NFTABLES << 8;
const GET_TABLE: u16 = NFTABLES << 8 | 1;
const DELETE_TABLE: u16 = NFTABLES << 8 | 2;
/// linux/netlink.h
const ERROR: u16 = 2;
const DONE: u16 = 3;
const REQUEST: u16 = 1;
const ACK: u16 = 4;
const DUMP: u16 = 0x300;

fn main() -> Result<()> {
    match std::env::args().nth(1).as_deref() {
        Some("count") => println!("{}", ask(&[message(GET_TABLE, REQUEST | DUMP, 0)])?),
        Some("flush") => {
            // Without a family and a name, the message deletes all tables.
            let batch = [
                message(BATCH_BEGIN, REQUEST, NFTABLES),
                message(DELETE_TABLE, REQUEST | ACK, 0),
                message(BATCH_END, REQUEST, NFTABLES),
            ];
            ask(&batch)?;
        }
        other => bail!("expected count or flush, got {other:?}"),
    }
    Ok(())
}

/// struct nlmsghdr and struct nfgenmsg of no family.
fn message(kind: u16, flags: u16, resource: u16) -> Vec<u8> {
    let mut bytes = 20_u32.to_ne_bytes().to_vec();
    bytes.extend(kind.to_ne_bytes());
    bytes.extend(flags.to_ne_bytes());
    bytes.extend([0; 8]);
    bytes.extend([0, 0]);
    bytes.extend(resource.to_be_bytes());
    bytes
}

/// Sends the messages and reads until the end or an acknowledgement. Returns the number of tables
/// in the answers.
fn ask(messages: &[Vec<u8>]) -> Result<usize> {
    let kind = Some(netlink::NETFILTER);
    let socket = socket_with(AddressFamily::NETLINK, SocketType::RAW, SocketFlags::CLOEXEC, kind)?;
    send(&socket, &messages.concat(), SendFlags::empty()).context("sending to nf_tables")?;
    let mut tables = 0;
    loop {
        let mut buffer = [0; 64 << 10];
        let length = rustix::io::read(&socket, &mut buffer).context("reading from nf_tables")?;
        let mut rest = &buffer[..length];
        ensure!(!rest.is_empty(), "nf_tables: expected an answer, got the end");
        while let Some(header) = rest.get(..20) {
            let size = u32::from_ne_bytes(header[..4].try_into()?);
            let size = usize::try_from(size)?.max(20).next_multiple_of(4);
            match u16::from_ne_bytes(header[4..6].try_into()?) {
                NEW_TABLE => tables += 1,
                DONE => return Ok(tables),
                ERROR => {
                    let error = i32::from_ne_bytes(header[16..20].try_into()?);
                    ensure!(error == 0, std::io::Error::from_raw_os_error(-error));
                    return Ok(tables);
                }
                other => bail!("nf_tables: unexpected message {other:#x}"),
            }
            rest = rest.get(size..).unwrap_or_default();
        }
    }
}
