//! # api
//!
//! The room for every wire type: the frames that go to the agent in a guest ([`agent`]), the HTTP API of the daemon
//! ([`types`]; with its OpenAPI schemas under the feature `openapi`), and its typed client (feature `client`).
//!
//! What may not enter: logic. A type here says what goes over a wire, its units and its caps.

pub mod agent;
#[cfg(feature = "client")]
pub mod client;
pub mod types;
