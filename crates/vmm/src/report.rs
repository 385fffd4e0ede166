//! Lines for the daemon's log, while the VM goes on.
//!
//! They go to standard error, which the zygote inherits from the daemon. The end of a VM has an
//! exit record instead ([`crate::exit`]).

use dayfly_units::VmId;
use std::io::Write;
use std::sync::OnceLock;

static VM: OnceLock<VmId> = OnceLock::new();

/// Sets the VM that the lines of this process are about.
pub fn of_vm(id: VmId) {
    let _ = VM.set(id);
}

/// Writes a line. The caller limits the number of lines, because a guest may cause them.
pub fn line(text: &str) {
    let vm = VM.get().map(|id| format!(" of VM {id}")).unwrap_or_default();
    // Without a log the VM goes on.
    let _ = std::io::stderr().write_all(format!("dayfly-vmm{vm}: {text}\n").as_bytes());
}
