//! Processes of streams that an earlier daemon has started ([`crate::net::streams`]).

use crate::daemon::Daemon;
use crate::net::streams;
pub use crate::net::streams::left;
use dayfly_host::process::Process;
use dayfly_units::VmId;

/// Has the VMs that live wait for the processes of their streams. The sweep ends the others.
pub fn adopt(daemon: &Daemon, left: Vec<(VmId, Process)>) {
    let vms = daemon.registry.all();
    for (id, process) in left {
        let of = vms.iter().find(|vm| vm.id == id && vm.phase().alive());
        if let Some(vm) = of.filter(|vm| streams::is_of(&process, vm.uid)) {
            // A client may follow the program with which the VM is removed.
            let follows = vm.followers.clone().try_read_owned().ok();
            vm.streams.adopt(process, vm.ledger.relays.clone(), follows);
        }
    }
}
