//! Changes of what guests reach, and what the rules of the VM network namespace share.

use dayfly_units::Egress;
use std::net::Ipv4Addr;

/// The table in the VM network namespace.
pub(super) const TABLE: &str = "dayfly";
/// Maximum number of elements in a set of guests. A VM network has at most 24 bits of addresses,
/// and a host fewer guests.
pub(super) const MOST_GUESTS: u32 = 1 << 20;

/// A change of what a guest may reach.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in crate::net) enum Change {
    /// Creates the chain and the set of a network, for its first guest.
    NewNetwork(String),
    /// Adds a guest to a network.
    Join(String, Ipv4Addr),
    /// Removes a guest from a network.
    Leave(String, Ipv4Addr),
    /// Removes the chain and the set of a network without guests.
    NoNetwork(String),
    /// Creates the chain and the sets of an egress policy with rules, for its first guest.
    NewPolicy(u32, Egress),
    /// Applies a policy to a guest: that with this number, or no way out.
    Limit(Option<u32>, Ipv4Addr),
    /// Ends what [`Self::Limit`] began.
    Unlimit(Option<u32>, Ipv4Addr),
    /// Forgets how many packets of a guest were refused.
    Forget(Ipv4Addr),
    /// Opens an address for the policy's service of names at this place, for some milliseconds.
    Open(u32, usize, Ipv4Addr, u64),
    /// Removes the chain and the sets of a policy without guests.
    NoPolicy(u32, Egress),
}
