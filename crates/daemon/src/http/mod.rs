//! The HTTP API, and connections that have left HTTP by an upgrade.

pub mod handed;
pub mod json;
pub mod listing;
pub mod ndjson;
pub mod once;
pub mod ports;
pub mod query;
pub mod relay;
pub mod routes;
pub mod session;
pub mod stream;
pub mod upload;
pub mod websocket;
