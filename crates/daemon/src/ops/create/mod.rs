//! Creates a VM: from a request to a VM whose agent has its identity.
//!
//! ```text
//!  Order ─▶ source verified, open, pinned ─▶ id, name, slot reserved ─▶ VMM started
//!            ─▶ (boot: Ready) ─▶ Identity ─▶ VmGuard
//! ```
//!
//! Dropping a [`VmGuard`] removes its VM, because the caller that waits for it may be cancelled at
//! any moment.

mod again;
mod attempt;
mod guard;
#[cfg(test)]
mod harness;
mod last_lines;
mod order;
mod start;

pub use again::{restart, start as start_again};
pub use attempt::create;
pub use guard::{Next, VmGuard};
pub use order::{Order, Origin};

#[cfg(test)]
#[path = "again_tests.rs"]
mod starting_again;

#[cfg(test)]
#[path = "create_tests.rs"]
mod failing;

#[cfg(test)]
#[path = "egress_tests.rs"]
mod egress;

#[cfg(test)]
#[path = "expiry_tests.rs"]
mod expiring;

#[cfg(test)]
#[path = "fork_tests.rs"]
mod forking;

#[cfg(test)]
#[path = "garbage_tests.rs"]
mod garbage;

#[cfg(test)]
#[path = "gone_tests.rs"]
mod gone;

#[cfg(test)]
#[path = "hostile_tests.rs"]
mod hostile;

#[cfg(test)]
#[path = "late_tests.rs"]
mod late;

#[cfg(test)]
#[path = "sizes_tests.rs"]
mod sizes;

#[cfg(test)]
#[path = "takeover_tests.rs"]
mod taken_over;

#[cfg(test)]
#[path = "stopped_tests.rs"]
mod stopped;
