//! Places of connections and flows to published ports, which are bounded for each port and for all.

use dayfly_machine_init::MAX_RELAY_CONNECTIONS;
use std::io;
use std::net::TcpStream;
use std::sync::atomic::AtomicUsize;
use std::sync::{Arc, Mutex, PoisonError};

/// The most ports of all VMs.
pub(crate) const MAX_PORTS: usize = 1024;
/// Connections or flows of one port at a time. Further connections are reset; datagrams of further
/// flows are dropped.
pub(crate) const MAX_OF_PORT: usize = 256;
/// Connections of each port that are served although other ports have many.
const RESERVED: usize = 4;
/// Reserved connections of all ports at a time.
const MAX_RESERVED: usize = MAX_PORTS * RESERVED;
/// Connections of all ports at a time, without the reserved ones.
const MAX_OF_ALL: usize = 1024;
// The difference is for connections whose end the machine has not noticed yet.
const _: () = assert!(MAX_OF_ALL + MAX_RESERVED + 2048 < MAX_RELAY_CONNECTIONS);

/// Where connections go: makes a stream to a port of the machine's loopback.
pub(crate) type Connect = Arc<dyn Fn(u16) -> io::Result<TcpStream> + Send + Sync>;

/// How many places are taken.
#[derive(Debug, Default)]
pub(crate) struct Room(Mutex<usize>);

/// Places of the connections and flows of all ports. They last as long as the supervisor, because
/// the end of a port or of the daemon does not end connections.
#[derive(Debug, Default)]
pub(crate) struct Rooms {
    /// Of the reserved connections, at most [`MAX_RESERVED`].
    reserved: Arc<Room>,
    /// Of all others, at most [`MAX_OF_ALL`].
    shared: Arc<Room>,
    /// Bytes of datagrams that wait to be sent to the machine.
    pub(crate) waiting: Arc<AtomicUsize>,
}

/// A connection's place among those of its port and of all ports.
#[derive(Debug)]
pub(crate) struct Place {
    of_all: Option<Arc<Room>>,
    of_port: Arc<Room>,
}

impl Room {
    fn take(&self, most: usize) -> Option<usize> {
        let mut taken = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        (*taken < most).then(|| {
            *taken += 1;
            *taken
        })
    }

    fn give_back(&self) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) -= 1;
    }
}

impl Place {
    /// A place, if there is one. The first [`RESERVED`] of a port are reserved ones.
    pub(crate) fn take(rooms: &Rooms, of_port: &Arc<Room>) -> Option<Self> {
        let number = of_port.take(MAX_OF_PORT)?;
        let mut place = Self { of_all: None, of_port: Arc::clone(of_port) };
        let (room, most) = if number > RESERVED {
            (&rooms.shared, MAX_OF_ALL)
        } else {
            (&rooms.reserved, MAX_RESERVED)
        };
        room.take(most)?;
        place.of_all = Some(Arc::clone(room));
        Some(place)
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.of_port.give_back();
        if let Some(of_all) = &self.of_all {
            of_all.give_back();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_port_has_places_that_the_others_cannot_take() {
        let all = Rooms::default();
        let ports: Vec<Arc<Room>> = (0..6).map(|_| Arc::default()).collect();
        let mut held = Vec::new();
        for port in &ports[..5] {
            held.extend((0..MAX_OF_PORT).map_while(|_| Place::take(&all, port)));
        }
        assert_eq!(held.len(), MAX_OF_ALL + 5 * RESERVED);
        let last: Vec<Place> =
            (0..MAX_OF_PORT).map_while(|_| Place::take(&all, &ports[5])).collect();
        assert_eq!(last.len(), RESERVED);
        drop((held, last));
        assert_eq!(*all.shared.0.lock().unwrap(), 0);
        assert_eq!(*all.reserved.0.lock().unwrap(), 0);
        assert!(ports.iter().all(|port| *port.0.lock().unwrap() == 0));
    }
}
