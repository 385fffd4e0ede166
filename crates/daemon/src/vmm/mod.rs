//! Drives VMM processes: starts them, connects to them and to their guests' agents, and keeps the
//! pool of warm VMMs.

pub(crate) mod again;
pub mod agent_link;
pub mod console;
pub mod control_link;
pub(crate) mod demand;
pub mod dial;
pub mod guest_socket;
pub mod identity;
pub mod launch;
pub mod link;
pub mod pool;
pub(crate) mod requested;
pub mod run_dir;
pub mod sizes;
pub mod source;
pub mod zygotes;
