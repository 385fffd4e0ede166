//! virtio-net (virtio 1.2 section 5.1) over a tap of the host: one receive queue, one transmit
//! queue.
//!
//! A device has no **link** until [`Net::connect`]. Until then the device receives nothing, and
//! every packet that the driver transmits is lost. So no packet of a clone passes before the daemon
//! has given the clone its identity. That holds for packets that the parent had queued, and for
//! packets that the clone's programs send early.
//!
//! A link lets out only packets from the guest's own address. This check serves honest guests. The
//! reverse-path filter at the tap's other end stops a guest that changes a packet during the check,
//! or has taken over this process.
//!
//! The host does checksums and segmentation: the tap arrives with a header of [`HEADER_BYTES`] and
//! its offloads set (TUNSETVNETHDRSZ, TUNSETOFFLOAD).

use super::bucket::Bucket;
use super::interrupt::Interrupt;
use super::ring::{Broken, Chain, Ring};
use super::tokens::TAP;
use crate::config::LinkConfig;
use crate::memory::writes::Writes;
use crate::meter::{Meter, NetTraffic};
use std::net::Ipv4Addr;
use std::os::fd::{AsFd as _, AsRawFd as _, OwnedFd};
use std::sync::Arc;
use std::time::Instant;
use virtio_bindings::virtio_ids::VIRTIO_ID_NET;
use virtio_bindings::virtio_net as spec;
use virtio_queue::Queue;
use vm_memory::GuestMemoryMmap;
use vmm_sys_util::epoll::{ControlOperation, Epoll, EpollEvent, EventSet};

/// VIRTIO_ID_NET.
pub const DEVICE_ID: u32 = VIRTIO_ID_NET;
/// receiveq1 and transmitq1 (5.1.2), of 256 descriptors each.
pub const QUEUES: &[u16] = &[256, 256];
/// Index of the transmit queue. The driver kicks it for each packet, and the receive queue rarely.
pub const TRANSMIT: usize = 1;
/// Bytes of struct virtio_net_hdr with VERSION_1 (5.1.6).
pub const HEADER_BYTES: usize = 12;
/// The longest packet in bytes, with its header: 64 KiB of IP behind an Ethernet header with a VLAN
/// tag.
const PACKET_BYTES: usize = HEADER_BYTES + 65536 + 18;
/// Bytes of the packet buffer. An allocation of this size is mapped, so pages that no packet
/// reaches take no memory.
const ROOM_BYTES: usize = 256 << 10;
/// Packets of each direction that are served before other devices have their turn.
const TURN: usize = 64;
/// Bytes of configuration: the MAC, a status that is not offered, one pair of queues.
const CONFIG_BYTES: usize = 10;
/// The MAC of a device that had no link yet.
const NO_MAC: [u8; 6] = [0x02, 0xdf, 0, 0, 0, 0];
/// Most buffers that writev(2) takes (UIO_MAXIOV).
const MAX_PIECES: usize = 1024;

/// The features that this device offers, besides the common ones.
pub const FEATURES: u64 = 1 << spec::VIRTIO_NET_F_CSUM
    | 1 << spec::VIRTIO_NET_F_GUEST_CSUM
    | 1 << spec::VIRTIO_NET_F_MAC
    | GUEST_TSO
    | 1 << spec::VIRTIO_NET_F_HOST_TSO4
    | 1 << spec::VIRTIO_NET_F_HOST_TSO6
    | 1 << spec::VIRTIO_NET_F_MRG_RXBUF;
const GUEST_TSO: u64 = 1 << spec::VIRTIO_NET_F_GUEST_TSO4 | 1 << spec::VIRTIO_NET_F_GUEST_TSO6;

/// The link to the host's network.
#[derive(Debug)]
struct Link {
    /// `None`: every packet that the guest sends is lost.
    tap: Option<OwnedFd>,
    /// Whether epoll watches the tap.
    watched: bool,
    address: Ipv4Addr,
    sends: Bucket,
    receives: Bucket,
}

/// A virtio-net device.
#[derive(Debug)]
pub struct Net {
    mac: [u8; 6],
    link: Option<Link>,
    epoll: Arc<Epoll>,
    /// A packet from the tap with its header, which waits for receive buffers. `waiting` is its
    /// length in bytes; 0 if no packet waits.
    packet: Vec<u8>,
    waiting: usize,
    meter: Meter,
    deadline: Option<Instant>,
}

/// What [`Net::serve`] needs from the transport and the device thread.
pub struct Turn<'a> {
    pub mem: &'a GuestMemoryMmap,
    pub writes: &'a Writes,
    pub queues: &'a mut [Queue],
    pub features: u64,
    pub interrupt: &'a Interrupt,
    pub now: Instant,
    pub stop: &'a dyn Fn() -> bool,
}

impl Net {
    /// A device without a link, whose taps `epoll` will watch. `meter` counts its packets.
    pub const fn new(epoll: Arc<Epoll>, meter: Meter) -> Self {
        let packet = Vec::new();
        Self { mac: NO_MAC, link: None, epoll, packet, waiting: 0, meter, deadline: None }
    }

    /// Gives the device a link. Without a tap, every packet that the guest sends is lost.
    pub fn connect(&mut self, config: &LinkConfig, tap: Option<OwnedFd>) {
        self.mac = config.mac;
        self.waiting = 0;
        let (sends, receives) = (Bucket::new(config.sends), Bucket::new(config.receives));
        // Assigning the link closes the old tap, and so ends its watch by epoll.
        self.link = Some(Link { tap, watched: false, address: config.address, sends, receives });
    }

    /// Handles a reset by the driver: drops the waiting packet and the deadline.
    pub const fn reset(&mut self) {
        (self.waiting, self.deadline) = (0, None);
    }

    /// Copies configuration space (5.1.4) from `offset` on; past its end are zeroes.
    pub fn read_config(&self, offset: usize, data: &mut [u8]) {
        let mut config = [0; CONFIG_BYTES];
        config[..6].copy_from_slice(&self.mac);
        config[8] = 1; // max_virtqueue_pairs
        super::transport::copy_config(&config, offset, data);
    }

    /// The packets counted so far.
    pub fn traffic(&self) -> NetTraffic {
        self.meter.net()
    }

    /// When the device must be served again, if a rate limit stopped it.
    pub const fn deadline(&self) -> Option<Instant> {
        self.deadline
    }

    /// Moves packets both ways; returns whether packets may be left.
    ///
    /// # Errors
    /// [`Broken`].
    pub fn serve(&mut self, turn: &mut Turn<'_>) -> Result<bool, Broken> {
        self.deadline = None;
        if let Some(Link { tap: Some(tap), watched, .. }) = &mut self.link
            && !std::mem::replace(watched, true)
        {
            let event = EpollEvent::new(EventSet::IN | EventSet::EDGE_TRIGGERED, TAP);
            // Without the watch no packet would be received, and no error would show it.
            if let Err(error) = self.epoll.ctl(ControlOperation::Add, tap.as_raw_fd(), event) {
                crate::exit::fail(&error);
            }
        }
        let sends = self.send(turn)?;
        Ok(self.receive(turn)? || sends)
    }

    /// Sends the packets of the transmit queue to the tap.
    fn send(&mut self, turn: &mut Turn<'_>) -> Result<bool, Broken> {
        let Some(queue) = turn.queues.get_mut(TRANSMIT) else { return Ok(false) };
        let mut ring = Ring::new(queue, turn.mem, turn.writes);
        let mut left = TURN;
        loop {
            ring.hush()?;
            loop {
                if let Some(Err(when)) = self.link.as_mut().map(|link| link.sends.ready(turn.now)) {
                    self.deadline = earlier(self.deadline, when);
                    ring.signal(turn.interrupt)?;
                    return Ok(false);
                }
                let Some(chain) = ring.pop()? else { break };
                match self.link.as_mut().map(|link| link.transmit(&chain)) {
                    Some(Ok(bytes)) => self.meter.sent(bytes),
                    None | Some(Err(())) => self.meter.refused(),
                }
                ring.push(chain.head, 0)?;
                left -= 1;
                if left == 0 || (turn.stop)() {
                    ring.signal(turn.interrupt)?;
                    return Ok(true);
                }
            }
            ring.signal(turn.interrupt)?;
            if !ring.listen()? {
                return Ok(false);
            }
        }
    }

    /// Reads packets from the tap into buffers of the receive queue.
    fn receive(&mut self, turn: &mut Turn<'_>) -> Result<bool, Broken> {
        let (Some(link), Some(queue)) = (&mut self.link, turn.queues.first_mut()) else {
            return Ok(false);
        };
        let Some(tap) = &link.tap else { return Ok(false) };
        let mut ring = Ring::new(queue, turn.mem, turn.writes);
        if !ring.ready() {
            return Ok(false);
        }
        if self.packet.is_empty() {
            self.packet = vec![0; ROOM_BYTES];
        }
        let mut left = TURN;
        let more = loop {
            if self.waiting == 0 {
                if let Err(when) = link.receives.ready(turn.now) {
                    self.deadline = earlier(self.deadline, when);
                    break false;
                }
                // The read fails if the tap's interface is gone or down; then nothing is received.
                match rustix::io::read(tap.as_fd(), &mut self.packet[..PACKET_BYTES]) {
                    Err(rustix::io::Errno::INTR) => continue,
                    // No packet waits, or no sender exists any more.
                    Ok(0) | Err(_) => break false,
                    Ok(length) => self.waiting = length,
                }
            }
            let packet = &mut self.packet[..self.waiting];
            if packet.len() > HEADER_BYTES && acceptable(packet, turn.features) {
                let merges = turn.features & 1 << spec::VIRTIO_NET_F_MRG_RXBUF != 0;
                match deliver(&mut ring, packet, merges)? {
                    Delivered::Done => {
                        let bytes = (self.waiting - HEADER_BYTES) as u64;
                        link.receives.take(bytes);
                        self.meter.received(bytes);
                    }
                    Delivered::NoRoom => {
                        // Ask for a kick when the driver adds buffers; it may have added some
                        // already.
                        let seen = ring.available()?;
                        if ring.listen_beyond(seen)? {
                            continue;
                        }
                        break false;
                    }
                    Delivered::TooLong => {}
                }
            }
            self.waiting = 0;
            left -= 1;
            if left == 0 || (turn.stop)() {
                break true;
            }
        };
        ring.signal(turn.interrupt)?;
        Ok(more)
    }
}

fn earlier(one: Option<Instant>, other: Instant) -> Option<Instant> {
    Some(one.map_or(other, |one| one.min(other)))
}

impl Link {
    /// Sends one packet; returns its bytes without the header.
    fn transmit(&mut self, chain: &Chain<'_>) -> Result<u64, ()> {
        let packet = &chain.readable;
        let fits = (HEADER_BYTES..=PACKET_BYTES).contains(&packet.len())
            && packet.pieces().len() <= MAX_PIECES;
        let mut head = [0; HEADER_BYTES + 42];
        let there = packet.copy_to(&mut head);
        if !fits
            || !chain.writable.is_empty()
            || !is_from(&head[HEADER_BYTES..there.max(HEADER_BYTES)], self.address)
        {
            return Err(());
        }
        if let Some(tap) = &self.tap {
            // A packet that the host refuses is lost, as on any wire.
            packet.write(tap.as_fd()).map_err(drop)?;
        }
        let bytes = (packet.len() - HEADER_BYTES) as u64;
        self.sends.take(bytes);
        Ok(bytes)
    }
}

/// Whether a frame comes from `address`: IPv4 with this source, or ARP with this sender (or
/// 0.0.0.0, for a probe).
fn is_from(frame: &[u8], address: Ipv4Addr) -> bool {
    let at = |from: usize| frame.get(from..from + 4).map(|b| Ipv4Addr::new(b[0], b[1], b[2], b[3]));
    match frame.get(12..14) {
        Some([0x08, 0x00]) => at(26) == Some(address),
        Some([0x08, 0x06]) => {
            at(28).is_some_and(|sender| sender == address || sender.is_unspecified())
        }
        _ => false,
    }
}

/// Adapts a packet from the tap to the driver's features. Returns `false` if that is impossible.
fn acceptable(packet: &mut [u8], features: u64) -> bool {
    const GSO_NONE: u8 = 0;
    let &mut [flags, gso, ..] = packet else { return false };
    if gso != GSO_NONE && features & GUEST_TSO == 0 {
        return false;
    }
    if flags & 1 != 0 && features & 1 << spec::VIRTIO_NET_F_GUEST_CSUM == 0 {
        packet[0] &= !1;
        return sum(packet).is_some();
    }
    true
}

/// Completes the checksum that the header asks for (5.1.6.2): the sum starts at csum_start, its
/// field lies csum_offset bytes further.
fn sum(packet: &mut [u8]) -> Option<()> {
    let field = |at: usize| usize::from(u16::from_le_bytes([packet[at], packet[at + 1]]));
    let start = HEADER_BYTES + field(6);
    let place = start + field(8);
    let words = packet.get(start..)?.chunks(2);
    let mut sum: u64 =
        words.map(|w| u64::from(u16::from_be_bytes([w[0], w.get(1).copied().unwrap_or(0)]))).sum();
    while sum >> 16 != 0 {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    let folded = !u16::try_from(sum).ok()?;
    packet.get_mut(place..place + 2)?.copy_from_slice(&folded.to_be_bytes());
    Some(())
}

enum Delivered {
    Done,
    NoRoom,
    TooLong,
}

/// Writes a packet to as many buffers as it needs, and their number into its header (5.1.6.4).
/// Without `merges`, a packet must fit into one buffer.
fn deliver(ring: &mut Ring<'_, '_>, packet: &mut [u8], merges: bool) -> Result<Delivered, Broken> {
    let mut chains: Vec<Chain<'_>> = Vec::new();
    let mut room = 0;
    while room < packet.len() {
        if !merges && !chains.is_empty() {
            ring.push(chains[0].head, 0)?;
            return Ok(Delivered::TooLong);
        }
        let Some(chain) = ring.pop()? else {
            ring.unpop(u16::try_from(chains.len()).unwrap_or(0));
            return Ok(Delivered::NoRoom);
        };
        if chain.writable.is_empty() || !chain.readable.is_empty() {
            return Err(Broken::Chain { head: chain.head, what: "expected writable buffers only" });
        }
        room += chain.writable.len();
        chains.push(chain);
    }
    let count = u16::try_from(chains.len()).unwrap_or(u16::MAX);
    packet[10..12].copy_from_slice(&count.to_le_bytes());
    let mut rest: &[u8] = packet;
    for chain in &chains {
        let written = chain.writable.copy_from(rest);
        rest = &rest[written..];
        ring.push(chain.head, u32::try_from(written).unwrap_or(u32::MAX))?;
    }
    Ok(Delivered::Done)
}

#[cfg(test)]
#[path = "net_tests.rs"]
mod tests;
