//! The address range of the VMs.

use std::net::Ipv4Addr;

/// A network with an aligned first address, such as `10.88.0.0/16`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Prefix {
    /// The network address, which no host or VM has.
    pub first: Ipv4Addr,
    /// Length of the prefix: 8 to 29 bits.
    pub bits: u8,
}

impl std::fmt::Display for Prefix {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}/{}", self.first, self.bits)
    }
}

impl std::str::FromStr for Prefix {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || {
            format!(
                "expected the first address of a network and 8 to 29 bits, such as 10.88.0.0/16, \
                 got {text:?}"
            )
        };
        let (first, bits) = text.split_once('/').ok_or_else(wrong)?;
        let (first, bits) = (
            first.parse::<Ipv4Addr>().map_err(|_| wrong())?,
            bits.parse::<u8>().map_err(|_| wrong())?,
        );
        let prefix = Self { first, bits };
        let fits = (8..=29).contains(&bits)
            && u32::from(first).is_multiple_of(1 << (32 - u32::from(bits)));
        if fits { Ok(prefix) } else { Err(wrong()) }
    }
}

impl Prefix {
    /// The gateway's address: the first plus 1.
    #[must_use]
    pub fn gateway(self) -> Ipv4Addr {
        self.address(0).unwrap_or(self.first)
    }

    /// The address of VM `index`, from 1 (0 is the gateway). The last address is for broadcasts,
    /// and the last but one is the host's.
    pub(crate) fn address(self, index: u32) -> Option<Ipv4Addr> {
        let count = 1_u32 << (32 - u32::from(self.bits));
        (index + 3 < count).then(|| Ipv4Addr::from(u32::from(self.first) + 1 + index))
    }

    /// The index of `address`, as [`Self::address`] counts; `None` for addresses that no VM has.
    pub(crate) fn index(self, address: Ipv4Addr) -> Option<u32> {
        let index = u32::from(address).checked_sub(u32::from(self.first))?.checked_sub(1)?;
        (index > 0 && self.address(index).is_some()).then_some(index)
    }
}
