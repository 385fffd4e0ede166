//! A snapshot of a running VM: sealed, stopped, saved, and going on.
//!
//! ```text
//! Running ─▶ Precopy ─Freeze▶ seal ─▶ pause, save, go on ─▶ Identity ─Thaw▶ Running ─▶ hash, sync, publish
//!                             ╰────── a failure goes straight here ──▲
//! ```
//!
//! RAM is copied while the VM runs; it stands still for what it wrote last (`dayfly_vmm::memory::live`).
//!
//! From `Freeze` to `Thaw` runs to its end even when the client goes away: nobody else would let the VM go on.

use crate::colours::saved::{self, Coloured};
use crate::daemon::Daemon;
use crate::depot::Loaded;
use crate::error::{Fault, Outcome, blocking, chain};
use crate::flatten;
use crate::ndjson::{Teller, metered};
use crate::vm::beneath::Beneath;
use crate::vm::control_link::ControlError;
use crate::vm::state::Event;
use crate::vm::{Disk, Facts, Vm, agent_link, control_link, death, identity};
use dayfly_api::types::{ErrorCode, Snapshot, SnapshotRequest};
use dayfly_store::{
    BlockHint, Committed, DiskSpec, Freeze, IoError, Known, Meter, PagedSpec, Pin, Prepared, SavedSnapshot,
    SnapshotSpec, SnapshotWriter, VmLayer,
};
use dayfly_units::Name;
use dayfly_vmm::config::MAX_LAYERS;
use dayfly_vmm::control::{Answer, Command, Frozen};
use dayfly_vmm::disk::page_map::{self, PageMapError};
use dayfly_vmm::memory::working_set::{self, Record};
use rustix::fs::{MemfdFlags, memfd_create};
use std::fs::File;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use tokio::sync::oneshot;

/// Takes a snapshot of a running VM, which goes on.
///
/// # Errors
/// The name is taken, the VM does not run or has too many layers, or a step failed; there is no snapshot then, and the VM goes on where
/// that was possible.
pub async fn snapshot(
    daemon: Arc<Daemon>,
    vm: Arc<Vm>,
    request: SnapshotRequest,
    tell: Teller,
) -> Outcome<Snapshot> {
    // One snapshot after the other, hashing included: the next stands on the layers of this one.
    let _one = vm.snapshots.lock().await;
    free(&daemon, &request.name).await?;
    allowed(&vm)?;
    arrived(&daemon, &vm, Some(&tell)).await?;
    tell.phase(format!("saving {} of memory", dayfly_units::Bytes(vm.facts.memory_bytes))).await;
    let section = {
        let (daemon, vm, name) = (daemon.clone(), vm.clone(), request.name.clone());
        daemon.undo.clone().spawn(async move {
            let writer = begin(&daemon, &vm, &name).await?;
            precopy(&daemon, &vm, PRECOPY, writer.memory()).await?;
            let _turn = vm.turn.lock().await;
            if let Err(e) = vm.step(Event::Freeze) {
                // It runs, or has ended: either way nothing is to be noted for us any more.
                let within = daemon.config.deadlines.control;
                let _ = control_link::command(&vm.dir.control(), PRECOPY, within).await;
                return Err(e.into());
            }
            death::note(&daemon, &vm).await;
            let saved = save_into(&daemon, &vm, writer, Command::Freeze).await;
            let awake = thaw(&daemon, &vm).await;
            death::note(&daemon, &vm).await;
            let saved = saved?;
            awake?;
            Ok::<_, Fault>(saved)
        })
    };
    let saved =
        section.await.map_err(|e| Fault::internal(format_args!("snapshotting VM {}: {e}", vm.name)))??;
    if let Some(Frozen { paused_us, pages }) = saved.frozen {
        let (ms, part) = (paused_us / 1000, paused_us % 1000 / 100);
        tell.phase(format!("stood still for {ms}.{part} ms, while {pages} pages were copied")).await;
    }
    tell.phase("hashing and storing").await;
    let committed = commit(&daemon, &vm, saved, request.name, &tell).await?;
    Ok(daemon.depot.shown(&committed.manifest))
}

/// Waits until all memory is there of what the VM is a clone of: what it has not written is read from that.
///
/// # Errors
/// It takes too long, or who brings it died.
pub async fn arrived(daemon: &Arc<Daemon>, vm: &Vm, tell: Option<&Teller>) -> Outcome<()> {
    let template = vm.facts.snapshot.as_ref().and_then(|name| daemon.depot.known_snapshot(name));
    let beneath = vm.beneath().or_else(|| template.map(Beneath::Snapshot));
    let Some(pager) = beneath.as_ref().and_then(Beneath::filling).cloned() else { return Ok(()) };
    if let Some(tell) = tell {
        tell.phase("waiting for the rest of its memory").await;
    }
    pager.whole(daemon.config.deadlines.save).await
}

/// Checks that no snapshot has this name.
///
/// # Errors
/// One has.
pub async fn free(daemon: &Arc<Daemon>, name: &Name) -> Outcome<()> {
    let (daemon, name) = (daemon.clone(), name.clone());
    blocking(move || match daemon.depot.store().snapshot(&name) {
        Err(dayfly_store::OpenError::NotFound { .. }) if !daemon.depot.forming().has(&name) => Ok(()),
        _ => Err(taken(&name)),
    })
    .await
}

/// What is said where one has.
#[must_use]
pub fn taken(name: &Name) -> Fault {
    Fault::conflict(format_args!("snapshot {name}: exists; remove it or choose another name"))
}

/// Checks that another layer may be frozen.
///
/// # Errors
/// There are too many, or it is not known on which the VM stands.
pub fn allowed(vm: &Vm) -> Outcome<()> {
    let live = vm.live();
    if let Some(why) = live.no_snapshot {
        return Err(Fault::new(
            ErrorCode::State,
            format_args!("VM {}: neither a snapshot nor a fork of it can be made: {why}", vm.name),
        ));
    }
    for (d, disk) in live.disks.iter().enumerate() {
        // Each snapshot that is stored makes the chain short again.
        if disk.writable.is_some() && disk.layers.len() >= MAX_LAYERS {
            return Err(Fault::new(
                ErrorCode::Exhausted,
                format_args!(
                    "VM {}: disk {d}: expected fewer than {MAX_LAYERS} layers for another snapshot, got {}: they could not be merged, the daemon's log says why",
                    vm.name,
                    disk.layers.len()
                ),
            ));
        }
    }
    Ok(())
}

/// To copy all of RAM.
const PRECOPY: Command = Command::Precopy { own: false };

/// What a VMM saved, and the store does not have yet.
#[derive(Debug)]
pub struct Saved {
    snapshot: SavedSnapshot,
    page_map: Option<File>,
    /// How it stood still, where it goes on.
    frozen: Option<Frozen>,
    /// Keeps what it stands on, should the VM end before it is stored.
    pin: Option<Pin>,
}

impl Saved {
    /// Which frames of its RAM, which has `memory_bytes`, held which blocks of the disks' chains as they are now, by the VMM's word: a
    /// hint, to be compared by content. Read and decoded at each call.
    ///
    /// # Errors
    /// It is not what a VMM writes.
    pub fn page_map(&self, memory_bytes: u64) -> Result<Vec<page_map::Run>, PageMapError> {
        self.page_map.as_ref().map_or(Ok(Vec::new()), |file| page_map::record::read(file, memory_bytes))
    }

    /// Of a VM that nobody asked which frames held blocks.
    #[must_use]
    pub const fn without_page_map(snapshot: SavedSnapshot) -> Self {
        Self { snapshot, page_map: None, frozen: None, pin: None }
    }
}

/// Seals, stops and saves a VM that is `Freezing`. It stays stopped; its disks stand on one more layer each.
///
/// # Errors
/// A step failed; the disks are as they were.
pub async fn save(daemon: &Arc<Daemon>, vm: &Arc<Vm>, name: &Name) -> Outcome<Saved> {
    let writer = begin(daemon, vm, name).await?;
    save_into(daemon, vm, writer, Command::Save).await
}

/// The files of a snapshot to be.
async fn begin(daemon: &Arc<Daemon>, vm: &Arc<Vm>, name: &Name) -> Outcome<SnapshotWriter> {
    let (shared, bytes, name) = (daemon.clone(), vm.facts.memory_bytes, name.clone());
    blocking(move || Ok(shared.depot.store().snapshot_writer_in_memory(&name, bytes)?)).await
}

/// Copies RAM to `memory` while the VM runs, as `how`, a `Precopy`, says.
///
/// # Errors
/// The VMM did not.
pub async fn precopy(daemon: &Arc<Daemon>, vm: &Arc<Vm>, how: Command, memory: &File) -> Outcome<()> {
    let memory = memory.try_clone();
    let memory = memory.map_err(|e| Fault::internal(format_args!("descriptors for a snapshot: {e}")))?;
    let within = daemon.config.deadlines.save;
    match control_link::with_fds(&vm.dir.control(), how, vec![memory.into()], within).await? {
        Answer::Precopied(done) => {
            tracing::info!(vm = %vm.id, rounds = done.rounds, pages = done.pages, us = done.took_us, "copied its memory");
            Ok(())
        }
        got => Err(Fault::internal(format_args!("the VMM, for Precopy: expected Precopied, got {got:?}"))),
    }
}

/// Seals a VM and saves it by `how`: `Save`, for which it is stopped and stays so, or `Freeze`.
async fn save_into(
    daemon: &Arc<Daemon>,
    vm: &Arc<Vm>,
    writer: SnapshotWriter,
    how: Command,
) -> Outcome<Saved> {
    allowed(vm)?;
    let deadlines = daemon.config.deadlines;
    if vm.has_agent() {
        agent_link::seal(&vm.dir.vsock(), deadlines.agent).await?;
    }
    if how == Command::Save {
        control_link::done(&vm.dir.control(), Command::Pause, deadlines.control).await?;
    }
    let same = vm.clone();
    let (writer, page_map, fds, disks) = blocking(move || {
        let mut disks = same.live().disks;
        let mut writer = writer;
        let failed = |e: std::io::Error| Fault::internal(format_args!("descriptors for a snapshot: {e}"));
        let mut fds: Vec<OwnedFd> = Vec::new();
        let page_map: File =
            memfd_create("page-map", MemfdFlags::CLOEXEC).map_err(|e| failed(e.into()))?.into();
        for file in [writer.state(), writer.memory(), &page_map] {
            fds.push(file.try_clone().map_err(failed)?.into());
        }
        freeze_disks(&mut disks, &mut fds, |layer| writer.freeze(layer))?;
        Ok((writer, page_map, fds, disks))
    })
    .await?;
    let pin = vm.pinned();
    let answer = control_link::with_fds(&vm.dir.control(), how, fds, deadlines.save).await;
    let mut snapshot = None;
    let frozen = answered(vm, answer, disks, |done| {
        // It may have been done: then the VM writes to its new layers already, and they must stay.
        snapshot = Some(writer.saved()).filter(|_| done);
    })?;
    let none = || Fault::internal("a save that was done and has no files");
    Ok(Saved { snapshot: snapshot.ok_or_else(none)?, page_map: Some(page_map), frozen, pin })
}

/// Makes ready to freeze the writable layers of `disks`, for a VMM that gets `fds`; they are then as they are when it is done.
///
/// # Errors
/// A layer is not there, or the host cannot make the files.
pub fn freeze_disks(
    disks: &mut [Disk],
    fds: &mut Vec<OwnedFd>,
    mut freeze: impl FnMut(&VmLayer) -> Result<Freeze, IoError>,
) -> Outcome<()> {
    for disk in disks {
        if let Some(layer) = disk.writable {
            let freeze = freeze(&layer)?;
            fds.extend([OwnedFd::from(freeze.map), OwnedFd::from(freeze.next_data)]);
            disk.layers.push(freeze.frozen);
            disk.writable = Some(freeze.next);
        }
    }
    Ok(())
}

/// What a VMM's answer means for the VM, whose disks are `disks` if it was done. `keep` is called where it was (`true`), and where it may have been:
/// what was made for it must stay then. Where it is not called, it was not done, and the VM is as it was.
///
/// # Errors
/// It was not done, or perhaps not.
pub fn answered(
    vm: &Vm,
    answer: Result<Answer, ControlError>,
    disks: Vec<Disk>,
    keep: impl FnOnce(bool),
) -> Outcome<Option<Frozen>> {
    let fault = match answer {
        Ok(answer @ (Answer::Ok | Answer::Frozen(_))) => {
            keep(true);
            vm.update(|live| live.disks = disks);
            return Ok(if let Answer::Frozen(frozen) = answer { Some(frozen) } else { None });
        }
        Err(e) if e.was_refused() => return Err(e.into()),
        Err(e) => e.into(),
        Ok(got) => Fault::internal(format_args!("the VMM, for a save: expected Ok or Frozen, got {got:?}")),
    };
    keep(false);
    let why = "its VMM did not say whether its disks were frozen for a snapshot or a fork";
    vm.update(|live| live.no_snapshot = Some(why.to_owned()));
    Err(fault)
}

/// Lets a VM go on after [`save`], well or not, and ends its seal. One that cannot is ended.
async fn thaw(daemon: &Arc<Daemon>, vm: &Arc<Vm>) -> Outcome<()> {
    let result = async {
        control_link::done(&vm.dir.control(), Command::Resume, daemon.config.deadlines.control).await?;
        if vm.has_agent() {
            identity::give(daemon, vm, None, || ()).await?;
        }
        Ok::<_, Fault>(vm.step(Event::Thaw)?)
    };
    let Err(fault) = result.await else { return Ok(()) };
    if vm.phase().alive() {
        tracing::error!(vm = %vm.id, "cannot go on after a snapshot: {fault}");
        death::kill(daemon, vm).await?;
    }
    Err(fault.during(format_args!("VM {} could not go on after the snapshot and was ended", vm.name)))
}

/// Hashes, syncs and publishes what was saved; the VM's frozen layers are then in the store, and pinned as long as it lives.
///
/// This runs to its end in any case, as the VM must learn where its layers are.
async fn commit(
    daemon: &Arc<Daemon>,
    vm: &Arc<Vm>,
    saved: Saved,
    name: Name,
    tell: &Teller,
) -> Outcome<Box<Committed>> {
    let spec = spec(vm);
    let (work, same) = (daemon.clone(), vm.clone());
    to_its_end(daemon, name, tell, |meter| async move {
        let (shared, vm) = (work.clone(), same.clone());
        let result = blocking(move || store(&shared, &vm, saved, &spec, &meter)).await;
        death::note(&work, &same).await;
        let (committed, flattened) = result?;
        // After the note: a daemon that dies in between believes in fewer layers than the VMM has, never in more.
        flatten::rebase(&work, &same, flattened).await;
        Ok(committed)
    })
    .await
}

/// Stores and publishes what is `ready`, of a VM that has ended.
///
/// # Errors
/// The disk is full.
pub async fn publish(
    daemon: &Arc<Daemon>,
    ready: Ready,
    name: Name,
    tell: &Teller,
) -> Outcome<Box<Committed>> {
    let work = daemon.clone();
    to_its_end(daemon, name, tell, |meter| async move { blocking(move || ready.store(&work, &meter)).await })
        .await
}

/// Does `work`, which makes the snapshot `name`, whether or not somebody waits for it. A snapshot that nobody waits for any more is removed again.
async fn to_its_end<F>(
    daemon: &Arc<Daemon>,
    name: Name,
    tell: &Teller,
    work: impl FnOnce(Arc<Meter>) -> F,
) -> Outcome<Box<Committed>>
where
    F: Future<Output = Outcome<Box<Committed>>> + Send + 'static,
{
    let meter = Arc::new(Meter::default());
    let (sender, receiver) = oneshot::channel();
    let (work, shared, made) = (work(meter.clone()), daemon.clone(), name.clone());
    daemon.undo.spawn(async move {
        if let Err(Ok(_)) = sender.send(work.await) {
            tracing::info!(snapshot = %made, "nobody waits for it any more: removing it");
            let removed = blocking(move || shared.depot.remove_snapshot(&made)).await;
            if let Err(e) = removed {
                tracing::error!("{e}");
            }
        }
    });
    let gone =
        |_| Fault::internal(format_args!("storing the snapshot {name}: the daemon's own thread ended"));
    metered(tell, &meter, receiver).await.map_err(gone)?
}

/// What the store is told of a VM.
pub fn spec(vm: &Vm) -> SnapshotSpec {
    let live = vm.live();
    spec_of(&vm.facts, &live.disks, live.agent_version)
}

/// The same of what is no VM.
#[must_use]
pub fn spec_of(facts: &Facts, disks: &[Disk], agent_version: String) -> SnapshotSpec {
    let disks = disks.iter().map(|disk| DiskSpec {
        image: disk.image.clone(),
        size_bytes: disk.size_bytes,
        writable: disk.writable.is_some(),
        layers: disk.layers.clone(),
    });
    SnapshotSpec {
        parent: facts.snapshot.clone(),
        kernel: facts.kernel.clone(),
        vcpus: facts.vcpus,
        nets: facts.nets,
        memory_bytes: facts.memory_bytes,
        agent_version,
        config: facts.config.clone(),
        labels: facts.labels.clone(),
        disks: disks.collect(),
    }
}

/// What was saved, ready to be stored: clones of it can run.
#[derive(Debug)]
pub struct Ready {
    prepared: Prepared,
    hints: Vec<(u32, BlockHint)>,
    colours: Vec<u8>,
    /// Frames in the order in which clones will want them.
    order: Vec<u32>,
    /// As in [`Saved`].
    pin: Option<Pin>,
}

impl Ready {
    /// Colours RAM of the VM or fork `of` and stages all but that. Blocks.
    ///
    /// # Errors
    /// Something it stands on is gone, or the disk is full. The VM keeps its layers.
    pub fn new(of: &Name, saved: Saved, spec: &SnapshotSpec) -> Outcome<Self> {
        // By the VMM's word, which is not trusted: what it says is compared by content, and without it blocks are found by their hashes.
        let runs = saved.page_map(spec.memory_bytes).unwrap_or_else(|e| {
            tracing::warn!(vm = %of, "its page map is not used: {}", chain(&e));
            Vec::new()
        });
        let hint = |run: page_map::Run| {
            (0..run.count).map(move |n| {
                let block = run.block.saturating_add(n);
                (run.first.saturating_add(n), BlockHint { disk: run.disk, layer: run.layer, block })
            })
        };
        let hints = runs.into_iter().flat_map(hint).collect();
        let Saved { snapshot, pin, .. } = saved;
        let Coloured { colours, free } = coloured(of, &snapshot, spec.memory_bytes);
        let prepared = snapshot.merging(flatten::merge).prepare(spec, &free)?;
        Ok(Self { prepared, hints, colours, order: Vec::new(), pin })
    }

    /// As a template that nobody finds. Blocks.
    ///
    /// # Errors
    /// Something it stands on is gone or damaged.
    pub fn open(&self) -> Outcome<Loaded> {
        Ok(Loaded::whole(self.prepared.open()?))
    }

    /// With what clones touch first, which is stored so that it is fetched together. Blocks.
    ///
    /// # Errors
    /// The disk is full.
    pub fn expecting(mut self, record: &Record) -> Outcome<Self> {
        self.prepared.keep_working_set(&working_set::encode(record))?;
        self.order = record.in_order();
        Ok(self)
    }

    /// Stores and publishes it. Blocks.
    ///
    /// # Errors
    /// The name is taken, or the disk is full.
    pub fn store(self, daemon: &Daemon, meter: &Meter) -> Outcome<Box<Committed>> {
        let Self { prepared, hints, colours, order, pin: _pin } = self;
        let tenant = daemon.depot.tenant();
        let known =
            Known { hints: &hints, colours: &colours, order: &order, meter: Some(meter), ..Known::default() };
        // One that failed may have published layers.
        let mut committed = prepared
            .commit_paged(&PagedSpec { tenant: &tenant, known })
            .inspect_err(|_| daemon.depot.look_for_garbage())?;
        if let Some(resident) = committed.resident.take()
            && let Err(fault) = daemon.depot.keep_resident(&committed.manifest.name, resident)
        {
            tracing::warn!(snapshot = %committed.manifest.name, "its first clone will read its RAM: {fault}");
        }
        Ok(Box::new(committed))
    }
}

/// What clones of the VM's own template touch first: clones of the VM take their identities in the same way.
#[must_use]
pub fn inherited(daemon: &Daemon, facts: &Facts) -> Option<Record> {
    let template = daemon.depot.known_snapshot(facts.snapshot.as_ref()?)?;
    // A damaged one is refused where clones are told to use it.
    working_set::read(template.working_set.as_ref()?, facts.memory_bytes).ok()
}

/// Stores what was saved of a VM that may go on.
fn store(
    daemon: &Daemon,
    vm: &Vm,
    saved: Saved,
    spec: &SnapshotSpec,
    meter: &Meter,
) -> Outcome<(Box<Committed>, Vec<flatten::Rebase>)> {
    let tops = flatten::tops(daemon, spec);
    let mut ready = Ready::new(&vm.name, saved, spec)?;
    if let Some(record) = inherited(daemon, &vm.facts) {
        ready = ready.expecting(&record)?;
    }
    let committed = ready.store(daemon, meter)?;
    let live = vm.update(|live| {
        let disks = live.disks.iter_mut().zip(spec.disks.iter().zip(&committed.manifest.disks));
        disks
            .for_each(|(disk, (was, stored))| flatten::stored(&mut disk.layers, &was.layers, &stored.layers));
        live.clone()
    });
    // The pin of `committed` keeps the layers until the VM's own does.
    if live.phase.alive() {
        vm.keep_pinned(daemon.depot.pin(&vm.name, &live.disks)?);
    }
    let flattened = flatten::rebases(daemon, tops, spec, &committed.manifest);
    Ok((committed, flattened))
}

fn coloured(of: &Name, snapshot: &SavedSnapshot, memory_bytes: u64) -> Coloured {
    match saved::coloured(snapshot.memory(), snapshot.state(), memory_bytes) {
        Ok((coloured, report)) => {
            tracing::info!(vm = %of, "frames of {}", saved::told(&report));
            coloured
        }
        Err(e) => {
            tracing::warn!(vm = %of, "its memory is stored without colours: {}", chain(&e));
            Coloured::default()
        }
    }
}
