//! What keeps the images and layers of a VM.

use super::Vm;
use crate::model::live::Live;
use dayfly_store::Pin;
use dayfly_units::sync::lock;

impl Vm {
    /// Whether a VM with the state `live` keeps its disks when it has ended: it can start again, or
    /// a later daemon can adopt it.
    pub(super) fn keeps_disks(&self, live: &Live) -> bool {
        let stays = !self.facts.ephemeral && !self.facts.auto_remove;
        self.unadopted.is_some() || stays && live.no_snapshot.is_none()
    }

    /// Keeps the pin of its image and layers until the VM is removed, or until it ends if its disks
    /// are of no use then.
    pub fn keep_pinned(&self, pin: Pin) {
        let live = lock(&self.live);
        let keeps = live.phase.alive() || self.keeps_disks(&live);
        let before = if keeps { lock(&self.pin).replace(pin) } else { Some(pin) };
        drop(live);
        // Dropped after the lock of `live`: the drop may remove layers, and readers of `live` must
        // not wait for that.
        drop(before);
    }

    /// A copy of its pin, for another user of the same image and layers.
    #[must_use]
    pub fn pinned(&self) -> Option<Pin> {
        lock(&self.pin).clone()
    }

    /// Drops its pin.
    pub fn release_pin(&self) {
        let pin = lock(&self.pin).take();
        // Dropped outside the lock, because the drop may remove layers.
        drop(pin);
    }
}
