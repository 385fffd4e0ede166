//! Giving a machine its own place on the network, and removing what it had from the machine that it
//! was cloned from.
//!
//! The order is:
//!
//! 1. Read the state of the interface, and the addresses of the other interfaces.
//! 2. Disable IPv6 on the interface: this network has no IPv6, and an address derived from another
//!    machine's MAC must not stay.
//! 3. Add the new address, and only then set the MAC and the interface up.
//! 4. Set the routes, and only then delete the old addresses: an interface that has no address for
//!    a moment loses the routes that users added.
//! 5. End connections from addresses that are gone. Not earlier, because running programs could
//!    open new connections from the old address. Also, a reset must not reach the peer, and now has
//!    no route out even if the host would pass it. (If a clone has its parent's address, only the
//!    host stops the reset.)
//!
//! If one of the last three steps fails, the interface is set down. Nothing leaves the machine
//! then, and the next attempt sees that connections must still be ended.
//!
//! Connections from loopback addresses and from addresses of other interfaces (a bridge to
//! containers) stay, because both ends were copied. Connections of containers with their own
//! network namespace are not visible here; their translation to this machine's address ends with
//! the address (nf_nat_masquerade).

mod connections;
mod error;
mod interface;
mod netlink;
mod settings;

pub use error::NetworkError;
pub use settings::{Bad, MAX_NAMESERVERS, Settings};

use interface::Interface;
use netlink::Channel;
use netlink_sys::protocols::NETLINK_ROUTE;
use rustix::io::Errno;
use std::net::IpAddr;
use std::path::Path;

/// Gives the machine whose root is `root` its place on the network, or none; /etc/resolv.conf is
/// not changed. `clone` means that the machine had another identity before, so connections from the
/// interface's addresses are ended even if the addresses stay. A machine whose settings are already
/// in place keeps its connections.
///
/// # Errors
/// [`NetworkError`]; the steps before the failed one are done, and all steps can be repeated.
pub fn take_on(root: &Path, new: Option<&Settings>, clone: bool) -> Result<(), NetworkError> {
    let name = match (interface::find(root)?, new) {
        (Some(name), _) => name,
        (None, Some(_)) => return Err(interface::missing(root)),
        (None, None) => return Ok(()),
    };
    let mut channel = Channel::open(NETLINK_ROUTE).map_err(NetworkError::Netlink)?;
    let old = Interface::read(&mut channel, name)?;
    no_ipv6(root, &old.name)?;
    let same = !clone && new.map_or_else(|| old.is_unset(), |new| old.is(new));
    // Connections from an address count as new only if the interface did not have the address
    // before.
    let fresh = new.map(|new| new.address).filter(|ip| !old.has(*ip)).map(IpAddr::V4);
    let doomed = |ip: IpAddr| {
        !(ip.is_loopback() || ip.is_unspecified() || Some(ip) == fresh || old.elsewhere(ip))
    };
    let changed = match new {
        Some(new) => old.become_machine(&mut channel, new),
        None => old.take_away(&mut channel),
    };
    if same {
        return changed;
    }
    changed.and_then(|()| connections::reset(root, &doomed)).inspect_err(|_| {
        // The first error is returned, so this one is dropped.
        let _ = old.down(&mut channel);
    })
}

/// Disables IPv6 on an interface, which removes its addresses.
fn no_ipv6(root: &Path, name: &str) -> Result<(), NetworkError> {
    let path = root.join("proc/sys/net/ipv6/conf").join(name).join("disable_ipv6");
    match std::fs::OpenOptions::new()
        .write(true)
        .open(&path)
        .and_then(|mut f| std::io::Write::write_all(&mut f, b"1"))
    {
        Ok(()) => Ok(()),
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(()),
        Err(e) => {
            Err(NetworkError::File { path, errno: Errno::from_io_error(&e).unwrap_or(Errno::IO) })
        }
    }
}

#[cfg(test)]
mod tests;
