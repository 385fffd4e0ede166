//! Functions for the crate `fuzz`: what PID 1 reads of its guest.

use crate::exec::Programs;
use dayfly_api::agent::Identity;
use rustix::io::Errno;
use std::os::unix::net::UnixStream;

/// The text of /etc/hosts in which `new` names this machine instead of `old`.
#[must_use]
pub fn hosts(text: &str, old: Option<&str>, new: &str) -> String {
    crate::identity::files::hosts(text, old, new)
}

/// Whether the host may give the guest this identity.
#[must_use]
pub fn is_valid(identity: &Identity) -> bool {
    crate::identity::is_valid(identity)
}

/// Reads the request line of a program of the guest, where the host does not listen.
///
/// # Errors
/// The text that the program gets.
pub fn local(stream: &UnixStream, programs: &Programs) -> Result<Option<String>, String> {
    crate::local::answer(stream, programs, || Err(Errno::CONNREFUSED))
}
