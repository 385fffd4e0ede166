//! A page of the template that was present, with other content, before the pager put it there.
//!
//! A process that maps the memfd beside its registered memory makes a page of zeroes by reading a
//! missing one. A VMM's filter does not allow that; this is the second barrier. Which VMM did it is
//! unknown, and it is no reason to end the others: the page is overwritten in place, so every later
//! reader gets the right content. A clone that has the page mapped may have read zeroes, or have
//! copied them into a private page. It is killed with that cause, also if the kernel mapped the
//! page because of a fault beside it (fault-around): whether it was read is unknown, and a clone
//! must not run on with wrong memory. All other clones get a private copy of the right page, which
//! is how the kernel reports that they had none.

use crate::clones::{Clone, Clones};
use std::collections::HashSet;

/// Calls `overwrite`, which puts `page` in place of frame `frame`, and kills the clones that may
/// have read the page that was there.
pub fn replace(clones: &Clones, frame: u32, page: &[u8], overwrite: impl FnOnce()) {
    let before = clones.all();
    before.iter().for_each(|(_, clone)| check(clone, frame, page));
    overwrite();
    let checked: HashSet<u64> = before.iter().map(|(id, _)| *id).collect();
    let arrived = clones.all().into_iter().filter(|(id, _)| !checked.contains(id));
    arrived.for_each(|(_, clone)| check(&clone, frame, page));
}

fn check(clone: &Clone, frame: u32, page: &[u8]) {
    if clone.is_killed() {
        return;
    }
    for address in clone.addresses(frame) {
        match clone.uffd().put(address, page) {
            Ok(true) => {}
            // It has ended, or has other memory there: a part of its RAM from another file.
            Err(e) if matches!(e.raw_os_error(), Some(libc::ESRCH | libc::ENOENT)) => {}
            Ok(false) => clone.kill(&format!(
                "it may have read zeroes in place of frame {frame}, because another process made \
                 that page of its template"
            )),
            Err(e) => clone.kill(&format!("replacing frame {frame}: {e}")),
        }
    }
}
