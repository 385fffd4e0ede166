//! Permits for connections and flows of published ports.

use rustix::net::sockopt::set_socket_linger;
use rustix::process::{Resource, getrlimit};
use std::sync::{Arc, LazyLock};
use std::time::Duration;
use tokio::net::TcpStream;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// Published connections of all VMs use at most 1/`SHARE` of the daemon's descriptors; each uses
/// two.
const SHARE: u64 = 2;

/// Permits for the connections of all VMs, which keep descriptors free for everything else.
pub(super) fn permits_of_all() -> Arc<Semaphore> {
    static ALL: LazyLock<Arc<Semaphore>> = LazyLock::new(|| {
        let descriptors = getrlimit(Resource::Nofile).current.unwrap_or(1 << 20);
        let connections = usize::try_from(descriptors / SHARE / 2).unwrap_or(usize::MAX);
        Arc::new(Semaphore::new(connections.clamp(1, Semaphore::MAX_PERMITS)))
    });
    ALL.clone()
}

/// The most UDP flows of all VMs. Each has a UDP port of the host, of which the host itself needs
/// some: by default the kernel gives out 28,232 of them.
const MAX_FLOWS_OF_ALL: u64 = 8192;

/// Permits for the flows of all VMs. They are not those of connections, because a client can begin
/// flows in the name of others.
pub(super) fn permits_of_flows() -> Arc<Semaphore> {
    static ALL: LazyLock<Arc<Semaphore>> = LazyLock::new(|| {
        let descriptors = getrlimit(Resource::Nofile).current.unwrap_or(1 << 20);
        let flows = (descriptors / SHARE / 4).clamp(1, MAX_FLOWS_OF_ALL);
        Arc::new(Semaphore::new(usize::try_from(flows).unwrap_or(1)))
    });
    ALL.clone()
}

/// Permits for one connection or flow, of its VM and of all VMs; `None` if there are none left.
pub(super) fn turn(
    of_vm: &Arc<Semaphore>,
    of_all_vms: &Arc<Semaphore>,
) -> Option<[OwnedSemaphorePermit; 2]> {
    Some([of_vm.clone().try_acquire_owned().ok()?, of_all_vms.clone().try_acquire_owned().ok()?])
}

/// Makes closing the stream send an RST instead of a FIN.
pub(super) fn reset(stream: &TcpStream) {
    let _ = set_socket_linger(stream, Some(Duration::ZERO));
}
