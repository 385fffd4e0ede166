//! The loop: one thread, which never waits but for events.

use crate::arguments::{Arguments, Kind, Limits, Port};
use crate::framed::{BUFFER_BYTES, FramedFlows};
use crate::guests::Guests;
use crate::table::{Key, What};
use crate::tcp::{Connections, reset, set_buffers};
use crate::udp::{Flows, Idle, LASTING, MAX_FLOWS_OF_PORT, ONCE};
use rustix::event::epoll::{self, CreateFlags, Event, EventData, EventFlags};
use rustix::fd::OwnedFd;
use rustix::io::Errno;
use rustix::net::{SocketFlags, accept_with};
use rustix::time::Timespec;
use std::io;
use std::time::{Duration, Instant};

/// Events that one call reports.
const EVENTS: usize = 128;
/// Connections that one listener accepts before others have their turn.
const ACCEPTS: usize = 64;
/// How long a listener rests for which no descriptor or no memory is free: clients in the backlog
/// are accepted later.
const PAUSE: Duration = Duration::from_millis(100);

/// The relay of one VM.
#[derive(Debug)]
pub struct Relay {
    epoll: OwnedFd,
    /// Epoll watches it as long as it is open.
    _vmm: OwnedFd,
    ports: Vec<Port>,
    guests: Guests,
    limits: Limits,
    connections: Connections,
    flows: Flows,
    framed: FramedFlows,
    buffer: Vec<u8>,
    /// Listeners that rest, and until when.
    resting: Vec<(Instant, usize)>,
}

fn key(at: usize) -> Key {
    Key { at: u16::try_from(at).unwrap_or(u16::MAX), turn: 0 }
}

impl Relay {
    /// All that serving needs. Afterwards the relay allocates only for parts of framed datagrams.
    ///
    /// # Errors
    /// There is no memory or no descriptor.
    pub fn new(arguments: Arguments) -> io::Result<Self> {
        Self::with(arguments, Idle { once: ONCE, lasting: LASTING }, MAX_FLOWS_OF_PORT)
    }

    /// As [`Self::new`], with other bounds of flows.
    ///
    /// # Errors
    /// As [`Self::new`].
    pub fn with(arguments: Arguments, idle: Idle, most_of_port: usize) -> io::Result<Self> {
        let Arguments { guest, vmm, limits, ports, .. } = arguments;
        let guest_ports: Vec<u16> = ports.iter().map(|port| port.guest_port).collect();
        let epoll = epoll::create(CreateFlags::CLOEXEC)?;
        let vmm_key = key(0).pack(What::Vmm);
        epoll::add(&epoll, &vmm, EventData::new_u64(vmm_key), EventFlags::IN)?;
        let relay = Self {
            guests: Guests::new(guest, &guest_ports)?,
            connections: Connections::new(&limits),
            flows: Flows::new(limits.flows, most_of_port, idle, ports.len())
                .with_buffers(limits.buffer_bytes),
            framed: FramedFlows::new(limits.flows, limits.buffer_bytes),
            buffer: vec![0; BUFFER_BYTES],
            resting: Vec::with_capacity(ports.len()),
            epoll,
            _vmm: vmm,
            ports,
            limits,
        };
        for at in 0..relay.ports.len() {
            // A connection has the buffers of its listener.
            set_buffers(&relay.ports[at].socket, limits.buffer_bytes);
            relay.listen(at)?;
        }
        Ok(relay)
    }

    /// The addresses that the process may connect to.
    #[must_use]
    pub const fn guests(&self) -> &Guests {
        &self.guests
    }

    /// Whether a port has datagrams.
    #[must_use]
    pub fn has_udp(&self) -> bool {
        self.ports.iter().any(|port| port.kind == Kind::Udp)
    }

    fn listen(&self, at: usize) -> Result<(), Errno> {
        let data = EventData::new_u64(key(at).pack(What::Port));
        epoll::add(&self.epoll, &self.ports[at].socket, data, EventFlags::IN)
    }

    /// Serves until the VM has ended.
    ///
    /// # Errors
    /// Waiting for events fails.
    pub fn serve(&mut self) -> io::Result<()> {
        let mut events: Vec<Event> = Vec::with_capacity(EVENTS);
        loop {
            let next = self.next_time();
            let wait = match self.connections.has_turns() {
                true => Some(Duration::ZERO),
                false => next.map(|at| at.saturating_duration_since(Instant::now())),
            };
            let wait = wait.and_then(|wait| Timespec::try_from(wait).ok());
            events.clear();
            match epoll::wait(
                &self.epoll,
                rustix::buffer::spare_capacity(&mut events),
                wait.as_ref(),
            ) {
                Ok(_) | Err(Errno::INTR) => {}
                Err(e) => return Err(e.into()),
            }
            for event in &events {
                let Some((what, key)) = Key::unpack(event.data.u64()) else { continue };
                if what == What::Vmm {
                    return Ok(());
                }
                self.event(what, key, event.flags);
            }
            self.connections.take_turns();
        }
    }

    fn event(&mut self, what: What, key: Key, flags: EventFlags) {
        let Self { epoll, ports, flows, framed, buffer, .. } = self;
        match what {
            What::Port => self.come(usize::from(key.at)),
            What::Client => self.connections.event(key, true, flags),
            What::Guest => self.connections.event(key, false, flags),
            What::Flow => {
                flows.answer(key, buffer, |port| ports.get(port).map(|port| &port.socket));
            }
            What::Stream => framed.event(epoll, key, true, flags, buffer),
            What::Datagrams => framed.event(epoll, key, false, flags, buffer),
            // The end of the VM ends the loop, and streams have another one.
            What::Vmm | What::Control | What::StreamClient | What::StreamAgent | What::Line => {}
        }
    }

    /// Accepts connections of a port, or receives its datagrams.
    fn come(&mut self, at: usize) {
        let Self { epoll, ports, guests, flows, framed, buffer, limits, .. } = self;
        let Some(port) = ports.get(at) else { return };
        if port.kind == Kind::Udp {
            let may_begin = |flows: usize| flows + framed.len() < limits.flows;
            return flows.receive(epoll, (at, &port.socket), guests, buffer, may_begin);
        }
        for _ in 0..ACCEPTS {
            let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
            match accept_with(&port.socket, flags) {
                Ok(client) if port.kind == Kind::Tcp => {
                    self.connections.accept(epoll, client, guests, at);
                }
                Ok(stream) if flows.len() + framed.len() < limits.flows => {
                    framed.accept(epoll, stream, guests, at);
                }
                Ok(stream) => reset(stream),
                Err(Errno::AGAIN) => return,
                Err(Errno::MFILE | Errno::NFILE | Errno::NOBUFS | Errno::NOMEM) => {
                    return self.rest(at);
                }
                // It listens no more: the daemon has freed the port.
                Err(Errno::INVAL) => {
                    let _ = epoll::delete(&*epoll, &port.socket);
                    return;
                }
                // The error of a connection that has ended meanwhile (accept(2)).
                Err(_) => {}
            }
        }
    }

    fn rest(&mut self, at: usize) {
        if epoll::delete(&self.epoll, &self.ports[at].socket).is_ok() {
            self.resting.push((Instant::now() + PAUSE, at));
        }
    }

    /// Does what time has come for. Returns when there is more to do.
    fn next_time(&mut self) -> Option<Instant> {
        let now = Instant::now();
        while let Some((until, at)) = self.resting.first().copied()
            && until <= now
        {
            self.resting.remove(0);
            if self.listen(at).is_err() {
                self.resting.push((now + PAUSE, at));
            }
        }
        let resting = self.resting.first().map(|(until, _)| *until);
        let times = [resting, self.connections.expire(now), self.flows.expire(now)];
        times.into_iter().flatten().min()
    }
}
