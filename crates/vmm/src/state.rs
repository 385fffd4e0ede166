//! The state file of a snapshot (`state`): a [`VmState`] in postcard, sealed.
//!
//! Layout: the header of [`dayfly_units::sealed`] (magic `DFstate\n`, version 1 or 2, at most
//! 16 MiB), then the fields of [`VmState`] in their order in postcard's wire format, and nothing
//! after them. A change of any field raises [`VERSION`]. Version 2 adds the balloon; the state of a
//! VM without one is written as version 1. Checks, in this order: the envelope, the encoding, the
//! limits of each part. Devices check the meaning of their parts when they load them.

use crate::config::MAX_VCPUS;
use crate::memory::{MAX_HOLES, MemoryError};
use crate::platform::SerialSave;
use crate::vcpu::state::{StateError, VcpuState, check};
use crate::virtio::{DeviceState, DeviceStates};
use dayfly_units::sealed::{self, Magic, SealError};
use kvm_bindings::{kvm_clock_data, kvm_irqchip, kvm_pit_state2};
use serde::{Deserialize, Serialize};

/// The first 8 bytes of a state file.
pub const MAGIC: Magic = *b"DFstate\n";
/// The version of the encoding.
pub const VERSION: u32 = 2;
/// The version of a state without a balloon.
const WITHOUT_BALLOON: u32 = 1;
/// The longest payload, in bytes.
pub const MAX_BYTES: u64 = 16 << 20;
/// Bytes of vm-superio's receive FIFO.
const MAX_SERIAL_BYTES: usize = 64;

/// A whole machine without its memory and disks.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct VmState {
    /// RAM in bytes; the memory file has the same length.
    pub memory_bytes: u64,
    /// Large holes of the memory file, `(offset, length)` in bytes, ascending
    /// ([`crate::memory::large_holes`]).
    pub holes: Vec<(u64, u64)>,
    /// vCPUs in the order of their APIC ids.
    pub vcpus: Vec<VcpuState>,
    /// Both PICs and the I/O APIC (KVM_GET_IRQCHIP 0, 1, 2).
    pub irqchips: [kvm_irqchip; 3],
    /// The interval timer (KVM_GET_PIT2).
    pub pit: kvm_pit_state2,
    /// The guest's kvmclock (KVM_GET_CLOCK).
    pub clock: kvm_clock_data,
    /// The serial port COM1.
    pub serial: SerialSave,
    /// The virtio devices.
    pub devices: DeviceStates,
}

/// Why bytes are not a state file.
#[derive(Debug, thiserror::Error)]
pub enum DecodeError {
    /// The envelope is damaged, foreign or truncated.
    #[error("state file: {0}")]
    Seal(#[from] SealError),
    /// The payload is not a state. Its seal is valid, so its writer is at fault, not the disk.
    #[error("state file: payload at byte 96: {0}")]
    Encoding(#[from] postcard::Error),
    /// Bytes follow the state.
    #[error("state file: expected the end after byte {end}, got {extra} more bytes")]
    Trailing {
        /// Where the state ends in the file, in bytes.
        end: usize,
        /// The number of bytes after it.
        extra: usize,
    },
    /// The number of vCPUs is not 1 to [`MAX_VCPUS`].
    #[error("state file: expected 1 to {MAX_VCPUS} vCPUs, got {0}")]
    Vcpus(usize),
    /// The amount of RAM is not allowed, or there are too many holes.
    #[error("state file: {0}")]
    Memory(#[from] MemoryError),
    /// A vCPU's state exceeds its limits.
    #[error("state file: {0}")]
    Vcpu(#[from] StateError),
    /// An irqchip whose id differs from its place.
    #[error("state file: irqchip {at}: expected chip id {at}, got {got}")]
    Irqchip {
        /// Its place, 0 to 2.
        at: u32,
        /// Its id.
        got: u32,
    },
    /// More received bytes than the serial port's FIFO holds.
    #[error("state file: {0} bytes in the serial port, at most {MAX_SERIAL_BYTES}")]
    Serial(usize),
}

/// Encodes and seals `state`.
///
/// # Errors
/// When postcard cannot encode it; no state that [`crate::vm`] makes causes this.
pub fn encode(state: &VmState) -> Result<Vec<u8>, postcard::Error> {
    let balloon = state.devices.devices.iter().any(DeviceState::has_balloon);
    let version = if balloon { VERSION } else { WITHOUT_BALLOON };
    Ok(sealed::seal(&MAGIC, version, &postcard::to_stdvec(state)?))
}

/// Verifies and decodes a state file. No input makes it panic.
///
/// # Errors
/// [`DecodeError`] with place, expected and got.
pub fn decode(bytes: &[u8]) -> Result<VmState, DecodeError> {
    let (_, payload) = sealed::open(&MAGIC, WITHOUT_BALLOON..=VERSION, MAX_BYTES, bytes)?;
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
