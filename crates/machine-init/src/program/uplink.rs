//! The uplink: the network card by which the machine and its VMs reach other hosts.
//!
//! The supervisor decides which packets may leave (`dayfly_machine`'s `uplink`), because a machine
//! that was taken over could change everything here.

use crate::boot::{BootError, wait_for};
use dayfly_machine_init::{
    UPLINK_ADDRESS, UPLINK_DNS, UPLINK_GATEWAY, UPLINK_MAC, UPLINK_MASK, interface_of, set_address,
    set_gateway, set_up,
};
use std::fs;

/// Gives the uplink its address, the machine its default route and its DNS server.
pub(crate) fn bring_up() -> Result<(), BootError> {
    let name = wait_for("the uplink's interface", || interface_of(UPLINK_MAC))?;
    let step = |e| BootError::new(format!("the uplink, interface {name}"), e);
    for (file, value) in [("accept_redirects", "0"), ("send_redirects", "0"), ("rp_filter", "1")] {
        fs::write(format!("/proc/sys/net/ipv4/conf/{name}/{file}"), value).map_err(step)?;
    }
    // The file is missing on kernels without IPv6.
    drop(fs::write(format!("/proc/sys/net/ipv6/conf/{name}/disable_ipv6"), "1"));
    set_address(&name, UPLINK_ADDRESS, UPLINK_MASK).map_err(step)?;
    set_up(&name).map_err(step)?;
    set_gateway(&name, UPLINK_GATEWAY).map_err(step)?;
    fs::write("/etc/resolv.conf", format!("nameserver {UPLINK_DNS}\n"))
        .map_err(|e| BootError::new("/etc/resolv.conf", e))
}
