//! The VMM with a bare-metal guest, on any `/dev/kvm`: boot, exits, pause, save, load, clones.
#![expect(clippy::unwrap_used, reason = "tests")]

mod balloon;
mod clones;
mod confined;
mod cpu;
mod ends;
#[path = "../harness/mod.rs"]
mod harness;
mod room;
mod running;
mod sizes;
mod warm;
