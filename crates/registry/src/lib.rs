//! # registry
//!
//! Pulls manifests and blobs from OCI registries (distribution-spec 1.1, "Pull"). The CLI and the
//! crate `image` call it on the user's host; the daemon has no part in it.
//!
//! - [`Reference`]: names of images, by docker's grammar
//! - [`Config`]: mirrors and insecure registries; [`DockerConfig`]: credentials
//! - [`Registry`]: manifests and blobs, with authentication, redirects and retries
//! - [`BlobCache`]: blobs on disk, verified, shared by concurrent pulls
//!
//! ```text
//! Registry ──▶ endpoint (mirrors first) ──▶ 401? token or Basic ──▶ redirects ──▶ body
//!                  │ failed: the next                                    digest ──▶ BlobCache
//! ```
//!
//! A registry is hostile until digests match: each answer has a bound in bytes, each wait a bound
//! in silence, redirects and retries a bound in number. Credentials go to the registry that they
//! are for and to its token server, never to the target of a redirect. This crate knows neither
//! layers nor platforms nor the daemon.

mod auth;
mod blobs;
mod challenge;
mod client;
mod config;
mod credentials;
mod digest;
mod download;
mod error;
#[doc(hidden)]
pub mod fuzzing;
mod reference;
mod requests;
mod retry;
mod secret;
#[doc(hidden)]
pub mod testing;
mod text;
mod tls;
mod transport;
mod url;

#[cfg(test)]
mod tests;

pub use blobs::BlobCache;
pub use client::{Manifest, Registry, Settings};
pub use config::{Config, ConfigError};
pub use credentials::{CredentialsError, DockerConfig};
pub use digest::{Blob, BlobDigest, DigestError};
pub use error::RegistryError;
pub use reference::{Reference, ReferenceError};
pub use retry::Policy;
pub use transport::Timeouts;
