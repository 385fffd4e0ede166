//! Names of modules, and the lists in a modules' folder.

use super::body::packed;
use crate::error::BootError;
use std::path::Path;

/// Largest `modules.builtin` or `modules.dep` in bytes.
pub(super) const MAX_LIST_BYTES: u64 = 16 << 20;

/// A module's name in the kernel's spelling: no folder, no suffix, `_` in place of `-`.
pub(super) fn name_of(path: &str) -> String {
    let file = path.rsplit('/').next().unwrap_or(path);
    let stem = file.split_once(".ko").map_or(file, |(stem, _)| stem);
    stem.replace('-', "_")
}

/// The text of a list in the modules' folder.
pub(super) fn list(folder: &Path, name: &str) -> Result<String, BootError> {
    let bytes = packed(folder, name, MAX_LIST_BYTES)?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_compared_as_the_kernel_does() {
        assert_eq!(
            name_of("kernel/drivers/char/hw_random/virtio-rng.ko.xz"),
            name_of("virtio_rng")
        );
    }
}
