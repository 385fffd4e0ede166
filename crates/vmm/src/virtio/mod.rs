//! Virtio devices over MMIO: disks, vsock, entropy, network, balloon.
//!
//! This module holds what the guest sees of its devices, and the two threads that serve them. What
//! may not enter: KVM beyond two registrations, ACPI, the order in which a VM is paused and saved
//! ([`crate::vm`]), disk formats ([`crate::disk`]).
//!
//! Four kinds of thread use the devices:
//!
//! - **A vCPU** reads and writes registers ([`DeviceSet::mmio_read`], [`DeviceSet::mmio_write`]).
//!   InterruptStatus and InterruptACK need no lock. Every other register takes its device's lock.
//!   A device's thread holds that lock while it serves the device, so a reset returns when nothing
//!   is in flight. Kicks of busy queues do not come here: KVM writes an eventfd.
//! - **The thread of the disks** ([`DeviceSet::run_disks`]) sleeps in a read of the one eventfd
//!   that every disk's kicks write. A request waits for the host's disk, so no other device is
//!   served here.
//! - **The thread of all other devices** ([`DeviceSet::run_loop`]), *the device thread* in their
//!   modules, sleeps in epoll. It never takes the lock of a disk.
//! - **The main thread** pauses, saves, loads, freezes. It takes the devices' locks too, so a
//!   running vCPU cannot tear the state of one device. The saved devices belong to one instant only
//!   if the vCPUs are parked.
//!
//! Both device threads pass the [`gate`] before they touch a device. Interrupts are raised without
//! a lock, by whichever thread serves the device. The log of writes to guest memory
//! ([`crate::memory::writes`]) has its own lock, because both threads write to it.
//!
//! The thread of the disks serves a part of a queue at a time (`block_turn`), and then gives the
//! other disks and other threads a turn ([`turns`]). Reads of one disk are in flight together; none
//! is in flight when a turn has ended.
//!
//! Order of locks: the gate's state, then one device, then the page map, then the limits on
//! growth; never two devices. The log of writes comes last. The device thread never waits for the
//! page map, which the thread of the disks holds during a turn.

mod balloon;
#[cfg(test)]
mod balloon_tests;
mod block;
#[cfg(test)]
mod block_bench;
#[cfg(test)]
mod block_model_tests;
#[cfg(test)]
mod block_tests;
mod block_turn;
mod bucket;
mod device;
#[cfg(test)]
mod disk_thread_tests;
mod event_loop;
#[cfg(test)]
mod flight_tests;
#[doc(hidden)]
pub mod fuzzing;
mod gate;
#[cfg(test)]
mod held;
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
mod turns;
mod vsock;

pub use crate::disk::{DiskSpec, LayerSpec};
pub use balloon::{BalloonState, BalloonStatus, GuestMemory};
pub use block::DiskCounters;
pub use device::{DeviceError, DeviceHealth, MmioSlot, VsockSpec};
pub use ring::Broken;
pub use set::{DeviceSet, FIRST_GSI, MMIO_BASE, MMIO_SIZE};
pub use state::{DeviceState, DeviceStates, KindState, LoadError};
pub use transport::{QueueRegisters, TransportState, TransportStateError};
pub use vsock::socket_path;
