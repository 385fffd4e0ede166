//! # vmm
//!
//! This crate runs exactly one VM in one process: KVM, memory, devices, the saving and loading of
//! the whole machine, and the jail around it. The binary `dayfly-vmm` is [`process::main`]: a
//! [`zygote`], or a VMM that is forked from one. The daemon uses [`config`], [`zygote::Client`],
//! [`control::Client`] and [`disk::layer`].
//!
//! What may not enter: anything about more than one VM, names, images, templates, policy, or paths
//! of files on disk. Every file arrives as an open descriptor.
//!
//! Threads: `main` (control socket, save), `devices` (packets, sockets), `disks` (unless the VM has
//! none), `vcpu0`…; [`workers`] makes all but the first ahead. Lock order: a vCPU's phase, a vCPU's
//! descriptor, a device. [`vm`] draws the states of the VM, [`vcpu`] those of one vCPU.

pub mod arch;
pub mod config;
pub mod control;
pub mod disk;
pub mod exit;
pub mod fds;
#[cfg(test)]
mod golden;
pub mod heap;
pub mod jail;
pub mod limits;
pub mod memory;
pub mod meter;
pub mod platform;
pub mod process;
pub mod report;
pub mod seccomp;
pub mod state;
pub mod timeline;
pub mod vcpu;
pub mod virtio;
pub mod vm;
pub mod workers;
pub mod zygote;
