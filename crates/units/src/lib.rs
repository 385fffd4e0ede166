//! # units
//!
//! Small types that every other crate uses: byte counts, pages, identifiers, names, the [`sealed`]
//! header that precedes everything dayfly writes and later decodes, and [`text`] that is safe to
//! print. Also the content of [`sparse`] files with its [`Digest`], which clients and stores must
//! compute alike; the hash [`tree`] that proves a part of such a file; the figures of a store and
//! the configuration of an image; the [`CpuModel`] of a VM, its [`egress`] policy and its
//! [`ports`]; the causes of an [`error`] in one line; the known word that a misspelt one means
//! ([`suggest`]); and locks ([`sync`]). Tests end a process at a [`failpoint`], and fail if what
//! they need is required and absent ([`needs`]).
//!
//! This crate contains no policy and knows nothing about KVM, HTTP or file locations. It does no
//! I/O except on files that the caller opened ([`sparse`]), and on sources for a test
//! ([`failpoint::in_sources`]).

mod cpu_model;
mod digest;
pub mod egress;
pub mod error;
pub mod failpoint;
mod ids;
pub mod image_config;
pub mod needs;
mod pages;
pub mod ports;
pub mod regions;
pub mod sealed;
pub mod sparse;
mod stored;
pub mod suggest;
pub mod sync;
pub mod text;
pub mod tree;

pub use cpu_model::{CpuModel, CpuModelError};
pub use digest::{Digest, DigestError};
pub use egress::{Egress, EgressError};
pub use ids::{IdError, Name, NameError, VmId, VmName, VmNameError};
pub use image_config::{ImageConfig, MODULES_SOURCE};
pub use pages::{Bytes, PAGE_SIZE, ParseBytesError};
pub use ports::{GuestPort, PortProtocol};
pub use stored::{Counted, MemoryKinds, Pages, StoreStats, Unreadable};
