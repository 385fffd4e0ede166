//! A VM as plain data, and the decisions about it that need no I/O.

pub mod deadline;
pub mod disk;
pub mod events;
pub mod exit;
pub mod facts;
pub mod filter;
pub mod live;
pub mod memory_time;
pub mod program;
pub mod request_key;
pub mod state;
pub mod step;
pub mod vm_slot;
pub mod volumes;
