//! Fork: clones of a VM that runs, and goes on running (Kaleidoscope, section 3.1).
//!
//! ```text
//! Running ─▶ Precopy ─Fork▶ pause, copy the last pages, freeze the disks, go on ─Thaw▶ Running
//!                                                   ╰──▶ an Epoch ──▶ births, side by side ──▶ an identity each
//! ```
//!
//! What the VM has written since its own birth is copied to a memory file while it runs; it stands still for what it wrote last, as
//! for a snapshot ([`crate::snapshot`]). Its clones map that file over what the VM itself is mapped from: nothing is hashed, stored or synced, and all
//! clones of one epoch share it. The guest is not sealed: a clone is spoken to by this daemon alone, which gives it its identity first.
//!
//! From `Fork` to `Thaw` runs to its end even when the client goes away.

use crate::daemon::Daemon;
use crate::depot::sharing::Shared;
use crate::error::{Fault, Outcome, blocking, chain};
use crate::snapshot::{allowed, answered, arrived, freeze_disks, precopy};
use crate::time::Asked;
use crate::vm::beneath::{Beneath, Ram};
use crate::vm::birth::{Order, Origin, Part, birth};
use crate::vm::state::Event;
use crate::vm::step::Step;
use crate::vm::{Disk, Facts, ForkFacts, Vm, agent_link, control_link, death};
use crate::{flatten, forming, snapshot};
use dayfly_api::types::{ErrorCode, ForkRequest, Forked};
use dayfly_store::{ChainLayer, Freezing, Pin, seal_content};
use dayfly_units::PAGE_SIZE;
use dayfly_vmm::config::Shape;
use dayfly_vmm::control::{Command, Frozen};
use dayfly_vmm::memory::{backing, live};
use futures::future::try_join_all;
use rustix::fs::{MemfdFlags, SealFlags};
use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

/// The most clones of one fork.
const MOST: u32 = 4096;

/// A VM at one instant, from which clones start.
#[derive(Debug)]
pub struct Epoch {
    /// Its RAM.
    pub ram: Arc<Ram>,
    /// Its sealed state.
    pub state: File,
    /// Its disks.
    pub disks: Vec<EpochDisk>,
    /// What it is.
    pub facts: Facts,
    /// Of the agent in it.
    pub agent_version: String,
    /// Keeps what it stands on in the store, and what the VM has frozen.
    pub pin: Pin,
    /// How the VM stood still.
    pub frozen: Frozen,
}

/// A disk at that instant.
#[derive(Debug)]
pub struct EpochDisk {
    /// The lowest layer.
    pub base: File,
    /// Data and map of each layer over it, the lowest first.
    pub layers: Vec<(File, File)>,
    /// Which they are.
    pub disk: Disk,
}

impl Epoch {
    /// Which shells its clones can be.
    pub fn shape(&self) -> Shape {
        let disks = u8::try_from(self.disks.len()).unwrap_or(u8::MAX);
        Shape { memory_bytes: self.facts.memory_bytes, vcpus: self.facts.vcpus, disks, nets: self.facts.nets }
    }
}

/// A file in the host's memory of so many bytes, all zero, which keeps that length.
fn memory(name: &str, bytes: u64) -> io::Result<File> {
    let file = File::from(rustix::fs::memfd_create(name, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?);
    if bytes > 0 {
        file.set_len(bytes)?;
        rustix::fs::fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW)?;
    }
    Ok(file)
}

fn files(e: io::Error) -> Fault {
    Fault::internal(format_args!("files for a fork: {e}"))
}

/// Starts clones of a VM that runs: all of them or none.
///
/// # Errors
/// It does not run, there is no room for them, or a step failed; the VM goes on where that was possible.
pub async fn fork(daemon: &Arc<Daemon>, vm: &Arc<Vm>, request: ForkRequest, asked: Asked) -> Outcome<Forked> {
    let ForkRequest { count, name, labels, forks, template } = request;
    let least = u32::from(template.is_none());
    if !(least..=MOST).contains(&count) {
        return Err(Fault::invalid(format_args!("count: expected {least} to {MOST}, got {count}")));
    }
    if count > 1 && name.is_some() {
        return Err(Fault::invalid("name: expected none where there is more than one clone"));
    }
    // One after the other: each freezes the layers that the one before has put on top.
    let one = vm.snapshots.clone().lock_owned().await;
    allowed(vm)?;
    if let Some(template) = &template {
        snapshot::free(daemon, template).await?;
    }
    // Refused before the VM stands still, where it is clear that not all fit; each then reserves its own.
    let fit =
        (0..count).map(|_| daemon.budget.reserve(vm.facts.memory_bytes, None)).collect::<Result<Vec<_>, _>>();
    drop(fit.map_err(Step::Memory.failed())?);
    let (work, same) = (daemon.clone(), vm.clone());
    let section = daemon.undo.spawn(async move { freeze(&work, &same).await });
    let epoch = section.await.map_err(|e| Fault::internal(format_args!("forking VM {}: {e}", vm.name)))??;
    let (epoch, frozen_us) = (Arc::new(epoch), asked.elapsed_us());
    daemon.pool.expect_shape(epoch.shape());
    let template = match template {
        Some(name) => Some(forming::begin(daemon, &epoch, name).await?),
        None => None,
    };
    let order = Order {
        origin: Origin::Fork(epoch.clone(), 1),
        name,
        labels,
        forks,
        ephemeral: false,
        part: Part::User,
        network: None,
        next: None,
    };
    // Each a task of its own, so that they are born on all CPUs. One that fails drops the others, which takes their VMs with them.
    let births = (1..=count).map(|number| {
        let daemon = daemon.clone();
        let order = Order { origin: Origin::Fork(epoch.clone(), number), ..order.clone() };
        let task = tokio::spawn(async move { birth(&daemon, asked, order).await });
        let task = tokio_util::task::AbortOnDropHandle::new(task);
        async { task.await.unwrap_or_else(|e| Err(Fault::internal(format_args!("a birth ended: {e}")))) }
    });
    let newborns = tokio::select! {
        newborns = try_join_all(births) => newborns?,
        () = daemon.stop.cancelled() => return Err(Fault::new(ErrorCode::Internal, "the daemon was asked to stop")),
    };
    if let Some(template) = template {
        template.keep();
    }
    // Nobody waits for it but the next fork, which does even if this has not begun: however fast they come, there are few layers.
    let (work, same) = (daemon.clone(), vm.clone());
    daemon.undo.spawn(async move {
        flatten::merge_frozen(&work, &same).await;
        drop(one);
    });
    let items = newborns.into_iter().map(|newborn| newborn.keep().shown()).collect();
    let Frozen { paused_us, pages } = epoch.frozen;
    Ok(Forked { paused_us, pages, frozen_us, items })
}

/// Whether only what a VM has written need be copied: a clone of a clone of a clone may have its RAM from more files than a VMM takes.
fn fits_over(beneath: &Beneath) -> bool {
    let (rows, files) = beneath.shared().map_or((0, 0), |shared| (shared.rows(), shared.files.len()));
    // A row may part one that it is laid over.
    rows + 2 * live::MOST_FORK_ROWS <= backing::MAX_ROWS && files < backing::MAX_FILES
}

/// Makes an epoch of a VM, which goes on.
async fn freeze(daemon: &Arc<Daemon>, vm: &Arc<Vm>) -> Outcome<Epoch> {
    let beneath = vm.beneath().filter(fits_over);
    if beneath.is_none() {
        // All of it is copied.
        arrived(daemon, vm, None).await?;
    }
    vm.phase().after(Event::Fork)?;
    let has_agent = vm.has_agent();
    let (socket, within) = (vm.dir.vsock(), daemon.config.deadlines.agent);
    if has_agent {
        agent_link::fork(&socket, within).await?;
    }
    let written = freeze_told(daemon, vm, beneath.is_some()).await;
    if has_agent {
        // Clones do not wait for it.
        let vm = vm.clone();
        daemon.undo.spawn(async move {
            if let Err(e) = agent_link::forked(&socket, within).await {
                // The next fork ends it, or the next identity.
                tracing::warn!(vm = %vm.id, "{e}");
            }
        });
    }
    epoch(vm, daemon, beneath, written?).await
}

/// The same of a VM whose agent knows; with `own` only what is not as in its template is copied.
pub(crate) async fn freeze_told(daemon: &Arc<Daemon>, vm: &Arc<Vm>, own: bool) -> Outcome<Written> {
    // Before it: what takes time between the last round of copying and the standing still makes more pages that are copied then.
    let target = target(daemon, vm).await?;
    precopy(daemon, vm, Command::Precopy { own }, &target.ram).await?;
    let _turn = vm.turn.lock().await;
    if let Err(e) = vm.step(Event::Fork) {
        // It runs, or has ended: either way nothing is to be noted for us any more.
        let within = daemon.config.deadlines.control;
        let _ = control_link::command(&vm.dir.control(), Command::Precopy { own }, within).await;
        return Err(e.into());
    }
    death::note(daemon, vm).await;
    let written = stand_still(daemon, vm, target).await;
    vm.step(Event::Thaw)?;
    death::note(daemon, vm).await;
    written
}

/// What a VMM has written.
pub(crate) struct Written {
    state: File,
    ram: File,
    /// The rows of `ram`.
    list: File,
    frozen: Frozen,
    /// Keeps what the VM stands on, should it end before the epoch does so.
    pin: Option<Pin>,
}

/// What a VMM is to write.
struct Target {
    state: File,
    ram: File,
    list: File,
    /// All of it, in the order of [`Command::Fork`].
    fds: Vec<OwnedFd>,
    /// The disks afterwards.
    disks: Vec<Disk>,
    freezing: Freezing,
}

async fn target(daemon: &Arc<Daemon>, vm: &Arc<Vm>) -> Outcome<Target> {
    let (same, store) = (vm.clone(), daemon.depot.store().clone());
    blocking(move || {
        let ram = memory("ram", same.facts.memory_bytes).map_err(files)?;
        let (state, list) = (memory("state", 0).map_err(files)?, memory("pages", 0).map_err(files)?);
        let mut fds: Vec<OwnedFd> = Vec::new();
        for file in [&state, &ram, &list] {
            fds.push(file.try_clone().map_err(files)?.into());
        }
        let (mut disks, mut freezing) = (same.live().disks, store.freezing());
        freeze_disks(&mut disks, &mut fds, |layer| freezing.freeze(layer))?;
        Ok(Target { state, ram, list, fds, disks, freezing })
    })
    .await
}

async fn stand_still(daemon: &Arc<Daemon>, vm: &Arc<Vm>, target: Target) -> Outcome<Written> {
    let Target { state, ram, list, fds, disks, freezing } = target;
    let within = daemon.config.deadlines.save;
    let pin = vm.pinned();
    let answer = control_link::with_fds(&vm.dir.control(), Command::Fork, fds, within).await;
    let frozen = answered(vm, answer, disks, |_| freezing.keep())?;
    let frozen = frozen.ok_or_else(|| Fault::internal("the VMM, for a fork: expected Frozen, got Ok"))?;
    Ok(Written { state, ram, list, frozen, pin })
}

/// What clones start from.
pub(crate) async fn epoch(
    vm: &Arc<Vm>,
    daemon: &Arc<Daemon>,
    beneath: Option<Beneath>,
    written: Written,
) -> Outcome<Epoch> {
    let (vm, daemon) = (vm.clone(), daemon.clone());
    blocking(move || {
        let Written { state, ram, list, frozen, pin: before } = written;
        for (file, what) in [(&state, "state"), (&ram, "memory"), (&list, "list of pages")] {
            // Fails where a VMM still could write to it.
            seal_content(file)
                .map_err(|e| Fault::internal(format_args!("a fork: sealing its {what}: {e}")))?;
        }
        let rows = backing::decode(&list).map_err(|e| Fault::internal(chain(&e)))?;
        let pages = vm.facts.memory_bytes / PAGE_SIZE;
        backing::check(&rows, pages, &[pages]).map_err(|e| Fault::internal(chain(&e)))?;
        let ram = match beneath {
            None if rows.is_empty() => Ram { memory: ram, shared: None, pager: None, working_set: None },
            None => return Err(Fault::internal("a fork: expected that all was copied, got a list of pages")),
            Some(beneath) => {
                let shared = Shared::over(beneath.shared(), &rows, &ram).map_err(files)?;
                let shared =
                    shared.ok_or_else(|| Fault::internal("a fork: more rows of pages than a VMM takes"))?;
                let working_set = beneath.working_set().map(File::try_clone).transpose().map_err(files)?;
                let memory = beneath.memory().try_clone().map_err(files)?;
                Ram { memory, shared: Some(shared), pager: beneath.wanted().cloned(), working_set }
            }
        };
        let live = vm.live();
        let disks: Vec<Disk> = live.disks.into_iter().map(Disk::lent).collect();
        let pin = daemon.depot.pin(&vm.name, &disks)?;
        drop(before);
        let disks = disks.into_iter().map(|disk| open(&daemon, disk)).collect::<Outcome<_>>()?;
        let fork = ForkFacts { from: Some(vm.id), ..ForkFacts::default() };
        let facts = Facts { fork, ..vm.facts.clone() };
        let agent_version = live.agent_version;
        Ok(Epoch { ram: Arc::new(ram), state, disks, facts, agent_version, pin, frozen })
    })
    .await
}

fn open(daemon: &Daemon, disk: Disk) -> Outcome<EpochDisk> {
    let store = daemon.depot.store();
    let base = store.image(&disk.image.name)?;
    if base.reference() != disk.image {
        return Err(Fault::new(
            ErrorCode::Damaged,
            format_args!(
                "image {}: expected {}, got {}",
                disk.image.name,
                disk.image.digest,
                base.reference().digest
            ),
        ));
    }
    let layer = |layer: &ChainLayer| match layer {
        ChainLayer::Frozen(layer) | ChainLayer::Borrowed(layer) => {
            Ok::<_, Fault>(store.open_frozen_layer(layer)?)
        }
        ChainLayer::Stored(layer) => {
            let open = store.open_layers(std::slice::from_ref(layer), "a fork")?.pop();
            let open = open.ok_or_else(|| Fault::internal("a layer that was opened"))?;
            Ok((open.data, open.map))
        }
    };
    let layers = disk.layers.iter().map(layer).collect::<Outcome<_>>()?;
    Ok(EpochDisk { base: base.disk, layers, disk })
}
