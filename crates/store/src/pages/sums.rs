//! Which groups of a pack were compared with their sums.

use crate::integrity::verify::Stamp;
use dayfly_units::sync::lock;
use std::sync::Mutex;

/// The groups of a pack that were read since its file had this stamp: a bit per group.
#[derive(Debug, Default)]
pub(super) struct Sound(Mutex<Option<(Stamp, Vec<u64>)>>);

impl Sound {
    pub(super) fn has(&self, stamp: &Stamp, group: usize) -> bool {
        lock(&self.0).as_ref().is_some_and(|(then, bits)| {
            then == stamp && bits.get(group / 64).is_some_and(|bits| bits >> (group % 64) & 1 == 1)
        })
    }

    pub(super) fn add(&self, stamp: Stamp, group: usize, groups: usize) {
        let mut known = lock(&self.0);
        let known = match known.as_mut() {
            Some(known) if known.0 == stamp => known,
            _ => known.insert((stamp, vec![0; groups.div_ceil(64)])),
        };
        if let Some(bits) = known.1.get_mut(group / 64) {
            *bits |= 1 << (group % 64);
        }
    }
}
