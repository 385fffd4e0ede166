//! Verification of files before their first use, and the search for damage.

pub(crate) mod scrub;
pub(crate) mod verify;
