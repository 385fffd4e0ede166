//! The protocol between the daemon and a VMM process, over the VMM's control socket.
//!
//! A message is a 4-byte little-endian length, at most [`MAX_MESSAGE_BYTES`], and as many bytes of
//! JSON. Descriptors travel as `SCM_RIGHTS` with the first byte of a message. Each [`Command`] gets
//! one [`Answer`]. A connection may carry any number of commands, and several connections may be
//! open.
//!
//! A VMM outlives upgrades and downgrades of the daemon, so both sides meet other versions. The VMM
//! reports its version in [`Status::protocol`]:
//!
//! | version | what it adds |
//! |---|---|
//! | 1 | |
//! | 2 | `Status` reports `protocol`, `layers` and `busy`, and is answered during `Precopy` |
//! | 3 | a VM whose disk has no space on the host stops; `Status` reports `no_space` |
//! | 4 | `Status` reports `traffic` |
//! | 5 | `Status` reports `disk_reads` |
//! | 6 | `Balloon`; `Status` reports `max_vcpus`; a warm VMM restores a VM with fewer vCPUs |
//!
//! Both sides ignore fields that they do not know. A field that is missing has the value that fits
//! the version before the field. A VMM refuses a command that it does not know, without any effect.

pub mod client;
mod message;
pub mod server;
pub mod wire;

pub use crate::disk::{FileId, NoSpace};
pub use crate::virtio::{BalloonStatus, GuestMemory};
pub use client::{Client, ClientError};
pub use message::{
    Answer, Busy, Command, ExitReason, ExitRecord, Frozen, MAX_MESSAGE_BYTES, PROTOCOL, Precopied,
    Status,
};
