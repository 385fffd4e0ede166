//! Bounds of a VM's relay and of its process of streams: connections, flows and streams, so that
//! neither the memory of the VM's control group nor the host's UDP ports are used up by clients.

use dayfly_relay::streams::MAX_STREAMS;
use dayfly_units::sync::lock;
use std::sync::Mutex;

/// Maximum number of concurrent connections to all ports of one VM. Further connections are reset
/// at once.
pub const MAX_CONNECTIONS: usize = 1024;
/// Maximum number of concurrent flows of all UDP ports of one VM.
pub const MAX_FLOWS: usize = 1024;
/// The UDP flows of all VMs of which each VM gets half of what is left, but for [`LEAST_FLOWS`] of
/// each. Each flow has a UDP port of the host, of which the host itself needs some: by default the
/// kernel gives out 28,232 of them.
const FLOWS_OF_ALL: usize = 8192;
/// The least flows of a VM with UDP ports, as long as there are fewer than [`MAX_FLOWS_OF_ALL`].
const LEAST_FLOWS: usize = 64;
/// The most UDP flows of all VMs, but for one of each.
const MAX_FLOWS_OF_ALL: usize = 16_384;

/// Connections may take a quarter of `--memory-max`, flows another one, and streams another one.
const FRACTION: u64 = 4;
/// SO_RCVBUF and SO_SNDBUF of each socket of a VM with limited memory. The kernel doubles them.
const BUFFER_BYTES: usize = 16 << 10;
/// What the kernel charges at most for a connection with such buffers: four of them, and the two
/// sockets. Pages in its pipes were charged when they were received, or never.
const CONNECTION_BYTES: u64 = 160 << 10;
/// Likewise for a flow: the two buffers of one socket.
const FLOW_BYTES: u64 = 72 << 10;
/// Likewise for a flow of the machine's supervisor: four buffers, and two incomplete datagrams.
const FRAMED_BYTES: u64 = 288 << 10;

/// Likewise for a stream: what is handed over with it, two pipes, and what its sockets hold.
const STREAM_BYTES: u64 = 512 << 10;

/// Flows that VMs may have, in all.
static FLOWS: Mutex<usize> = Mutex::new(0);

/// The flows that one VM may have, until this is dropped.
#[derive(Debug)]
pub(super) struct FlowShare(usize);

impl FlowShare {
    /// Half of what is left for all VMs, within bounds; none for a VM without UDP ports.
    pub(super) fn take(has_flows: bool) -> Self {
        if !has_flows {
            return Self(0);
        }
        let mut all = lock(&FLOWS);
        let count = share(*all);
        *all += count;
        Self(count)
    }

    pub(super) const fn count(&self) -> usize {
        self.0
    }
}

fn share(taken: usize) -> usize {
    if taken >= MAX_FLOWS_OF_ALL {
        return 1;
    }
    (FLOWS_OF_ALL.saturating_sub(taken) / 2).clamp(LEAST_FLOWS, MAX_FLOWS)
}

impl Drop for FlowShare {
    fn drop(&mut self) {
        *lock(&FLOWS) -= self.0;
    }
}

/// How many of `most` things with this many bytes fit into the fraction of a VM's memory; at least
/// one.
fn fit(memory_max_bytes: Option<u64>, most: usize, bytes: u64) -> usize {
    let fit = memory_max_bytes.map_or(u64::MAX, |max| max / FRACTION / bytes);
    usize::try_from(fit).unwrap_or(usize::MAX).min(most).max(1)
}

/// The most streams in a process of a VM that may take `memory_max_bytes` beside its RAM.
pub(super) fn streams(memory_max_bytes: Option<u64>) -> usize {
    fit(memory_max_bytes, MAX_STREAMS, STREAM_BYTES)
}

/// The bounds of one relay.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Bounds {
    connections: usize,
    flows: usize,
    buffer_bytes: Option<usize>,
}

impl Bounds {
    /// Bounds of the relay of a VM that may take `memory_max_bytes` beside its RAM, and as many
    /// flows as its share has. `framed`: its flows are those of the machine's supervisor.
    pub(super) fn of(memory_max_bytes: Option<u64>, framed: bool, flows: usize) -> Self {
        let flow = if framed { FRAMED_BYTES } else { FLOW_BYTES };
        Self {
            connections: fit(memory_max_bytes, MAX_CONNECTIONS, CONNECTION_BYTES),
            flows: fit(memory_max_bytes, flows, flow),
            buffer_bytes: memory_max_bytes.map(|_| BUFFER_BYTES),
        }
    }

    /// Words of the relay's command line.
    pub(super) fn arguments(&self) -> Vec<String> {
        let Self { connections, flows, buffer_bytes } = self;
        let mut words = vec!["--connections".to_owned(), connections.to_string()];
        words.extend(["--flows".to_owned(), flows.to_string()]);
        if let Some(bytes) = buffer_bytes {
            words.extend(["--buffer".to_owned(), bytes.to_string()]);
        }
        words
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::group_limits::LEAST_MEMORY_BYTES;

    #[test]
    fn what_clients_can_take_is_half_of_the_memory_at_most() {
        assert_eq!(
            Bounds::of(None, false, 7),
            Bounds { connections: MAX_CONNECTIONS, flows: 7, buffer_bytes: None }
        );
        for framed in [false, true] {
            for max in [LEAST_MEMORY_BYTES, 64 << 20, 1 << 30, 1 << 40] {
                let bounds = Bounds::of(Some(max), framed, MAX_FLOWS);
                let flow = if framed { FRAMED_BYTES } else { FLOW_BYTES };
                let taken =
                    bounds.connections as u64 * CONNECTION_BYTES + bounds.flows as u64 * flow;
                assert!(taken <= max / 2, "{max}: {bounds:?}");
                assert!(bounds.connections >= 16 && bounds.flows >= 14, "{max}: {bounds:?}");
                assert!(bounds.buffer_bytes.is_some());
            }
        }
        let most = Bounds::of(Some(1 << 40), false, MAX_FLOWS);
        assert_eq!((most.connections, most.flows), (MAX_CONNECTIONS, MAX_FLOWS));
    }

    #[test]
    fn streams_can_take_a_quarter_of_the_memory_at_most() {
        assert_eq!(streams(None), MAX_STREAMS);
        for max in [LEAST_MEMORY_BYTES, 64 << 20, 1 << 30] {
            let most = streams(Some(max));
            assert!(most as u64 * STREAM_BYTES <= max / 4 && most >= 4, "{max}: {most}");
        }
        assert_eq!(streams(Some(1 << 40)), MAX_STREAMS);
        // More than what a process holds of a stream: the hand-over, and two pipes.
        let held = dayfly_relay::streams::message::HANDED_MAX_BYTES as u64 + 2 * (64 << 10);
        assert!(STREAM_BYTES > held, "{held}");
    }

    #[test]
    fn shares_of_flows_leave_ports_of_the_host_free() {
        let (mut taken, mut shares) = (0, Vec::new());
        for _ in 0..1000 {
            shares.push(share(taken));
            taken += share(taken);
        }
        assert_eq!((shares[0], shares[5], shares[99]), (MAX_FLOWS, MAX_FLOWS, LEAST_FLOWS));
        assert!(taken < MAX_FLOWS_OF_ALL + LEAST_FLOWS + 1000, "{taken}");
    }
}
