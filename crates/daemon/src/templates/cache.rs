//! The store as the daemon uses it: manifests in the API's form, errors as answers. The methods
//! block.

use crate::base::error::{ApiError, Outcome};
use crate::model::disk::Disk;
use crate::templates::objects::{shown_image, shown_kernel};
use crate::templates::open::OpenTemplate;
use crate::templates::pagers::Pagers;
use crate::templates::pending::PendingSnapshots;
use crate::templates::recent::{Evicted, Recent};
use crate::templates::sharing;
use dayfly_api::types::{self, ErrorCode};
use dayfly_host::reaper::Reapers;
use dayfly_store::{
    Digest, Image, ImageSpec, Kernel, KernelSpec, LayerId, Listing, Pin, Resident,
    SnapshotManifest, Store, VmLayer,
};
use dayfly_units::{Name, VmId, error::chain, failpoint, sync::lock};
use std::collections::HashMap;
use std::fs::File;
use std::io::Read;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use tokio::sync::Notify;

/// The store with its open snapshots, their pagers, and pending snapshots.
#[derive(Debug, Clone)]
pub struct TemplateCache {
    pub(super) store: Store,
    /// Notified when a layer of a removed snapshot has lost its last VM, warm VMM or template.
    pub(super) garbage: Arc<Notify>,
    pub(super) open: Arc<Mutex<Recent>>,
    pub(super) pagers: Pagers,
    pending: Arc<PendingSnapshots>,
    /// A lock for each snapshot that was ever opened, which serialises its opening.
    loading: Arc<Mutex<HashMap<Name, Arc<Mutex<()>>>>>,
    /// Threads that free the RAM of snapshots that are closed.
    reapers: Arc<Reapers>,
}

fn listed<T, U>(kind: &str, listing: Listing<T>, shown: impl Fn(T) -> U) -> Vec<U> {
    for (name, error) in &listing.damaged {
        tracing::warn!("{kind} {name} is left out of the listing: {}", chain(error));
    }
    listing.items.into_iter().map(shown).collect()
}

fn digest(text: &str) -> Outcome<Digest> {
    text.parse().map_err(|e| ApiError::invalid(format_args!("digest in the head: {e}")))
}

/// Sort key of `6.1.0-56` and `6.12.117`: the numbers in order, compared as numbers.
fn by_version(release: &str) -> Vec<u64> {
    release.split(|c: char| !c.is_ascii_digit()).filter_map(|n| n.parse().ok()).collect()
}

impl TemplateCache {
    /// A cache over `store`, without open snapshots.
    #[must_use]
    pub fn new(store: Store, pagers: Pagers) -> Self {
        let garbage: Arc<Notify> = Arc::default();
        let notified = garbage.clone();
        store.when_garbage(move || notified.notify_one());
        Self {
            store,
            garbage,
            open: Arc::new(Mutex::new(Recent::new())),
            pagers,
            pending: Arc::default(),
            loading: Arc::default(),
            reapers: Arc::new(Reapers::none()),
        }
    }

    /// With the RAM of closed snapshots freed by these threads, and not by the thread that closes
    /// them.
    #[must_use]
    pub fn freeing_on(self, reapers: Arc<Reapers>) -> Self {
        Self { reapers, ..self }
    }

    /// Closes snapshots on the threads that free memory. The caller holds no lock of this cache.
    fn close(&self, evicted: Evicted) {
        if !evicted.is_empty() {
            // The node of a template's memory is unknown: its clones on any node have touched it.
            self.reapers.run(0, move || drop(evicted));
        }
    }

    /// The underlying store.
    #[must_use]
    pub fn store(&self) -> &Store {
        &self.store
    }

    /// Pending snapshots: forks that are not stored yet, and can be cloned by the name that they
    /// get.
    #[must_use]
    pub fn pending(&self) -> &PendingSnapshots {
        &self.pending
    }

    /// All readable images. Damaged ones are logged and left out.
    ///
    /// # Errors
    /// The folder of images cannot be listed.
    pub fn images(&self) -> Outcome<Vec<types::Image>> {
        Ok(listed("image", self.store.images()?, shown_image))
    }

    /// The image `name`, verified.
    ///
    /// # Errors
    /// No such image, or it is damaged.
    pub fn image(&self, name: &Name) -> Outcome<types::Image> {
        Ok(shown_image(self.open_image(name)?.manifest))
    }

    /// The image `name`, verified, open and pinned.
    ///
    /// # Errors
    /// As [`Self::image`].
    pub fn open_image(&self, name: &Name) -> Outcome<Image> {
        Ok(self.store.image(name)?)
    }

    /// Stores an image from a zstd frame.
    ///
    /// # Errors
    /// The content is not what `head` says, the name is in use with other content, or the disk is
    /// full.
    pub fn put_image(
        &self,
        name: &Name,
        head: &types::ImageUpload,
        body: &mut dyn Read,
    ) -> Outcome<types::Image> {
        let spec = ImageSpec {
            size_bytes: head.size_bytes,
            digest: digest(&head.digest)?,
            source: head.source.clone(),
            config: head.config.clone(),
        };
        Ok(shown_image(self.store.put_image(name, &spec, body)?))
    }

    /// Removes an image that no snapshot and no VM uses.
    ///
    /// # Errors
    /// No such image, or it is in use.
    pub fn remove_image(&self, name: &Name) -> Outcome<()> {
        Ok(self.store.remove_image(name)?)
    }

    /// All readable kernels. Damaged ones are logged and left out.
    ///
    /// # Errors
    /// The folder of kernels cannot be listed.
    pub fn kernels(&self) -> Outcome<Vec<types::Kernel>> {
        Ok(listed("kernel", self.store.kernels()?, shown_kernel))
    }

    /// The kernel `name`, verified.
    ///
    /// # Errors
    /// No such kernel, or it is damaged.
    pub fn kernel(&self, name: &Name) -> Outcome<types::Kernel> {
        Ok(shown_kernel(self.store.kernel(name)?.manifest))
    }

    /// The kernel `name`. Without a name, the kernel with the highest release, and of equals the
    /// one stored last.
    ///
    /// # Errors
    /// No such kernel, or it is damaged.
    pub fn open_kernel(&self, name: Option<&Name>) -> Outcome<Kernel> {
        if let Some(name) = name {
            return Ok(self.store.kernel(name)?);
        }
        let kernels = self.store.kernels()?.items;
        let newest =
            kernels.into_iter().max_by_key(|k| (by_version(&k.release), k.created_unix_ms));
        let newest = newest.ok_or_else(|| {
            ApiError::not_found("no kernel is stored; `dayfly kernel fetch 6.12` gets one")
        })?;
        Ok(self.store.kernel(&newest.name)?)
    }

    /// Stores a kernel from a zstd frame.
    ///
    /// # Errors
    /// The content is not what `head` says, or the disk is full.
    pub fn put_kernel(
        &self,
        name: &Name,
        head: &types::KernelUpload,
        body: &mut dyn Read,
    ) -> Outcome<types::Kernel> {
        let spec = KernelSpec {
            release: head.release.clone(),
            vmlinux_bytes: head.vmlinux_bytes,
            initrd_bytes: head.initrd_bytes,
            digest: digest(&head.digest)?,
            modules: head.modules.clone(),
        };
        Ok(shown_kernel(self.store.put_kernel(name, &spec, body)?))
    }

    /// Removes the kernel `name`.
    ///
    /// # Errors
    /// No such kernel.
    pub fn remove_kernel(&self, name: &Name) -> Outcome<()> {
        Ok(self.store.remove_kernel(name)?)
    }

    /// All readable snapshots, by name, pending ones included. Damaged ones are logged and left
    /// out.
    ///
    /// # Errors
    /// The folder of snapshots cannot be listed.
    pub fn snapshots(&self) -> Outcome<Vec<types::Snapshot>> {
        // Pending snapshots are read first: one that is stored meanwhile is in both lists, not in
        // neither.
        let mut all = self.pending.all();
        let stored = listed("snapshot", self.store.snapshots()?, |m| self.shown(&m));
        all.retain(|pending| stored.iter().all(|s| s.name != pending.name));
        all.extend(stored);
        all.sort_by(|a, b| a.name.cmp(&b.name));
        Ok(all)
    }

    /// The snapshot `name`, verified.
    ///
    /// # Errors
    /// No such snapshot, or it is damaged.
    pub fn snapshot(&self, name: &Name) -> Outcome<types::Snapshot> {
        if let Some(pending) = self.pending.shown(name) {
            return Ok(pending);
        }
        let open = self.open_snapshot(name)?;
        Ok(self.shown(&open.manifest))
    }

    /// A snapshot in the API's form.
    ///
    /// # Panics
    /// Never: a manifest without a disk is refused when it is read.
    #[must_use]
    pub fn shown(&self, manifest: &SnapshotManifest) -> types::Snapshot {
        let layers = || manifest.disks.iter().flat_map(|disk| &disk.layers);
        let open = lock(&self.open).peek(&manifest.name).filter(|open| open.manifest == *manifest);
        types::Snapshot {
            name: manifest.name.clone(),
            created_unix_ms: manifest.created_unix_ms,
            image: manifest.disks[0].image.name.clone(),
            kernel: manifest.kernel.name.clone(),
            parent: manifest.parent.clone(),
            vcpus: manifest.vcpus,
            max_vcpus: manifest.known_vcpus(),
            cpu_model: manifest.cpu_model,
            memory_bytes: manifest.memory_bytes,
            memory_stored_bytes: manifest.memory.data_bytes,
            layers: layers().map(|layer| layer.id.to_string()).collect(),
            layers_stored_bytes: layers()
                .map(|layer| layer.data.data_bytes.saturating_add(layer.map.bytes))
                .sum(),
            pending: false,
            resident: open.and_then(|open| open.resident()),
        }
    }

    /// The snapshot `name`, verified, open and pinned. It stays open for later requests. Its RAM
    /// may still be loading.
    ///
    /// # Errors
    /// As [`Self::snapshot`].
    pub fn open_snapshot(&self, name: &Name) -> Outcome<Arc<OpenTemplate>> {
        if let Some(open) = self.known_snapshot(name) {
            return Ok(open);
        }
        if self.pending.has(name) {
            return Err(ApiError::new(
                ErrorCode::State,
                format_args!(
                    "snapshot {name}: is being stored; until it is, it can be cloned, \
                     and nothing else"
                ),
            ));
        }
        // Opens of one snapshot take turns, so concurrent callers share one open snapshot and its
        // RAM is loaded once.
        let turn = lock(&self.loading).entry(name.clone()).or_default().clone();
        let opened = self.open_in_turn(name, &turn);
        if opened.is_err() {
            let mut loading = lock(&self.loading);
            // The map's reference and `turn`: no other caller waits.
            if Arc::strong_count(&turn) == 2 {
                loading.remove(name);
            }
        }
        opened
    }

    fn open_in_turn(&self, name: &Name, turn: &Mutex<()>) -> Outcome<Arc<OpenTemplate>> {
        let _turn = lock(turn);
        let known = lock(&self.open).find(name);
        let known = match known {
            Some((open, _)) if open.is_current() => return Ok(open),
            // Only other files of it have changed, so its RAM need not be read again.
            Some((open, bytes)) if !open.is_lost() => {
                open.snapshot.resident().unwrap_or(None).map(|resident| (resident, open, bytes))
            }
            _ => None,
        };
        let outdated = lock(&self.open).forget(name);
        self.close(outdated);
        let (open, bytes) = match known {
            Some((resident, before, bytes)) => {
                let snapshot = self.store.open_resident(name, resident)?;
                // Another snapshot of this name has other RAM, which that pager does not fill.
                let same = snapshot.manifest == before.snapshot.manifest;
                let pager = before.pager.clone().filter(|_| same);
                (
                    OpenTemplate {
                        snapshot,
                        pager,
                        shared: before.shared.clone().filter(|_| same),
                    },
                    bytes,
                )
            }
            None => self.load(name)?,
        };
        let open = Arc::new(open);
        failpoint::reached("daemon.open_snapshot.loaded");
        self.keep(name, &open, bytes);
        Ok(open)
    }

    /// Opens a snapshot whose RAM is not in memory. Also returns the bytes of the host's memory
    /// that it will take.
    fn load(&self, name: &Name) -> Outcome<(OpenTemplate, u64)> {
        let bytes = self.store.snapshot(name)?.memory.data_bytes;
        if bytes <= lock(&self.open).resident_most {
            let (snapshot, plan) = self.store.open_lazily(name)?;
            let Some(plan) = plan else { return Ok((OpenTemplate::whole(snapshot), 0)) };
            let open = lock(&self.open).all();
            let shared = sharing::with(&self.store, &self.tenant(), &snapshot, &plan, &open);
            match self.pagers.start(&snapshot, &plan, shared.as_ref()) {
                Ok(wanted) => {
                    let (pager, shared) = (Some(Arc::new(wanted)), shared.map(Arc::new));
                    return Ok((OpenTemplate { snapshot, pager, shared }, bytes));
                }
                Err(e) => tracing::warn!(
                    "snapshot {name}: its memory is read before it runs: {}",
                    chain(&e)
                ),
            }
        }
        Ok((OpenTemplate::whole(self.store.open_snapshot(name)?), 0))
    }

    /// Opens a snapshot just made with its saved RAM, which stays in the host's memory while it is
    /// open. Does nothing if the RAM is larger than the limit for all open snapshots, an eighth of
    /// the host's memory.
    ///
    /// # Errors
    /// As [`Self::snapshot`].
    pub fn keep_resident(&self, name: &Name, resident: Resident) -> Outcome<()> {
        let bytes = resident.data_bytes();
        if bytes <= lock(&self.open).resident_most {
            let snapshot = self.store.open_resident(name, resident)?;
            self.keep(name, &Arc::new(OpenTemplate::whole(snapshot)), bytes);
        }
        Ok(())
    }

    /// Keeps a snapshot open, unless it has been removed since: it would then keep its layers and
    /// RAM without being used again.
    fn keep(&self, name: &Name, open: &Arc<OpenTemplate>, bytes: u64) {
        let mut recent = lock(&self.open);
        let mut evicted = recent.keep(name.clone(), open.clone(), bytes);
        if !open.is_current() {
            evicted = evicted.and(recent.forget(name));
        }
        drop(recent);
        self.close(evicted);
    }

    /// Bytes of RAM of a clone of the snapshot.
    ///
    /// # Errors
    /// As [`Self::snapshot`].
    pub fn memory_bytes(&self, name: &Name) -> Outcome<u64> {
        match self.pending.find(name) {
            Some(fork_point) => Ok(fork_point.facts.memory_bytes),
            None => Ok(self.open_snapshot(name)?.manifest.memory_bytes),
        }
    }

    /// The snapshot `name`, if it is open and its files are unchanged. Costs some ten calls of
    /// stat(2).
    #[must_use]
    pub fn known_snapshot(&self, name: &Name) -> Option<Arc<OpenTemplate>> {
        let (open, _) = lock(&self.open).find(name)?;
        open.is_current().then_some(open)
    }

    /// Removes a snapshot and the layers that only it needed. Layers that VMs still use are removed
    /// with the last of these VMs.
    ///
    /// # Errors
    /// No such snapshot.
    pub fn remove_snapshot(&self, name: &Name) -> Outcome<()> {
        // The task that stores a pending snapshot removes it.
        if self.pending.remove(name) { Ok(()) } else { self.remove_stored(name) }
    }

    /// As [`Self::remove_snapshot`], for a snapshot that is stored.
    ///
    /// # Errors
    /// No such snapshot.
    pub fn remove_stored(&self, name: &Name) -> Outcome<()> {
        self.store.remove_snapshot(name)?;
        failpoint::reached("daemon.remove_snapshot.removed");
        let removed = lock(&self.open).forget(name);
        // Here and not by the reapers, because it may hold the last pin of a layer that `collect`
        // removes. This function blocks anyway, and holds no lock.
        drop(removed);
        lock(&self.loading).remove(name);
        self.collect();
        failpoint::reached("daemon.remove_snapshot.layers");
        self.collect_pages();
        failpoint::reached("daemon.remove_snapshot.pages");
        Ok(())
    }

    /// The namespace of the snapshots' pages in the store. The daemon has one user, so it is
    /// constant.
    #[must_use]
    #[expect(
        clippy::missing_panics_doc,
        clippy::expect_used,
        reason = "locally proven: letters are a name"
    )]
    pub fn tenant(&self) -> Name {
        "default".parse().expect("letters are a name")
    }

    /// Creates a writable layer for disk `disk` of `vm`.
    ///
    /// # Errors
    /// The host cannot create it.
    pub fn writable(&self, vm: VmId, disk: u8) -> Outcome<(VmLayer, File)> {
        Ok(self.store.create_vm_layer(vm, disk)?)
    }

    /// Bytes on disk that `vm`, which has `disks`, uses alone: its own and borrowed layers, except
    /// layers that other VMs use too.
    #[must_use]
    pub fn vm_bytes(&self, vm: VmId, disks: &[Disk]) -> u64 {
        let shared: Vec<VmLayer> = disks.iter().flat_map(Disk::shared_layers).collect();
        self.store.vm_disk_bytes(vm, &shared).unwrap_or(0)
    }

    /// Removes the layers of a VM that is gone.
    ///
    /// # Errors
    /// The host cannot remove them.
    pub fn remove_vm(&self, vm: VmId) -> Outcome<()> {
        Ok(self.store.remove_vm(vm)?)
    }

    /// Pins the images and layers of a VM with these disks.
    ///
    /// # Errors
    /// An image or a layer is missing.
    pub fn pin(&self, name: &Name, disks: &[Disk]) -> Outcome<Pin> {
        let images: Vec<_> = disks.iter().map(|disk| disk.image.clone()).collect();
        let layers: Vec<LayerId> = disks.iter().flat_map(Disk::stored).collect();
        let shared: Vec<VmLayer> = disks.iter().flat_map(Disk::shared_layers).collect();
        Ok(self.store.pin(&format!("VM {name}"), &images, &layers, &shared)?)
    }

    /// The folder in the store with the VMs' own layers.
    #[must_use]
    pub fn vms_folder(&self) -> PathBuf {
        self.store.root().join("vms")
    }
}

#[cfg(test)]
#[path = "cache_tests.rs"]
mod tests;
