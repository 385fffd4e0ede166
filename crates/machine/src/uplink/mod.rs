//! The uplink: how the machine and its VMs reach what the user's host reaches.
//!
//! ```text
//! machine ─ virtio-net ─ QEMU ═ frames ═ supervisor ═ frames ═ passt ─ sockets ─▶ host's network
//!                                         `filter`             or QEMU's user network
//! ```
//!
//! [`program`]s turn the machine's packets into connections of an ordinary process in the host's
//! network namespace, so the uplink needs no rights. The supervisor relays each frame between
//! QEMU and the program. So the filter also holds against a machine that was taken over, a program
//! that ends can be started again, and QEMU never sees the host's network namespace.
//!
//! All threads here start before the supervisor leaves the host's network namespace.

mod filter;
mod frames;
mod host;
mod program;
mod relay;
mod state;
#[cfg(test)]
mod tests;

pub(crate) use filter::{Range, allows};
pub(crate) use frames::{LENGTH_BYTES, read_frame};
pub(crate) use program::Kind;
pub(crate) use relay::start;
pub use state::Uplink;
