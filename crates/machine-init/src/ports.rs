//! Published ports of VMs in the machine: what the machine's daemon and the supervisor say to each
//! other.
//!
//! ```text
//! client ─▶ port of the user's host, supervisor ─▶ RELAY_PORT ─▶ port of the machine's loopback,
//!                                                                daemon ─▶ port of the VM
//! ```
//! The supervisor connects to [`PORTS_PORT`], which leads to the daemon's socket [`PORTS_SOCKET`].
//! The daemon sends [`PortOrder`]s, the supervisor a [`PortAnswer`] to each `Bind`. Each is one
//! line of JSON. When the connection ends, the supervisor frees all ports. On a new connection the
//! daemon sends all orders again that hold.
//!
//! A connection to [`RELAY_PORT`] begins with the port of the machine's loopback, two bytes, most
//! significant first. For a UDP port there is a connection for each flow, which is all datagrams of
//! one client's address and port. It carries each datagram behind its length, two bytes, most
//! significant first.

use serde::{Deserialize, Serialize};
use std::io::{self, Read};
use std::net::SocketAddr;

/// TCP port in the machine that leads to [`PORTS_SOCKET`].
pub const PORTS_PORT: u16 = 1026;
/// TCP port in the machine for connections of clients.
pub const RELAY_PORT: u16 = 1027;
/// Path in the machine of the daemon's socket for the supervisor.
pub const PORTS_SOCKET: &str = "/run/dayfly/ports.sock";
/// The longest line in bytes.
pub const MAX_PORT_LINE_BYTES: usize = 4096;
/// Connections to [`PORTS_PORT`] that are served at a time.
pub const MAX_PORTS_CONNECTIONS: usize = 4;
/// Connections to [`RELAY_PORT`] that are served at a time. The supervisor makes at most 5,120:
/// 4 for each of 1,024 ports, and 1,024 others. It checks this number when it is compiled.
pub const MAX_RELAY_CONNECTIONS: usize = 8192;

/// The longest datagram in bytes that a length of two bytes can describe.
pub const MAX_DATAGRAM_BYTES: usize = u16::MAX as usize;

/// Reads a datagram of a flow into `buffer`, and returns its length; `None` at the flow's end.
///
/// # Errors
/// The stream's errors; `UnexpectedEof` if it ends within a datagram; `InvalidData` if the buffer
/// is shorter than the datagram.
pub fn read_datagram(from: &mut impl Read, buffer: &mut [u8]) -> io::Result<Option<usize>> {
    let mut length = [0; 2];
    match from.read(&mut length[..1])? {
        0 => return Ok(None),
        _ => from.read_exact(&mut length[1..])?,
    }
    let length = usize::from(u16::from_be_bytes(length));
    let datagram = buffer.get_mut(..length).ok_or(io::ErrorKind::InvalidData)?;
    from.read_exact(datagram)?;
    Ok(Some(length))
}

/// An order of the daemon.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PortOrder {
    /// Listen, and forward connections.
    Bind {
        /// Number of the order, unique for this daemon.
        id: u64,
        /// Where on the user's host. Port 0 is one that the host chooses.
        address: SocketAddr,
        /// Port of the machine's loopback.
        to: u16,
        /// Whether the port is one of UDP.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        udp: bool,
    },
    /// Undo an order.
    Free {
        /// Number of the order.
        id: u64,
    },
}

/// The answer to [`PortOrder::Bind`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PortAnswer {
    /// Number of the order.
    pub id: u64,
    /// Why the user's host does not listen there, if it does not.
    pub refused: Option<PortRefusal>,
    /// The port on which the host listens. A supervisor of an earlier version does not say it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub port: Option<u16>,
}

/// Why a port is not published.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PortRefusal {
    /// The kind of the error.
    pub kind: RefusalKind,
    /// The error of the user's host.
    pub why: String,
}

/// The kinds of errors of [`PortRefusal`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RefusalKind {
    /// Another program has the port.
    Taken,
    /// The user may not have the port, or the host has no such address.
    Invalid,
    /// Another error.
    Other,
}
