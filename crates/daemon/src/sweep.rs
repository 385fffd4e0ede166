//! What a crash left behind, judged against what this daemon knows, at any time.
//!
//! Order matters: what is known is asked before *and* after the host is looked at, so that what was born or removed meanwhile is
//! not taken for a leak.

use crate::config::{Config, VMM_NAME};
use crate::daemon::Daemon;
use crate::error::{Fault, Outcome, blocking};
use dayfly_api::types;
use dayfly_host::leaks::{self, Found, Known, Leak, Places};
use dayfly_units::VmId;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::Arc;

fn places(daemon: &Daemon) -> Places {
    Places {
        program: VMM_NAME.to_owned(),
        vm_folders: vec![daemon.config.vms(), daemon.depot.vms_folder()],
        // The store empties its staging folder when it is opened, and every maker removes what is its own.
        temporary: Vec::new(),
        mount_roots: vec![daemon.config.vms()],
    }
}

/// Every VM of the registry and every shell, with its process; one that is being started may have any process that says it is its.
fn known(daemon: &Daemon, found: &Found, into: &mut Known) {
    for id in daemon.registry.seats() {
        let entry = into.vms.entry(id).or_insert(None);
        *entry = entry.or_else(|| found.processes.iter().find(|p| p.vm == id).map(|p| p.process));
    }
    for vm in daemon.registry.all() {
        let running = vm.live().process;
        let starting = || found.processes.iter().find(|p| p.vm == vm.id).map(|p| p.process);
        let process = running.or_else(|| vm.phase().alive().then(starting).flatten());
        let entry = into.vms.entry(vm.id).or_insert(process);
        *entry = entry.or(process);
    }
}

/// Whether a VMM was started for this run folder: another daemon's are none of our business.
fn ours(config: &Config, pid: u32) -> bool {
    let name = config.vmm_name();
    let name = name.as_os_str().as_bytes();
    let cmdline = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    cmdline.strip_prefix(name).is_some_and(|rest| rest.first() == Some(&0))
}

/// Whether it is the folder of a VM that has gone, of which others stand on a layer; nothing else of that VM is there rightly.
fn held(leak: &Leak, folder: &Path, vms: &[VmId]) -> bool {
    let Leak::File(path) = leak else { return false };
    path.parent() == Some(folder) && vms.iter().any(|vm| path.ends_with(vm.to_string()))
}

fn look(daemon: &Daemon) -> Outcome<Vec<Leak>> {
    let failed = |e: std::io::Error| Fault::internal(format_args!("looking for leaks: {e}"));
    let places = places(daemon);
    // The run folder itself may be a mount of somebody's.
    let mut before = Known { mounts: [daemon.config.vms()].into(), ..Known::default() };
    known(daemon, &Found::default(), &mut before);
    let mut of_others = daemon.depot.store().held_vms();
    let mut found = leaks::scan(&places, None).map_err(failed)?;
    found.processes.retain(|p| ours(&daemon.config, p.process.pid));
    of_others.extend(daemon.depot.store().held_vms());
    known(daemon, &found, &mut before);
    let mut leaks = leaks::judge(&found, &before);
    let folder = daemon.depot.vms_folder();
    leaks.retain(|leak| !held(leak, &folder, &of_others));
    Ok(leaks)
}

/// What belongs to no VM and no operation.
///
/// # Errors
/// The host cannot be looked at.
pub async fn find(daemon: &Arc<Daemon>) -> Outcome<Vec<Leak>> {
    let daemon = daemon.clone();
    blocking(move || look(&daemon)).await
}

/// Removes what [`find`] finds, and gives what it removed.
///
/// # Errors
/// The host cannot be looked at. What cannot be removed is logged, and found again.
pub async fn sweep(daemon: &Arc<Daemon>) -> Outcome<Vec<Leak>> {
    let daemon = daemon.clone();
    blocking(move || {
        let mut leaks = look(&daemon)?;
        leaks.retain(|leak| match leaks::sweep(leak, None) {
            Ok(()) => {
                tracing::info!(kind = leak.kind(), "swept {leak}");
                true
            }
            Err(e) => {
                tracing::error!("{e}");
                false
            }
        });
        Ok(leaks)
    })
    .await
}

/// As clients see it.
#[must_use]
pub fn shown(leak: &Leak) -> types::Leak {
    types::Leak { kind: leak.kind().to_owned(), what: leak.to_string() }
}
