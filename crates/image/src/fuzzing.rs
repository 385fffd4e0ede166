//! Functions for the crate `fuzz`: images of others, and the script for debugfs.

pub use crate::disk::fuzzing::{Unpacked, digest, docker, document, layer, layout, script_line};
pub use crate::save::fuzzing::small_disk;
