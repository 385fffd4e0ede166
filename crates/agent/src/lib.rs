//! # agent
//!
//! The room for what runs inside a guest: the first process of the initramfs ([`init`]), and the server behind
//! vsock port 1024 ([`server`]) that runs programs ([`exec`]), moves files ([`archive`]) and makes a clone the
//! machine it is to be ([`identity`]).
//!
//! What may not enter: an asynchronous runtime, name-service switches or anything else that loads code or data of
//! the guest's own libc (the binary is static and meets images we do not know), and features that exist only for
//! tests. This is process 1: nothing that arrives over the wire, from a file or from a tar stream may panic.
//!
//! ```text
//! init ──▶ server ──▶ gate (may this be served now?)
//!             │  └──▶ wire (frames in and out)
//!             ├──▶ exec ──▶ spawn, cage, users
//!             ├──▶ archive
//!             ├──▶ identity ──▶ network, hooks, watch (the image's own programs learn of it)
//!             └──▶ stat, power, priority
//! local ──▶ the host: a program in the guest asks for clones of it
//!   └─────▶ watch
//! ```

pub mod archive;
pub mod console;
pub mod exec;
pub mod gate;
pub mod hooks;
pub mod identity;
pub mod init;
pub mod kernel;
pub mod local;
pub mod network;
pub mod power;
pub mod priority;
pub mod server;
pub mod stat;
pub mod vsock;
pub mod watch;
pub mod wire;
