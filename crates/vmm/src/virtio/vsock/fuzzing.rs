//! Functions for the crate `fuzz`: the host's side of all vsock connections, without a device.

use super::connection::BUFFER_BYTES;
use super::muxer::{MAX_CONNECTIONS, Muxer};
use super::packet::HEADER_BYTES;
pub use super::packet::{Header, op};
use crate::disk::IoList;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};
use vmm_sys_util::epoll::{Epoll, EpollEvent, EventSet};

/// Bytes that the host buffers for a connection.
pub const BUFFER: u32 = BUFFER_BYTES;
/// Bytes of a packet's header.
pub const HEADER: usize = HEADER_BYTES;

/// The host's side of all connections, at a time that the caller moves.
#[derive(Debug)]
pub struct Connections {
    muxer: Muxer,
    epoll: Arc<Epoll>,
    now: Instant,
}

impl Connections {
    /// Connections of the guest 3. Programs of the host connect to `listener`, which is at `path`.
    ///
    /// # Errors
    /// epoll fails.
    pub fn new(listener: OwnedFd, path: PathBuf) -> std::io::Result<Self> {
        let epoll = Arc::new(Epoll::new()?);
        let muxer = Muxer::new(3, listener, path, Arc::clone(&epoll), 1);
        Ok(Self { muxer, epoll, now: Instant::now() })
    }

    /// Accepts programs of the host, and reads what all sockets have.
    ///
    /// # Errors
    /// epoll fails.
    pub fn events(&mut self) -> std::io::Result<()> {
        self.muxer.accept(self.now);
        let mut events = [EpollEvent::default(); 64];
        let count = self.epoll.wait(0, &mut events)?;
        for event in &events[..count] {
            let set = EventSet::from_bits_truncate(event.events());
            self.muxer.event(event.data(), set, self.now);
        }
        Ok(())
    }

    /// A packet from the guest.
    pub fn on_packet(&mut self, header: &Header, data: &mut [u8]) {
        self.muxer.on_packet(header, &IoList::of(data), self.now);
    }

    /// The next packet for the guest, of at most `room` bytes of data. As the device, it must have
    /// room for a byte.
    pub fn next_packet(&mut self, room: usize) -> Option<(Header, Vec<u8>)> {
        let mut bytes = vec![0; room];
        let (header, length) = self.muxer.next_packet(&IoList::of(&mut bytes), self.now)?;
        bytes.truncate(length);
        Some((header, bytes))
    }

    /// Lets time pass.
    pub fn later(&mut self, time: Duration) {
        self.now += time;
        self.muxer.expire(self.now);
    }

    /// The guest's driver was reset.
    pub fn forget_guest(&mut self) {
        self.muxer.forget_guest(self.now);
    }

    /// The ports of host and guest, and the buffered bytes, of each connection, in order.
    #[must_use]
    pub fn all(&self) -> Vec<(u32, u32, usize)> {
        let connections = self.muxer.connections();
        let mut all: Vec<_> =
            connections.map(|c| (c.host_port, c.guest_port, c.buffered())).collect();
        all.sort_unstable();
        all
    }

    /// Whether no limit on the number of connections is exceeded.
    #[must_use]
    pub fn within_limits(&self) -> bool {
        self.muxer.len() <= MAX_CONNECTIONS
    }
}
