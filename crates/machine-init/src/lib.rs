//! # machine-init
//!
//! The program `dayfly-machine-init` is PID 1 of a machine (`dayfly-machine`): a Linux host with
//! KVM under QEMU. This library is what the program and the host's side have in common: the
//! protocol, the token of a start, limits for connections, and the interfaces at both ends.
//!
//! The program is static and small, because it lies in the machine's initramfs. So this crate knows
//! nothing about QEMU, kernels or the host's files.

mod net;
mod ports;
mod proto;
mod slots;
mod streams;
mod token;

pub use net::{InterfaceMover, interface_of, open_tap, set_address, set_gateway, set_up};
pub use ports::{
    MAX_DATAGRAM_BYTES, MAX_PORT_LINE_BYTES, MAX_PORTS_CONNECTIONS, MAX_RELAY_CONNECTIONS,
    PORTS_PORT, PORTS_SOCKET, PortAnswer, PortOrder, PortRefusal, RELAY_PORT, RefusalKind,
    read_datagram,
};
pub use proto::{
    API_PORT, CONTROL_MAC, CONTROL_PORT_NAME, DAEMON_SOCKET, DaemonConfig, DaemonStatus, EXEC_PORT,
    ExecSpec, Exit, GUEST_ADDRESS, GUEST_CONFIG_PATH, GUEST_MASK, GuestConfig, GuestShare,
    GuestStatus, Kind, LOG_PORT_NAME, MAX_API_CONNECTIONS, MAX_EXEC_CONNECTIONS, MAX_FRAME_BYTES,
    Request, Root, TOKEN_BYTES, TOKEN_DEADLINE, UPLINK_ADDRESS, UPLINK_DNS, UPLINK_GATEWAY,
    UPLINK_MAC, UPLINK_MASK, WindowSize, read_frame, write_frame,
};
pub use slots::{Slot, Slots};
pub use streams::{join_streams, timespec, widen};
pub use token::Token;
