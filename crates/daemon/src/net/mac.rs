//! The MACs of VMs.

use std::net::Ipv4Addr;

/// The MAC that belongs to this address: locally administered and unique.
#[must_use]
pub fn mac(address: Ipv4Addr) -> [u8; 6] {
    let [a, b, c, d] = address.octets();
    [0x02, 0xdf, a, b, c, d]
}

/// A MAC in its usual text form.
#[must_use]
pub fn mac_text(mac: [u8; 6]) -> String {
    mac.map(|byte| format!("{byte:02x}")).join(":")
}
