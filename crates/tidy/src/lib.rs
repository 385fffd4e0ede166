//! Checks of the source tree that the compiler and clippy do not make.
//!
//! Each rule is a file in [`rules`] and explains itself there. `lists.toml` and `forbidden.toml`
//! hold what the rules exempt and the words that are not used. [`baseline`] is the ratchet for
//! what broke a rule before it was made. The test `tests/tidy.rs` runs all of them.

pub mod baseline;
pub mod check;
pub mod finding;
pub mod lines;
pub mod lists;
pub mod markdown;
pub mod prose;
pub mod rules;
pub mod rust;
pub mod tree;

use std::path::PathBuf;

/// Root of the workspace that this crate was built in.
#[must_use]
pub fn root() -> PathBuf {
    PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../.."))
}
