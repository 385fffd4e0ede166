//! Verification of files before their first use, the search for damage, and
//! its repair.

pub(crate) mod repair;
pub(crate) mod scrub;
pub(crate) mod verify;
