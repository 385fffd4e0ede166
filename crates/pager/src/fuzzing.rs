//! Functions for the crate `fuzz`: the plan that the daemon sends.

use rustix::fd::OwnedFd;

/// Whether the plan that waits in `socket` is accepted, and how many frames come first.
#[must_use]
pub fn begin(socket: &OwnedFd) -> Option<usize> {
    crate::begin::begin(socket).ok().flatten().map(|plan| plan.first.len())
}
