//! The network of QEMU's guests: made by the code that makes the daemon's, with other addresses.
//!
//! So both VMMs have the same way to the host: a tap, its route, the packet filter with connection
//! tracking, and a veth pair. All of it ends with [`Network`]; the next run removes what a killed
//! run has left.

use crate::prelude::*;
use dayfly_daemon::net::{mac, mac_text};
use dayfly_host::net::{GATEWAY_MAC, VmNetns, VmNetnsSpec};
use rustix::fs::FlockOperation;
use std::fs::File;
use std::net::Ipv4Addr;
use std::os::fd::OwnedFd;

/// The folder of the namespace's file.
const FOLDER: &str = "/run/dayfly-bench-io";
/// The host's end of the uplink.
const UPLINK: &str = "dayflybio";
const TAP: &str = "bio0";
const BITS: u8 = 29;

/// The network, with one guest.
#[derive(Debug)]
pub struct Network {
    netns: VmNetns,
    first: Ipv4Addr,
    /// Locked: there is one such network.
    _folder: File,
}

impl Network {
    /// Makes it of the eight addresses from `first` on. Blocks.
    ///
    /// # Errors
    /// Another run has it, or the host refuses.
    pub fn new(first: Ipv4Addr) -> Result<Self> {
        std::fs::create_dir_all(FOLDER).context(FOLDER)?;
        let folder = File::open(FOLDER).context(FOLDER)?;
        rustix::fs::flock(&folder, FlockOperation::NonBlockingLockExclusive)
            .with_context(|| format!("{FOLDER}: does another run have it?"))?;
        let spec = VmNetnsSpec {
            pin: Path::new(FOLDER).join("netns"),
            first,
            bits: BITS,
            uplink: UPLINK.to_owned(),
            reach: Vec::new(),
            most_connections: 1024,
        };
        let netns = VmNetns::open_or_create(&spec, &[]).inspect_err(|_| {
            let _ = std::fs::remove_dir_all(FOLDER);
        });
        let netns = netns.context("the network of QEMU's guests")?;
        Ok(Self { netns, first, _folder: folder })
    }

    fn at(&self, place: u32) -> Ipv4Addr {
        Ipv4Addr::from_bits(self.first.to_bits() + place)
    }

    /// The guest's address.
    pub fn address(&self) -> Ipv4Addr {
        self.at(2)
    }

    /// The guest's MAC.
    pub fn mac(&self) -> String {
        mac_text(mac(self.address()))
    }

    /// What the guest's init reads on the kernel's command line: its address, its gateway, and the
    /// gateway's MAC.
    pub fn words(&self) -> String {
        format!("bench.net={},{},{}", self.address(), self.at(1), mac_text(GATEWAY_MAC))
    }

    /// Opens the guest's tap, which no process may have open. Blocks.
    ///
    /// # Errors
    /// The host refuses.
    pub fn tap(&self) -> Result<OwnedFd> {
        let address = self.address();
        Ok(self.netns.tap(TAP, address, mac(address)).context("the tap of QEMU's guest")?.into())
    }
}

impl Drop for Network {
    fn drop(&mut self) {
        let removed = self.netns.remove().context("the network of QEMU's guests");
        if let Err(error) = removed.and_then(|()| std::fs::remove_dir_all(FOLDER).context(FOLDER)) {
            eprintln!("removing {error:#}");
        }
    }
}

/// What is left of a network that was dropped.
pub fn leaks() -> Vec<String> {
    let places = [FOLDER.to_owned(), format!("/sys/class/net/{UPLINK}")];
    places.into_iter().filter(|place| Path::new(place).exists()).collect()
}
