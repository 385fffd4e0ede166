//! Fork: clones of a running VM, which goes on (Kaleidoscope, section 3.1).
//!
//! ```text
//! Running ─▶ Precopy ─Fork▶ pause, copy the last pages, freeze the disks, go on ─Thaw▶ Running
//!                                                   ╰─▶ ForkPoint ─▶ clones ─▶ an identity each
//! ```
//!
//! The pages that the VM has written since it was created are copied to a memory file while it
//! runs. It is paused to copy the last of them, as for a snapshot ([`crate::ops::snapshot`]). Its
//! clones map this file over the VM's own backing. Nothing is hashed, stored or synced, and all
//! clones of a fork point share the file. The guest is not sealed, because only this daemon can
//! reach a clone before it has its identity.
//!
//! The section from `Fork` to `Thaw` runs to its end even if the client goes away.

use crate::base::error::{ApiError, Outcome, blocking};
use crate::base::time::Asked;
use crate::daemon::Daemon;
use crate::model::disk::Disk;
use crate::model::facts::{Facts, ForkFacts};
use crate::model::request_key::RequestKey;
use crate::model::state::Event;
use crate::net::check_many;
use crate::ops::awake::awake;
use crate::ops::create::{Order, Origin, VmGuard, create};
use crate::ops::save::{allowed, answered, arrived, end_precopy, freeze_disks, precopy};
use crate::ops::section::section;
use crate::ops::{admit, expiry, flatten, immutable, pending, publish};
use crate::templates::fork_point::{ForkPoint, ForkPointDisk};
use crate::templates::memory_backing::{MemoryBacking, Ram};
use crate::templates::shared::Shared;
use crate::vm::batch::Batch;
use crate::vm::{Vm, record};
use crate::vmm::source::Purpose;
use crate::vmm::{agent_link, control_link};
use dayfly_api::types::{ErrorCode, EventKind, ForkRequest, Forked, NetworkRequest, Publish};
use dayfly_store::{ChainLayer, Freezing, Pin, ReplacedLayer, seal_content};
use dayfly_units::{Egress, PAGE_SIZE, error::chain, failpoint};
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

/// Creates a memfd of `bytes` zero bytes. If `bytes` is not 0, its length is sealed.
fn memory(name: &str, bytes: u64) -> io::Result<File> {
    let file = File::from(rustix::fs::memfd_create(
        name,
        MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING,
    )?);
    if bytes > 0 {
        file.set_len(bytes)?;
        rustix::fs::fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW)?;
    }
    Ok(file)
}

fn files(e: io::Error) -> ApiError {
    ApiError::internal(format_args!("files for a fork: {e}"))
}

/// Starts clones of a running VM, or of a paused one, which runs for a moment: all of them or none.
///
/// # Errors
/// The VM does not run, the clones do not fit, or a step failed; if possible, the VM goes on.
pub async fn fork(
    daemon: &Arc<Daemon>,
    vm: &Arc<Vm>,
    request: ForkRequest,
    asked: Asked,
) -> Outcome<Forked> {
    fork_once(daemon, vm, request, None, asked).await
}

/// As [`fork`], on request of a client with this key.
///
/// # Errors
/// As [`fork`].
pub async fn fork_once(
    daemon: &Arc<Daemon>,
    vm: &Arc<Vm>,
    request: ForkRequest,
    key: Option<RequestKey>,
    asked: Asked,
) -> Outcome<Forked> {
    forked(daemon, vm, request, asked, By::Client(key)).await
}

/// As [`fork`], on request of the VM's own guest. The clones count against its limit.
///
/// # Errors
/// As [`fork`].
pub async fn fork_for_guest(
    daemon: &Arc<Daemon>,
    vm: &Arc<Vm>,
    request: ForkRequest,
    asked: Asked,
) -> Outcome<Forked> {
    forked(daemon, vm, request, asked, By::Guest).await
}

/// What asks for a fork.
enum By {
    /// A client, with the key of its request.
    Client(Option<RequestKey>),
    /// The VM's own guest.
    Guest,
}

fn check(request: &ForkRequest) -> Outcome<()> {
    expiry::check(request.lifetime)?;
    let (count, least) = (request.count, u32::from(request.template.is_none()));
    if !(least..=MOST).contains(&count) {
        return Err(ApiError::invalid(format_args!(
            "count: expected {least} to {MOST}, got {count}"
        )));
    }
    if count > 1 && request.name.is_some() {
        return Err(ApiError::invalid("name: expected none where there is more than one clone"));
    }
    check_many(count, &request.publish)
}

async fn forked(
    daemon: &Arc<Daemon>,
    vm: &Arc<Vm>,
    request: ForkRequest,
    asked: Asked,
    by: By,
) -> Outcome<Forked> {
    let (by_guest, key) = match by {
        By::Client(key) => (false, key),
        By::Guest => (true, None),
    };
    check(&request)?;
    let ForkRequest { count, name, labels, forks, lifetime, limits, template, .. } = request;
    let (egress, publish) = (request.egress, (request.publish, request.publish_exposed));
    // Forks take turns, because each freezes the layers that the one before put on top. The task
    // that freezes owns the lock: a client that goes away does not release it.
    let one = vm.snapshots.clone().lock_owned().await;
    allowed(vm)?;
    if let Some(template) = &template {
        publish::free(daemon, template).await?;
        admit::snapshot(daemon, vm).await?;
    }
    // A fork whose clones do not fit is refused before the VM is paused. Each clone reserves its
    // memory and books its CPUs later.
    admit::clones(daemon, vm, count, limits).await?;
    let awake = awake(daemon, vm).await?;
    let (work, same) = (daemon.clone(), vm.clone());
    let within = 2 * daemon.config.deadlines.save;
    let frozen = async move { Ok((freeze(&work, &same).await?, one)) };
    let (mut fork_point, one) = section(daemon, vm, "a fork", within, frozen).await?;
    drop(awake);
    fork_point.facts.fork.by_guest = by_guest;
    let (fork_point, frozen_us) = (Arc::new(fork_point), asked.elapsed_us());
    daemon.pool.expect_shape(fork_point.shape());
    let template = match template {
        Some(name) => Some(pending::begin(daemon, &fork_point, name).await?),
        None => None,
    };
    let batch = Batch::of(&daemon.config, count).map_err(ApiError::internal)?;
    let order = Order {
        origin: Origin::Fork(fork_point.clone(), 1),
        name,
        labels,
        forks,
        lifetime,
        until: vm.live().deadline.filter(|_| by_guest),
        ephemeral: false,
        purpose: Purpose::User,
        network: network_of(&fork_point, egress, publish),
        volumes: None,
        limits,
        vcpus: None,
        next: None,
        entrypoint: None,
        request: key,
        batch: batch.clone(),
    };
    let guards = tokio::select! {
        guards = children(daemon, &fork_point, &order, count, asked) => guards?,
        () = daemon.stop.cancelled() => return Err(ApiError::stopping()),
    };
    failpoint::reached("daemon.fork.children");
    batch.iter().try_for_each(|batch| batch.commit()).map_err(ApiError::internal)?;
    failpoint::reached("daemon.fork.committed");
    if let Some(template) = template {
        template.keep();
    }
    // Only the next fork waits for the merge, through the lock `one`, so frozen layers stay few.
    let (work, same) = (daemon.clone(), vm.clone());
    daemon.undo.spawn(async move {
        flatten::merge_frozen(&work, &same).await;
        drop(one);
    });
    let items: Vec<_> = guards.into_iter().map(|guard| guard.keep().shown()).collect();
    if !items.is_empty() {
        daemon.happened(vm, EventKind::Forked);
    }
    let Frozen { paused_us, pages } = fork_point.frozen;
    Ok(Forked { paused_us, pages, frozen_us, items })
}

/// The network of clones that get another egress policy than the VM, or ports; `None`: the VM's.
/// Ports are not inherited, because a port of the host leads to one VM.
fn network_of(
    fork_point: &ForkPoint,
    egress: Option<Egress>,
    (publish, publish_exposed): (Vec<Publish>, bool),
) -> Option<NetworkRequest> {
    if egress.is_none() && publish.is_empty() && !publish_exposed {
        return None;
    }
    let own = fork_point.facts.network.clone();
    let network = NetworkRequest { publish, publish_exposed, ..own };
    Some(match egress {
        Some(egress) => network.with_policy(egress),
        None => network,
    })
}

/// Creates the clones of a fork point. A task for each, so that all CPUs start clones. If one
/// fails, the others are dropped, which removes their VMs.
async fn children(
    daemon: &Arc<Daemon>,
    fork_point: &Arc<ForkPoint>,
    order: &Order,
    count: u32,
    asked: Asked,
) -> Outcome<Vec<VmGuard>> {
    let creations = (1..=count).map(|number| {
        let daemon = daemon.clone();
        let order = Order { origin: Origin::Fork(fork_point.clone(), number), ..order.clone() };
        let task = tokio::spawn(async move {
            let guard = create(&daemon, asked, order).await?;
            failpoint::reached("daemon.fork.child");
            Ok(guard)
        });
        let task = tokio_util::task::AbortOnDropHandle::new(task);
        async {
            task.await
                .unwrap_or_else(|e| Err(ApiError::internal(format_args!("a creation ended: {e}"))))
        }
    });
    try_join_all(creations).await
}

/// Whether it suffices to copy the pages that the VM has written. After several generations of
/// forks the backing may need more files than a VMM accepts.
fn fits_over(backing: &MemoryBacking) -> bool {
    let (rows, files) =
        backing.shared().map_or((0, 0), |shared| (shared.rows(), shared.files.len()));
    // A row can split a row that it is laid over in two.
    rows + 2 * live::MOST_FORK_ROWS <= backing::MAX_ROWS && files < backing::MAX_FILES
}

/// Makes a fork point of a VM, which goes on.
async fn freeze(daemon: &Arc<Daemon>, vm: &Arc<Vm>) -> Outcome<ForkPoint> {
    let backing = vm.backing().filter(fits_over);
    if backing.is_none() {
        // All RAM is copied, so it must be complete.
        arrived(daemon, vm, None).await?;
    }
    vm.phase().after(Event::Fork)?;
    let has_agent = vm.has_agent();
    let (socket, within) = (vm.dir.vsock(), daemon.config.deadlines.agent);
    if has_agent {
        agent_link::fork(&socket, within).await?;
    }
    let written = freeze_notified(daemon, vm, backing.is_some()).await;
    if has_agent {
        // Clones do not wait for this.
        let vm = vm.clone();
        daemon.undo.spawn(async move {
            if let Err(e) = agent_link::forked(&socket, within).await {
                // The agent's fork state ends with the next fork or the next identity.
                tracing::warn!(vm = %vm.id, "{e}");
            }
        });
    }
    fork_point(vm, daemon, backing, written?).await
}

/// The pausing part of a fork, after the agent was informed. With `own`, only pages that differ
/// from the backing are copied.
pub(crate) async fn freeze_notified(
    daemon: &Arc<Daemon>,
    vm: &Arc<Vm>,
    own: bool,
) -> Outcome<Written> {
    // Prepared before the precopy, because time between the last round of copying and the pause
    // adds pages to be copied then.
    let target = target(daemon, vm).await?;
    failpoint::reached("daemon.fork.files");
    let copy = Command::Precopy { own };
    precopy(daemon, vm, copy.clone(), &target.ram).await?;
    failpoint::reached("daemon.fork.precopied");
    let turn = vm.take_turn(daemon.config.deadlines.control).await;
    let _turn = match turn.and_then(|turn| begun(vm, &target).map(|()| turn)) {
        Ok(turn) => turn,
        Err(error) => {
            end_precopy(daemon, vm, copy).await;
            return Err(error);
        }
    };
    record::note(&daemon.registry, vm).await;
    failpoint::reached("daemon.fork.forking");
    let written = stand_still(daemon, vm, target).await;
    vm.step(Event::Thaw)?;
    record::note(&daemon.registry, vm).await;
    failpoint::reached("daemon.fork.thawed");
    written
}

/// Begins the pausing part of a fork, for which `target` was prepared.
fn begun(vm: &Vm, target: &Target) -> Outcome<()> {
    // Only the holder of the lock `snapshots` changes the chains, so this is a fault of the daemon.
    if vm.live().disks != target.before {
        return Err(ApiError::internal(format_args!(
            "a fork of VM {}: its layers changed while it was prepared; nothing was frozen",
            vm.name
        )));
    }
    vm.step(Event::Fork)?;
    Ok(())
}

/// The files that a VMM wrote for a fork.
pub(crate) struct Written {
    state: File,
    ram: File,
    /// The list of rows, which say where the pages of `ram` belong.
    list: File,
    frozen: Frozen,
    /// Keeps the VM's image and layers until the fork point has its pin, even if the VM ends.
    pin: Option<Pin>,
}

/// The files that a VMM will write for a fork.
struct Target {
    state: File,
    ram: File,
    list: File,
    /// The descriptors of [`Command::Fork`], in its order.
    fds: Vec<OwnedFd>,
    /// The VM's disks when this was made.
    before: Vec<Disk>,
    /// The VM's disks after the fork.
    disks: Vec<Disk>,
    freezing: Freezing,
}

async fn target(daemon: &Arc<Daemon>, vm: &Arc<Vm>) -> Outcome<Target> {
    let (same, store) = (vm.clone(), daemon.templates.store().clone());
    blocking(move || {
        let ram = memory("ram", same.facts.memory_bytes).map_err(files)?;
        let (state, list) =
            (memory("state", 0).map_err(files)?, memory("pages", 0).map_err(files)?);
        let mut fds: Vec<OwnedFd> = Vec::new();
        for file in [&state, &ram, &list] {
            fds.push(file.try_clone().map_err(files)?.into());
        }
        let live = same.live();
        let (mut disks, mut freezing) = (live.disks.clone(), store.freezing());
        let read_only = live.read_only_layers;
        freeze_disks(&mut disks, &mut fds, read_only, |layer| freezing.freeze(layer))?;
        Ok(Target { state, ram, list, fds, before: live.disks, disks, freezing })
    })
    .await
}

async fn stand_still(daemon: &Arc<Daemon>, vm: &Arc<Vm>, target: Target) -> Outcome<Written> {
    let Target { state, ram, list, fds, disks, freezing, before: _ } = target;
    let within = daemon.config.deadlines.save;
    let pin = vm.pinned();
    let answer = control_link::decided(&vm.dir.control(), Command::Fork, fds, within).await;
    failpoint::reached("daemon.fork.frozen");
    let frozen = answered(vm, answer, disks, |_| freezing.keep())?;
    let frozen =
        frozen.ok_or_else(|| ApiError::internal("the VMM, for a fork: expected Frozen, got Ok"))?;
    Ok(Written { state, ram, list, frozen, pin })
}

/// Makes the fork point from the files that the VMM wrote.
pub(crate) async fn fork_point(
    vm: &Arc<Vm>,
    daemon: &Arc<Daemon>,
    backing: Option<MemoryBacking>,
    written: Written,
) -> Outcome<ForkPoint> {
    let (same, shared) = (vm.clone(), daemon.clone());
    let made = blocking(move || {
        let (vm, daemon) = (same, shared);
        let Written { state, ram, list, frozen, pin: before } = written;
        for (file, what) in [(&state, "state"), (&ram, "memory"), (&list, "list of pages")] {
            // Sealing fails if a VMM could still write to the file.
            seal_content(file)
                .map_err(|e| ApiError::internal(format_args!("a fork: sealing its {what}: {e}")))?;
        }
        let rows = backing::decode(&list).map_err(|e| ApiError::internal(chain(&e)))?;
        let pages = vm.facts.memory_bytes / PAGE_SIZE;
        backing::check(&rows, pages, &[pages]).map_err(|e| ApiError::internal(chain(&e)))?;
        let ram = match backing {
            None if rows.is_empty() => {
                Ram { memory: ram, shared: None, pager: None, working_set: None }
            }
            None => {
                return Err(ApiError::internal(
                    "a fork: expected that all was copied, got a list of pages",
                ));
            }
            Some(backing) => {
                let shared = Shared::over(backing.shared(), &rows, &ram).map_err(files)?;
                let shared = shared.ok_or_else(|| {
                    ApiError::internal("a fork: more rows of pages than a VMM takes")
                })?;
                let working_set =
                    backing.working_set().map(File::try_clone).transpose().map_err(files)?;
                let memory = backing.memory().try_clone().map_err(files)?;
                Ram { memory, shared: Some(shared), pager: backing.wanted().cloned(), working_set }
            }
        };
        let live = vm.live();
        let disks: Vec<Disk> = live.disks.into_iter().map(Disk::for_clone).collect();
        let pin = daemon.templates.pin(&vm.name, &disks)?;
        drop(before);
        let mut replaced = Vec::new();
        let disks = disks.into_iter().map(|disk| open(&daemon, disk, &mut replaced));
        let disks = disks.collect::<Outcome<_>>()?;
        let fork = ForkFacts { from: Some(vm.id), ..ForkFacts::default() };
        let facts = Facts { fork, network: vm.network_now(), ..vm.facts.clone() };
        let agent_version = live.agent_version;
        let ram = Arc::new(ram);
        Ok((ForkPoint { ram, state, disks, facts, agent_version, pin, frozen }, replaced))
    });
    let (fork_point, replaced) = made.await?;
    immutable::replaced_layers(daemon, vm, replaced).await;
    failpoint::reached("daemon.fork.pinned");
    Ok(fork_point)
}

/// Opens a disk of a fork point. Adds to `replaced` the layers that had to be copied.
fn open(daemon: &Daemon, disk: Disk, replaced: &mut Vec<ReplacedLayer>) -> Outcome<ForkPointDisk> {
    let store = daemon.templates.store();
    let base = store.image(&disk.image.name)?;
    if base.reference() != disk.image {
        return Err(ApiError::new(
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
        ChainLayer::Frozen(layer) | ChainLayer::Shared(layer) => {
            let open = store.open_frozen_layer(layer)?;
            replaced.extend(open.replaced);
            Ok::<_, ApiError>(((open.data, open.map), None))
        }
        ChainLayer::Stored(layer) => {
            let open = store.open_layers(std::slice::from_ref(layer), "a fork")?.pop();
            let open = open.ok_or_else(|| ApiError::internal("a layer that was opened"))?;
            Ok(((open.data, open.map), open.tree))
        }
    };
    let layers = disk.layers.iter().map(layer).collect::<Outcome<Vec<_>>>()?;
    let (layers, of_layers): (_, Vec<_>) = layers.into_iter().unzip();
    let trees = std::iter::once(base.tree).chain(of_layers).collect();
    Ok(ForkPointDisk { base: base.disk, layers, trees, disk })
}
