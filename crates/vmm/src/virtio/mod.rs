//! Virtio devices over MMIO: disks, vsock, entropy, network.
//!
//! This module holds what the guest sees of its devices, and the one thread that serves them. What
//! may not enter: KVM beyond two registrations, ACPI, the order in which a VM is paused and saved
//! ([`crate::vm`]), disk formats ([`crate::disk`]).
//!
//! Three kinds of thread use the devices:
//!
//! - **A vCPU** reads and writes registers ([`DeviceSet::mmio_read`], [`DeviceSet::mmio_write`]).
//!   InterruptStatus and InterruptACK need no lock. Every other register takes its device's lock.
//!   The device thread holds that lock while it serves the device, so a reset returns when nothing
//!   is in flight. Kicks of busy queues do not come here: KVM writes an eventfd.
//! - **The device thread** ([`DeviceSet::run_loop`]) sleeps in epoll, and passes the [`gate`]
//!   before it touches a device.
//! - **The main thread** pauses, saves, loads, freezes. It takes the devices' locks too, so a
//!   running vCPU cannot tear the state of one device. The saved devices belong to one instant only
//!   if the vCPUs are parked.
//!
//! Order of locks: the gate's state, then one device, then the page map, then the limits on
//! growth; never two devices.

mod block;
#[cfg(test)]
mod block_bench;
#[cfg(test)]
mod block_model_tests;
#[cfg(test)]
mod block_tests;
mod bucket;
mod device;
mod event_loop;
#[doc(hidden)]
pub mod fuzzing;
mod gate;
mod interrupt;
mod net;
mod no_space;
#[cfg(test)]
mod page_map_tests;
mod registers;
mod ring;
mod rng;
mod set;
mod slot;
mod stall;
#[cfg(test)]
mod stall_tests;
mod state;
#[cfg(test)]
mod testing;
#[cfg(test)]
mod tests;
mod tokens;
mod transport;
#[cfg(test)]
mod transport_tests;
mod vsock;

pub use crate::disk::{DiskSpec, LayerSpec};
pub use block::DiskCounters;
pub use device::{DeviceError, DeviceHealth, MmioSlot, VsockSpec};
pub use net::NetCounters;
pub use ring::Broken;
pub use set::{DeviceSet, FIRST_GSI, MMIO_BASE, MMIO_SIZE};
pub use state::{DeviceState, DeviceStates, KindState, LoadError};
pub use transport::{QueueRegisters, TransportState, TransportStateError};
pub use vsock::socket_path;
