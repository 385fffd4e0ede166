//! What an adopted VM has: its network, its memory, its disks.

use crate::daemon::Daemon;
use crate::net::Attachment;
use crate::vm::Vm;
use dayfly_api::types::ErrorCode;
use dayfly_host::process::Process;

/// Gives a live VM its network attachment, its memory and its pin again. `relay` passes the
/// bytes of its published ports.
pub(super) fn give_resources(daemon: &Daemon, vm: &Vm, relay: Option<Process>) {
    let (networks, had, asked) = (&daemon.networks, vm.live().network, vm.network_now());
    vm.attach(Attachment::adopt(networks, had, &asked, relay));
    vm.keep_memory(daemon.budget.adopt(vm.node, vm.facts.memory_bytes));
    vm.keep_share(daemon.space.adopt());
    match daemon.templates.pin(&vm.name, &vm.live().disks) {
        Ok(pin) => vm.keep_pinned(pin),
        // Its VMM has all files open; only snapshots need the pin.
        Err(error) => vm.update(|live| live.no_snapshot = Some(error.0.message)),
    }
}

/// Pins the disks of a VM that has ended, so that it can start again.
pub(super) fn keep_disks(daemon: &Daemon, vm: &Vm) {
    let disks = vm.live().disks;
    let error = match daemon.templates.pin(&vm.name, &disks) {
        Ok(pin) => return vm.keep_pinned(pin),
        Err(error) => error.0,
    };
    tracing::warn!(vm = %vm.id, "looking for its disks: {}", error.message);
    // If something is missing, the start is refused. Another error, such as one of the host, may
    // pass: then all layers stay until the VM starts or is removed.
    if !matches!(error.code, ErrorCode::NotFound | ErrorCode::Damaged) {
        let images = disks.iter().map(|disk| disk.image.name.clone()).collect();
        let holder = format!("VM {}", vm.name);
        vm.keep_pinned(daemon.templates.store().pin_every_layer(&holder, images));
    }
}
