//! # vmm
//!
//! The room for exactly one VM in one process: KVM, memory, devices, saving and loading the whole machine, and the jail
//! around it. The binary `dayfly-vmm` is [`process::main`]: a [`zygote`], and every VMM that is forked from it. The daemon uses
//! [`config`], [`zygote::Client`], [`control::Client`] and [`disk::layer`].
//!
//! What may not enter: anything about more than one VM, names, images, templates, policy, or where files lie on disk:
//! everything arrives as an open descriptor.
//!
//! Threads: `main` (control socket, save), `devices` (queues, sockets), `vcpu0`…, which a [`crew`] has ready. Locks are taken in this order:
//! a vCPU's phase, a vCPU's descriptor, a device. [`vm`] draws the VM's states, [`vcpu`] those of one vCPU.

pub mod arch;
pub mod config;
pub mod control;
pub mod crew;
pub mod disk;
pub mod exit;
pub mod fds;
pub mod jail;
pub mod memory;
pub mod platform;
pub mod process;
pub mod seccomp;
pub mod state;
pub mod timeline;
pub mod vcpu;
pub mod virtio;
pub mod vm;
pub mod zygote;
