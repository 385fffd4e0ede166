//! # api
//!
//! All wire types: the frames between host and agent ([`agent`]), and the HTTP API of the daemon
//! ([`types`]). The feature `openapi` adds the OpenAPI schemas, the feature `client` a typed
//! client.
//!
//! This crate holds no logic. A type defines what goes over a wire, with its units and its limits.

pub mod agent;
#[cfg(feature = "client")]
pub mod client;
pub mod types;
