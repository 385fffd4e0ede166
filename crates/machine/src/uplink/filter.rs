//! Which of the machine's frames may leave. No I/O.
//!
//! A frame of the machine is passed on if it is
//! - ARP, with the machine's address as the sender, or
//! - IPv4, no fragment, from the machine's address, to one unicast address of another host, or to
//!   the uplink's DNS server if the host has a resolver.
//!
//! Everything else is dropped without an answer. IPv6 never leaves. Fragments are dropped because
//! only the first one has ports, so no program could check the others. Link-local addresses
//! (169.254/16) are dropped because clouds serve the host's credentials there.

use dayfly_machine_init::{UPLINK_ADDRESS, UPLINK_DNS, UPLINK_GATEWAY, UPLINK_MASK};
use std::net::Ipv4Addr;

/// Bytes of an Ethernet header (IEEE 802.3), an ARP packet (RFC 826), an IPv4 header (RFC 791).
const ETHERNET_BYTES: usize = 14;
const ARP_BYTES: usize = 28;
const IPV4_BYTES: usize = 20;
/// Ethernet types.
const IPV4: u16 = 0x0800;
const ARP: u16 = 0x0806;
/// The DNS port.
const DNS: u16 = 53;
const TCP: u8 = 6;
const UDP: u8 = 17;

/// An IPv4 range of addresses that belong to the user's host.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Range {
    first: u32,
    bits: u8,
}

impl Range {
    /// The range with this prefix; `None` if there are more than 32 `bits`.
    pub(crate) fn new(address: Ipv4Addr, bits: u8) -> Option<Self> {
        (bits <= 32).then(|| Self { first: address.to_bits() & mask(bits), bits })
    }

    pub(crate) fn contains(self, address: Ipv4Addr) -> bool {
        address.to_bits() & mask(self.bits) == self.first
    }
}

fn mask(bits: u8) -> u32 {
    u32::MAX.checked_shl(32 - u32::from(bits)).unwrap_or(0)
}

fn number(bytes: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_be_bytes(*bytes.get(at..)?.first_chunk()?))
}

fn address(bytes: &[u8], at: usize) -> Option<Ipv4Addr> {
    Some(Ipv4Addr::from(*bytes.get(at..)?.first_chunk::<4>()?))
}

/// Whether the machine may send this frame. `own` are the ranges of the user's host, `names` is
/// whether it has a resolver. Without one, a program would send questions to 0.0.0.0, which is the
/// host itself.
pub(crate) fn allows(frame: &[u8], own: &[Range], names: bool) -> bool {
    let allowed = || -> Option<bool> {
        let payload = frame.get(ETHERNET_BYTES..)?;
        match number(frame, 12)? {
            ARP => Some(payload.len() >= ARP_BYTES && address(payload, 14)? == UPLINK_ADDRESS),
            IPV4 => packet(payload, own, names),
            _ => Some(false),
        }
    };
    allowed().unwrap_or(false)
}

/// Whether an IPv4 packet may leave; `None` if it is truncated.
fn packet(packet: &[u8], own: &[Range], names: bool) -> Option<bool> {
    let first = *packet.first()?;
    let header = usize::from(first & 15) * 4;
    let total = usize::from(number(packet, 2)?);
    // Flags and offset: all but "do not fragment" (bit 14) make it a fragment.
    let fragment = number(packet, 6)? & 0xbfff != 0;
    let (from, to) = (address(packet, 12)?, address(packet, 16)?);
    let whole = first >> 4 == 4
        && header >= IPV4_BYTES
        && (header..=packet.len()).contains(&total)
        && !fragment;
    if !whole || from != UPLINK_ADDRESS {
        return Some(false);
    }
    let link = Range::new(
        UPLINK_GATEWAY,
        32 - u8::try_from(UPLINK_MASK.to_bits().trailing_zeros()).unwrap_or(0),
    )?;
    if link.contains(to) {
        let kind = *packet.get(9)?;
        let dns = (kind == TCP || kind == UDP) && number(packet, header + 2)? == DNS;
        return Some(names && to == UPLINK_DNS && dns);
    }
    // A connection to 0.0.0.0 reaches the loopback interface (ip(7)).
    let unicast = to.octets()[0] != 0 && !to.is_loopback() && to.octets()[0] < 224;
    Some(unicast && !to.is_link_local() && !own.iter().any(|range| range.contains(to)))
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// An IPv4 packet with a correct checksum in an Ethernet frame.
    pub(crate) fn ipv4(kind: u8, from: Ipv4Addr, to: Ipv4Addr, payload: &[u8]) -> Vec<u8> {
        let total = u16::try_from(IPV4_BYTES + payload.len()).unwrap();
        let mut header = [0x45, 0, 0, 0, 0, 1, 0x40, 0, 64, kind].to_vec();
        header[2..4].copy_from_slice(&total.to_be_bytes());
        header.extend_from_slice(&[0, 0]);
        header.extend_from_slice(&from.octets());
        header.extend_from_slice(&to.octets());
        let sum = checksum(&header);
        header[10..12].copy_from_slice(&sum.to_be_bytes());
        [&[2, 0xdf, 0, 0, 1, 3, 2, 0xdf, 0, 0, 1, 2, 8, 0][..], &header, payload].concat()
    }

    /// The internet checksum (RFC 1071).
    pub(crate) fn checksum(bytes: &[u8]) -> u16 {
        let mut sum = 0_u32;
        for pair in bytes.chunks(2) {
            sum += u32::from(pair[0]) << 8 | u32::from(pair.get(1).copied().unwrap_or(0));
        }
        while sum > 0xffff {
            sum = (sum & 0xffff) + (sum >> 16);
        }
        !u16::try_from(sum).unwrap()
    }

    pub(crate) fn udp(from: Ipv4Addr, to: Ipv4Addr, port: u16, body: &[u8]) -> Vec<u8> {
        let length = u16::try_from(8 + body.len()).unwrap();
        let header = [4444_u16, port, length, 0].map(u16::to_be_bytes).concat();
        ipv4(UDP, from, to, &[&header[..], body].concat())
    }

    const OTHER: Ipv4Addr = Ipv4Addr::new(198, 51, 100, 7);
    const HOST: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 2);

    fn to(address: Ipv4Addr, port: u16) -> bool {
        let own = [Range::new(HOST, 32).unwrap(), Range::new([203, 0, 113, 9].into(), 24).unwrap()];
        allows(&udp(UPLINK_ADDRESS, address, port, b"x"), &own, true)
    }

    #[test]
    fn other_hosts_are_reached_and_the_users_host_is_not() {
        assert!(to(OTHER, 80) && to(UPLINK_DNS, 53) && to([10, 1, 2, 3].into(), 80));
        for (address, port) in [
            ([127, 0, 0, 1], 80),
            ([127, 9, 9, 9], 80),
            ([0, 0, 0, 0], 80),
            ([0, 1, 2, 3], 80),
            ([224, 0, 0, 1], 80),
            ([255, 255, 255, 255], 67),
            (HOST.octets(), 80),
            ([203, 0, 113, 200], 80),
            (UPLINK_GATEWAY.octets(), 80),
            (UPLINK_GATEWAY.octets(), 53),
            (UPLINK_DNS.octets(), 80),
            ([169, 254, 77, 7], 53),
            ([169, 254, 77, 8], 80),
            ([169, 254, 169, 254], 80),
            ([169, 254, 169, 254], 53),
        ] {
            assert!(!to(address.into(), port), "{address:?}:{port}");
        }
    }

    #[test]
    fn names_are_asked_for_only_if_the_host_has_a_resolver() {
        let question = udp(UPLINK_ADDRESS, UPLINK_DNS, 53, b"x");
        assert!(allows(&question, &[], true) && !allows(&question, &[], false));
        assert!(allows(&udp(UPLINK_ADDRESS, OTHER, 53, b"x"), &[], false));
    }

    #[test]
    fn forged_sources_fragments_and_other_protocols_do_not_leave() {
        for from in [[127, 0, 0, 1], [10, 88, 0, 2], [0, 0, 0, 0], UPLINK_GATEWAY.octets()] {
            assert!(!allows(&udp(from.into(), OTHER, 80, b"x"), &[], true), "{from:?}");
        }
        let good = udp(UPLINK_ADDRESS, OTHER, 80, b"xyz");
        assert!(allows(&good, &[], true));
        for (at, value, what) in [
            (14, 0x65, "version 6"),
            (14, 0x44, "a header of 16 bytes"),
            (14, 0x4f, "a header that is longer than the packet"),
            (20, 0x60, "more fragments"),
            (20, 0x41, "a fragment's offset"),
            (21, 1, "a fragment's offset"),
            (20, 0xc0, "the reserved flag"),
            (17, 0xff, "a total length beyond the frame"),
            (17, 19, "a total length without a header"),
            (12, 0x86, "IPv6"),
        ] {
            let mut bad = good.clone();
            bad[at] = value;
            assert!(!allows(&bad, &[], true), "{what}");
        }
        for length in 0..good.len() {
            assert!(!allows(&good[..length], &[], true), "{length} bytes");
        }
    }

    #[test]
    fn arp_has_the_machines_address() {
        let arp = |from: Ipv4Addr| {
            let mut frame = [&[0xff; 6][..], &[2, 0xdf, 0, 0, 1, 2, 8, 6]].concat();
            frame.extend_from_slice(&[0, 1, 8, 0, 6, 4, 0, 1, 2, 0xdf, 0, 0, 1, 2]);
            frame.extend_from_slice(&from.octets());
            frame.extend_from_slice(&[0; 6]);
            frame.extend_from_slice(&UPLINK_GATEWAY.octets());
            frame
        };
        assert!(allows(&arp(UPLINK_ADDRESS), &[], true));
        assert!(!allows(&arp(UPLINK_GATEWAY), &[], true));
        assert!(!allows(&arp(UPLINK_ADDRESS)[..41], &[], true));
    }
}
