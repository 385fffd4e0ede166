//! The task that keeps the warm pool filled, and ends surplus warm VMMs and clones.

use crate::base::error::{ApiError, Outcome, blocking};
use crate::base::pidfd::readable;
use crate::daemon::Daemon;
use crate::model::vm_slot::VmSlot;
use crate::vm::record::read_exit;
use crate::vmm::demand::TICK;
use crate::vmm::launch::{Fds, Launched};
use crate::vmm::link;
use crate::vmm::pool::{Guest, Missing, Pool, WarmVmm, YIELD};
use crate::vmm::requested::Requested;
use crate::vmm::sizes::Template;
use crate::vmm::source::{CloneOf, Purpose};
use dayfly_api::types::ErrorCode;
use dayfly_host::priority::background;
use dayfly_host::process::Process;
use dayfly_units::{Name, VmId, error::chain};
use dayfly_vmm::config::{Shape, Start};
use dayfly_vmm::control::Command;
use std::sync::Arc;
use std::time::Instant;
use tokio::time::timeout;

/// Fills the pool according to the demand until the daemon stops, and then ends all warm VMMs.
/// Keeps `requested` up to date.
pub async fn keep(daemon: Arc<Daemon>, mut requested: Requested) {
    let mut last_look = Instant::now();
    while !daemon.stop.is_cancelled() {
        if last_look.elapsed() >= TICK {
            last_look = Instant::now();
            note(&daemon, &mut requested).await;
            let surplus = daemon.pool.surplus();
            if !surplus.is_empty() {
                end(&daemon, surplus).await;
                trim_layers(&daemon).await;
            }
        }
        if let Some(missing) = daemon.pool.missing() {
            hold_back(&daemon.pool).await;
            let made = match &missing {
                Missing::WarmVmm(shape) => make(&daemon, *shape).await.map(|warm| (warm, true)),
                Missing::WarmClone(template) => {
                    daemon.pool.making.send_replace(Some(template.name.clone()));
                    prime(&daemon, template).await
                }
            };
            match (made, &missing) {
                (Ok((warm, new)), _) => shelve(&daemon, warm, new).await,
                // The VMM was killed, which does not mean that the next one will be.
                (Err(error), _) if error.0.code == ErrorCode::Guest => {
                    tracing::warn!("making {missing:?} ahead of demand: {error}");
                    // The host may be short of memory.
                    tokio::time::sleep(YIELD).await;
                }
                (Err(error), Missing::WarmClone(template))
                    if error.0.code == ErrorCode::NotFound =>
                {
                    // The snapshot was removed meanwhile.
                    tracing::debug!("making {missing:?} ahead of demand: {error}");
                    daemon.pool.give_up(template);
                }
                (Err(error), Missing::WarmClone(template)) => {
                    tracing::error!("making {missing:?} ahead of demand: {error}");
                    daemon.pool.give_up(template);
                }
                (Err(error), Missing::WarmVmm(_)) => {
                    tracing::error!("making {missing:?} ahead of demand: {error}");
                    tokio::time::sleep(TICK).await; // requests make their own VMMs meanwhile
                }
            }
            daemon.pool.making.send_replace(None);
            continue;
        }
        tokio::select! {
            () = daemon.pool.wanted.notified() => {}
            () = tokio::time::sleep(TICK) => {}
            () = daemon.stop.cancelled() => {}
        }
    }
    note(&daemon, &mut requested).await;
    end(&daemon, daemon.pool.close()).await;
}

/// Writes for the next daemon which snapshots were cloned last, if that has changed.
async fn note(daemon: &Daemon, requested: &mut Requested) {
    if !requested.note(daemon.pool.requested()) {
        return;
    }
    let written = requested.clone();
    let written = blocking(move || written.write().map_err(ApiError::internal)).await;
    // Once for each change, also on a full disk.
    if let Err(e) = written {
        tracing::warn!("the next daemon will not know which snapshots were cloned last: {e}");
    }
}

/// Announces the snapshots that were cloned last before this daemon started, or `newest` if none of
/// them is left, so that the pool makes a warm clone of each.
pub async fn announce(daemon: &Arc<Daemon>, requested: &Requested, newest: Option<Name>) {
    // The last one last, because a pool that is full keeps what was announced last.
    let mut left = false;
    for name in requested.names().iter().rev() {
        left |= announce_one(daemon, name).await;
    }
    if let (false, Some(newest)) = (left, newest) {
        announce_one(daemon, &newest).await;
    }
}

/// Announces a snapshot. Returns whether it exists.
async fn announce_one(daemon: &Arc<Daemon>, name: &Name) -> bool {
    if daemon.config.pool == 0 || daemon.stop.is_cancelled() {
        return true;
    }
    hold_back(&daemon.pool).await;
    let (templates, wanted) = (daemon.templates.clone(), name.clone());
    let opened = blocking(move || {
        background(|| templates.open_ahead(&wanted)?.map(|open| Template::of(&open)).transpose())
    });
    match opened.await {
        Ok(Some(template)) => daemon.pool.announce(&template),
        // Too large to be read ahead of a request.
        Ok(None) => {}
        Err(e) if e.0.code == ErrorCode::NotFound => return false,
        Err(e) => tracing::warn!("no warm clone of snapshot {name}: {e}"),
    }
    true
}

/// Removes prepared layers that no warm VMM needs any more. One stays for a request without a warm
/// VMM.
async fn trim_layers(daemon: &Arc<Daemon>) {
    let (templates, layers) = (daemon.templates.clone(), daemon.pool.layers() + 1);
    if let Err(error) = blocking(move || Ok(templates.store().trim_vm_layers(layers)?)).await {
        // The next start of the daemon removes them.
        tracing::warn!("layers made ahead: {error}");
    }
}

/// Waits until no creation and no removal is in progress, but at most [`YIELD`].
async fn hold_back(pool: &Pool) {
    let quiet = pool.quiet.notified();
    if !pool.is_quiet() {
        let _ = timeout(YIELD, quiet).await;
    }
}

/// Makes a warm VMM on the node that is emptiest.
async fn make(daemon: &Arc<Daemon>, shape: Shape) -> Outcome<WarmVmm> {
    // Requests prefer nodes with warm VMMs, so warm VMMs are spread as VMs should be.
    let waiting = daemon.pool.memory_by_node(daemon.nodes.len());
    let vm_slot = daemon.registry.vm_slot(daemon.budget.emptiest(&waiting))?;
    let (maker, layers) = (daemon.clone(), daemon.pool.layers() + 1);
    let start = Start::WarmVmm { shape, record: false };
    let made = blocking(move || {
        background(|| {
            let launched = maker.launcher.launch(vm_slot, start, Fds::default(), true, true)?;
            if shape.disks > 0
                && let Err(e) = maker.templates.store().prepare_vm_layers(layers)
            {
                // Requests make their own layers.
                tracing::warn!("layers for the next VMs: {}", chain(&e));
            }
            Ok(launched)
        })
    });
    match made.await {
        // What waits in the pool is the provider's.
        Ok(Launched { process, link, group, ready: _, zygote_us: _ }) => {
            Ok(WarmVmm { vm_slot, process, link, group, shape, guest: None })
        }
        Err(error) => {
            discard(daemon, vm_slot).await;
            Err(error)
        }
    }
}

/// Makes a warm clone from a waiting warm VMM, or from a new one. Also returns whether the VMM is
/// new.
async fn prime(daemon: &Arc<Daemon>, template: &Template) -> Outcome<(WarmVmm, bool)> {
    let waiting = daemon.pool.waiting_vmm(template.shape);
    let new = waiting.is_none();
    let mut warm = match waiting {
        Some(warm) => warm,
        None => make(daemon, template.shape).await?,
    };
    let (maker, wanted, vm_slot, vmm) =
        (daemon.clone(), template.clone(), warm.vm_slot, warm.process.clone());
    let guest = move || {
        let open = maker.templates.open_snapshot(&wanted.name)?;
        if Template::of(&open)?.sized(wanted.shape.vcpus) != wanted {
            return Err(ApiError::not_found(format_args!(
                "snapshot {}: is another one by now",
                wanted.name
            )));
        }
        Ok((
            open.manifest.agent_version.clone(),
            CloneOf::new(
                &maker.templates,
                &maker.config.vm(vm_slot.id).exit(),
                vm_slot.id,
                &vmm,
                (&open).into(),
                Purpose::Pool,
            )?,
        ))
    };
    let warm_clones = async {
        let (agent_version, clone) = blocking(move || background(guest)).await?;
        let CloneOf { config, fds, disks, backing, pin } = clone;
        let within = daemon.config.deadlines.control;
        link::command(&mut warm.link, &Command::Restore(config), &fds, within).await?;
        Ok(Guest { disks, backing, pin, agent_version, template: template.clone() })
    };
    match warm_clones.await {
        Ok(guest) => Ok((WarmVmm { guest: Some(guest), ..warm }, new)),
        Err(error) => {
            let killed = was_killed(daemon, &warm).await;
            end(daemon, vec![warm]).await;
            Err(if killed {
                ApiError::new(ErrorCode::Guest, "its VMM was killed from outside")
            } else {
                error
            })
        }
    }
}

/// Whether a warm VMM was killed: it has ended, and without an exit record.
async fn was_killed(daemon: &Daemon, warm: &WarmVmm) -> bool {
    // If its connection broke, it is ending.
    let ended = timeout(YIELD, readable(&warm.process)).await;
    let record = daemon.config.vm(warm.vm_slot.id).exit();
    matches!(ended, Ok(Ok(())))
        && blocking(move || Ok(read_exit(&record).1.is_err())).await == Ok(true)
}

/// Puts back a warm VMM or clone that was taken and not used. It is ended instead if the pool is
/// closed, or if its process ended while it was out of the pool.
pub async fn give_back(daemon: &Arc<Daemon>, warm: WarmVmm) {
    shelve(daemon, warm, false).await;
}

/// Puts a warm VMM or clone into the pool, and watches its process if it is new.
async fn shelve(daemon: &Arc<Daemon>, warm: WarmVmm, new: bool) {
    let (id, process) = (warm.vm_slot.id, warm.process.clone());
    match daemon.pool.put(warm) {
        None if new => watch(daemon, id, process),
        // Its watcher missed an end while it was not in the pool.
        None if !process.is_alive().unwrap_or(false) => {
            end(daemon, daemon.pool.remove(id).into_iter().collect()).await
        }
        None => {}
        Some(warm) => end(daemon, vec![warm]).await,
    }
}

/// Removes a warm VMM or clone from the pool when its process ends.
fn watch(daemon: &Arc<Daemon>, id: VmId, process: Arc<Process>) {
    let daemon = daemon.clone();
    tokio::spawn(async move {
        if let Err(e) = readable(&process).await {
            tracing::error!("waiting for a warm VMM: {e}");
            return;
        }
        if let Some(warm) = daemon.pool.remove(id) {
            tracing::warn!(warm = %id, "a warm VMM ended while it waited");
            end(&daemon, vec![warm]).await;
            daemon.pool.wanted.notify_one();
        }
    });
}

/// Ends the warm clones of snapshots called `name`, which is being removed, also one that is being
/// made: afterwards none of them uses the snapshot's image.
pub async fn forget(daemon: &Arc<Daemon>, name: &Name) {
    end(daemon, daemon.pool.forget(name)).await;
    let mut making = daemon.pool.making.subscribe();
    // An error means that the pool is gone, and its warm clones with it.
    let _ = making.wait_for(|making| making.as_ref() != Some(name)).await;
    end(daemon, daemon.pool.forget(name)).await;
}

/// Kills warm VMMs and removes their files.
async fn end(daemon: &Arc<Daemon>, warm_vmms: Vec<WarmVmm>) {
    let asked = warm_vmms.iter().map(|warm| warm.process.kill()).collect::<Vec<_>>();
    for (warm, asked) in warm_vmms.into_iter().zip(asked) {
        let within = daemon.config.deadlines.reap;
        let ended = blocking(move || {
            asked.map_err(|e| ApiError::internal(format_args!("SIGKILL for a warm VMM: {e}")))?;
            warm.process
                .wait(Some(within))
                .map_err(|e| ApiError::internal(format_args!("a warm VMM: {e}")))?;
            // Dropping `warm` here drops its pin.
            Ok(warm.vm_slot)
        });
        match ended.await {
            Ok(vm_slot) => discard(daemon, vm_slot).await,
            Err(error) => tracing::error!("{error}"),
        }
    }
}

/// Removes the files of a warm VMM whose process is gone, and releases its slot.
async fn discard(daemon: &Arc<Daemon>, vm_slot: VmSlot) {
    let (path, templates) = (daemon.config.vm(vm_slot.id), daemon.templates.clone());
    let removed = blocking(move || match std::fs::remove_dir_all(path.path()) {
        Err(e) if e.kind() != std::io::ErrorKind::NotFound => {
            Err(ApiError::internal(format_args!("removing {}: {e}", path.path().display())))
        }
        _ => templates.remove_vm(vm_slot.id),
    });
    match removed.await {
        Ok(()) => daemon.registry.release_unused(vm_slot),
        Err(error) => tracing::error!("{error}"),
    }
}
