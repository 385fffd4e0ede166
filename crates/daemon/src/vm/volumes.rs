//! The volumes of a VM.

use crate::model::volumes::{VolumeFacts, VolumeState};
use crate::volumes::named::Hold;
use dayfly_api::types::VmVolume;
use dayfly_units::sync::lock;
use std::os::fd::OwnedFd;
use std::sync::Mutex;

/// An open folder for a volume, and what keeps a named volume meanwhile.
#[derive(Debug)]
pub struct OpenVolume {
    /// The folder, opened with the rights of the volume's client; `None` if it is on another host.
    pub folder: Option<OwnedFd>,
    /// Keeps a named volume until its VM is in the registry.
    pub hold: Option<Hold>,
}

/// The open folders of a VM's volumes, until they are mounted.
#[derive(Debug, Default)]
pub struct OpenVolumes(Mutex<Vec<OpenVolume>>);

impl OpenVolumes {
    /// Keeps the folders.
    pub fn keep(&self, volumes: Vec<OpenVolume>) {
        *lock(&self.0) = volumes;
    }

    /// The folders, once.
    #[must_use]
    pub fn take(&self) -> Vec<OpenVolume> {
        std::mem::take(&mut *lock(&self.0))
    }
}

/// The volumes in the API's form.
pub(super) fn shown_volumes(volumes: &[VolumeFacts], states: &[VolumeState]) -> Vec<VmVolume> {
    volumes.iter().enumerate().map(|(n, volume)| volume.shown(states.get(n))).collect()
}
