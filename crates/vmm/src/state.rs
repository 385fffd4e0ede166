//! The saved machine as bytes: [`VmState`] in postcard inside a sealed envelope, `state` in a snapshot.
//!
//! Layout: the header of [`dayfly_units::sealed`] (magic `DFstate\n`, version 1, at most 16 MiB), then the fields of
//! [`VmState`] in their order in postcard's wire format, and nothing after them. To change any field is to raise
//! [`VERSION`]. Checked in this order: the envelope, the encoding, the limits of each part; devices check the meaning of their own
//! parts when they load them.

use crate::config::MAX_VCPUS;
use crate::memory::{MAX_HOLES, MemoryError};
use crate::platform::SerialSave;
use crate::vcpu::state::{StateError, VcpuState, check};
use crate::virtio::DeviceStates;
use dayfly_units::sealed::{self, Magic, SealError};
use kvm_bindings::{kvm_clock_data, kvm_irqchip, kvm_pit_state2};
use serde::{Deserialize, Serialize};

/// What the file starts with.
pub const MAGIC: Magic = *b"DFstate\n";
/// The version of the encoding.
pub const VERSION: u32 = 1;
/// The longest payload, in bytes.
pub const MAX_BYTES: u64 = 16 << 20;
/// Most bytes in the serial port's receive buffer (vm-superio's FIFO).
const MAX_SERIAL_BYTES: usize = 64;

/// A whole machine but for its memory and disks.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct VmState {
    /// RAM in bytes; the memory file is as long.
    pub memory_bytes: u64,
    /// Large holes of the memory file, `(offset, length)` in bytes, in rising order ([`crate::memory::large_holes`]).
    pub holes: Vec<(u64, u64)>,
    /// vCPUs by APIC id.
    pub vcpus: Vec<VcpuState>,
    /// Both PICs and the I/O APIC (KVM_GET_IRQCHIP 0, 1, 2).
    pub irqchips: [kvm_irqchip; 3],
    /// The interval timer.
    pub pit: kvm_pit_state2,
    /// The guest's kvmclock.
    pub clock: kvm_clock_data,
    /// The serial port.
    pub serial: SerialSave,
    /// Virtio devices.
    pub devices: DeviceStates,
}

/// Why bytes are not a state.
#[derive(Debug, thiserror::Error)]
pub enum DecodeError {
    /// The envelope is damaged, foreign or truncated.
    #[error("state file: {0}")]
    Seal(#[from] SealError),
    /// The payload is not a state. It was sealed, so whoever wrote it is at fault, not the disk.
    #[error("state file: payload at byte 96: {0}")]
    Encoding(#[from] postcard::Error),
    /// Something follows the state.
    #[error("state file: expected the end after byte {end}, got {extra} more bytes")]
    Trailing {
        /// Where the state ends in the file.
        end: usize,
        /// Bytes after it.
        extra: usize,
    },
    /// A number of vCPUs that no VM has.
    #[error("state file: expected 1 to {MAX_VCPUS} vCPUs, got {0}")]
    Vcpus(usize),
    /// An amount of RAM that no VM has.
    #[error("state file: {0}")]
    Memory(#[from] MemoryError),
    /// A vCPU beyond its limits.
    #[error("state file: {0}")]
    Vcpu(#[from] StateError),
    /// An irqchip that is not the one at its place.
    #[error("state file: irqchip {at}: expected chip id {at}, got {got}")]
    Irqchip {
        /// Its place.
        at: u32,
        /// Its id.
        got: u32,
    },
    /// More received bytes than the serial port holds.
    #[error("state file: {0} bytes in the serial port, at most {MAX_SERIAL_BYTES}")]
    Serial(usize),
}

/// The bytes of a state file.
///
/// # Errors
/// When postcard cannot encode it, which no state that [`crate::vm`] makes causes.
pub fn encode(state: &VmState) -> Result<Vec<u8>, postcard::Error> {
    Ok(sealed::seal(&MAGIC, VERSION, &postcard::to_stdvec(state)?))
}

/// A state from the bytes of a state file. Never panics, whatever the bytes.
///
/// # Errors
/// [`DecodeError`], naming place, expected and got.
pub fn decode(bytes: &[u8]) -> Result<VmState, DecodeError> {
    let (_, payload) = sealed::open(&MAGIC, VERSION..=VERSION, MAX_BYTES, bytes)?;
    let (state, rest) = postcard::take_from_bytes::<VmState>(payload)?;
    if !rest.is_empty() {
        return Err(DecodeError::Trailing { end: bytes.len() - rest.len(), extra: rest.len() });
    }
    if !(1..=usize::from(MAX_VCPUS)).contains(&state.vcpus.len()) {
        return Err(DecodeError::Vcpus(state.vcpus.len()));
    }
    crate::memory::check_size(state.memory_bytes)?;
    if state.holes.len() > MAX_HOLES {
        return Err(MemoryError::Holes(state.holes.len()).into());
    }
    for vcpu in &state.vcpus {
        check(vcpu)?;
    }
    for (at, chip) in (0..).zip(&state.irqchips) {
        if chip.chip_id != at {
            return Err(DecodeError::Irqchip { at, got: chip.chip_id });
        }
    }
    if state.serial.received.len() > MAX_SERIAL_BYTES {
        return Err(DecodeError::Serial(state.serial.received.len()));
    }
    Ok(state)
}

#[cfg(test)]
#[path = "state_tests.rs"]
mod tests;
