//! Frozen layers must not change any more: other VMs read them, and snapshots are made of them.
//!
//! ```text
//!  frozen ─▶ can a process write to it? ─no─▶ shared, published
//!                     │ yes, or unknown
//!                     ▼
//!            a copy takes its place ─▶ shared, published
//!                     ╰─▶ still written to by a VMM that should have closed it ─▶ the VM is ended
//!                                    otherwise: its VMM gets the copy (Rebase)
//! ```
//!
//! A VMM gets a read-only descriptor of each layer that it freezes, and closes the writable one. A
//! VMM that keeps the writable one has been taken over by its guest. The store makes the copy
//! ([`Store::open_frozen_layer`]), so what others read is safe before the VM ends.

use crate::base::error::{ApiError, Outcome, blocking};
use crate::daemon::Daemon;
use crate::model::disk::Disk;
use crate::model::exit::exit_now;
use crate::templates::pagers::end_with;
use crate::vm::Vm;
use crate::vmm::control_link;
use dayfly_api::types::{ErrorCode, ExitKind};
use dayfly_store::{ChainLayer, OpenError, ReplacedLayer, Store, VmLayer};
use dayfly_vmm::control::{Answer, Command};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Why a VM is ended.
const CAUSE: &str = "its VMM can still write to a disk layer that it reported as frozen, so its \
                     guest may have taken it over; snapshots and clones have a copy of the layer";

/// How long a writer may stay before its VM is ended, and the pause between two looks. A process
/// that the daemon starts has copies of the daemon's descriptors for an instant, until it executes
/// its program, and on a busy host that instant may be seconds. No event reports that they are
/// closed.
const CLOSED_WITHIN: Duration = Duration::from_secs(10);
const LOOK: Duration = Duration::from_millis(10);

/// Makes sure that no process can write to the frozen layers of a VM.
///
/// # Errors
/// A layer cannot be read or copied. Or the VM was ended, and it is ephemeral: its layers are
/// removed with it.
pub async fn prove(daemon: &Arc<Daemon>, vm: &Arc<Vm>) -> Outcome<()> {
    let (shared, disks) = (daemon.clone(), vm.live().disks);
    let replaced = blocking(move || {
        let layers = disks.iter().flat_map(|disk| &disk.layers).filter_map(frozen);
        let open = layers.map(|layer| shared.templates.store().open_frozen_layer(&layer));
        let open = open.collect::<Result<Vec<_>, _>>()?;
        Ok(open.into_iter().filter_map(|layer| layer.replaced).collect())
    });
    let ended = replaced_layers(daemon, vm, replaced.await?).await;
    if ended && vm.facts.ephemeral {
        return Err(ApiError::new(ErrorCode::Guest, format_args!("VM {}: {CAUSE}", vm.name)));
    }
    Ok(())
}

const fn frozen(layer: &ChainLayer) -> Option<VmLayer> {
    match layer {
        ChainLayer::Frozen(layer) | ChainLayer::Shared(layer) => Some(*layer),
        ChainLayer::Stored(_) => None,
    }
}

/// Ends the VMs that can still write to layers that were copied, and gives the others the copies.
/// `vm` depends on these layers. Returns whether `vm` was ended.
pub(crate) async fn replaced_layers(
    daemon: &Arc<Daemon>,
    vm: &Arc<Vm>,
    replaced: Vec<ReplacedLayer>,
) -> bool {
    let mut ended = false;
    for layer in replaced {
        daemon.metrics.copied_layer();
        let id = layer.layer.vm;
        let owner =
            if id == vm.id { Some(vm.clone()) } else { daemon.registry.find(&id.to_string()).ok() };
        let Some(owner) = owner else { continue };
        // A VMM of an earlier version keeps its descriptor until it gets another file.
        if owner.live().read_only_layers && stays_written(&layer).await {
            end(daemon, &owner, &layer.layer);
            ended |= owner.id == vm.id;
            continue;
        }
        tracing::warn!(vm = %id, layer = ?layer.layer, "copied: a process could write to it");
        if let Err(error) = rebase(daemon, &owner, layer).await
            && owner.phase().alive()
        {
            tracing::warn!(vm = %id, "it keeps the layer of which a copy was made: {error}");
        }
    }
    ended
}

/// Whether a process can write to the layer during all of [`CLOSED_WITHIN`].
async fn stays_written(layer: &ReplacedLayer) -> bool {
    let begun = Instant::now();
    loop {
        match layer.has_writer() {
            Ok(true) if begun.elapsed() < CLOSED_WITHIN => tokio::time::sleep(LOOK).await,
            Ok(written) => return written,
            Err(error) => {
                tracing::error!("asking for a lease on a frozen layer: {error}");
                return false;
            }
        }
    }
}

/// Ends a VM whose VMM kept a layer.
fn end(daemon: &Daemon, vm: &Vm, layer: &VmLayer) {
    tracing::error!(vm = %vm.id, name = %vm.name, ?layer, "{CAUSE}: ending it");
    let Some(process) = vm.process() else { return };
    // First, because the VMM may have written its exit record already.
    vm.update(|live| {
        live.exit.get_or_insert_with(|| exit_now(ExitKind::Failed, CAUSE));
    });
    if let Err(e) = end_with(&process, &vm.dir.exit(), CAUSE, &daemon.groups) {
        tracing::error!(vm = %vm.id, "ending it: {e}");
    }
}

/// Has the VMM use the copy in place of the layer.
async fn rebase(daemon: &Arc<Daemon>, vm: &Arc<Vm>, layer: ReplacedLayer) -> Outcome<()> {
    let number = layer.layer.disk;
    let Some(disk) = vm.live().disks.into_iter().nth(number.into()) else { return Ok(()) };
    let store = daemon.templates.store().clone();
    let fds = blocking(move || Ok(chain_with_copy(&store, &disk, layer)?)).await?;
    let within = daemon.config.deadlines.control;
    let command = Command::Rebase { disk: number };
    match control_link::with_fds(&vm.dir.control(), command, fds, within).await? {
        Answer::Ok => {}
        got => tracing::warn!(vm = %vm.id, ?got, "its disk {number} keeps its layers"),
    }
    Ok(())
}

/// The descriptors of [`Command::Rebase`]: the former data of the layer, and the chain up to its
/// copy.
fn chain_with_copy(
    store: &Store,
    disk: &Disk,
    replaced: ReplacedLayer,
) -> Result<Vec<OwnedFd>, OpenError> {
    let mut fds = vec![OwnedFd::from(replaced.data)];
    for layer in &disk.layers {
        let (data, map) = match layer {
            ChainLayer::Frozen(layer) | ChainLayer::Shared(layer) => {
                let open = store.open_frozen_layer(layer)?;
                (open.data, open.map)
            }
            ChainLayer::Stored(layer) => {
                let open = store.open_layers(std::slice::from_ref(layer), "a VM that goes on")?;
                let Some(open) = open.into_iter().next() else { continue };
                (open.data, open.map)
            }
        };
        fds.extend([OwnedFd::from(data), OwnedFd::from(map)]);
        if frozen(layer) == Some(replaced.layer) {
            break;
        }
    }
    Ok(fds)
}
