//! The network that VMs have: a namespace for each tenant, a tap for each VM, routes between them, and the way out.
//!
//! ```text
//!                    the tenant's namespace                           the host's
//!  10.88.0.2 ── vm1 ┐  10.88.0.1 on lo: gateway, names    ┌ 10.88.255.254
//!  10.88.0.3 ── vm2 ┼─ routes to each /32 ─────── uplink ─┴─ dayfly…  ── masquerade ── the world
//! ```
//!
//! There is no bridge, though the field has one: each guest is alone on its link, has a /32, and sends all to the gateway. A bridge of Linux's
//! has 1,023 ports at most (BR_MAX_PORTS), and each broadcast on it wakes every idle VM. Routes also say who may speak as whom: a
//! packet whose source is not the address behind its tap is dropped (rp_filter=1, Documentation/networking/ip-sysctl.rst). Where a
//! guest is, is known (permanent neighbours), so it is never asked.
//!
//! All taps have the same MAC: what a clone has learned of its gateway stays right.

mod messages;
mod netlink;
mod netns;
mod nft;
mod tap;
mod tenant;
#[cfg(test)]
mod tests;

pub use netlink::NetlinkError;
pub use netns::Netns;
pub use tap::{HEADER_BYTES, Tap};
pub use tenant::{GATEWAY_MAC, Tenant, TenantSpec};

use std::io;
use std::path::PathBuf;

/// Why something of the network was not done.
#[derive(Debug, thiserror::Error)]
pub enum NetError {
    /// The kernel refused a message.
    #[error(transparent)]
    Netlink(#[from] NetlinkError),
    /// A system call.
    #[error("{0}")]
    Call(&'static str, #[source] io::Error),
    /// A file.
    #[error("{what} {}", path.display())]
    File {
        /// What was done.
        what: &'static str,
        /// With which.
        path: PathBuf,
        /// Why not.
        #[source]
        source: io::Error,
    },
    /// There is something of that name.
    #[error("interface {0:?}: expected a name of 1 to 15 bytes without '/' or spaces")]
    Name(String),
    /// Too many addresses, or too few, or not the first of them.
    #[error("network {0}/{1}: expected the first of its addresses, and 8 to 29 bits")]
    Addresses(std::net::Ipv4Addr, u8),
    /// An address that is not one of the network's, or not a guest's.
    #[error("address {0}: expected one of {1}/{2} that is neither its first two nor its last two")]
    Foreign(std::net::Ipv4Addr, std::net::Ipv4Addr, u8),
}

impl NetError {
    /// Whether there is an interface of that name.
    #[must_use]
    pub fn is_busy(&self) -> bool {
        matches!(self, Self::Call(_, source) if source.kind() == io::ErrorKind::ResourceBusy)
    }
}

pub(crate) fn call(what: &'static str) -> impl FnOnce(rustix::io::Errno) -> NetError {
    move |errno| NetError::Call(what, errno.into())
}

pub(crate) fn file(what: &'static str, path: &std::path::Path) -> impl FnOnce(io::Error) -> NetError {
    let path = path.to_owned();
    move |source| NetError::File { what, path, source }
}
