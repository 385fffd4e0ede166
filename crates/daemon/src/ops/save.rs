//! Saves a VM: from its VMM to the files of a snapshot.

use crate::base::error::{ApiError, Outcome, blocking};
use crate::base::progress::ProgressSender;
use crate::daemon::Daemon;
use crate::model::disk::Disk;
use crate::model::state::Event;
use crate::ops::{remove, space};
use crate::templates::memory_backing::MemoryBacking;
use crate::vm::Vm;
use crate::vmm::agent_link::LinkError;
use crate::vmm::control_link::{self, ControlError};
use crate::vmm::{agent_link, identity};
use dayfly_api::types::ErrorCode;
use dayfly_packer::jail::memory_bytes;
use dayfly_store::{Freeze, IoError, Pin, SavedSnapshot, SnapshotWriter, VmLayer};
use dayfly_sys::reopen;
use dayfly_units::{Name, failpoint};
use dayfly_vmm::config::MAX_LAYERS;
use dayfly_vmm::control::{Answer, Command, Frozen};
use dayfly_vmm::disk::page_map::{self, PageMapError};
use rustix::fs::{MemfdFlags, memfd_create};
use std::fs::File;
use std::os::fd::OwnedFd;
use std::sync::Arc;

/// Waits until the backing of the VM's RAM is complete, because pages that the VM has not written
/// are read from the backing.
///
/// # Errors
/// The time limit passed, or the pager died.
pub async fn arrived(
    daemon: &Arc<Daemon>,
    vm: &Vm,
    progress: Option<&ProgressSender>,
) -> Outcome<()> {
    let template =
        vm.facts.snapshot.as_ref().and_then(|name| daemon.templates.known_snapshot(name));
    let backing = vm.backing().or_else(|| template.map(MemoryBacking::Snapshot));
    let Some(pager) = backing.as_ref().and_then(MemoryBacking::filling).cloned() else {
        return Ok(());
    };
    if let Some(progress) = progress {
        progress.phase("waiting for the rest of its memory").await;
    }
    pager.whole(daemon.config.deadlines.save).await
}

/// Checks that another layer may be frozen.
///
/// # Errors
/// A disk has too many layers, the VM's layers are unknown, its VMM has not answered yet, or it
/// waits for space: its guest would not answer. Or a copy of its RAM does not fit its limit.
pub fn allowed(vm: &Vm) -> Outcome<()> {
    vm.answers()?;
    vm.has_space("take a snapshot of or fork")?;
    let live = vm.live();
    if let Some(why) = live.no_snapshot {
        return Err(ApiError::new(
            ErrorCode::State,
            format_args!("VM {}: neither a snapshot nor a fork of it can be made: {why}", vm.name),
        ));
    }
    for (d, disk) in live.disks.iter().enumerate() {
        // A stored snapshot makes the chain short again.
        if disk.writable.is_some() && disk.layers.len() >= MAX_LAYERS {
            return Err(ApiError::new(
                ErrorCode::Exhausted,
                format_args!(
                    "VM {}: disk {d}: expected fewer than {MAX_LAYERS} layers for another \
                     snapshot, got {}: they could not be merged, the daemon's log says why",
                    vm.name,
                    disk.layers.len()
                ),
            ));
        }
    }
    has_memory_for_a_copy(vm, 0)
}

/// Checks that a copy of RAM, and the process that stores it ([`crate::ops::packer`]), fit the VM's
/// limit of memory. Without its program there is no such process.
///
/// # Errors
/// They do not fit.
pub fn can_be_stored(daemon: &Daemon, vm: &Vm) -> Outcome<()> {
    let is_installed = daemon.config.packer().is_file();
    let beside = if is_installed { memory_bytes(vm.facts.memory_bytes) } else { 0 };
    has_memory_for_a_copy(vm, beside)
}

/// Checks that a copy of RAM fits the VM's limit of memory: its VMM writes the copy to a file in
/// memory, which the kernel charges to the VM's control group, as long as a clone uses it. So is
/// the memory of the process that stores the copy, `beside`. The page cache of its disks does not
/// count, because the kernel reclaims it for the copy.
fn has_memory_for_a_copy(vm: &Vm, beside: u64) -> Outcome<()> {
    let Some(limit) = vm.memory_limit_bytes() else { return Ok(()) };
    let Some(used) = vm.unreclaimable_bytes() else {
        return Err(ApiError::new(
            ErrorCode::State,
            format_args!(
                "VM {}: memory: its limit is {limit} bytes, and its use is not known, because its \
                 control group was not found: a copy of RAM for a snapshot or a fork might end \
                 it; stop it and start it again",
                vm.name
            ),
        ));
    };
    let needed = used.saturating_add(vm.facts.memory_bytes).saturating_add(beside);
    if needed <= limit {
        return Ok(());
    }
    Err(ApiError::new(
        ErrorCode::State,
        format_args!(
            "VM {}: memory: expected at most its limit of {limit} bytes for a snapshot or a fork, \
             which copies RAM, got {used} in use, {} of RAM and {beside} to store it; create it \
             with a larger --memory-max, or remove clones of it",
            vm.name, vm.facts.memory_bytes
        ),
    ))
}

/// A saved VM that is not stored yet.
#[derive(Debug)]
pub struct Saved {
    pub(crate) snapshot: SavedSnapshot,
    pub(crate) page_map: Option<File>,
    /// How long the VM was frozen, if it goes on.
    pub(crate) frozen: Option<Frozen>,
    /// Keeps the image and layers, even if the VM ends before it is stored.
    pub(crate) pin: Option<Pin>,
}

impl Saved {
    /// The VMM's page map: which frames of RAM held which blocks of the disks' current chains. It
    /// is a hint, to be compared by content. Each call reads and decodes the file.
    ///
    /// # Errors
    /// The file is not what a VMM writes.
    pub fn page_map(&self, memory_bytes: u64) -> Result<Vec<page_map::Run>, PageMapError> {
        self.page_map
            .as_ref()
            .map_or(Ok(Vec::new()), |file| page_map::record::read(file, memory_bytes))
    }

    /// A saved VM without a page map, such as a fork point.
    #[must_use]
    pub const fn without_page_map(snapshot: SavedSnapshot) -> Self {
        Self { snapshot, page_map: None, frozen: None, pin: None }
    }
}

/// Seals, stops and saves a VM in phase `Freezing`. The VM stays stopped, and each writable disk
/// has one more frozen layer.
///
/// # Errors
/// A step failed; the disks are unchanged.
pub async fn save(daemon: &Arc<Daemon>, vm: &Arc<Vm>, name: &Name) -> Outcome<Saved> {
    let writer = begin(daemon, vm, name).await?;
    save_into(daemon, vm, writer, Command::Save).await
}

/// Creates the files of a snapshot.
pub(crate) async fn begin(
    daemon: &Arc<Daemon>,
    vm: &Arc<Vm>,
    name: &Name,
) -> Outcome<SnapshotWriter> {
    let (shared, bytes, name) = (daemon.clone(), vm.facts.memory_bytes, name.clone());
    blocking(move || Ok(shared.templates.store().snapshot_writer_in_memory(&name, bytes)?)).await
}

/// Copies RAM to `memory` while the VM runs; `how` is a `Precopy` command.
///
/// # Errors
/// The VMM failed or refused.
pub async fn precopy(
    daemon: &Arc<Daemon>,
    vm: &Arc<Vm>,
    how: Command,
    memory: &File,
) -> Outcome<()> {
    if !vm.phase().alive() {
        // The control socket may be that of the VM that was started in its place.
        let why = format!("VM {}: has ended", vm.name);
        return Err(ApiError::new(ErrorCode::State, why));
    }
    let failed =
        |e: std::io::Error| ApiError::internal(format_args!("descriptors for a snapshot: {e}"));
    let mut fds = vec![memory.try_clone().map_err(failed)?.into()];
    // VMMs of the version that accepts read-only layers accept this file too.
    let whole = how == Command::Precopy { own: false } && vm.live().read_only_layers;
    if let Some(backing) = vm.backing().filter(|_| whole) {
        fds.push(reopen::read_only(backing.memory()).map_err(failed)?);
    }
    let within = daemon.config.deadlines.save;
    match control_link::with_fds(&vm.dir.control(), how, fds, within).await? {
        Answer::Precopied(done) => {
            let (rounds, pages, us) = (done.rounds, done.pages, done.took_us);
            tracing::info!(vm = %vm.id, rounds, pages, us, "copied its memory");
            Ok(())
        }
        got => Err(ApiError::internal(format_args!(
            "the VMM, for Precopy: expected Precopied, got {got:?}"
        ))),
    }
}

/// Ends the VMM's log of written pages, after a [`precopy`] that nothing follows. The VM still
/// runs, or has ended.
pub async fn end_precopy(daemon: &Daemon, vm: &Vm, how: Command) {
    let within = daemon.config.deadlines.control;
    let _ = control_link::command(&vm.dir.control(), how, within).await;
}

/// Seals a VM and saves it by the command `how`: `Save` leaves it stopped, `Freeze` lets it go on.
pub(crate) async fn save_into(
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
        let failed =
            |e: std::io::Error| ApiError::internal(format_args!("descriptors for a snapshot: {e}"));
        let mut fds: Vec<OwnedFd> = Vec::new();
        let page_map: File =
            memfd_create("page-map", MemfdFlags::CLOEXEC).map_err(|e| failed(e.into()))?.into();
        for file in [writer.state(), writer.memory(), &page_map] {
            fds.push(file.try_clone().map_err(failed)?.into());
        }
        let read_only = same.live().read_only_layers;
        freeze_disks(&mut disks, &mut fds, read_only, |layer| writer.freeze(layer))?;
        Ok((writer, page_map, fds, disks))
    })
    .await?;
    let pin = vm.pinned();
    failpoint::reached("daemon.save.files");
    let answer = control_link::decided(&vm.dir.control(), how, fds, deadlines.save).await;
    failpoint::reached("daemon.save.frozen");
    let mut snapshot = None;
    let frozen = answered(vm, answer, disks, |done| {
        // If the freeze may have happened, the VM may write to its new layers, so they must stay.
        snapshot = Some(writer.saved()).filter(|_| done);
    })?;
    let none = || ApiError::internal("a save that was done and has no files");
    Ok(Saved { snapshot: snapshot.ok_or_else(none)?, page_map: Some(page_map), frozen, pin })
}

/// Prepares freezing the writable layers of `disks`. Adds the descriptors for the VMM to `fds`, and
/// changes `disks` to their state after the freeze. With `read_only`, the VMM gets read-only
/// descriptors of the layers, and closes its writable ones.
///
/// # Errors
/// A layer is missing, or the host cannot create the files.
pub fn freeze_disks(
    disks: &mut [Disk],
    fds: &mut Vec<OwnedFd>,
    read_only: bool,
    mut freeze: impl FnMut(&VmLayer) -> Result<Freeze, IoError>,
) -> Outcome<()> {
    for disk in disks {
        if let Some(layer) = disk.writable {
            let freeze = freeze(&layer)?;
            fds.extend([OwnedFd::from(freeze.map), OwnedFd::from(freeze.next_data)]);
            fds.extend(read_only.then(|| OwnedFd::from(freeze.read_only)));
            disk.layers.push(freeze.frozen);
            disk.writable = Some(freeze.next);
        }
    }
    Ok(())
}

/// Updates the VM from the VMM's answer to a freeze. If the freeze happened, `disks` become its
/// disks and `keep(true)` is called. If that is unknown, `keep(false)` is called, the new files
/// must stay, and the VM cannot be snapshotted any more. If the VMM refused, `keep` is not called.
///
/// # Errors
/// The freeze did not happen, or it is unknown whether it happened.
pub fn answered(
    vm: &Vm,
    answer: Result<Answer, ControlError>,
    disks: Vec<Disk>,
    keep: impl FnOnce(bool),
) -> Outcome<Option<Frozen>> {
    let error = match answer {
        Ok(answer @ (Answer::Ok | Answer::Frozen(_))) => {
            keep(true);
            vm.update(|live| live.disks = disks);
            return Ok(if let Answer::Frozen(frozen) = answer { Some(frozen) } else { None });
        }
        Err(e) if e.was_refused() => return Err(e.into()),
        Err(e) => e.into(),
        Ok(got) => ApiError::internal(format_args!(
            "the VMM, for a save: expected Ok or Frozen, got {got:?}"
        )),
    };
    keep(false);
    let why = "its VMM did not say whether its disks were frozen for a snapshot or a fork";
    vm.update(|live| live.no_snapshot = Some(why.to_owned()));
    Err(error)
}

/// Resumes a VM after [`save`] or [`save_into`], successful or not, and unseals it. Waits for a VMM
/// or an agent that is late. A VM whose VMM or agent refuses is killed, because it cannot go on.
pub(crate) async fn thaw(daemon: &Arc<Daemon>, vm: &Arc<Vm>) -> Outcome<()> {
    let result = async {
        let within = daemon.config.deadlines.control;
        let control = vm.dir.control();
        match control_link::decided(&control, Command::Resume, Vec::new(), within).await? {
            Answer::Ok => {}
            got => {
                let got = Box::new(got);
                return Err(ControlError::Unexpected { command: Command::Resume, got }.into());
            }
        }
        unseal(daemon, vm).await?;
        Ok::<_, ApiError>(vm.step(Event::Thaw)?)
    };
    let Err(error) = result.await else { return Ok(()) };
    if vm.phase().alive() {
        tracing::error!(vm = %vm.id, "cannot go on after a snapshot: {error}");
        remove::kill(daemon, vm).await?;
    }
    Err(error
        .during(format_args!("VM {} could not go on after the snapshot and was ended", vm.name)))
}

/// Gives the guest its identity again. An agent that does not answer is asked again until the VM
/// ends: a guest may be busy for long, and it is not ended for that. If its disk waits for space,
/// it tries again, because no other task has it go on while it is being saved.
async fn unseal(daemon: &Daemon, vm: &Vm) -> Outcome<()> {
    if !vm.has_agent() {
        return Ok(());
    }
    loop {
        match identity::give(daemon.config.deadlines.agent, vm, None, || ()).await {
            Err(late @ LinkError::Timeout { .. }) if vm.phase().alive() => {
                tracing::warn!(vm = %vm.id, "{late}: asking it again");
                space::retry(daemon, vm).await;
            }
            given => return given.map(drop).map_err(ApiError::from),
        }
    }
}
