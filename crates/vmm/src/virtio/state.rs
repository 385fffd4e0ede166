//! The saved state of the devices. Order and encoding of the whole file belong to [`crate::state`].

use super::balloon::BalloonState;
use super::block::BlockState;
use super::transport::{TransportState, TransportStateError};
use super::vsock::VsockState;
use serde::{Deserialize, Serialize};

/// The state of all devices, in the order of their slots.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeviceStates {
    /// One state for each slot; without one of the balloon if the guest has none.
    pub devices: Vec<DeviceState>,
}

/// The state of one device.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeviceState {
    /// The virtio device id.
    pub device_id: u32,
    /// Registers and queues.
    pub transport: TransportState,
    /// State that only this kind of device has.
    pub kind: KindState,
}

impl DeviceState {
    /// Whether this is the state of a balloon.
    #[must_use]
    pub const fn has_balloon(&self) -> bool {
        matches!(self.kind, KindState::Balloon(_))
    }
}

/// The state of a device beyond its registers, by kind.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum KindState {
    /// Disk.
    Block(BlockState),
    /// vsock.
    Vsock(VsockState),
    /// Entropy: nothing to save.
    Rng,
    /// Network: nothing to save, because a link belongs to the host and each clone gets a new one.
    Net,
    /// Balloon. Only since version 2 of the state ([`crate::state`]).
    Balloon(BalloonState),
}

/// Why the saved state of devices was refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum LoadError {
    /// The number of devices differs.
    #[error("devices: expected {expected}, got {got}")]
    Count {
        /// Devices of this VM.
        expected: usize,
        /// Devices in the state.
        got: usize,
    },
    /// A slot holds another kind of device.
    #[error("device {number}: expected virtio device {expected}, got {got}")]
    Device {
        /// Number of the slot.
        number: usize,
        /// virtio device id of the VM's device.
        expected: u32,
        /// virtio device id in the state.
        got: u32,
    },
    /// The device has another size, mode or context id than the saved one.
    #[error("device {number}: expected {expected}, got {got}")]
    Kind {
        /// Number of the slot.
        number: usize,
        /// State of the VM's device.
        expected: String,
        /// Saved state.
        got: String,
    },
    /// The saved registers are invalid.
    #[error("device {number}: {source}")]
    Transport {
        /// Number of the slot.
        number: usize,
        /// The cause.
        source: TransportStateError,
    },
}
