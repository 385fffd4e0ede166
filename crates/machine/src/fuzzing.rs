//! Functions for the crate `fuzz`: what QEMU and the machine say.

use crate::lines::Lines;
use crate::qmp::Monitor;
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
