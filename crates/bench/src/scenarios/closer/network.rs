//! VMs with a network, which is this process's own.

use crate::prelude::*;
use crate::requests::create;
use crate::testbed::Testbed;
use dayfly_api::types::{CreateRequest, NetworkRequest, PortProtocol, Publish, Source, VmLimits};
use rustix::mount::{MountFlags, MountPropagationFlags, mount, mount_change};
use rustix::thread::UnshareFlags;
use std::process::Command;

/// The addresses of VMs.
pub const RANGE: &str = "10.77.0.0/24";
/// The guest's port, TCP and UDP.
const GUEST_PORT: u16 = 80;

/// Moves this thread, and all that it starts from now on, into a network namespace with nothing but
/// a loopback device, and gives it its own folder /run. Both end with the last of them.
pub fn enter_own() -> Result<()> {
    // SAFETY: unshare(2) of these namespaces changes what this thread and those that it starts see
    // of mounts and of the network, and nothing that others share with it.
    unsafe { rustix::thread::unshare_unsafe(UnshareFlags::NEWNS | UnshareFlags::NEWNET) }
        .context("a network of this benchmark's own (needs CAP_SYS_ADMIN)")?;
    mount_change("/", MountPropagationFlags::PRIVATE | MountPropagationFlags::REC)?;
    mount("none", "/run", "tmpfs", MountFlags::empty(), None).context("/run")?;
    let up = Command::new("ip").args(["link", "set", "lo", "up"]).status().context("ip")?;
    ensure!(up.success(), "ip link set lo up: {up}");
    Ok(())
}

/// A VM whose port 80 is published at 127.0.0.1.
#[derive(Debug)]
pub struct Published {
    pub id: VmId,
    pub udp: u16,
    pub tcp: u16,
}

/// Creates a clone of a snapshot that publishes both ports.
pub async fn published(testbed: &Testbed, from: &Name, limits: VmLimits) -> Result<Published> {
    let protocols = [PortProtocol::Udp, PortProtocol::Tcp];
    let publish = protocols
        .iter()
        .map(|protocol| Publish {
            host: None,
            host_port: 0,
            guest_port: GUEST_PORT,
            protocol: *protocol,
        })
        .collect();
    let network = NetworkRequest { publish, ..NetworkRequest::default() };
    let request = create(Source::Snapshot(from.clone()), &[]);
    let vm = testbed.client.create(&CreateRequest { network, limits, ..request }).await?;
    let has = vm.network.map(|network| network.published).unwrap_or_default();
    let [udp, tcp] = protocols.map(|protocol| {
        let port = has.iter().find(|port| port.protocol == protocol);
        port.map(|port| port.host_port).with_context(|| format!("{protocol:?} in {has:?}"))
    });
    Ok(Published { id: vm.id, udp: udp?, tcp: tcp? })
}
