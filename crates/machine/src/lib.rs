//! # machine
//!
//! The room for a Linux host with KVM, on computers whose own KVM cannot run a stock kernel: QEMU emulates a CPU with
//! SVM and nested paging, Linux runs on it, and in that Linux the same `dayflyd` that would run natively. The caller
//! reaches the daemon through a unix socket, as if it were local.
//!
//! What may not enter: anything about images, snapshots, VMs or HTTP. The machine forwards bytes and runs programs.
//!
//! ```text
//! caller ─▶ api.sock, exec.sock ─▶ supervisor ─▶ private network ─▶ dayfly-machine-init ─▶ dayflyd, programs
//!                                      └─ parent of QEMU and virtiofsd, init of their pid namespace
//!
//! none ──init──▶ stopped ──start──▶ starting ──ready──▶ running ──stop──▶ stopped ──rm──▶ none
//!                   ▲                   └────any end────────┴──▶ crashed ──start──▶ starting
//! ```

mod config;
mod cpio;
mod elf;
mod errors;
mod exec;
mod files;
mod initramfs;
mod kernel;
mod layout;
mod leaks;
mod lock;
mod machine;
mod net;
mod probe;
mod proto;
mod qemu;
mod status;
mod streams;
mod supervisor;

pub use config::InitOptions;
pub use errors::{InitError, StartError, StopError};
pub use exec::{ExecError, Input, Output, RawTerminal, copy_in, window_size};
pub use files::FileError;
pub use initramfs::BuildError;
pub use kernel::KernelError;
pub use leaks::{Leak, leaks};
pub use machine::{Machine, Reexec, Started, Stopped};
pub use probe::{Probe, probe};
pub use proto::{DaemonStatus, ExecSpec, Exit, GuestStatus, Root, WindowSize};
pub use status::{State, Status};
pub use supervisor::supervisor_main;

/// What the machine's own programs need from this room.
pub mod guest {
    pub use crate::net::{set_address, set_up};
    pub use crate::proto::{
        API_PORT, CONTROL_PORT_NAME, DAEMON_SOCKET, DaemonConfig, DaemonStatus, EXEC_PORT, ExecSpec, Exit,
        GUEST_CONFIG_PATH, GuestConfig, GuestShare, GuestStatus, Kind, LOG_PORT_NAME, MAX_FRAME_BYTES,
        Request, Root, WindowSize, read_frame, write_frame,
    };
    pub use crate::qemu::{GUEST_ADDRESS, GUEST_MASK};
    pub use crate::streams::{join_streams, widen};
}
