//! Stock Linux guests: where they run, their images, and what is done if the emulation loses one.
//!
//! Where KVM cannot run Linux, guests run in a machine (`dayfly-machine`) of the benchmark's own,
//! so that its store has no other snapshots.

mod guests;
mod images;
mod losses;
pub mod machine;
mod place;
pub mod scripts;
mod state;

pub use guests::{LABEL, remove_vms, reported};
pub use images::Set;
pub use losses::Losses;
pub use place::{Options, Stock};
