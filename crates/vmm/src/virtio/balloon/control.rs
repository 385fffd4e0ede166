//! The balloon as the main thread uses it.

use super::BalloonStatus;
use crate::virtio::device::DeviceError;
use crate::virtio::set::DeviceSet;

impl DeviceSet {
    /// Sets how much memory the guest shall give to its balloon, if `target_bytes` has a value, and
    /// asks its driver for new statistics. Returns the status of now, before the driver answers.
    ///
    /// # Errors
    /// [`DeviceError::NoBalloon`], [`DeviceError::BalloonTarget`].
    pub fn balloon(&self, target_bytes: Option<u64>) -> Result<BalloonStatus, DeviceError> {
        let status = self.present().last().and_then(|slot| slot.balloon(target_bytes));
        status.ok_or(DeviceError::NoBalloon)?.map_err(|max| {
            let got = target_bytes.unwrap_or_default();
            DeviceError::BalloonTarget { max, got }
        })
    }
}
