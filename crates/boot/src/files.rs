//! Reads files that may be longer than they should be.

use crate::error::{BootError, on};
use std::fs::File;
use std::io::Read;
use std::path::Path;

/// Largest kernel, program or initramfs in bytes, packed or unpacked.
pub const MAX_KERNEL_BYTES: u64 = 512 << 20;

/// Reads a whole file of at most `cap` bytes.
///
/// # Errors
/// [`BootError::Io`], and [`BootError::Tree`] for a longer file.
pub fn read_capped(path: &Path, cap: u64) -> Result<Vec<u8>, BootError> {
    let file = File::open(path).map_err(on("open", path))?;
    let mut bytes = Vec::new();
    file.take(cap + 1).read_to_end(&mut bytes).map_err(on("read", path))?;
    if bytes.len() as u64 > cap {
        return Err(BootError::Tree {
            path: path.to_owned(),
            expected: format!("a file of at most {cap} bytes"),
            got: "more".to_owned(),
        });
    }
    Ok(bytes)
}
