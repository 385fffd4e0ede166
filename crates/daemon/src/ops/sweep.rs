//! Sweep: finds what a crash left, compared with what this daemon knows, at any time.
//!
//! The registry is read before *and* after the host is scanned, so that VMs created or removed
//! meanwhile are not taken for leaks.

use crate::base::config::{RELAY_NAME, STREAMS_NAME, VMM_NAME, VOLUME_NAME};
use crate::base::error::{ApiError, Outcome, blocking};
use crate::daemon::Daemon;
use crate::net::{relay, streams};
use crate::vm::survey::is_ours;
use dayfly_api::types;
use dayfly_host::leaks::{self, Found, Known, Leak, Places};
use dayfly_host::process::scan_below;
use dayfly_units::VmId;
use std::path::Path;
use std::sync::Arc;

fn places(daemon: &Daemon) -> Places {
    Places {
        program: VMM_NAME.to_owned(),
        vm_folders: vec![daemon.config.vms(), daemon.templates.vms_folder()],
        // The store empties its staging folder when it is opened, and every operation removes its
        // own files.
        temporary: Vec::new(),
        mount_roots: vec![daemon.config.vms()],
    }
}

/// Adds every VM and every warm VMM with its process. A VM that is being started may have any
/// process that names it.
fn known(daemon: &Daemon, found: &Found, into: &mut Known) {
    into.groups.extend(daemon.groups.own());
    for id in daemon.registry.vm_slots() {
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

/// Whether the leak is the layer folder of a removed VM of which other VMs use a layer. Nothing
/// else of such a VM may be left.
fn held(leak: &Leak, folder: &Path, vms: &[VmId]) -> bool {
    let Leak::File(path) = leak else { return false };
    path.parent() == Some(folder) && vms.iter().any(|vm| path.ends_with(vm.to_string()))
}

fn look(daemon: &Daemon) -> Outcome<Vec<Leak>> {
    let failed = |e: std::io::Error| ApiError::internal(format_args!("looking for leaks: {e}"));
    let places = places(daemon);
    // The run folder itself may be a mount point.
    let mut before = Known { mounts: [daemon.config.vms()].into(), ..Known::default() };
    known(daemon, &Found::default(), &mut before);
    let mut of_others = daemon.templates.store().shared_layer_owners();
    let mut found = leaks::scan(&places, daemon.groups.groups()).map_err(failed)?;
    found.processes.retain(|p| is_ours(&daemon.config, p.process.pid));
    of_others.extend(daemon.templates.store().shared_layer_owners());
    known(daemon, &found, &mut before);
    let mut leaks = leaks::decide(&found, &before);
    let folder = daemon.templates.vms_folder();
    // A VM whose layers are not known may use any of them.
    let every = daemon.templates.store().every_layer_is_pinned();
    let layers = |leak: &Leak| matches!(leak, Leak::File(path) if path.parent() == Some(&folder));
    leaks.retain(|leak| !(held(leak, &folder, &of_others) || every && layers(leak)));
    leaks.extend(helpers(daemon).map_err(failed)?);
    Ok(leaks)
}

/// The servers of volumes, and the relays of published ports and of streams, that belong to no VM
/// that lives. Those of which this daemon knows that they end are left out.
fn helpers(daemon: &Daemon) -> std::io::Result<Vec<Leak>> {
    let vms = daemon.config.vms();
    let mut found = scan_below(&vms, VOLUME_NAME)?;
    found.retain(|server| !daemon.volume_servers.has(server.process));
    let relays = scan_below(&vms, RELAY_NAME)?;
    found.extend(relays.into_iter().filter(|found| !relay::is_ending(found.process)));
    let of_streams = scan_below(&vms, STREAMS_NAME)?;
    found.extend(of_streams.into_iter().filter(|found| !streams::is_running(found.process)));
    let lives = |vm: VmId| {
        let vm = daemon.registry.find(&vm.to_string());
        vm.is_ok_and(|vm| vm.phase().alive())
    };
    found.retain(|helper| !lives(helper.vm));
    Ok(found.iter().map(|helper| Leak::Process(helper.process, helper.vm)).collect())
}

/// Finds processes, files and mounts that belong to no VM and no operation.
///
/// # Errors
/// The host cannot be scanned.
pub async fn find(daemon: &Arc<Daemon>) -> Outcome<Vec<Leak>> {
    let daemon = daemon.clone();
    blocking(move || look(&daemon)).await
}

/// Removes the leaks of [`find`], and returns those that it removed.
///
/// # Errors
/// The host cannot be scanned. A leak that cannot be removed is logged, and stays.
pub async fn sweep(daemon: &Arc<Daemon>) -> Outcome<Vec<Leak>> {
    let daemon = daemon.clone();
    blocking(move || {
        let mut leaks = look(&daemon)?;
        leaks.retain(|leak| match leaks::sweep(leak, daemon.groups.groups()) {
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

/// The leak in the API's form.
#[must_use]
pub fn shown(leak: &Leak) -> types::Leak {
    types::Leak { kind: leak.kind().to_owned(), what: leak.to_string() }
}
