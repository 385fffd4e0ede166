//! IPv4 ranges that a guest does not reach unless the host's owner allows it.

use ipnet::Ipv4Net;
use std::net::Ipv4Addr;

const fn range(a: u8, b: u8, c: u8, d: u8, bits: u8) -> Ipv4Net {
    Ipv4Net::new_assert(Ipv4Addr::new(a, b, c, d), bits)
}

/// Every range outside the public internet by the IANA IPv4 special-purpose registry (RFC 6890),
/// and public addresses at which clouds serve machine secrets.
pub const NOT_PUBLIC: &[Ipv4Net] = &[
    // "This network".
    range(0, 0, 0, 0, 8),
    // RFC 1918.
    range(10, 0, 0, 0, 8),
    range(172, 16, 0, 0, 12),
    range(192, 168, 0, 0, 16),
    // RFC 6598, for carriers; Alibaba's metadata service is 100.100.100.200.
    range(100, 64, 0, 0, 10),
    // Loopback.
    range(127, 0, 0, 0, 8),
    // Link-local: the metadata services of AWS, GCP, Azure and others are at 169.254.169.254 and
    // nearby.
    range(169, 254, 0, 0, 16),
    // IETF protocol assignments; Oracle's metadata service is 192.0.0.192.
    range(192, 0, 0, 0, 24),
    // Azure's WireServer.
    range(168, 63, 129, 16, 32),
    // Benchmarks (RFC 2544).
    range(198, 18, 0, 0, 15),
    // Multicast, reserved, broadcast.
    range(224, 0, 0, 0, 4),
    range(240, 0, 0, 0, 4),
];

/// Whether an address is in none of [`NOT_PUBLIC`].
#[must_use]
pub fn is_public(address: Ipv4Addr) -> bool {
    !NOT_PUBLIC.iter().any(|range| range.contains(&address))
}
