//! # machine
//!
//! Runs a Linux host with KVM on computers whose own KVM cannot run a stock kernel. QEMU emulates a
//! CPU with SVM and nested paging. Linux runs on that CPU, and in it the same `dayflyd` as on a
//! native host. The caller reaches the daemon through a unix socket, as if the daemon were local.
//!
//! This crate knows nothing about images, snapshots or VMs. The machine forwards bytes and runs
//! programs. Only the number of VMs matters here, because no command ends a machine with VMs
//! unasked (`decide`): the caller gives the number, and the supervisor reads it from the daemon
//! (`vm_count`).
//!
//! ```text
//! caller ─▶ api.sock, exec.sock ─▶ supervisor ─▶ private network ─▶ dayfly-machine-init
//!                                     │                                └─▶ dayflyd, programs
//!                                     └─ parent of QEMU and virtiofsd, init of their pid namespace
//!
//! none ──init──▶ stopped ──start──▶ starting ──ready──▶ running ──stop──▶ stopped ──rm──▶ none
//!                   ▲                   └────any end────────┴──▶ crashed ──start──▶ starting
//! ```
//!
//! The private network ends in a network namespace of the machine that holds init's two listeners
//! and nothing else, so no VM reaches them (`dayfly-machine-init`). QEMU runs as a user that owns
//! nothing, under a system call filter (`confine`). The machine sees only those folders of the host
//! that are shared by name (`share`). Other hosts are reached by the `uplink`.

mod config;
mod confine;
mod datagrams;
mod decide;
mod disk;
mod errors;
mod exec;
mod files;
mod forward;
mod found;
#[doc(hidden)]
pub mod fuzzing;
mod initramfs;
mod layout;
mod leaks;
mod lines;
mod lock;
mod machine;
mod modules;
mod places;
mod ports;
mod probe;
mod progress;
mod qemu;
mod qmp;
mod report;
mod rights;
mod run_state;
mod share;
mod start;
mod status;
mod stop;
mod supervisor;
mod uplink;
mod vm_count;
mod watch;

pub use config::InitOptions;
pub use dayfly_boot::BootError;
pub use dayfly_machine_init as guest;
pub use dayfly_machine_init::{DaemonStatus, ExecSpec, Exit, GuestStatus, Root, WindowSize};
pub use decide::{Consent, Purpose};
pub use errors::{InitError, StartError, StopError};
pub use exec::{ExecError, Input, Output, RawTerminal, copy_in, window_size};
pub use files::FileError;
pub use initramfs::BuildError;
pub use leaks::{Leak, leaks};
pub use machine::Machine;
pub use probe::{Accelerator, Probe, accelerator, probe};
pub use report::EndReport;
pub use rights::{subordinate_ids, tun};
pub use share::{Access, Share, ShareError};
pub use start::{Note, Reexec, StartOrder, Started, kernel_crashed};
pub use status::{State, Status};
pub use stop::Stopped;
pub use supervisor::supervisor_main;
pub use uplink::Uplink;
