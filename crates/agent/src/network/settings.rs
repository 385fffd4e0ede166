//! The network part of an identity, validated.

use dayfly_api::agent::NetworkIdentity;
use std::net::Ipv4Addr;

/// Maximum number of nameservers that resolvers use (MAXNS, resolv.conf(5)).
pub const MAX_NAMESERVERS: usize = 3;

/// A machine's place on its network: the valid fields of a [`NetworkIdentity`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Settings {
    /// The interface's Ethernet address, a unicast address.
    pub mac: [u8; 6],
    /// The machine's address.
    pub address: Ipv4Addr,
    /// The gateway's address, which differs from the machine's.
    pub gateway: Ipv4Addr,
    /// The Ethernet address of the gateway's interface.
    pub gateway_mac: Option<[u8; 6]>,
    /// At most [`MAX_NAMESERVERS`].
    pub nameservers: Vec<Ipv4Addr>,
}

/// An invalid field.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Bad {
    /// The field's name.
    pub field: &'static str,
    /// A description of valid values.
    pub expected: &'static str,
    /// The value.
    pub got: String,
}

impl Settings {
    /// Validates every field.
    ///
    /// # Errors
    /// The first invalid field.
    pub fn check(identity: &NetworkIdentity) -> Result<Self, Bad> {
        let NetworkIdentity { mac, address, gateway, gateway_mac, nameservers } = identity;
        let bad = |field, expected, got: &dyn std::fmt::Debug| Bad {
            field,
            expected,
            got: format!("{got:?}").chars().take(80).collect(),
        };
        // The lowest bit of the first byte marks a group address (IEEE 802, section 8.2).
        let mac_of_one = |field, mac: &String| {
            mac_of(mac).filter(|m| m[0] & 1 == 0 && *m != [0; 6]).ok_or_else(|| {
                bad(field, "six bytes in hexadecimal joined by ':', not zero and of no group", mac)
            })
        };
        let one = mac_of_one("network.mac", mac)?;
        let gateway_mac =
            gateway_mac.as_ref().map(|mac| mac_of_one("network.gateway_mac", mac)).transpose()?;
        let expected = "an IPv4 address of one machine, and not of this one alone";
        if !of_one_machine(*address) {
            return Err(bad("network.address", expected, address));
        }
        if !of_one_machine(*gateway) || gateway == address {
            return Err(bad("network.gateway", expected, gateway));
        }
        if nameservers.len() > MAX_NAMESERVERS {
            return Err(bad("network.nameservers", "at most 3", &nameservers.len()));
        }
        // A loopback nameserver (such as 127.0.0.53) may be intended.
        if let Some(other) = nameservers.iter().find(|n| !of_one_machine(**n) && !n.is_loopback()) {
            return Err(bad("network.nameservers", "IPv4 addresses of one machine each", other));
        }
        Ok(Self {
            mac: one,
            address: *address,
            gateway: *gateway,
            gateway_mac,
            nameservers: nameservers.clone(),
        })
    }
}

const fn of_one_machine(ip: Ipv4Addr) -> bool {
    !(ip.is_unspecified() || ip.is_loopback() || ip.is_multicast() || ip.is_broadcast())
}

fn mac_of(text: &str) -> Option<[u8; 6]> {
    let mut mac = [0; 6];
    let mut parts = text.split(':');
    for byte in &mut mac {
        let part =
            parts.next().filter(|p| p.len() == 2 && p.bytes().all(|b| b.is_ascii_hexdigit()))?;
        *byte = u8::from_str_radix(part, 16).ok()?;
    }
    parts.next().is_none().then_some(mac)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn good() -> NetworkIdentity {
        NetworkIdentity {
            mac: "02:df:0A:58:00:02".into(),
            address: Ipv4Addr::new(10, 88, 0, 2),
            gateway: Ipv4Addr::new(169, 254, 1, 1),
            gateway_mac: Some("02:df:00:00:00:01".into()),
            nameservers: vec![Ipv4Addr::new(10, 88, 0, 1), Ipv4Addr::new(127, 0, 0, 53)],
        }
    }

    #[test]
    fn what_can_be_is_taken_as_it_is() {
        let NetworkIdentity { address, gateway, nameservers, .. } = good();
        let mac = [0x02, 0xdf, 0x0a, 0x58, 0x00, 0x02];
        let gateway_mac = Some([0x02, 0xdf, 0, 0, 0, 1]);
        assert_eq!(
            Settings::check(&good()),
            Ok(Settings { mac, address, gateway, gateway_mac, nameservers })
        );
    }

    #[test]
    fn each_bad_field_is_named_with_what_it_is() {
        let macs = [
            "",
            "02:df:0a:58:00",
            "02:df:0a:58:00:02:03",
            "02:df:0a:58:00:2",
            "02:df:0a:58:00:+2",
            "02-df-0a-58-00-02",
            "02:df:0a:58:00:0g",
            "00:00:00:00:00:00",
            "03:df:0a:58:00:02",
            "ff:ff:ff:ff:ff:ff",
        ];
        for mac in macs {
            let Bad { field, got, .. } =
                Settings::check(&NetworkIdentity { mac: mac.into(), ..good() }).unwrap_err();
            assert_eq!((field, got), ("network.mac", format!("{mac:?}")));
            let gateway_mac = Some(mac.into());
            let Bad { field, .. } =
                Settings::check(&NetworkIdentity { gateway_mac, ..good() }).unwrap_err();
            assert_eq!(field, "network.gateway_mac");
        }
        for ip in ["0.0.0.0", "127.0.0.1", "127.9.9.9", "224.0.0.1", "239.1.2.3", "255.255.255.255"]
        {
            let ip: Ipv4Addr = ip.parse().unwrap();
            let Bad { field, got, .. } =
                Settings::check(&NetworkIdentity { address: ip, ..good() }).unwrap_err();
            assert_eq!((field, got), ("network.address", ip.to_string()));
            let Bad { field, got, .. } =
                Settings::check(&NetworkIdentity { gateway: ip, ..good() }).unwrap_err();
            assert_eq!((field, got), ("network.gateway", ip.to_string()));
            let asked = Settings::check(&NetworkIdentity { nameservers: vec![ip], ..good() });
            assert_eq!(asked.is_err(), !ip.is_loopback(), "{ip}");
        }
        let own = NetworkIdentity { gateway: good().address, ..good() };
        assert_eq!(Settings::check(&own).unwrap_err().field, "network.gateway");
        let four = NetworkIdentity { nameservers: vec![Ipv4Addr::new(1, 1, 1, 1); 4], ..good() };
        let Bad { field, got, .. } = Settings::check(&four).unwrap_err();
        assert_eq!((field, got.as_str()), ("network.nameservers", "4"));
    }
}
