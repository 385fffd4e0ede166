//! Templates: open snapshots, the memory that their clones share, and the pagers that fill this
//! memory. [`cache::TemplateCache`] owns the state.

mod ahead;
pub mod cache;
mod errors;
pub mod fork_point;
pub mod garbage;
pub mod memory_backing;
mod objects;
pub mod open;
pub mod pagers;
pub mod pending;
mod recent;
pub mod shared;
pub mod sharing;
