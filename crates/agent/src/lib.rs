//! # agent
//!
//! The code that runs inside a guest: the first process of the initramfs ([`init`]), and the server
//! behind vsock port 1024 ([`server`]). The server runs programs ([`exec`]), moves files
//! ([`archive`]) and gives a clone its identity ([`identity`]).
//!
//! Not allowed here: an asynchronous runtime; name-service switches, or anything else that loads
//! code or data of the guest's libc (the binary is static and runs in unknown images); features
//! that exist only for tests. The agent is PID 1, so nothing that arrives over the wire, from a
//! file or from a tar stream may cause a panic.
//!
//! ```text
//! init ──▶ server ──▶ gate (may this be served now?)
//!             │  └──▶ wire (frames in and out)
//!             ├──▶ exec ──▶ spawn, cage, users, detached (output of detached programs)
//!             ├──▶ archive
//!             ├──▶ volumes (file systems whose server is on the host)
//!             ├──▶ identity ──▶ network, hooks, watch (informs the image's own programs)
//!             └──▶ cpus, stat, power, priority
//! small_file ◀── every module that reads a file of the image by its path
//! local ──▶ the host: a program in the guest requests clones of its machine
//!   └─────▶ watch
//! ```

pub mod archive;
pub mod console;
mod cpus;
pub mod exec;
#[doc(hidden)]
pub mod fuzzing;
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
pub mod small_file;
pub mod stat;
pub mod volumes;
pub mod vsock;
pub mod watch;
pub mod wire;
