//! The name service for VMs (RFC 1035): a VM resolves itself and the VMs of its network by name and
//! by id, below `dayfly.internal`, and in reverse by address. All other questions go to the host's
//! servers.
//!
//! | module | what it does |
//! |---|---|
//! | [`message`] | reads a guest's question, writes an answer |
//! | [`answer`] | reads a server's answer, writes it again without unreachable addresses |
//! | [`addresses`] | defines which addresses those are |
//! | [`index`] | maps names and addresses to VMs |
//! | [`policy`] | decides how a question is handled; no I/O |
//! | [`limits`] | bounds what one VM may ask |
//! | [`forward`] | asks the host's servers |
//! | [`sockets`] | makes a queue for each guest, up to the number of sockets |
//! | [`server`] | runs the tasks |
//! | [`timed`] | measures how long the tasks occupy an async worker |
//!
//! Questions come from guests and answers from the network. The work of reading either is bounded
//! by the message's length. No byte of either is passed on without being parsed.

pub mod addresses;
pub mod answer;
pub mod forward;
pub mod index;
pub mod limits;
pub mod message;
pub mod policy;
pub mod server;
pub mod sockets;
pub mod timed;

pub use index::{Guest, Index, Policy, Registration};
pub use policy::Scope;
pub use server::{Opener, Serving, serve};
pub use sockets::{Sockets, bind};
pub use timed::Stats;

use crate::base::prefix::Prefix;
use crate::net::network::Network;
pub use dayfly_api::agent::DOMAIN;
use dayfly_units::error::chain;
use std::io;
use std::sync::Arc;
use tokio::sync::watch;

/// Starts the service at this network's gateway address; it runs until the result is dropped. Call
/// it within a tokio runtime.
pub(super) fn start(network: &Arc<Network>) -> io::Result<Serving> {
    let at = server::place(network.prefix);
    let sockets = network.vm_netns.run(move || bind(at)).map_err(io::Error::other)??;
    let (sender, servers) = watch::channel(Arc::from([]));
    tokio::spawn(forward::follow_the_host(sender));
    let scope = Scope { prefix: network.prefix, reach: network.reach.clone() };
    let same = network.clone();
    let opener: Opener =
        Arc::new(move |guest, found| same.vm_netns.open(guest, found).map_err(|e| chain(&e)));
    serve(network.names.clone(), scope, servers, sockets, Some(opener))
}

#[cfg(test)]
mod egress_tests;
#[cfg(test)]
mod message_tests;
#[cfg(test)]
pub(super) mod server_world;
