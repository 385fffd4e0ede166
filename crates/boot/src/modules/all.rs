//! All files of a modules' folder, for a copy of it.

use super::body::packed;
use super::names::MAX_LIST_BYTES;
use super::needs::walk;
use crate::error::BootError;
use std::collections::BTreeSet;
use std::io::ErrorKind;
use std::path::Path;

/// The folders of `lib/modules/<release>` that hold modules: those of the kernel, and those that an
/// administrator added.
const FOLDERS: [&str; 3] = ["kernel", "extra", "updates"];
/// The lists that come with a kernel. depmod(8) reads them, and makes all others.
const LISTS: [&str; 3] = ["modules.order", "modules.builtin", "modules.builtin.modinfo"];

/// The paths of all modules of `folder` (`lib/modules/<release>`), relative to it, sorted.
///
/// # Errors
/// [`BootError::Io`], and [`BootError::Tree`] for more than 65,536 modules.
pub fn files(folder: &Path) -> Result<BTreeSet<String>, BootError> {
    let mut files = BTreeSet::new();
    for below in FOLDERS {
        walk(folder, below, &mut files)?;
    }
    Ok(files)
}

/// The lists of `folder` that depmod(8) reads, each with its name. A missing one is left out.
///
/// # Errors
/// [`BootError`], also for a list of more than 16 MiB, and for one that is no regular file.
pub fn lists(folder: &Path) -> Result<Vec<(&'static str, Vec<u8>)>, BootError> {
    let list = |name: &'static str| match packed(folder, name, MAX_LIST_BYTES) {
        Err(BootError::Io { source, .. }) if source.kind() == ErrorKind::NotFound => None,
        content => Some(content.map(|bytes| (name, bytes))),
    };
    LISTS.into_iter().filter_map(list).collect()
}
