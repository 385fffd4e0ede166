//! # units
//!
//! The room for the small words every other room speaks: byte counts, pages, identifiers, names, and the
//! [`sealed`] header that precedes everything dayfly writes and later decodes.
//!
//! What may not enter: I/O, policy, anything that knows about KVM, HTTP or a file's place on disk.

mod ids;
mod pages;
pub mod regions;
pub mod sealed;

pub use ids::{IdError, Name, NameError, VmId};
pub use pages::{Bytes, PAGE_SIZE, ParseBytesError};
