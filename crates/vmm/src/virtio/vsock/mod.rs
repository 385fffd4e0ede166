//! virtio-vsock (virtio 1.2 section 5.10) over a unix socket, with Firecracker's protocol.
//!
//! A program of the host connects to the listening socket, writes `CONNECT <port>\n` and reads
//! `OK <host port>\n`. Then it has a stream to that port of the guest. A guest's connection to port
//! P of CID 2 goes to the unix socket `<path>_<P>`.
//!
//! After a load the guest may believe in connections that are gone.
//! VIRTIO_VSOCK_EVENT_TRANSPORT_RESET reports that. On this event Linux ends **every** connection
//! it knows, in a separate work item. It would also end a new connection that overtook the event.
//! So [`Gate`] holds all packets, both ways, until the guest has made the event's buffer available
//! again:
//!
//! ```text
//! load, the guest had connections ─▶ Announce ─event sent─▶ Announced ─buffer available─▶ Open
//! load, the guest had none; reset by the driver ────────────────────────────────────────▶ Open
//! ```
//!
//! The event delays a clone's first answer by a round trip through the guest (20 to 50 of 330 ms in
//! a machine). So a guest that had no connection when it was saved gets no event.

mod connection;
pub mod fuzzing;
mod muxer;
#[cfg(test)]
mod muxer_tests;
mod packet;
#[cfg(test)]
pub(super) mod testing;
#[cfg(test)]
mod tests;

pub use muxer::{Token, socket_path};

use super::interrupt::Interrupt;
use super::ring::{Broken, Chain, Ring};
use crate::disk::IoList;
use crate::memory::writes::Writes;
use muxer::Muxer;
use packet::{HEADER_BYTES, Header};
use serde::{Deserialize, Serialize};
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;
use virtio_bindings::virtio_ids::VIRTIO_ID_VSOCK;
use virtio_queue::Queue;
use vm_memory::GuestMemoryMmap;
use vmm_sys_util::epoll::{Epoll, EventSet};

/// VIRTIO_ID_VSOCK.
pub const DEVICE_ID: u32 = VIRTIO_ID_VSOCK;
/// Receive, transmit and event queue, with their sizes in descriptors.
pub const QUEUES: &[u16] = &[256, 256, 16];
/// The first queues, which are kicked often.
pub const FAST_QUEUES: usize = 2;
const RECEIVE: usize = 0;
const TRANSMIT: usize = 1;
const EVENTS: usize = 2;
/// VIRTIO_VSOCK_EVENT_TRANSPORT_RESET.
const TRANSPORT_RESET: [u8; 4] = 0_u32.to_le_bytes();
/// Most receive buffers filled by one read of a socket (Linux's buffers are 4 KiB).
const MAX_BATCH: usize = 32;
/// Most bytes read from one socket before the next socket has its turn.
const MAX_BATCH_BYTES: usize = 64 << 10;

/// The saved state besides the queues. Connections are not saved; the guest learns that they are
/// gone.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct VsockState {
    /// The guest's context id.
    pub guest_cid: u32,
    /// Whether the guest believes in a connection.
    pub connected: bool,
}

/// Whether packets flow; see the module's diagram.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Gate {
    Open,
    /// The guest must get the reset event.
    Announce,
    /// The guest has the reset event. The available index of the event queue at that time.
    Announced(u16),
}

/// A virtio-vsock device.
#[derive(Debug)]
pub struct Vsock {
    guest_cid: u32,
    gate: Gate,
    forget: bool,
    muxer: Muxer,
}

/// What [`Vsock::serve`] needs from the transport and the device thread.
pub struct Service<'a> {
    /// Guest memory.
    pub mem: &'a GuestMemoryMmap,
    /// The log of the devices' writes to guest memory.
    pub writes: &'a Writes,
    /// The three queues.
    pub queues: &'a mut [Queue],
    /// The device's interrupt.
    pub interrupt: &'a Interrupt,
    /// The device clock, which stands still while the VM is paused.
    pub now: Instant,
    /// Whether to return early.
    pub stop: &'a dyn Fn() -> bool,
}

impl Service<'_> {
    fn ring(&mut self, index: usize) -> Option<Ring<'_, '_>> {
        Some(Ring::new(self.queues.get_mut(index)?, self.mem, self.writes))
    }
}

impl Vsock {
    /// A device for the guest with `guest_cid`.
    ///
    /// The caller has made `listener` non-blocking and watches it edge-triggered. `epoll` watches
    /// the sockets of connections, under tokens from `first_token` up.
    pub fn new(
        guest_cid: u32,
        listener: OwnedFd,
        path: PathBuf,
        epoll: Arc<Epoll>,
        first_token: Token,
    ) -> Self {
        let muxer = Muxer::new(guest_cid, listener, path, epoll, first_token);
        Self { guest_cid, gate: Gate::Open, forget: false, muxer }
    }

    /// Whether `state` was saved from a device with this context id.
    #[must_use]
    pub const fn fits(&self, state: &VsockState) -> bool {
        self.guest_cid == state.guest_cid
    }

    /// Copies configuration space (5.10.4): the guest's context id.
    pub fn read_config(&self, offset: usize, data: &mut [u8]) {
        super::transport::copy_config(&u64::from(self.guest_cid).to_le_bytes(), offset, data);
    }

    /// Handles a reset by the driver. The device thread drops the connections, before it does
    /// anything else.
    pub const fn reset(&mut self) {
        (self.gate, self.forget) = (Gate::Open, true);
    }

    /// The state to be saved besides the queues.
    #[must_use]
    pub fn save(&self) -> VsockState {
        let connected =
            self.gate != Gate::Open || !self.forget && self.muxer.guest_has_connections();
        VsockState { guest_cid: self.guest_cid, connected }
    }

    /// Handles a load. `connected`: the driver is live and believes in a connection.
    pub const fn loaded(&mut self, connected: bool) {
        self.reset();
        if connected {
            self.gate = Gate::Announce;
        }
    }

    /// Takes the host's connections that wait at the listener.
    pub fn accept(&mut self, now: Instant) {
        self.muxer.accept(now);
    }

    /// Handles an event of a connection's socket.
    pub fn event(&mut self, token: Token, events: EventSet, now: Instant) {
        self.muxer.event(token, events, now);
    }

    /// When the device must be served even without an event.
    #[must_use]
    pub const fn deadline(&self) -> Option<Instant> {
        self.muxer.deadline()
    }

    /// Does the work that needs no driver: drops the connections of the last driver, and
    /// connections past their deadline.
    pub fn tidy(&mut self, now: Instant) {
        if std::mem::take(&mut self.forget) {
            self.muxer.forget_guest(now);
        }
        self.muxer.expire(now);
    }

    /// Moves packets both ways until there are none or `stop` returns true. Returns whether packets
    /// may be left. The driver is live.
    ///
    /// # Errors
    /// [`Broken`].
    pub fn serve(&mut self, service: &mut Service<'_>) -> Result<bool, Broken> {
        self.tidy(service.now);
        if !self.pass_gate(service)? {
            return Ok(false);
        }
        let more = self.transmit(service)?;
        Ok(self.receive(service)? || more)
    }

    fn pass_gate(&mut self, service: &mut Service<'_>) -> Result<bool, Broken> {
        let interrupt = service.interrupt;
        let Some(events) = service.queues.get_mut(EVENTS) else {
            return Ok(true);
        };
        let mut ring = Ring::new(events, service.mem, service.writes);
        if !ring.ready() {
            // A driver without this queue cannot get the event.
            self.gate = Gate::Open;
        }
        if self.gate == Gate::Announce {
            let Some(chain) = ring.pop()? else {
                // No buffer yet: the guest kicks when it adds one.
                if !ring.listen()? {
                    return Ok(false);
                }
                return self.pass_gate(service);
            };
            if chain.writable.len() < TRANSPORT_RESET.len() {
                return Err(Broken::Chain { head: chain.head, what: "too short for an event" });
            }
            chain.writable.copy_from(&TRANSPORT_RESET);
            self.gate = Gate::Announced(ring.available()?);
            ring.push(chain.head, 4)?;
            interrupt.raise(super::interrupt::USED_BUFFER);
        }
        if let Gate::Announced(seen) = self.gate
            && (ring.available()? != seen || ring.listen_beyond(seen)?)
        {
            self.gate = Gate::Open;
        }
        Ok(self.gate == Gate::Open)
    }

    /// Handles the packets that the guest sends.
    fn transmit(&mut self, service: &mut Service<'_>) -> Result<bool, Broken> {
        let (interrupt, stop, now) = (service.interrupt, service.stop, service.now);
        let Some(mut ring) = service.ring(TRANSMIT) else {
            return Ok(false);
        };
        let mut more = false;
        'all: loop {
            ring.hush()?;
            while let Some(chain) = ring.pop()? {
                self.packet(&chain, now)?;
                ring.push(chain.head, 0)?;
                more = stop();
                if more {
                    break 'all;
                }
            }
            if !ring.listen()? {
                break;
            }
        }
        ring.signal(interrupt)?;
        Ok(more)
    }

    fn packet(&mut self, chain: &Chain<'_>, now: Instant) -> Result<(), Broken> {
        let mut bytes = [0; HEADER_BYTES];
        if !chain.writable.is_empty() || chain.readable.copy_to(&mut bytes) != HEADER_BYTES {
            return Err(Broken::Chain {
                head: chain.head,
                what: "expected a header to read and nothing to write",
            });
        }
        let header = Header::decode(&bytes);
        let len = usize::try_from(header.len).unwrap_or(usize::MAX);
        let data = chain.readable.window(HEADER_BYTES, len);
        if data.len() < len {
            return Err(Broken::Chain {
                head: chain.head,
                what: "less data than the header names",
            });
        }
        self.muxer.on_packet(&header, &data, now);
        Ok(())
    }

    /// Sends packets to the guest, as long as it has buffers.
    fn receive(&mut self, service: &mut Service<'_>) -> Result<bool, Broken> {
        let (interrupt, stop, now) = (service.interrupt, service.stop, service.now);
        let Some(mut ring) = service.ring(RECEIVE) else {
            return Ok(false);
        };
        let (mut more, mut used) = (false, false);
        while self.muxer.has_packet() {
            more = stop();
            if more {
                break;
            }
            ring.hush()?;
            let count = if self.muxer.wants_room() { MAX_BATCH } else { 1 };
            let buffers = take_buffers(&mut ring, count)?;
            if buffers.is_empty() {
                // No buffer is left: the guest kicks when it adds some.
                if ring.listen()? {
                    continue;
                }
                break;
            }
            let mut room = IoList::new();
            for buffer in &buffers {
                room.append(&buffer.room);
            }
            let packet = self.muxer.next_packet(&room, now);
            let filled = match &packet {
                Some((header, len)) => fill(&mut ring, &buffers, header, *len)?,
                None => 0,
            };
            used |= filled > 0;
            ring.unpop(u16::try_from(buffers.len() - filled).unwrap_or_default());
        }
        if used {
            ring.signal(interrupt)?;
        }
        Ok(more)
    }
}

/// A receive buffer, split into the parts for header and data.
struct Buffer<'m> {
    head: u16,
    header: IoList<'m>,
    room: IoList<'m>,
}

fn take_buffers<'m>(ring: &mut Ring<'_, 'm>, count: usize) -> Result<Vec<Buffer<'m>>, Broken> {
    let (mut buffers, mut bytes) = (Vec::with_capacity(count), 0);
    while buffers.len() < count
        && bytes < MAX_BATCH_BYTES
        && let Some(chain) = ring.pop()?
    {
        if !chain.readable.is_empty() || chain.writable.len() <= HEADER_BYTES {
            let what = "expected a buffer for a header and data, to write only";
            return Err(Broken::Chain { head: chain.head, what });
        }
        let room = chain.writable.window(HEADER_BYTES, MAX_BATCH_BYTES);
        bytes += room.len();
        buffers.push(Buffer {
            head: chain.head,
            header: chain.writable.window(0, HEADER_BYTES),
            room,
        });
    }
    Ok(buffers)
}

/// Writes headers for `len` bytes of data that already lie in the buffers, one packet per buffer.
/// Returns the number of buffers used.
fn fill(
    ring: &mut Ring<'_, '_>,
    buffers: &[Buffer<'_>],
    header: &Header,
    len: usize,
) -> Result<usize, Broken> {
    let (mut rest, mut used) = (len, 0);
    for buffer in buffers {
        let part = rest.min(buffer.room.len());
        let part_len = u32::try_from(part).unwrap_or(u32::MAX);
        buffer.header.copy_from(&Header { len: part_len, ..*header }.encode());
        #[expect(clippy::cast_possible_truncation, reason = "44")]
        ring.push(buffer.head, part_len.saturating_add(HEADER_BYTES as u32))?;
        (rest, used) = (rest - part, used + 1);
        if rest == 0 {
            break;
        }
    }
    Ok(used)
}
