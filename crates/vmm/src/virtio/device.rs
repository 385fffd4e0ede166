//! What devices are made of, how they report their health, and why they cannot be made or changed.

use super::block::DiskCounters;
use super::ring::Broken;
use super::state::LoadError;
use crate::disk::{FreezeError, OpenDiskError};
use crate::meter::NetTraffic;
use std::io;
use std::os::fd::OwnedFd;
use std::path::PathBuf;

/// Longest path of a unix socket in bytes, with the port's suffix (`sun_path` less its final zero).
pub(super) const MAX_SOCKET_PATH: usize = 107;

/// What the vsock device is made of.
#[derive(Debug)]
pub struct VsockSpec {
    /// A listening unix stream socket.
    pub listener: OwnedFd,
    /// A guest's connection to port P of CID 2 goes to the unix socket `<path>_<P>`.
    pub path: PathBuf,
    /// The guest's context id.
    pub guest_cid: u32,
}

/// A device's MMIO window and interrupt, for ACPI: device `LNRO0005`, edge-triggered, active high,
/// not shared.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MmioSlot {
    /// Guest physical address of the window.
    pub base: u64,
    /// Length of the window in bytes.
    pub size: u64,
    /// Interrupt (GSI).
    pub gsi: u32,
}

/// Why devices could not be made, changed or served.
#[derive(Debug, thiserror::Error)]
pub enum DeviceError {
    /// The number of media differs from the number of disks that the VM was made for.
    #[error("disks: expected {expected}, got {got}")]
    Disks {
        /// Disks of this VM.
        expected: usize,
        /// Media given.
        got: usize,
    },
    /// The VM has no disk of this number.
    #[error("disk {number}: expected one below {expected}")]
    NoDisk {
        /// The number given, from 0.
        number: usize,
        /// Disks of this VM.
        expected: usize,
    },
    /// The VM has no network device.
    #[error("connect: expected a network device, this VM has none")]
    NoNet,
    /// The guest was saved without a balloon.
    #[error("balloon: this VM's snapshot was made without one")]
    NoBalloon,
    /// The balloon cannot get as large.
    #[error("balloon: expected at most {max} bytes, this VM's RAM, got {got}")]
    BalloonTarget {
        /// RAM in bytes.
        max: u64,
        /// The size given, in bytes.
        got: u64,
    },
    /// The files of a disk were refused.
    #[error("disk {number}: {source}")]
    Disk {
        /// Number of the disk, from 0.
        number: usize,
        /// The cause.
        source: OpenDiskError,
    },
    /// The vsock path is too long for a port's suffix.
    #[error("vsock path {path:?}: expected at most {max} bytes")]
    VsockPath {
        /// The vsock path given.
        path: PathBuf,
        /// Longest path allowed, in bytes.
        max: usize,
    },
    /// A call to the host failed.
    #[error("{what}")]
    Host {
        /// The call, for the error's text.
        what: String,
        /// The cause.
        #[source]
        source: io::Error,
    },
    /// Saved state was refused.
    #[error(transparent)]
    Load(#[from] LoadError),
    /// A layer could not be frozen, so no layer of any disk was frozen.
    #[error("disk {number}: {source}")]
    Freeze {
        /// Number of the disk, from 0.
        number: usize,
        /// The cause.
        source: FreezeError,
    },
    /// The number of file pairs differs from the number of writable disks.
    #[error("freeze: expected files for {expected} writable disks, got {got}")]
    FreezeCount {
        /// Writable disks of this VM.
        expected: usize,
        /// File pairs given.
        got: usize,
    },
    /// The operation needs paused devices; the text is its name.
    #[error("{0}: the devices are not paused")]
    NotPaused(&'static str),
}

pub(super) fn host(what: impl Into<String>) -> impl FnOnce(io::Error) -> DeviceError {
    let what = what.into();
    move |source| DeviceError::Host { what, source }
}

/// The health of one device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceHealth {
    /// The virtio device id: 1 network, 2 block, 4 entropy, 5 balloon, 19 vsock.
    pub device_id: u32,
    /// Why the device needs a reset, if the driver broke a rule since the last reset.
    pub broken: Option<Broken>,
    /// Failed requests, if the device is a disk.
    pub disk: Option<DiskCounters>,
    /// Packets and bytes, if the device is a network device.
    pub net: Option<NetTraffic>,
}
