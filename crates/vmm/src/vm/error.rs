//! Why a VM could not be made, run or saved.

use crate::arch::{acpi, boot, cpuid, regs};
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
    /// A value in the configuration is not allowed.
    #[error("configuration: {what}: expected {expected}, got {got}")]
    Config {
        /// The field.
        what: &'static str,
        /// The allowed values.
        expected: String,
        /// The value.
        got: u64,
    },
    /// A KVM ioctl failed.
    #[error("{0}")]
    Kvm(&'static str, #[source] kvm_ioctls::Error),
    /// Guest RAM could not be set up.
    #[error(transparent)]
    Memory(#[from] memory::MemoryError),
    /// Kernel, initramfs or command line could not be loaded.
    #[error(transparent)]
    Load(#[from] boot::LoadError),
    /// The ACPI tables could not be written.
    #[error(transparent)]
    Acpi(#[from] acpi::AcpiError),
    /// The first registers could not be set.
    #[error(transparent)]
    Regs(#[from] regs::RegsError),
    /// CPUID has more entries than KVM takes.
    #[error("CPUID: more entries than KVM takes")]
    Cpuid,
    /// This host's CPU lacks features of the CPU model or of the saved guest's CPU.
    #[error(transparent)]
    Features(#[from] cpuid::Lacking),
    /// KVM cannot hide features from a guest.
    #[error(transparent)]
    Unhidden(#[from] cpuid::Unhidden),
    /// The generation id could not be written.
    #[error("VM generation id")]
    Generation(#[source] vm_memory::GuestMemoryError),
    /// No random generation id: getrandom(2) failed.
    #[error("VM generation id: getrandom")]
    Random(#[source] io::Error),
    /// The serial port or its interrupt could not be set up.
    #[error(transparent)]
    Platform(#[from] PlatformError),
    /// A virtio device was refused.
    #[error("devices")]
    Devices(#[from] DeviceError),
    /// The recorder could not serve the guest's pages.
    #[error("recording which pages are touched")]
    Recorder(#[source] io::Error),
    /// A pager fills the RAM, but there is no userfaultfd that makes a page fault wait for it.
    #[error("restore: memory that a pager fills: this kernel gave no userfaultfd")]
    NoUserfaultfd,
    /// The pager did not accept the memory.
    #[error("restore: the pager of its memory")]
    Pager(#[source] io::Error),
    /// The record of the working set was refused.
    #[error(transparent)]
    WorkingSet(#[from] memory::working_set::WorkingSetError),
    /// The state file could not be read.
    #[error("state file")]
    StateRead(#[source] io::Error),
    /// The state file exceeds the limit.
    #[error("state file: {got} bytes, at most {max}")]
    StateLength {
        /// The file's length in bytes.
        got: u64,
        /// The limit in bytes.
        max: u64,
    },
    /// The state file is not a state.
    #[error(transparent)]
    Decode(#[from] state::DecodeError),
    /// This host's KVM refuses a vCPU's state.
    #[error("vCPU {id}")]
    Vcpu {
        /// The vCPU's place in the saved state, from 0.
        id: usize,
        /// The refused part.
        #[source]
        source: vcpu_state::StateError,
    },
    /// A thread could not be made.
    #[error("starting a thread")]
    Thread(#[source] io::Error),
    /// The saved VM differs from the warm VMM's shape.
    #[error("restore: {what}: expected {expected}, what the warm VMM was made for, got {got}")]
    Shape {
        /// The quantity that differs.
        what: &'static str,
        /// The warm VMM's value.
        expected: u64,
        /// The saved VM's value.
        got: u64,
    },
    /// The warm VMM has more vCPUs than the saved guest knows of.
    #[error(
        "restore: vCPUs: expected {saved} to {known}, those that the snapshot's guest knows of, \
         got {wanted}; bake a new snapshot"
    )]
    UnknownVcpus {
        /// The number of saved vCPUs.
        saved: usize,
        /// The number that the guest knows of.
        known: u8,
        /// The number in the warm VMM.
        wanted: usize,
    },
    /// The VM could not start to run: clocks, or the interrupt of the generation id.
    #[error(transparent)]
    Run(#[from] VmError),
}

pub(super) fn on(what: &'static str) -> impl FnOnce(kvm_ioctls::Error) -> BuildError {
    move |error| BuildError::Kvm(what, error)
}

/// Why a VM could not pause or resume.
#[derive(Debug, thiserror::Error)]
pub enum VmError {
    /// A vCPU did not stop.
    #[error(transparent)]
    Park(#[from] ParkError),
    /// Clocks could not be set.
    #[error("setting the clocks of a restored VM")]
    Clocks(#[source] vcpu_state::StateError),
    /// The guest could not be informed of its new generation id.
    #[error("raising the VM generation id's interrupt")]
    Generation(#[source] io::Error),
}

/// Why a network device could not be connected.
#[derive(Debug, thiserror::Error)]
pub enum ConnectError {
    /// More than one descriptor came with `Connect`.
    #[error("connect: expected one descriptor, a tap, or none, got {0}")]
    Fds(usize),
    /// The VM has no network device, or the device refused the tap.
    #[error(transparent)]
    Device(#[from] DeviceError),
}

/// Why a VM could not be saved or forked. The VM is unchanged, with its old writable layers.
#[derive(Debug, thiserror::Error)]
pub enum SaveError {
    /// The VM runs; `Save` needs a paused VM.
    #[error("save: the VM runs; pause it first")]
    Running,
    /// Pages that the guest has not written are read from the template's memory, which is not whole
    /// yet.
    #[error("save: not all of the template's memory has arrived yet; try again when it has")]
    NotWhole,
    /// RAM was copied for a fork: the copy lacks the template's pages.
    #[error(
        "save: expected a copy of all of its memory, got one for a fork, without the template's \
         pages; copy all of it first"
    )]
    CopiedForFork,
    /// The wrong number of descriptors.
    #[error(
        "save: expected {expected} descriptors (state, memory, page map, \
         three for each of {writable} writable disks), got {got}"
    )]
    Fds {
        /// The right number.
        expected: usize,
        /// Writable disks.
        writable: usize,
        /// The number that came.
        got: usize,
    },
    /// A KVM ioctl failed.
    #[error("save: {0}")]
    Kvm(&'static str, #[source] kvm_ioctls::Error),
    /// A vCPU's state could not be read.
    #[error("save: vCPU {id}")]
    Vcpu {
        /// The vCPU's id.
        id: u8,
        /// The part that could not be read.
        #[source]
        source: vcpu_state::StateError,
    },
    /// The clocks of a VM that has not run yet could not be set.
    #[error("save")]
    Clocks(#[source] VmError),
    /// The state could not be encoded.
    #[error("save: encoding the state")]
    Encode(#[source] postcard::Error),
    /// The state file could not be written.
    #[error("save: state file")]
    StateWrite(#[source] io::Error),
    /// The state file is not empty.
    #[error("save: state file: expected an empty file, got {0} bytes")]
    StateNotEmpty(u64),
    /// The page map's file could not be written.
    #[error("save: page map file")]
    PageMapWrite(#[source] io::Error),
    /// The file for the page map is not empty.
    #[error("save: page map file: expected an empty file, got {0} bytes")]
    PageMapNotEmpty(u64),
    /// Guest RAM could not be copied.
    #[error("save")]
    Memory(#[from] memory::DumpError),
    /// The VM did not stop.
    #[error("freeze")]
    Freeze(#[source] VmError),
    /// A precopy of own pages needs a template and a pagemap.
    #[error(
        "fork: expected a VM that is a clone, and a pagemap: all of its memory has to be copied"
    )]
    NoTemplate,
    /// The pagemap, which shows the VM's own pages, could not be read.
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
    /// `Fork` without `Precopy`.
    #[error("fork: expected that its memory was copied before")]
    NotCopied,
    /// RAM was copied to another file before.
    #[error("save: expected the memory file that RAM was copied to before")]
    OtherMemory,
    /// Data and map of a layer do not come in pairs.
    #[error(
        "rebase: expected the data of a layer, then data and map of each new one, \
         got {0} descriptors"
    )]
    Pairs(usize),
    /// The disk refused.
    #[error("rebase")]
    Rebase(#[source] DeviceError),
    /// The pages that this VM touches are not recorded.
    #[error("working set: expected a VM that was started to be recorded")]
    NotRecorded,
    /// The record of touched pages could not be written.
    #[error("working set file")]
    WorkingSet(#[source] io::Error),
    /// The page map could not be read, or a disk's layer could not be frozen.
    #[error("save: disks")]
    Disks(#[source] DeviceError),
}
