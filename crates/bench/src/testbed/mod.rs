//! A daemon with its own store and run folder, in temporary folders.

mod births;
mod daemon;
mod floor;
pub mod host;
mod pager;
pub mod processes;
pub mod random;
mod snapshots;

pub use births::{AtOnce, Birth, Births};
pub use daemon::Testbed;
pub use floor::{Floor, Linked};
pub use pager::Served;
pub use snapshots::{Guest, Taken};
