//! What is saved of the devices. The order and the encoding of the whole file are the core's.

use super::block::BlockState;
use super::transport::{TransportState, TransportStateError};
use super::vsock::VsockState;
use serde::{Deserialize, Serialize};

/// All devices, in the order of their slots.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeviceStates {
    /// One for each slot.
    pub devices: Vec<DeviceState>,
}

/// A device.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeviceState {
    /// The virtio device id.
    pub device_id: u32,
    /// Its registers and queues.
    pub transport: TransportState,
    /// What is its own.
    pub kind: KindState,
}

/// What a kind of device has beyond its registers.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum KindState {
    /// A disk.
    Block(BlockState),
    /// Sockets.
    Vsock(VsockState),
    /// Entropy.
    Rng,
    /// A network device: its link is not the machine's.
    Net,
}

/// Why saved devices were refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum LoadError {
    /// Another number of devices.
    #[error("devices: expected {expected}, got {got}")]
    Count {
        /// Devices of this VM.
        expected: usize,
        /// Devices in the state.
        got: usize,
    },
    /// Another device in this place.
    #[error("device {number}: expected virtio device {expected}, got {got}")]
    Device {
        /// Its slot.
        number: usize,
        /// The device of this VM.
        expected: u32,
        /// The device in the state.
        got: u32,
    },
    /// The device is another one now.
    #[error("device {number}: expected {expected}, got {got}")]
    Kind {
        /// Its slot.
        number: usize,
        /// What it is here.
        expected: String,
        /// What was saved.
        got: String,
    },
    /// Its registers make no sense.
    #[error("device {number}: {source}")]
    Transport {
        /// Its slot.
        number: usize,
        /// Why.
        source: TransportStateError,
    },
}
