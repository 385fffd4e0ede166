//! Why a VM could not be made, run or saved.

use crate::arch::{acpi, boot, regs};
use crate::memory;
use crate::platform::PlatformError;
use crate::state;
use crate::vcpu::ParkError;
use crate::vcpu::state as vcpu_state;
use crate::virtio::DeviceError;
use std::io;

/// Why a VM could not be made.
#[derive(Debug, thiserror::Error)]
pub enum BuildError {
    /// A configuration that no VM may have.
    #[error("configuration: {what}: expected {expected}, got {got}")]
    Config {
        /// The field.
        what: &'static str,
        /// What it may be.
        expected: String,
        /// What it is.
        got: u64,
    },
    /// A KVM ioctl failed.
    #[error("{0}")]
    Kvm(&'static str, #[source] kvm_ioctls::Error),
    /// Guest RAM.
    #[error(transparent)]
    Memory(#[from] memory::MemoryError),
    /// Kernel, initramfs, command line.
    #[error(transparent)]
    Load(#[from] boot::LoadError),
    /// ACPI tables.
    #[error(transparent)]
    Acpi(#[from] acpi::AcpiError),
    /// First registers.
    #[error(transparent)]
    Regs(#[from] regs::RegsError),
    /// Too many CPUID entries.
    #[error("CPUID: more entries than KVM takes")]
    Cpuid,
    /// The generation id.
    #[error("VM generation id")]
    Generation(#[source] vm_memory::GuestMemoryError),
    /// Randomness for it.
    #[error("VM generation id: getrandom")]
    Random(#[source] io::Error),
    /// Serial port, interrupts.
    #[error(transparent)]
    Platform(#[from] PlatformError),
    /// Virtio devices.
    #[error("devices")]
    Devices(#[from] DeviceError),
    /// Pages cannot be served one by one.
    #[error("recording which pages are touched")]
    Recorder(#[source] io::Error),
    /// RAM is to be filled by a pager, but nobody can be made to wait for it.
    #[error("restore: memory that a pager fills: this kernel gave no userfaultfd")]
    NoUserfaultfd,
    /// The pager does not serve it.
    #[error("restore: the pager of its memory")]
    Pager(#[source] io::Error),
    /// The record of pages to lay ready.
    #[error(transparent)]
    WorkingSet(#[from] memory::working_set::WorkingSetError),
    /// The state file could not be read.
    #[error("state file")]
    StateRead(#[source] io::Error),
    /// The state file is too long.
    #[error("state file: {got} bytes, at most {max}")]
    StateLength {
        /// Its length.
        got: u64,
        /// The most.
        max: u64,
    },
    /// The state file is not a state.
    #[error(transparent)]
    Decode(#[from] state::DecodeError),
    /// A vCPU's state does not go into this host's KVM.
    #[error("vCPU {id}")]
    Vcpu {
        /// Which.
        id: usize,
        /// Why.
        #[source]
        source: vcpu_state::StateError,
    },
    /// A thread could not be made.
    #[error("starting a thread")]
    Thread(#[source] io::Error),
    /// The shell is not for a VM like this.
    #[error("restore: {what}: expected {expected}, what the shell was made for, got {got}")]
    Shape {
        /// In what it differs.
        what: &'static str,
        /// The shell's.
        expected: u64,
        /// The VM's.
        got: u64,
    },
    /// Clocks, or the word of the new generation.
    #[error(transparent)]
    Run(#[from] VmError),
}

/// Why a running VM could not do what it was asked.
#[derive(Debug, thiserror::Error)]
pub enum VmError {
    /// A vCPU did not stop.
    #[error(transparent)]
    Park(#[from] ParkError),
    /// Clocks could not be set.
    #[error("setting the clocks of a restored VM")]
    Clocks(#[source] vcpu_state::StateError),
    /// The guest could not be told its new generation.
    #[error("raising the VM generation id's interrupt")]
    Generation(#[source] io::Error),
}

/// Why a VM has no link.
#[derive(Debug, thiserror::Error)]
pub enum ConnectError {
    /// Not the descriptors that Connect takes.
    #[error("connect: expected one descriptor, a tap, or none, got {0}")]
    Fds(usize),
    /// It has no network device.
    #[error(transparent)]
    Device(#[from] DeviceError),
}

/// Why a VM could not be saved. It is as it was: paused, on its old writable layers.
#[derive(Debug, thiserror::Error)]
pub enum SaveError {
    /// It runs.
    #[error("save: the VM runs; pause it first")]
    Running,
    /// Pages that nobody wrote are read from its template, in which some are missing.
    #[error("save: not all of the template's memory has arrived yet; try again when it has")]
    NotWhole,
    /// Not the descriptors that Save takes.
    #[error(
        "save: expected {expected} descriptors (state, memory, page map, two for each of {writable} writable disks), got {got}"
    )]
    Fds {
        /// How many there have to be.
        expected: usize,
        /// Writable disks.
        writable: usize,
        /// How many came.
        got: usize,
    },
    /// A KVM ioctl failed.
    #[error("save: {0}")]
    Kvm(&'static str, #[source] kvm_ioctls::Error),
    /// A vCPU's state could not be read.
    #[error("save: vCPU {id}")]
    Vcpu {
        /// Which.
        id: u8,
        /// Why.
        #[source]
        source: vcpu_state::StateError,
    },
    /// Clocks of a VM that has not run yet.
    #[error("save")]
    Clocks(#[source] VmError),
    /// The state could not be encoded.
    #[error("save: encoding the state")]
    Encode(#[source] postcard::Error),
    /// The state file could not be written.
    #[error("save: state file")]
    StateWrite(#[source] io::Error),
    /// The state file holds something already.
    #[error("save: state file: expected an empty file, got {0} bytes")]
    StateNotEmpty(u64),
    /// The page map's file could not be written.
    #[error("save: page map file")]
    PageMapWrite(#[source] io::Error),
    /// The page map's file holds something already.
    #[error("save: page map file: expected an empty file, got {0} bytes")]
    PageMapNotEmpty(u64),
    /// Memory could not be written.
    #[error("save")]
    Memory(#[from] memory::DumpError),
    /// It did not stop.
    #[error("freeze")]
    Freeze(#[source] VmError),
    /// RAM is to be copied where it differs from a template, and there is none.
    #[error("fork: expected a VM that is a clone, and a pagemap: all of its memory has to be copied")]
    NoTemplate,
    /// Which pages are the VM's own could not be read.
    #[error("fork: reading which pages are the VM's own")]
    Pagemap(#[source] io::Error),
    /// The memory file has another length than RAM.
    #[error("fork: memory file: expected {expected} bytes, got {got}")]
    MemoryLength {
        /// RAM in bytes.
        expected: u64,
        /// The file's length.
        got: u64,
    },
    /// Nothing was copied before.
    #[error("fork: expected that its memory was copied before")]
    NotCopied,
    /// RAM was copied to another file before.
    #[error("save: expected the memory file that RAM was copied to before")]
    OtherMemory,
    /// Layers without a map.
    #[error("rebase: expected the data of a layer, then data and map of each new one, got {0} descriptors")]
    Pairs(usize),
    /// The disk refused.
    #[error("rebase")]
    Rebase(#[source] DeviceError),
    /// Nobody notes what this VM touches.
    #[error("working set: expected a VM that was started to be recorded")]
    NotRecorded,
    /// The record of touched pages could not be written.
    #[error("working set file")]
    WorkingSet(#[source] io::Error),
    /// The disks could not be asked what is where, or not be frozen.
    #[error("save: disks")]
    Disks(#[source] DeviceError),
}
