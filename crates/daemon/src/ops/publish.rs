//! Stores and publishes a snapshot's files.

use crate::base::error::{ApiError, Outcome, blocking};
use crate::base::progress::{ProgressSender, metered};
use crate::daemon::Daemon;
use crate::model::disk::Disk;
use crate::model::facts::{Facts, INIT_LABEL};
use crate::ops::colours::saved::{self, Coloured};
use crate::ops::flatten;
use crate::ops::packer::{self, Packer};
use crate::ops::save::Saved;
use crate::templates::open::OpenTemplate;
use crate::templates::pending::taken;
use crate::vm::Vm;
use dayfly_store::{
    BlockHint, ChainLayer, Committed, DiskSpec, Known, Meter, PagedSpec, Pin, Prepared,
    SavedSnapshot, SnapshotSpec, VmLayer,
};
use dayfly_units::{Name, error::chain, failpoint};
use dayfly_vmm::disk::page_map;
use dayfly_vmm::memory::working_set::{self, Record};
use std::pin::pin;
use std::sync::Arc;
use tokio::sync::oneshot;

/// Stores and publishes `ready`, whose VM has ended.
///
/// # Errors
/// The name is taken, or the disk is full.
pub async fn publish(
    daemon: &Arc<Daemon>,
    ready: Ready,
    name: Name,
    progress: &ProgressSender,
) -> Outcome<Box<Committed>> {
    let work = daemon.clone();
    to_its_end(daemon, name, progress, |meter| async move {
        blocking(move || {
            let committed = ready.store(&work, None, &meter)?;
            // No new daemon looks for the layers of a VM that has ended.
            release(&work, &committed.replaced);
            Ok(committed)
        })
        .await
    })
    .await
}

/// Releases the VM's own files of layers that a commit stored. The VM's record must name the stored
/// layers by then, because a new daemon looks for the layers that the record names. Blocks.
pub(crate) fn release(daemon: &Daemon, replaced: &[VmLayer]) {
    if let Err(e) = daemon.templates.store().remove_vm_layers(replaced) {
        // They are removed with the VM.
        tracing::warn!("leaving the VM's name of a stored layer: {}", chain(&e));
    }
}

/// Runs `work`, which makes the snapshot `name`, to its end even if the client goes away. The meter
/// is then stopped, which ends a packer, and a snapshot that was made all the same is removed
/// again.
pub(crate) async fn to_its_end<F>(
    daemon: &Arc<Daemon>,
    name: Name,
    progress: &ProgressSender,
    work: impl FnOnce(Arc<Meter>) -> F,
) -> Outcome<Box<Committed>>
where
    F: Future<Output = Outcome<Box<Committed>>> + Send + 'static,
{
    let meter = Arc::new(Meter::default());
    let (sender, receiver) = oneshot::channel();
    let (work, shared, made) = (work(meter.clone()), daemon.clone(), name.clone());
    let left = meter.clone();
    daemon.undo.spawn(async move {
        let mut sender = sender;
        let mut work = pin!(work);
        let done = tokio::select! {
            done = &mut work => Some(done),
            () = sender.closed() => None,
        };
        let done = match done {
            Some(done) => done,
            None => {
                left.stop();
                work.await
            }
        };
        if let Err(Ok(_)) = sender.send(done) {
            tracing::info!(snapshot = %made, "no client waits for it any more: removing it");
            let removed = blocking(move || shared.templates.remove_snapshot(&made)).await;
            if let Err(e) = removed {
                tracing::error!("{e}");
            }
        }
    });
    let gone = |_| {
        ApiError::internal(format_args!(
            "storing the snapshot {name}: the daemon's own thread ended"
        ))
    };
    metered(progress, &meter, receiver).await.map_err(gone)?
}

/// The specification of a snapshot of `vm` for the store.
pub fn spec(vm: &Vm) -> SnapshotSpec {
    let live = vm.live();
    let facts = Facts { network: vm.network_now(), ..vm.facts.clone() };
    spec_of(&facts, &live.disks, live.agent_version)
}

/// The specification of a snapshot without a live VM, such as that of a fork point.
#[must_use]
pub fn spec_of(facts: &Facts, disks: &[Disk], agent_version: String) -> SnapshotSpec {
    let disks = disks.iter().map(|disk| DiskSpec {
        image: disk.image.clone(),
        size_bytes: disk.size_bytes,
        writable: disk.writable.is_some(),
        layers: disk.layers.clone(),
    });
    let mut labels = facts.labels.clone();
    labels.remove(INIT_LABEL);
    labels.extend(facts.init.clone().map(|init| (INIT_LABEL.to_owned(), init)));
    SnapshotSpec {
        parent: facts.snapshot.clone(),
        ancestors: facts.ancestors.clone(),
        kernel: facts.kernel.clone(),
        vcpus: facts.vcpus,
        // Where the guest knows of no others, the manifest is one that earlier daemons read.
        max_vcpus: if facts.max_vcpus > facts.vcpus { facts.max_vcpus } else { 0 },
        cpu_model: facts.cpu_model,
        nets: facts.nets,
        memory_bytes: facts.memory_bytes,
        agent_version,
        config: facts.config.clone(),
        labels,
        egress: facts.network.policy().filter(|policy| !policy.is_internet()),
        disks: disks.collect(),
    }
}

/// A saved VM, ready to be stored; clones of it can run already.
#[derive(Debug)]
pub struct Ready {
    prepared: Prepared,
    hints: Vec<(u32, BlockHint)>,
    colours: Vec<u8>,
    /// Frames in the order in which clones touch them.
    order: Vec<u32>,
    /// As in [`Saved`].
    pin: Option<Pin>,
}

impl Ready {
    /// Colours the RAM of the VM or snapshot `of`, and stages everything except RAM. Blocks.
    ///
    /// # Errors
    /// An image or layer is gone, or the disk is full. The VM keeps its layers.
    pub fn new(of: &Name, saved: Saved, spec: &SnapshotSpec) -> Outcome<Self> {
        // The VMM's page map is not trusted: every hint is compared by content. Without hints,
        // blocks are found by their hashes.
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
        failpoint::reached("daemon.publish.prepared");
        Ok(Self { prepared, hints, colours, order: Vec::new(), pin })
    }

    /// A template that is not in the template cache. Blocks.
    ///
    /// # Errors
    /// An image or layer is gone or damaged.
    pub fn open(&self) -> Outcome<OpenTemplate> {
        Ok(OpenTemplate::whole(self.prepared.open()?))
    }

    /// Adds a working set, whose pages are stored together in this order. Blocks.
    ///
    /// # Errors
    /// The disk is full.
    pub fn expecting(mut self, record: &Record) -> Outcome<Self> {
        self.prepared.keep_working_set(&working_set::encode(record))?;
        self.order = record.in_order();
        Ok(self)
    }

    /// Stores and publishes the snapshot, with `packer` if there is one. Blocks.
    ///
    /// # Errors
    /// The name is taken, the disk is full, or the packer has failed.
    pub fn store(
        self,
        daemon: &Daemon,
        packer: Option<Packer>,
        meter: &Meter,
    ) -> Outcome<Box<Committed>> {
        let Self { prepared, hints, colours, order, pin: _pin } = self;
        let tenant = daemon.templates.tenant();
        let known = Known {
            hints: &hints,
            colours: &colours,
            order: &order,
            meter: Some(meter),
            ..Known::default()
        };
        // A failed commit may have published layers.
        let spec = PagedSpec { tenant: &tenant, known };
        let committed = match packer {
            None => prepared.commit_paged(&spec),
            Some(mut packer) => prepared.commit_paged_by(&spec, &mut packer),
        };
        let mut committed = committed.inspect_err(|_| daemon.templates.look_for_garbage())?;
        failpoint::reached("daemon.publish.committed");
        if let Some(resident) = committed.resident.take()
            && let Err(error) = daemon.templates.keep_resident(&committed.manifest.name, resident)
        {
            let snapshot = &committed.manifest.name;
            tracing::warn!(%snapshot, "its first clone will read its RAM: {error}");
        }
        Ok(Box::new(committed))
    }
}

/// The working set of the VM's own snapshot. It fits clones of the VM, because they take their
/// identities in the same way.
#[must_use]
pub fn inherited(daemon: &Daemon, facts: &Facts) -> Option<Record> {
    let template = daemon.templates.known_snapshot(facts.snapshot.as_ref()?)?;
    // A damaged record is reported when a VMM loads it.
    working_set::read(template.working_set.as_ref()?, facts.memory_bytes).ok()
}

/// Stores a saved VM that may go on, and updates its chains of layers.
pub(crate) fn store(
    daemon: &Daemon,
    vm: &Vm,
    saved: Saved,
    spec: &SnapshotSpec,
    meter: &Arc<Meter>,
) -> Outcome<(Box<Committed>, Vec<flatten::Rebase>)> {
    let tops = flatten::tops(daemon, spec);
    let mut ready = Ready::new(&vm.name, saved, spec)?;
    if let Some(record) = inherited(daemon, &vm.facts) {
        ready = ready.expecting(&record)?;
    }
    let packer = packer::start(daemon, vm, meter)?;
    let committed = ready.store(daemon, packer, meter)?;
    let live = vm.update(|live| {
        let disks = live.disks.iter_mut().zip(spec.disks.iter().zip(&committed.manifest.disks));
        disks.for_each(|(disk, (was, stored))| {
            let stored = stored.layers.iter().copied().map(ChainLayer::Stored);
            flatten::replace(&mut disk.layers, &was.layers, stored);
        });
        live.clone()
    });
    // The pin in `committed` keeps the layers until the VM has its own pin.
    // A VM that has ended needs them to start again; `keep_pinned` decides whether it can.
    match daemon.templates.pin(&vm.name, &live.disks) {
        Ok(pin) => vm.keep_pinned(pin),
        Err(e) if live.phase.alive() => return Err(e),
        Err(e) => tracing::warn!(vm = %vm.id, "its disks are not kept: {}", e.0.message),
    }
    failpoint::reached("daemon.publish.pinned");
    let flattened = flatten::rebases(daemon, tops, spec, &committed.manifest);
    Ok((committed, flattened))
}

fn coloured(of: &Name, snapshot: &SavedSnapshot, memory_bytes: u64) -> Coloured {
    match saved::coloured(snapshot.memory(), snapshot.state(), memory_bytes) {
        Ok((coloured, report)) => {
            tracing::info!(vm = %of, "frames of {}", saved::census_line(&report));
            coloured
        }
        Err(e) => {
            tracing::warn!(vm = %of, "its memory is stored without colours: {}", chain(&e));
            Coloured::default()
        }
    }
}

/// Checks that no snapshot has this name.
///
/// # Errors
/// A snapshot or a pending snapshot has it, or the store cannot be read.
pub async fn free(daemon: &Arc<Daemon>, name: &Name) -> Outcome<()> {
    let (daemon, name) = (daemon.clone(), name.clone());
    blocking(move || match daemon.templates.store().snapshot(&name) {
        Err(dayfly_store::OpenError::NotFound { .. }) if !daemon.templates.pending().has(&name) => {
            Ok(())
        }
        Ok(_) | Err(dayfly_store::OpenError::NotFound { .. }) => Err(taken(&name)),
        // Not "taken": that error advises to remove the snapshot.
        Err(e) => Err(ApiError::from(e).during(format_args!("looking for snapshot {name}"))),
    })
    .await
}
