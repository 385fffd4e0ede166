//! The network of VMs: addresses, taps, published ports and names.
//!
//! ```text
//!  guest ── virtio-net ── tap ┐                            ┌─ the host's own network
//!  guest ── virtio-net ── tap ┼─ VM network ───── uplink ──┤   (masqueraded; published
//!  guest ── virtio-net ── tap ┘  namespace                 └   ports: one relay per VM)
//!                                (routes, names)
//! ```
//!
//! This module decides; [`dayfly_host::net`] carries the decisions out. It handles no packets,
//! except for the questions that [`names`] answers.
//!
//! Address and MAC belong to a tap, and a VM has those of its tap. So creating a VM changes nothing
//! on the host: the VM takes a waiting tap, and the tap waits again when the VM has ended. The tap
//! that has waited longest is taken first, so that packets for an address's last owner have stopped
//! before its next use.
//!
//! A tap stays in the namespace without a process (TUNSETPERSIST). The daemon gives its description
//! of the tap to the VMM and keeps none. After the end of the VM it opens the tap anew.
//!
//! On a host without the requirements (root, tun, nf_tables) VMs have no network, and a request for
//! one gets the reason.

mod attachment;
mod bound;
mod bounds;
#[cfg(test)]
mod egress_tests;
mod error;
#[cfg(test)]
mod keep_tests;
pub mod keeper;
mod lease;
pub mod line;
mod mac;
pub mod names;
mod network;
mod networks;
mod publish;
pub mod publisher;
pub mod relay;
pub mod streams;
#[cfg(test)]
mod tests;

pub use attachment::Attachment;
pub use error::NetError;
pub use lease::{EgressControl, Lease};
pub use mac::{mac, mac_text};
pub use networks::Networks;
pub use publish::{MAX_PUBLISHED, Published, check_many};
