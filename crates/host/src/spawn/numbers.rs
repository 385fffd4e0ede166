//! The descriptor numbers of a new process.

/// The lowest descriptor number that [`super::Spawn::fds`] may ask for; 0, 1 and 2 are stdin,
/// stdout and stderr.
pub const FIRST_FD: i32 = 3;
/// One more than the highest descriptor number that [`super::Spawn::fds`] may ask for.
pub const END_FD: i32 = 512;
