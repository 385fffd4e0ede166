//! Volumes: folders of the host that guests use, and the processes that serve their files.
//!
//! ```text
//!  request ─▶ folder of the host, opened with the client's rights ([`folder`])
//!          or named volume, a folder in the state folder         ([`named`])
//!               └─▶ open folder ─▶ `dayfly-volume` with the stream to the guest ([`server`])
//!          or folder of another host, served by a process there  ([`offers`])
//!               └─▶ stream to that process, joined with the one to the guest
//! ```
//!
//! [`crate::ops::volumes`] joins them with VMs.

pub mod folder;
pub mod named;
pub mod offers;
mod remove;
pub mod server;
