//! Addresses that answers for guests must not contain. Otherwise an attacker could make a guest's
//! program connect to its own machine, its host's network or a cloud's metadata service (DNS
//! rebinding).

use dayfly_host::net::is_public;
use ipnet::Ipv4Net;
use std::net::{Ipv4Addr, Ipv6Addr};

/// Exceptions within 2000::/3, the only globally reachable range: protocol assignments (with Teredo
/// and ORCHID), documentation, 6to4 (which embeds an IPv4 address), and documentation again.
const REFUSED_V6: [(Ipv6Addr, u8); 4] = [
    (Ipv6Addr::new(0x2001, 0, 0, 0, 0, 0, 0, 0), 23),
    (Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 0), 32),
    (Ipv6Addr::new(0x2002, 0, 0, 0, 0, 0, 0, 0), 16),
    (Ipv6Addr::new(0x3fff, 0, 0, 0, 0, 0, 0, 0), 20),
];

/// Whether answers with this address are withheld from guests, which reach public addresses and
/// `reach`.
#[must_use]
pub fn refused_v4(ip: Ipv4Addr, reach: &[Ipv4Net]) -> bool {
    !is_public(ip) && !reach.iter().any(|range| range.contains(&ip))
}

/// [`refused_v4`] for IPv6. Guests have no IPv6, but a program with a dual-stack socket may send to
/// an embedded IPv4 address. So only addresses that are globally reachable as IPv6 pass.
#[must_use]
pub fn refused_v6(ip: Ipv6Addr) -> bool {
    let within =
        |(first, bits): &(Ipv6Addr, u8)| (ip.to_bits() ^ first.to_bits()) >> (128 - bits) == 0;
    !within(&(Ipv6Addr::new(0x2000, 0, 0, 0, 0, 0, 0, 0), 3)) || REFUSED_V6.iter().any(within)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_the_internet_s_is_refused() {
        let private = "0.0.0.0 0.1.2.3 10.0.0.0 10.255.255.255 10.88.0.2 100.64.0.1 \
            100.127.255.255 \
            127.0.0.1 169.254.169.254 172.16.0.1 172.31.255.255 192.168.1.1 198.19.0.1 224.0.0.1 \
            255.255.255.255 168.63.129.16 100.100.100.200";
        for ip in private.split_whitespace() {
            assert!(refused_v4(ip.parse().unwrap(), &[]), "{ip}");
        }
        let public = "1.1.1.1 9.255.255.255 11.0.0.0 100.63.255.255 100.128.0.0 126.255.255.255 \
            128.0.0.0 169.253.255.255 172.15.255.255 172.32.0.0 192.167.255.255 192.169.0.0 \
            168.63.129.15 168.63.129.17 223.255.255.255";
        for ip in public.split_whitespace() {
            assert!(!refused_v4(ip.parse().unwrap(), &[]), "{ip}");
        }
        let reach = ["10.1.0.0/16".parse().unwrap()];
        for (ip, refused) in [("10.1.2.3", false), ("10.2.0.1", true), ("127.0.0.1", true)] {
            assert_eq!(refused_v4(ip.parse().unwrap(), &reach), refused, "{ip}");
        }
        let private = ":: ::1 ::ffff:10.0.0.1 ::ffff:8.8.8.8 64:ff9b::a00:1 fe80::1 fd00::1 \
            fc00::1 \
            2002:a00:1:: 2001:0:4136::1 2001:db8::1 3fff::1 ff02::1 fd00:ec2::254";
        for ip in private.split_whitespace() {
            assert!(refused_v6(ip.parse().unwrap()), "{ip}");
        }
        for ip in ["2606:4700::1111", "2a00:1450::1", "2001:4860:4860::8888", "2003::1"] {
            assert!(!refused_v6(ip.parse().unwrap()), "{ip}");
        }
    }
}
