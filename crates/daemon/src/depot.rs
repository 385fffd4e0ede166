//! The store as the daemon uses it: its manifests in the API's words, its errors as answers. Blocks.

mod garbage;
mod recent;
pub mod sharing;

use crate::error::{Fault, Outcome, chain};
use crate::forming::Forming;
use crate::pagers::{Pager, Pagers, Wanted};
use crate::vm::Disk;
use crate::vm::registry::lock;
use dayfly_api::types::{self, ErrorCode};
use dayfly_store::{
    ChainLayer, CommitError, Digest, DiskRef, GcError, Image, ImageConfig, ImageManifest, ImageSpec, IoError,
    Kernel, KernelManifest, KernelSpec, LayerId, Listing, OpenError, OpenSnapshot, Pin, PinError, PutError,
    RemoveError, Resident, SnapshotManifest, Store, VmLayer,
};
use dayfly_units::{Name, VmId};
use recent::Recent;
use sharing::Shared;
use std::collections::HashMap;
use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use tokio::sync::Notify;

/// The store.
#[derive(Debug, Clone)]
pub struct Depot {
    store: Store,
    /// Layers of a snapshot that was removed have lost the last VM, shell or template that stood on them.
    garbage: Arc<Notify>,
    open: Arc<Mutex<Recent>>,
    pagers: Pagers,
    forming: Arc<Forming>,
    /// For each snapshot that was ever opened, who opens it now.
    loading: Arc<Mutex<HashMap<Name, Arc<Mutex<()>>>>>,
}

/// A snapshot that is open, and who fills its RAM where that is not whole yet.
#[derive(Debug)]
pub struct Loaded {
    /// Open.
    pub(crate) snapshot: OpenSnapshot,
    /// Who fills its memory, or has filled it.
    pub pager: Option<Arc<Wanted>>,
    /// What its clones have from other templates.
    pub shared: Option<Arc<Shared>>,
}

impl std::ops::Deref for Loaded {
    type Target = OpenSnapshot;

    fn deref(&self) -> &OpenSnapshot {
        &self.snapshot
    }
}

impl Loaded {
    /// One whose memory is all there, in its own file.
    pub(crate) const fn whole(snapshot: OpenSnapshot) -> Self {
        Self { snapshot, pager: None, shared: None }
    }

    /// Whether what is open is what would be opened now, and can be had.
    fn is_current(&self) -> bool {
        !self.is_lost() && self.snapshot.is_current()
    }

    /// Whether a part of its memory is missing for ever.
    fn is_lost(&self) -> bool {
        self.pager.as_ref().is_some_and(|wanted| wanted.pager().is_gone())
    }

    /// What of its RAM is in the host's memory, where it is not a file on disk.
    fn resident(&self) -> Option<types::Resident> {
        rustix::fs::fcntl_get_seals(&self.memory).ok()?;
        let own_bytes = self.memory.metadata().ok()?.blocks() * 512;
        Some(types::Resident { own_bytes, shared_bytes: self.shared.as_ref().map_or(0, |s| s.bytes()) })
    }

    /// Who has to be told of a clone.
    #[must_use]
    pub fn filling(&self) -> Option<&Arc<Pager>> {
        self.pager.as_ref().map(|wanted| wanted.pager()).filter(|pager| pager.is_filling())
    }
}

fn listed<T, U>(kind: &str, listing: Listing<T>, shown: impl Fn(T) -> U) -> Vec<U> {
    for (name, error) in &listing.damaged {
        tracing::warn!("{kind} {name} is left out of the listing: {}", chain(error));
    }
    listing.items.into_iter().map(shown).collect()
}

fn digest(text: &str) -> Outcome<Digest> {
    text.parse().map_err(|e| Fault::invalid(format_args!("digest in the head: {e}")))
}

/// Compares `6.1.0-56` and `6.12.117` as people do: number by number.
fn by_version(release: &str) -> Vec<u64> {
    release.split(|c: char| !c.is_ascii_digit()).filter_map(|n| n.parse().ok()).collect()
}

impl Depot {
    /// Uses this store.
    #[must_use]
    pub fn new(store: Store, pagers: Pagers) -> Self {
        let garbage: Arc<Notify> = Arc::default();
        let told = garbage.clone();
        store.when_garbage(move || told.notify_one());
        Self {
            store,
            garbage,
            open: Arc::new(Mutex::new(Recent::new())),
            pagers,
            forming: Arc::default(),
            loading: Arc::default(),
        }
    }

    /// The store itself.
    #[must_use]
    pub fn store(&self) -> &Store {
        &self.store
    }

    /// Forks that are not stored yet, and can be cloned by the name that they will have.
    #[must_use]
    pub fn forming(&self) -> &Forming {
        &self.forming
    }

    /// Every image that can be read.
    ///
    /// # Errors
    /// The folder cannot be listed.
    pub fn images(&self) -> Outcome<Vec<types::Image>> {
        Ok(listed("image", self.store.images()?, shown_image))
    }

    /// One image, verified.
    ///
    /// # Errors
    /// There is none, or it is damaged.
    pub fn image(&self, name: &Name) -> Outcome<types::Image> {
        Ok(shown_image(self.open_image(name)?.manifest))
    }

    /// One image, verified, open and pinned.
    ///
    /// # Errors
    /// As [`Self::image`].
    pub fn open_image(&self, name: &Name) -> Outcome<Image> {
        Ok(self.store.image(name)?)
    }

    /// Stores an image from a zstd frame.
    ///
    /// # Errors
    /// It is not what its head says, the name is in use with other content, or the disk is full.
    pub fn put_image(
        &self,
        name: &Name,
        head: &types::ImageUpload,
        body: &mut dyn Read,
    ) -> Outcome<types::Image> {
        let types::ImageConfig { entrypoint, cmd, env, workdir, user } = head.config.clone();
        let spec = ImageSpec {
            size_bytes: head.size_bytes,
            digest: digest(&head.digest)?,
            source: head.source.clone(),
            config: ImageConfig { entrypoint, cmd, env, workdir, user },
        };
        Ok(shown_image(self.store.put_image(name, &spec, body)?))
    }

    /// Removes an image that nothing uses.
    ///
    /// # Errors
    /// There is none, or it is in use.
    pub fn remove_image(&self, name: &Name) -> Outcome<()> {
        Ok(self.store.remove_image(name)?)
    }

    /// Every kernel that can be read.
    ///
    /// # Errors
    /// The folder cannot be listed.
    pub fn kernels(&self) -> Outcome<Vec<types::Kernel>> {
        Ok(listed("kernel", self.store.kernels()?, shown_kernel))
    }

    /// One kernel, verified.
    ///
    /// # Errors
    /// There is none, or it is damaged.
    pub fn kernel(&self, name: &Name) -> Outcome<types::Kernel> {
        Ok(shown_kernel(self.store.kernel(name)?.manifest))
    }

    /// The kernel of that name; without one, that of the highest release, and of these the one stored last.
    ///
    /// # Errors
    /// There is none, or it is damaged.
    pub fn open_kernel(&self, name: Option<&Name>) -> Outcome<Kernel> {
        if let Some(name) = name {
            return Ok(self.store.kernel(name)?);
        }
        let kernels = self.store.kernels()?.items;
        let newest = kernels.into_iter().max_by_key(|k| (by_version(&k.release), k.created_unix_ms));
        let newest = newest
            .ok_or_else(|| Fault::not_found("no kernel is stored; `dayfly kernel fetch 6.12` gets one"))?;
        Ok(self.store.kernel(&newest.name)?)
    }

    /// Stores a kernel from a zstd frame.
    ///
    /// # Errors
    /// It is not what its head says, or the disk is full.
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
        };
        Ok(shown_kernel(self.store.put_kernel(name, &spec, body)?))
    }

    /// Removes a kernel.
    ///
    /// # Errors
    /// There is none.
    pub fn remove_kernel(&self, name: &Name) -> Outcome<()> {
        Ok(self.store.remove_kernel(name)?)
    }

    /// Every snapshot that can be read.
    ///
    /// # Errors
    /// The folder cannot be listed.
    pub fn snapshots(&self) -> Outcome<Vec<types::Snapshot>> {
        // First: what is stored in between is in both.
        let mut all = self.forming.all();
        let stored = listed("snapshot", self.store.snapshots()?, |m| self.shown(&m));
        all.retain(|forming| stored.iter().all(|s| s.name != forming.name));
        all.extend(stored);
        all.sort_by(|a, b| a.name.cmp(&b.name));
        Ok(all)
    }

    /// One snapshot, verified.
    ///
    /// # Errors
    /// There is none, or it is damaged.
    pub fn snapshot(&self, name: &Name) -> Outcome<types::Snapshot> {
        if let Some(forming) = self.forming.shown(name) {
            return Ok(forming);
        }
        let open = self.open_snapshot(name)?;
        Ok(self.shown(&open.manifest))
    }

    /// A snapshot in the API's words.
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
            memory_bytes: manifest.memory_bytes,
            memory_stored_bytes: manifest.memory.data_bytes,
            layers: layers().map(|layer| layer.id.to_string()).collect(),
            layers_stored_bytes: layers()
                .map(|layer| layer.data.data_bytes.saturating_add(layer.map.bytes))
                .sum(),
            forming: false,
            resident: open.and_then(|open| open.resident()),
        }
    }

    /// One snapshot, verified, open and pinned; kept open for the next who asks. Its RAM may still be on its way.
    ///
    /// # Errors
    /// As [`Self::snapshot`].
    pub fn open_snapshot(&self, name: &Name) -> Outcome<Arc<Loaded>> {
        if let Some(open) = self.known_snapshot(name) {
            return Ok(open);
        }
        if self.forming.has(name) {
            return Err(Fault::new(
                ErrorCode::State,
                format_args!(
                    "snapshot {name}: is being stored; until it is, it can be cloned, and nothing else"
                ),
            ));
        }
        // Who asks for it at once with others finds what the first of them has opened: RAM comes once.
        let turn = lock(&self.loading).entry(name.clone()).or_default().clone();
        let _turn = lock(&turn);
        let known = lock(&self.open).find(name);
        let known = match known {
            Some((open, _)) if open.is_current() => return Ok(open),
            // Another of its files has changed: RAM need not be read again.
            Some((open, bytes)) if !open.is_lost() => {
                open.snapshot.resident().unwrap_or(None).map(|resident| (resident, open, bytes))
            }
            _ => None,
        };
        lock(&self.open).forget(name);
        let (open, bytes) = match known {
            Some((resident, before, bytes)) => {
                let snapshot = self.store.open_resident(name, resident)?;
                // Another snapshot of that name has other RAM, which that pager does not fill.
                let same = snapshot.manifest.memory == before.snapshot.manifest.memory;
                let pager = before.pager.clone().filter(|_| same);
                (Loaded { snapshot, pager, shared: before.shared.clone().filter(|_| same) }, bytes)
            }
            None => self.load(name)?,
        };
        let open = Arc::new(open);
        self.keep(name, &open, bytes);
        Ok(open)
    }

    /// Opens a snapshot whose RAM is not in memory, and says how much of that it will take.
    fn load(&self, name: &Name) -> Outcome<(Loaded, u64)> {
        let bytes = self.store.snapshot(name)?.memory.data_bytes;
        if bytes <= lock(&self.open).resident_most {
            let (snapshot, plan) = self.store.open_lazily(name)?;
            let Some(plan) = plan else { return Ok((Loaded::whole(snapshot), 0)) };
            let open = lock(&self.open).all();
            let shared = sharing::with(&self.store, &self.tenant(), &snapshot, &plan, &open);
            match self.pagers.start(&snapshot, &plan, shared.as_ref()) {
                Ok(wanted) => {
                    let (pager, shared) = (Some(Arc::new(wanted)), shared.map(Arc::new));
                    return Ok((Loaded { snapshot, pager, shared }, bytes));
                }
                Err(e) => tracing::warn!("snapshot {name}: its memory is read before it runs: {}", chain(&e)),
            }
        }
        Ok((Loaded::whole(self.store.open_snapshot(name)?), 0))
    }

    /// Opens a snapshot just made with the RAM that was saved, which stays in the host's memory while it is open; an eighth of that is
    /// for such.
    ///
    /// # Errors
    /// As [`Self::snapshot`].
    pub fn keep_resident(&self, name: &Name, resident: Resident) -> Outcome<()> {
        let bytes = resident.data_bytes();
        if bytes <= lock(&self.open).resident_most {
            let snapshot = self.store.open_resident(name, resident)?;
            self.keep(name, &Arc::new(Loaded::whole(snapshot)), bytes);
        }
        Ok(())
    }

    /// Keeps it open, but not if it was removed since: then nobody would ask for it any more, and it would keep its layers and RAM.
    fn keep(&self, name: &Name, open: &Arc<Loaded>, bytes: u64) {
        let mut recent = lock(&self.open);
        recent.keep(name.clone(), open.clone(), bytes);
        if !open.is_current() {
            recent.forget(name);
        }
    }

    /// RAM of a snapshot's clones.
    ///
    /// # Errors
    /// As [`Self::snapshot`].
    pub fn memory_bytes(&self, name: &Name) -> Outcome<u64> {
        match self.forming.find(name) {
            Some(epoch) => Ok(epoch.facts.memory_bytes),
            None => Ok(self.open_snapshot(name)?.manifest.memory_bytes),
        }
    }

    /// One snapshot, if it is open already and nothing of it has changed since: some ten calls of stat(2).
    #[must_use]
    pub fn known_snapshot(&self, name: &Name) -> Option<Arc<Loaded>> {
        let (open, _) = lock(&self.open).find(name)?;
        open.is_current().then_some(open)
    }

    /// Removes a snapshot, and the layers that only it needed; those that VMs stand on go with the last of these.
    ///
    /// # Errors
    /// There is none.
    pub fn remove_snapshot(&self, name: &Name) -> Outcome<()> {
        // Whoever stores it removes it.
        if self.forming.remove(name) { Ok(()) } else { self.remove_stored(name) }
    }

    /// The same of one that is no longer forming.
    ///
    /// # Errors
    /// There is none.
    pub fn remove_stored(&self, name: &Name) -> Outcome<()> {
        self.store.remove_snapshot(name)?;
        lock(&self.open).forget(name);
        lock(&self.loading).remove(name);
        self.collect();
        self.collect_pages();
        Ok(())
    }

    /// In whose namespace the pages of snapshots are: this daemon has one user.
    #[must_use]
    #[expect(clippy::missing_panics_doc, clippy::expect_used, reason = "locally proven: letters are a name")]
    pub fn tenant(&self) -> Name {
        "default".parse().expect("letters are a name")
    }

    /// A new writable layer.
    ///
    /// # Errors
    /// The host cannot make it.
    pub fn writable(&self, vm: VmId, disk: u8) -> Outcome<(VmLayer, File)> {
        Ok(self.store.create_vm_layer(vm, disk)?)
    }

    /// Bytes of disk that only `vm` takes, whose disks these are.
    #[must_use]
    pub fn vm_bytes(&self, vm: VmId, disks: &[Disk]) -> u64 {
        let borrowed: Vec<VmLayer> = disks.iter().flat_map(Disk::borrowed).collect();
        self.store.vm_disk_bytes(vm, &borrowed).unwrap_or(0)
    }

    /// Removes the layers of a VM that is gone.
    ///
    /// # Errors
    /// The host cannot remove them.
    pub fn remove_vm(&self, vm: VmId) -> Outcome<()> {
        Ok(self.store.remove_vm(vm)?)
    }

    /// Keeps what a VM with these disks stands on.
    ///
    /// # Errors
    /// Something of it is missing.
    pub fn pin(&self, name: &Name, disks: &[Disk]) -> Outcome<Pin> {
        let images: Vec<_> = disks.iter().map(|disk| disk.image.clone()).collect();
        let layers: Vec<LayerId> = disks.iter().flat_map(Disk::stored).collect();
        let borrowed: Vec<VmLayer> = disks.iter().flat_map(Disk::borrowed).collect();
        Ok(self.store.pin(&format!("VM {name}"), &images, &layers, &borrowed)?)
    }

    /// The folders of VMs' own layers.
    #[must_use]
    pub fn vms_folder(&self) -> PathBuf {
        self.store.root().join("vms")
    }
}

impl Disk {
    /// A disk of a snapshot, without its new writable layer.
    #[must_use]
    pub fn of(disk: &DiskRef) -> Self {
        let layers = disk.layers.iter().copied().map(ChainLayer::Stored).collect();
        Self { image: disk.image.clone(), size_bytes: disk.size_bytes, layers, writable: None }
    }

    /// The layers that are in the store.
    pub fn stored(&self) -> impl Iterator<Item = LayerId> + '_ {
        self.layers.iter().filter_map(|layer| match layer {
            ChainLayer::Stored(layer) => Some(layer.id),
            ChainLayer::Frozen(_) | ChainLayer::Borrowed(_) => None,
        })
    }

    /// The layers that other VMs have frozen.
    pub fn borrowed(&self) -> impl Iterator<Item = VmLayer> + '_ {
        self.layers.iter().filter_map(|layer| match layer {
            ChainLayer::Borrowed(layer) => Some(*layer),
            ChainLayer::Stored(_) | ChainLayer::Frozen(_) => None,
        })
    }

    /// The layers that the VM has made itself.
    pub fn own(&self) -> impl Iterator<Item = VmLayer> + '_ {
        let frozen = self.layers.iter().filter_map(|layer| match layer {
            ChainLayer::Frozen(layer) => Some(*layer),
            ChainLayer::Stored(_) | ChainLayer::Borrowed(_) => None,
        });
        frozen.chain(self.writable)
    }

    /// The same disk for clones of the VM.
    #[must_use]
    pub fn lent(mut self) -> Self {
        for layer in &mut self.layers {
            if let ChainLayer::Frozen(own) = *layer {
                *layer = ChainLayer::Borrowed(own);
            }
        }
        self
    }
}

fn shown_image(manifest: ImageManifest) -> types::Image {
    let ImageConfig { entrypoint, cmd, env, workdir, user } = manifest.config;
    types::Image {
        name: manifest.name,
        digest: manifest.disk.digest.to_string(),
        size_bytes: manifest.disk.bytes,
        stored_bytes: manifest.disk.data_bytes,
        created_unix_ms: manifest.created_unix_ms,
        source: manifest.source,
        config: types::ImageConfig { entrypoint, cmd, env, workdir, user },
    }
}

fn shown_kernel(manifest: KernelManifest) -> types::Kernel {
    types::Kernel {
        name: manifest.name,
        release: manifest.release,
        digest: manifest.digest.to_string(),
        created_unix_ms: manifest.created_unix_ms,
    }
}

fn io_code(e: &IoError) -> ErrorCode {
    if e.is_no_space() { ErrorCode::Exhausted } else { ErrorCode::Internal }
}

impl From<IoError> for Fault {
    fn from(e: IoError) -> Self {
        Self::new(io_code(&e), chain(&e))
    }
}

impl From<OpenError> for Fault {
    fn from(e: OpenError) -> Self {
        let code = match &e {
            OpenError::NotFound { .. } => ErrorCode::NotFound,
            OpenError::Damage(_) => ErrorCode::Damaged,
            OpenError::Io(e) => io_code(e),
        };
        Self::new(code, chain(&e))
    }
}

impl From<PutError> for Fault {
    fn from(e: PutError) -> Self {
        let full =
            |e: &io::Error| matches!(e.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded);
        let code = match &e {
            PutError::Stream { source: dayfly_store::sparse::CopyError::Write { source, .. }, .. } => {
                if full(source) { ErrorCode::Exhausted } else { ErrorCode::Internal }
            }
            PutError::TooLarge { .. }
            | PutError::Stream { .. }
            | PutError::Longer { .. }
            | PutError::Invalid { .. } => ErrorCode::Invalid,
            PutError::Digest { .. } => ErrorCode::Damaged,
            PutError::InUse { .. } => ErrorCode::Conflict,
            PutError::Io(e) => io_code(e),
        };
        Self::new(code, chain(&e))
    }
}

impl From<RemoveError> for Fault {
    fn from(e: RemoveError) -> Self {
        let code = match &e {
            RemoveError::NotFound { .. } => ErrorCode::NotFound,
            RemoveError::InUse { .. } => ErrorCode::Conflict,
            RemoveError::Io(e) => io_code(e),
        };
        Self::new(code, chain(&e))
    }
}

impl From<CommitError> for Fault {
    fn from(e: CommitError) -> Self {
        let code = match &e {
            CommitError::Exists { .. } => ErrorCode::Conflict,
            CommitError::Damage(_) => ErrorCode::Damaged,
            CommitError::Invalid { .. } => ErrorCode::Invalid,
            CommitError::Io(e) => io_code(e),
        };
        Self::new(code, chain(&e))
    }
}

impl From<PinError> for Fault {
    fn from(e: PinError) -> Self {
        let code = match &e {
            PinError::Damage(_) => ErrorCode::Damaged,
            PinError::Io(e) => io_code(e),
        };
        Self::new(code, chain(&e))
    }
}

impl From<GcError> for Fault {
    fn from(e: GcError) -> Self {
        Self::new(ErrorCode::Internal, chain(&e))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn releases_compare_as_numbers() {
        assert!(by_version("6.12.117+deb12-cloud-amd64") > by_version("6.1.0-56-cloud-amd64"));
        assert!(by_version("6.1.10") > by_version("6.1.9"));
        assert_eq!(by_version(""), Vec::<u64>::new());
    }
}
