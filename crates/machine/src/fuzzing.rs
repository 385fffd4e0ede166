//! Functions for the crate `fuzz`: what QEMU and the machine say.

use crate::lines::Lines;
use crate::qmp::Monitor;
use crate::uplink::{LENGTH_BYTES, Range, allows, read_frame};
use std::os::unix::net::UnixStream;
use std::path::Path;

/// Reads lines of QEMU's monitor. Returns the commands that answer them, and whether the machine is
/// paused afterwards.
pub fn monitor<'l>(lines: impl Iterator<Item = &'l [u8]>) -> (Vec<&'static str>, bool) {
    let mut monitor = Monitor::default();
    let commands = lines.filter_map(|line| monitor.read(line)).collect();
    (commands, monitor.paused(Path::new("/disk")).is_some())
}

/// The number of VMs in the answer of the machine's daemon.
#[must_use]
pub fn vms_in(answer: &[u8]) -> Option<u64> {
    crate::vm_count::vms_in(answer)
}

/// Reads the frames of a machine's uplink. Returns how many there are, and how many may leave.
#[must_use]
pub fn uplink(mut bytes: &[u8]) -> (usize, usize) {
    let own = Range::new([192, 0, 2, 0].into(), 24);
    let (mut frame, mut all, mut allowed) = (Vec::new(), 0, 0);
    while let Ok(true) = read_frame(&mut bytes, &mut frame) {
        all += 1;
        allowed += usize::from(allows(&frame[LENGTH_BYTES..], own.as_slice(), true));
    }
    (all, allowed)
}

/// All lines of the control line, up to its end.
#[must_use]
pub fn control_lines(mut from: UnixStream) -> Vec<String> {
    let (mut lines, mut all) = (Lines::default(), Vec::new());
    loop {
        let (some, more) = lines.read(&mut from);
        all.extend(some);
        if !more {
            return all;
        }
    }
}
