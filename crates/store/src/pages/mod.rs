//! # pages
//!
//! The bodies of pages: for each tenant one namespace of unique 4 KiB pages, stored by hash in
//! compressed packs. RAM and disk blocks share a namespace.
//!
//! A file `pages/<tenant>/<pack>` is a pack: groups of compressed pages, and a sealed footer that
//! names them ([`pack`]).
//!
//! Prebaked uVMs, section III-C, shows that raw memory deduplicates and a hypervisor's own format
//! does not. Its section IV-D keeps one compressed, deduplicated volume for all snapshots of a
//! host.
//!
//! Here the unit is the page; section V-C shows its cost in table entries (see [`index`]). Each
//! tenant has its own volume, because deduplication across tenants would reveal to one tenant what
//! another one stores.
//!
//! ```text
//! put: lease ─▶ look up ─▶ new pages, in the given order ─▶ packs in staging/
//!   packs in staging/ ─▶ rename, fsync ─▶ index
//! gc: tables + leases ─▶ live pages
//!   packs without live pages:  index ─▶ retire
//!   packs with few live pages: copy these into new packs ─▶ index ─▶ retire
//! ```
//!
//! A pack never changes. It may have been written by a process that is not trusted ([`work`]), so a
//! copy of a page counts only once its bytes were hashed ([`sound`], [`copies`]).
//!
//! A pack that nothing references is harmless: the next open finds its pages, and the next gc
//! removes them.

mod copies;
pub(crate) mod error;
mod frame;
pub(crate) mod gc;
pub(crate) mod index;
mod lease;
pub(crate) mod pack;
pub(crate) mod put;
pub(crate) mod quarantine;
pub(crate) mod read;
pub(crate) mod record;
pub(crate) mod report;
mod sound;
pub(crate) mod space;
mod sums;
pub(crate) mod tenant;
pub(crate) mod victims;
mod work;
mod writer;

pub use error::{PagesError, WorkError};
pub use lease::Lease;
pub use put::{Put, PutStats};
pub use read::Group;
pub use tenant::Tenant;
pub use work::PackWork;

pub(crate) use writer::write_pack;

#[cfg(test)]
mod tests;
