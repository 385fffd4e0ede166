//! The protocol between the daemon and a VMM process, over the VMM's control socket.
//!
//! A message is a 4-byte little-endian length, at most [`MAX_MESSAGE_BYTES`], and as many bytes of
//! JSON. Descriptors travel as `SCM_RIGHTS` with the first byte of a message. Each [`Command`] gets
//! one [`Answer`]. A connection may carry any number of commands, and several connections may be
//! open.

pub mod client;
mod message;
pub mod server;
pub mod wire;

pub use client::{Client, ClientError};
pub use message::{
    Answer, Command, ExitReason, ExitRecord, Frozen, MAX_MESSAGE_BYTES, Precopied, Status,
};
