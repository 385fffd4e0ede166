//! Functions for the crate `fuzz`: archives that a VM sends.

use anyhow::Result;
use std::ffi::OsStr;
use std::io::Read;
use std::path::Path;

/// Unpacks a VM's archive for a request of `name` into the folder `destination`.
///
/// # Errors
/// The archive is refused.
pub fn unpack(stream: impl Read, name: &str, destination: &Path) -> Result<u64> {
    crate::tarball::unpack(stream, Some(OsStr::new(name)), destination, false, false)
}
