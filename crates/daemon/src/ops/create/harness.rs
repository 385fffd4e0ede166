//! A daemon with a snapshot of the microguest, for tests with a real VMM on `/dev/kvm`.

use crate::base::config::Config;
use crate::base::error::Outcome;
use crate::base::time::Asked;
use crate::daemon::Daemon;
use crate::fixture;
use crate::model::vm_slot::VmSlot;
use crate::ops::create::last_lines::console_tail;
use crate::ops::create::{Order, Origin, VmGuard, create};
use crate::templates::cache::TemplateCache;
use crate::templates::pagers::{Pager, Pagers};
use crate::vmm::launch::Fds;
use dayfly_api::types::{ForkRequest, Lifetime, Source};
use dayfly_pager::wire::Settings;
use dayfly_store::{
    DiskSpec, Image, ImageConfig, ImageSpec, Kernel, KernelRef, KernelSpec, PagedSpec,
    SnapshotSpec, Store, sparse,
};
use dayfly_units::{CpuModel, Name, VmName};
use dayfly_vmm::arch::layout;
use dayfly_vmm::config::{BootConfig, DiskConfig, MAX_VCPUS, Start};
use dayfly_vmm::control::Client;
use dayfly_vmm::memory::working_set::{self, Record};
use std::collections::BTreeMap;
use std::os::fd::AsFd;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// RAM of a guest. The word `grow=` needs more than 64 MiB.
pub(super) const MEMORY_BYTES: u64 = 72 << 20;
/// The word `grow=` needs 8,192 blocks.
const DISK_BYTES: u64 = 32 << 20;
/// A fork with one clone.
pub(super) const ASKED: ForkRequest = ForkRequest {
    count: 1,
    name: None,
    labels: BTreeMap::new(),
    forks: 0,
    egress: None,
    publish: Vec::new(),
    publish_exposed: false,
    lifetime: Lifetime::UNLIMITED,
    limits: None,
    template: None,
};
/// Generous, because guests may be emulated on a busy host; only a hang takes this long.
pub(super) const WITHIN: Duration = Duration::from_secs(120);

/// The VMM program built beside the program of this test.
pub(super) async fn until(what: &str, mut holds: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !holds() {
        assert!(begun.elapsed() < WITHIN, "{what}: not within {} s", WITHIN.as_secs());
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

pub(super) struct Room {
    _folder: tempfile::TempDir,
    pub(super) daemon: Arc<Daemon>,
    pub(super) snapshot: Name,
}

impl Room {
    pub(super) async fn new(pool: usize) -> Self {
        let command_line = format!("born={:x}", layout::GENERATION.0);
        Self::with(pool, Settings::default(), &command_line, false).await
    }

    /// With a snapshot of a guest that got this kernel command line, with RAM in pages or in a
    /// file.
    pub(super) async fn with(
        pool: usize,
        settings: Settings,
        command_line: &str,
        paged: bool,
    ) -> Self {
        Self::expecting(pool, settings, command_line, paged, None).await
    }

    /// As [`Self::with`], with a working set.
    pub(super) async fn expecting(
        pool: usize,
        settings: Settings,
        command_line: &str,
        paged: bool,
        record: Option<&Record>,
    ) -> Self {
        let folder = tempfile::Builder::new().prefix("creations").tempdir_in("/dev/shm").unwrap();
        let config = Config { vmm: fixture::vmm(), pool, ..fixture::config(folder.path()) };
        std::fs::create_dir_all(config.vms()).unwrap();
        std::fs::create_dir_all(&config.state).unwrap();
        let store = Store::open(&config.state).unwrap();
        let nodes = dayfly_host::numa::nodes().unwrap();
        let mut pagers = Pagers::new(&config);
        pagers.settings = Settings { deadline_s: pagers.settings.deadline_s, ..settings };
        let daemon = fixture::daemon(config, TemplateCache::new(store, pagers), nodes);
        daemon.space.publish(&daemon.config.limits()).unwrap();
        let snapshot: Name = "s".parse().unwrap();
        bake(&daemon, &snapshot, command_line, paged, record).await;
        Self { _folder: folder, daemon, snapshot }
    }

    pub(super) fn order(&self, name: &VmName) -> Order {
        Order {
            name: Some(name.clone()),
            ..Order::of(Origin::Source(Source::Snapshot(self.snapshot.clone())))
        }
    }

    /// Stores the microguest that obeys these words as the kernel `again`.
    pub(super) fn store_kernel(&self, words: &str) -> Name {
        let again: Name = "again".parse().unwrap();
        let (elf, initrd) = (dayfly_microguest::elf(), dayfly_microguest::initramfs(words));
        let both = [elf, &initrd].concat();
        let spec = KernelSpec {
            release: "guest".into(),
            vmlinux_bytes: elf.len() as u64,
            initrd_bytes: initrd.len() as u64,
            digest: dayfly_store::Digest::of(&both),
            modules: None,
        };
        let body = zstd::encode_all(both.as_slice(), 1).unwrap();
        let store = self.daemon.templates.store();
        store.put_kernel(&again, &spec, &mut body.as_slice()).unwrap();
        again
    }

    pub(super) async fn create(&self, name: &VmName) -> Outcome<VmGuard> {
        create(&self.daemon, Asked::now(), self.order(name)).await
    }

    /// The pager of the open snapshot.
    pub(super) fn pager(&self) -> Arc<Pager> {
        let open = self.daemon.templates.known_snapshot(&self.snapshot).unwrap();
        open.pager.as_ref().unwrap().pager().clone()
    }

    /// Waits until nothing is left of any VM. Warm VMMs of the pool may stay.
    pub(super) async fn empty(&self) {
        let daemon = &self.daemon;
        until("VMs are forgotten", || daemon.registry.is_empty()).await;
        until("memory is returned", || daemon.budget.shares().iter().all(|share| share.0 == 0))
            .await;
        until("slots are those of the pool", || {
            daemon.registry.vm_slots().len() == daemon.pool.waiting().0
        })
        .await;
        let left = |path: PathBuf| std::fs::read_dir(path).unwrap().count();
        until("folders are those of the pool", || {
            left(daemon.config.vms()) == daemon.pool.waiting().0
        })
        .await;
        // The layer of a fork in progress may be removed a little later.
        until("no VM's layers are left", || {
            left(daemon.templates.vms_folder()) <= daemon.pool.waiting().0
        })
        .await;
    }
}

/// Waiting guests spin, so guests that a failed test leaves would take the CPUs from all later
/// tests.
impl Drop for Room {
    fn drop(&mut self) {
        for process in self.daemon.registry.all().iter().filter_map(|vm| vm.process()) {
            let _ended_already = process.kill();
        }
    }
}

/// Stores a snapshot of a guest that got this kernel command line and is ready.
async fn bake(
    daemon: &Arc<Daemon>,
    name: &Name,
    command_line: &str,
    paged: bool,
    record: Option<&Record>,
) {
    let store = daemon.templates.store();
    let (image, kernel) = store_guest(store);
    let (image_ref, kernel_ref) = (image.reference(), kernel.reference());

    let vm_slot: VmSlot = daemon.registry.vm_slot(0).unwrap();
    let (writable, data) = store.create_vm_layer(vm_slot.id, 0).unwrap();
    let mut fds = Fds::default();
    let disk = DiskConfig {
        size_bytes: DISK_BYTES,
        base_fd: fds.add(image.disk),
        layers: Vec::new(),
        writable_fd: Some(fds.add(data)),
        trees: Vec::new(),
    };
    let start = Start::Boot(BootConfig {
        kernel_fd: fds.add(kernel.vmlinux),
        initrd_fd: None,
        cmdline: command_line.to_owned(),
        memory_bytes: MEMORY_BYTES,
        vcpus: 1,
        max_vcpus: MAX_VCPUS,
        cpu_model: CpuModel::Host,
        disks: vec![disk],
        nets: 0,
    });
    let launched = daemon.launcher.launch(vm_slot, start, fds, false, false).unwrap();
    let dir = daemon.config.vm(vm_slot.id);
    until("the guest is ready", || console_tail(&dir).ends_with("ready")).await;
    let mut control = Client::connect(&dir.control(), Some(WITHIN)).unwrap();
    control.pause().unwrap();
    let mut writer = store.snapshot_writer(name).unwrap();
    let freeze = writer.freeze(&writable).unwrap();
    let page_map = tempfile::tempfile().unwrap();
    let (state, memory) = (writer.state().as_fd(), writer.memory().as_fd());
    let (map, next) = (freeze.map.as_fd(), freeze.next_data.as_fd());
    let read_only = freeze.read_only.as_fd();
    control.save(&[state, memory, page_map.as_fd(), map, next, read_only]).unwrap();
    drop((freeze.map, freeze.next_data));
    let disk = DiskSpec {
        image: image_ref,
        size_bytes: DISK_BYTES,
        writable: true,
        layers: vec![freeze.frozen],
    };
    let spec = spec(kernel_ref, disk);
    if paged {
        let mut prepared = writer.saved().prepare(&spec, &[]).unwrap();
        if let Some(record) = record {
            prepared.keep_working_set(&working_set::encode(record)).unwrap();
        }
        prepared.commit_paged(&PagedSpec::of(&daemon.templates.tenant())).unwrap();
    } else {
        assert!(record.is_none(), "only where pages are stored");
        writer.saved().commit(&spec).unwrap();
    }
    launched.process.kill().unwrap();
    launched.process.wait(Some(WITHIN)).unwrap();
    std::fs::remove_dir_all(dir.path()).unwrap();
    store.remove_vm(vm_slot.id).unwrap();
    daemon.registry.release_unused(vm_slot);
}

/// A snapshot of one vCPU, whose guest knows of all that a VM may have.
fn spec(kernel: KernelRef, disk: DiskSpec) -> SnapshotSpec {
    SnapshotSpec {
        parent: None,
        ancestors: Vec::new(),
        kernel,
        vcpus: 1,
        max_vcpus: MAX_VCPUS,
        cpu_model: CpuModel::Host,
        nets: 0,
        memory_bytes: MEMORY_BYTES,
        agent_version: String::new(),
        config: ImageConfig::default(),
        labels: BTreeMap::new(),
        egress: None,
        disks: vec![disk],
    }
}

/// Stores the microguest as a kernel, and an empty disk as its image.
fn store_guest(store: &Store) -> (Image, Kernel) {
    let guest: Name = "guest".parse().unwrap();
    let elf = dayfly_microguest::elf();
    let spec = KernelSpec {
        release: "guest".into(),
        vmlinux_bytes: elf.len() as u64,
        initrd_bytes: 0,
        digest: dayfly_store::Digest::of(elf),
        modules: None,
    };
    store.put_kernel(&guest, &spec, &mut zstd::encode_all(elf, 1).unwrap().as_slice()).unwrap();
    let disk = tempfile::tempfile().unwrap();
    disk.set_len(DISK_BYTES).unwrap();
    let spec = ImageSpec {
        size_bytes: DISK_BYTES,
        digest: sparse::digest(&disk).unwrap().digest,
        source: "nothing".into(),
        config: ImageConfig::default(),
    };
    store.put_image_raw(&guest, &spec, &mut &disk).unwrap();
    (store.image(&guest).unwrap(), store.kernel(&guest).unwrap())
}
