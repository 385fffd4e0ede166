//! # archive
//!
//! Reads and writes tar archives. The archives may be hostile. Only this crate implements the
//! format's rules.
//!
//! | module | concern |
//! |---|---|
//! | [`mod@reader`] | an archive as a sequence of entries; each length is checked before use |
//! | [`mod@writer`] | entries as a POSIX (pax) archive |
//! | [`path`] | names of entries: relative, without `..` |
//! | [`pack`] | a file or a folder of this host into an archive |
//! | [`unpack`] | an archive into a folder of this host: staged, then moved, or nothing |
//! | [`xattr`] | which extended attributes are copied, and how they are read and set |
//!
//! Formats read: ustar, GNU (long names, base-256 numbers, sparse files), pax (`x` records; sparse
//! formats 0.0, 0.1 and 1.0). Format written: pax, with sparse files in format 1.0. Sources:
//! POSIX.1-2017 `pax`, the GNU tar manual ("Tar Internals"), tar(5) of libarchive.
//!
//! The code is synchronous, over [`std::io::Read`] and [`std::io::Write`]. The crate knows nothing
//! about virtual machines, HTTP or images.

mod block;
mod error;
mod extension;
mod folder;
mod header;
mod hidden;
mod merge;
pub mod pack;
pub mod path;
mod pax;
mod place;
mod policy;
pub mod reader;
mod sparse;
pub mod unpack;
pub mod writer;
pub mod xattr;

#[cfg(test)]
mod tests;

pub use error::{ArchiveError, Refusal, refuse, show};
pub use header::Kind;
pub use path::EntryPath;
pub use reader::{CopyOptions, Entry, Limits, Reader};
pub use writer::{Head, Writer};
