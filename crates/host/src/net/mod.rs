//! The VMs' network: a VM network namespace, a tap for each VM, routes between the taps, and the
//! way out.
//!
//! ```text
//!                    VM network namespace                             the host's namespace
//!  10.88.0.2 ── vm1 ┐  10.88.0.1 on lo: gateway, names    ┌ 10.88.255.254
//!  10.88.0.3 ── vm2 ┼─ routes to each /32 ─────── uplink ─┴─ dayfly…  ── masquerade ── internet
//! ```
//!
//! There is no bridge, unlike in most systems: each guest is alone on its link, has a /32, and
//! sends every packet to the gateway. A Linux bridge has at most 1,023 ports (BR_MAX_PORTS), and
//! each broadcast on it wakes every idle VM.
//!
//! Routes also prevent spoofing: the kernel drops a packet whose source is not the address behind
//! its tap (rp_filter=1, Documentation/networking/ip-sysctl.rst). The guests' MACs are permanent
//! neighbour entries, so the kernel sends no ARP requests to guests.
//!
//! All taps have the same MAC, so the neighbour entry that a clone has for its gateway stays valid.

mod conntrack;
mod error;
mod forwarding;
mod messages;
mod netlink;
mod netns;
mod nft;
mod policies;
mod ranges;
mod setup;
mod spec;
mod tap;
#[cfg(test)]
mod tests;
mod vm_netns;
mod ways;

pub use error::NetError;
pub use netlink::NetlinkError;
pub use netns::Netns;
pub use policies::Found;
pub use ranges::{NOT_PUBLIC, is_public};
pub use spec::{GATEWAY_MAC, Guest, TapSpec, VmNetnsSpec};
pub use tap::{HEADER_BYTES, Tap, taps_of};
pub use vm_netns::VmNetns;
