//! Frames as a guest's kernel, or a root program in the guest, writes them to the tap.

use super::{GATEWAY_MAC, HEADER, mac};
use std::net::{Ipv4Addr, Ipv6Addr};

pub(super) const ICMP: u8 = 1;
pub(super) const TCP: u8 = 6;
pub(super) const UDP: u8 = 17;
const ICMPV6: u8 = 58;
const IPV4: u16 = 0x0800;
const ARP: u16 = 0x0806;
const IPV6: u16 = 0x86dd;

/// The internet checksum (RFC 1071).
fn sum(bytes: &[u8]) -> u16 {
    let word = |w: &[u8]| u32::from(u16::from_be_bytes([w[0], w.get(1).copied().unwrap_or(0)]));
    let mut sum: u32 = bytes.chunks(2).map(word).sum();
    while sum >> 16 != 0 {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    !u16::try_from(sum).unwrap()
}

fn length(bytes: usize) -> [u8; 2] {
    u16::try_from(bytes).unwrap().to_be_bytes()
}

fn ethernet(to: [u8; 6], from: [u8; 6], kind: u16, body: &[u8]) -> Vec<u8> {
    [&[0; HEADER][..], &to, &from, &kind.to_be_bytes(), body].concat()
}

/// A packet from the guest with the address `owner` to the gateway's MAC.
pub(super) struct Packet<'a> {
    pub(super) owner: Ipv4Addr,
    pub(super) from: Ipv4Addr,
    pub(super) to: Ipv4Addr,
    pub(super) protocol: u8,
    /// Flags and offset of a fragment (RFC 791).
    pub(super) fragment: u16,
    /// A multiple of four bytes.
    pub(super) options: &'a [u8],
    pub(super) to_mac: [u8; 6],
    pub(super) body: &'a [u8],
}

impl Packet<'_> {
    pub(super) fn bytes(&self) -> Vec<u8> {
        let head_bytes = 20 + self.options.len();
        let mut ip = vec![0x40 | u8::try_from(head_bytes / 4).unwrap(), 0];
        ip.extend(length(head_bytes + self.body.len()));
        ip.extend([0, 1]);
        ip.extend(self.fragment.to_be_bytes());
        ip.extend([64, self.protocol, 0, 0]);
        ip.extend(self.from.octets());
        ip.extend(self.to.octets());
        ip.extend(self.options);
        let check = sum(&ip).to_be_bytes();
        ip[10..12].copy_from_slice(&check);
        ethernet(self.to_mac, mac(self.owner), IPV4, &[&ip, self.body].concat())
    }
}

/// Sets the packet's time to live, and corrects the checksum.
pub(super) fn with_ttl(mut frame: Vec<u8>, ttl: u8) -> Vec<u8> {
    let ip = &mut frame[HEADER + 14..];
    let bytes = usize::from(ip[0] & 15) * 4;
    ip[8] = ttl;
    ip[10..12].fill(0);
    let check = sum(&ip[..bytes]).to_be_bytes();
    ip[10..12].copy_from_slice(&check);
    frame
}

pub(super) fn ipv4(from: Ipv4Addr, to: Ipv4Addr, protocol: u8, body: &[u8]) -> Vec<u8> {
    Packet { owner: from, from, to, protocol, fragment: 0, options: &[], to_mac: GATEWAY_MAC, body }
        .bytes()
}

/// A UDP packet without a checksum, as RFC 768 allows.
pub(super) fn udp(from: u16, to: u16, body: &[u8]) -> Vec<u8> {
    [&from.to_be_bytes()[..], &to.to_be_bytes(), &length(8 + body.len()), &[0, 0], body].concat()
}

/// TCP flags: SYN alone, and SYN with FIN, which is invalid.
pub(super) const SYN: u8 = 2;
pub(super) const SYN_FIN: u8 = 3;

/// The first segment of a connection.
pub(super) fn syn(ends: [Ipv4Addr; 2], from: u16, to: u16) -> Vec<u8> {
    segment(ends, from, to, SYN)
}

/// A segment with these flags (RFC 9293, 3.1).
pub(super) fn segment(ends: [Ipv4Addr; 2], from: u16, to: u16, flags: u8) -> Vec<u8> {
    let mut tcp = [
        &from.to_be_bytes()[..],
        &to.to_be_bytes(),
        &[0, 0, 0, 1, 0, 0, 0, 0, 0x50, flags, 0x40, 0],
    ]
    .concat();
    tcp.extend([0, 0, 0, 0]);
    let pseudo =
        [&ends[0].octets()[..], &ends[1].octets(), &[0, TCP], &length(tcp.len()), &tcp].concat();
    tcp[16..18].copy_from_slice(&sum(&pseudo).to_be_bytes());
    tcp
}

/// An ICMP echo request.
pub(super) fn ping() -> Vec<u8> {
    let mut icmp = vec![8, 0, 0, 0, 0, 1, 0, 1];
    let check = sum(&icmp).to_be_bytes();
    icmp[2..4].copy_from_slice(&check);
    icmp
}

/// An ARP request for `to`.
pub(super) fn arp(from: Ipv4Addr, to: Ipv4Addr) -> Vec<u8> {
    let body =
        [&[0, 1, 8, 0, 6, 4, 0, 1][..], &mac(from), &from.octets(), &[0; 6], &to.octets()].concat();
    ethernet([0xff; 6], mac(from), ARP, &body)
}

fn ipv6(
    owner: Ipv4Addr,
    from: Ipv6Addr,
    to: Ipv6Addr,
    mut icmp: Vec<u8>,
    to_mac: [u8; 6],
) -> Vec<u8> {
    let pseudo =
        [&from.octets()[..], &to.octets(), &[0, 0], &length(icmp.len()), &[0, 0, 0, ICMPV6], &icmp]
            .concat();
    let check = sum(&pseudo).to_be_bytes();
    icmp[2..4].copy_from_slice(&check);
    let head =
        [&[0x60, 0, 0, 0][..], &length(icmp.len()), &[ICMPV6, 255], &from.octets(), &to.octets()]
            .concat();
    ethernet(to_mac, mac(owner), IPV6, &[head, icmp].concat())
}

/// Typical IPv6 link traffic: an echo to all nodes and to the gateway's link-local address, a
/// neighbour solicitation for the gateway, and a router solicitation.
pub(super) fn link_local(owner: Ipv4Addr) -> Vec<Vec<u8>> {
    let own: Ipv6Addr = "fe80::df".parse().unwrap();
    // The address that follows from the gateway's MAC (RFC 4291, appendix A).
    let gateway: Ipv6Addr = "fe80::df:ff:fe00:1".parse().unwrap();
    let (nodes, routers): (Ipv6Addr, Ipv6Addr) =
        ("ff02::1".parse().unwrap(), "ff02::2".parse().unwrap());
    let echo = || vec![128, 0, 0, 0, 0, 1, 0, 1];
    let solicit =
        [&[135, 0, 0, 0, 0, 0, 0, 0][..], &gateway.octets(), &[1, 1], &mac(owner)].concat();
    vec![
        ipv6(owner, own, nodes, echo(), [0x33, 0x33, 0, 0, 0, 1]),
        ipv6(owner, own, gateway, echo(), GATEWAY_MAC),
        ipv6(owner, own, "ff02::1:ff00:1".parse().unwrap(), solicit, [0x33, 0x33, 0xff, 0, 0, 1]),
        ipv6(owner, own, routers, vec![133, 0, 0, 0, 0, 0, 0, 0], [0x33, 0x33, 0, 0, 0, 2]),
    ]
}
