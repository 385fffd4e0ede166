//! A machine's own place on its network, and nothing left of the one it was cloned from.
//!
//! In this order:
//!
//! 1. how the interface stands, and which addresses the others have;
//! 2. IPv6 off on the interface: there is none on this network, and an address made from another's MAC must not stay;
//! 3. the new address, and only then the MAC and up;
//! 4. the routes, and only then away with the old addresses: an interface that has none for a moment loses the routes
//!    that its users added;
//! 5. connections from addresses that are gone. Not before: programs run meanwhile, and could begin
//!    another from the old address; and a reset, which nobody must see, now has no way out even where the host would
//!    let it through (where a clone has its parent's address, the host alone stops it).
//!
//! Where one of the last three fails, the interface is set down: nothing goes out, and the next try sees by that that
//! connections are still to be ended.
//!
//! Connections from loopback addresses and from those of other interfaces (a bridge to containers) stay: both ends were
//! copied. Those of containers with a network of their own are not seen; their translation to this machine's address
//! goes with the address (nf_nat_masquerade).

mod connections;
mod interface;
mod netlink;
mod settings;

pub use settings::{Bad, MAX_NAMESERVERS, Settings};

use interface::Interface;
use netlink::Channel;
use netlink_sys::protocols::NETLINK_ROUTE;
use rustix::io::Errno;
use std::net::IpAddr;
use std::path::{Path, PathBuf};

/// Why a machine did not get its place.
#[derive(Debug, thiserror::Error)]
pub enum NetworkError {
    /// There is no interface.
    #[error("expected an interface of the driver {driver} in {folder}, got none")]
    Missing {
        /// Which driver's.
        driver: &'static str,
        /// Where interfaces are listed.
        folder: PathBuf,
    },
    /// It is not clear which interface.
    #[error("expected one interface of the driver {driver}, got {first} and {second}")]
    Many {
        /// Which driver's.
        driver: &'static str,
        /// One.
        first: String,
        /// Another.
        second: String,
    },
    /// The kernel cannot be asked.
    #[error("rtnetlink: {0}")]
    Netlink(Errno),
    /// The kernel refused to change the interface.
    #[error("interface {name}: {what}: {errno}")]
    Interface {
        /// Which.
        name: String,
        /// What was to be done.
        what: &'static str,
        /// Why not.
        errno: Errno,
    },
    /// The kernel refused to end connections.
    #[error("sock_diag: {what}: {errno}")]
    Sockets {
        /// What was to be done.
        what: &'static str,
        /// Why not.
        errno: Errno,
    },
    /// The kernel has no means to end connections, and there are some.
    #[error(
        "sock_diag: expected a kernel that ends connections (tcp_diag, CONFIG_INET_DIAG_DESTROY) or none from addresses that were another machine's, got {errno} and {count} connections, the first from {first}"
    )]
    Unable {
        /// How many.
        count: usize,
        /// The local address of one.
        first: IpAddr,
        /// What the kernel says.
        errno: Errno,
    },
    /// A file of /sys or /proc.
    #[error("{path}: {errno}")]
    File {
        /// Which.
        path: PathBuf,
        /// Why not.
        errno: Errno,
    },
}

impl NetworkError {
    /// What the kernel says, where it said something.
    #[must_use]
    pub const fn errno(&self) -> Option<Errno> {
        match self {
            Self::Missing { .. } | Self::Many { .. } => None,
            Self::Netlink(errno)
            | Self::Interface { errno, .. }
            | Self::Sockets { errno, .. }
            | Self::Unable { errno, .. }
            | Self::File { errno, .. } => Some(*errno),
        }
    }
}

/// Gives the machine whose root is `root` its place on the network, or none; /etc/resolv.conf is not touched. `clone`:
/// it was another machine before, so connections from the interface's addresses are ended though they stay the same.
/// A machine that is what it is to be keeps its connections.
///
/// # Errors
/// [`NetworkError`]; steps before the failed one are done, and all can be done again.
pub fn take_on(root: &Path, new: Option<&Settings>, clone: bool) -> Result<(), NetworkError> {
    let name = match (interface::find(root)?, new) {
        (Some(name), _) => name,
        (None, Some(_)) => return Err(interface::missing(root)),
        (None, None) => return Ok(()),
    };
    let mut channel = Channel::open(NETLINK_ROUTE).map_err(NetworkError::Netlink)?;
    let old = Interface::read(&mut channel, name)?;
    no_ipv6(root, &old.name)?;
    let same = !clone && new.map_or_else(|| old.is_nobody(), |new| old.is(new));
    // An address that it had before is no sign of a connection that was made since.
    let fresh = new.map(|new| new.address).filter(|ip| !old.has(*ip)).map(IpAddr::V4);
    let doomed =
        |ip: IpAddr| !(ip.is_loopback() || ip.is_unspecified() || Some(ip) == fresh || old.elsewhere(ip));
    let changed = match new {
        Some(new) => old.become_machine(&mut channel, new),
        None => old.take_away(&mut channel),
    };
    if same {
        return changed;
    }
    changed.and_then(|()| connections::reset(root, &doomed)).inspect_err(|_| {
        // The first error is the one to be told.
        let _ = old.down(&mut channel);
    })
}

/// Takes IPv6 from an interface, with the addresses it has.
fn no_ipv6(root: &Path, name: &str) -> Result<(), NetworkError> {
    let path = root.join("proc/sys/net/ipv6/conf").join(name).join("disable_ipv6");
    match std::fs::OpenOptions::new()
        .write(true)
        .open(&path)
        .and_then(|mut f| std::io::Write::write_all(&mut f, b"1"))
    {
        Ok(()) => Ok(()),
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(()),
        Err(e) => Err(NetworkError::File { path, errno: Errno::from_io_error(&e).unwrap_or(Errno::IO) }),
    }
}

/// /proc/net of the thread that asks; `/proc/net` itself is that of the process's first one.
fn proc_net(root: &Path) -> PathBuf {
    root.join("proc/thread-self/net")
}

#[cfg(test)]
mod tests;
