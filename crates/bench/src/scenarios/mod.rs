//! The scenarios, each a module with its options and a function `run`.

pub mod birth;
pub mod chain;
pub mod closer;
pub mod death;
pub mod dns;
pub mod faults;
pub mod first;
pub mod fork;
pub mod io;
pub mod jobs;
pub mod linux;
pub mod numa;
pub mod restore;
pub mod scale;
pub mod soak;
pub mod store;
pub mod trace;
