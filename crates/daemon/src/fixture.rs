//! Fixtures for unit tests of several modules.

use crate::base::config::{Config, Deadlines, DiskSpace, VmDir};
use crate::base::groups::GroupStock;
use crate::daemon::Daemon;
use crate::model::facts::{Facts, ForkFacts};
use crate::model::vm_slot::VmSlot;
use crate::net::relay::Place;
use crate::templates::cache::TemplateCache;
use crate::vm::Vm;
use crate::vm::budget::{Budget, Reservation};
use dayfly_host::cpus::CpuList;
use dayfly_host::groups::Root;
use dayfly_host::numa::Node;
use dayfly_host::process::{Named, Process, ProcessId};
use dayfly_store::{
    ChainLayer, Digest, DiskSpec, ImageConfig, ImageSpec, KernelRef, PagedSpec, SavedSnapshot,
    SnapshotSpec, Store, sparse,
};
use dayfly_units::{CpuModel, Name, VmId};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// A configuration with all folders below `folder`, without a VMM program.
pub(crate) fn config(folder: &Path) -> Config {
    Config {
        state: folder.join("s"),
        run: folder.join("r"),
        vmm: "/nonexistent/dayfly-vmm".into(),
        overcommit: 100,
        memory_reserve_bytes: None,
        disk: DiskSpace {
            share_bytes: Some(0),
            quota_bytes: None,
            reserve_bytes: Some(0),
            run_reserve_bytes: 0,
        },
        network: None,
        reach: Vec::new(),
        pool: 0,
        ports: None,
        first_uid: 0x7100_0000,
        group_root: Root::Nowhere,
        main_cpus: CpuList::default(),
        // Processes and threads of tests stand still for seconds on a busy host.
        deadlines: Deadlines::default().times(6),
    }
}

/// The VMM's program that was built with the test.
pub(crate) fn vmm() -> PathBuf {
    let vmm = programs().join("dayfly-vmm");
    assert!(vmm.is_file(), "{}: build the programs first: cargo build --release", vmm.display());
    vmm
}

/// The folder of the programs that were built with the test.
fn programs() -> PathBuf {
    std::env::current_exe().unwrap().ancestors().nth(2).unwrap().to_owned()
}

/// A place for a relay in `folder`, of a VM that ends with the test.
pub(crate) fn relay_place(folder: &Path) -> Place {
    let vmm = Process::open(ProcessId::own().unwrap()).unwrap().unwrap();
    let program = programs().join("dayfly-relay");
    assert!(program.is_file(), "{}: build the programs first", program.display());
    let dir = config(folder).vm(VmId::random());
    std::fs::create_dir_all(dir.path()).unwrap();
    let (uid, vmm) = (0x7100_0000, Arc::new(vmm));
    Place { program, dir, uid, group: None, vmm, memory_max_bytes: None, spent: Arc::default() }
}

/// Moves the calling thread, and threads that it starts, into a new network namespace and a mount
/// namespace with an empty /run. Notes on forwarding are in /run.
pub(crate) fn own_network() {
    use rustix::mount::{MountFlags, MountPropagationFlags, mount, mount_change};
    let own = rustix::thread::UnshareFlags::NEWNET | rustix::thread::UnshareFlags::NEWNS;
    // SAFETY: unshare(2) of these namespaces affects only this thread and threads that it starts.
    unsafe { rustix::thread::unshare_unsafe(own) }.expect("these tests need CAP_SYS_ADMIN");
    mount_change("/", MountPropagationFlags::PRIVATE | MountPropagationFlags::REC).unwrap();
    mount("none", "/run", "tmpfs", MountFlags::empty(), None).unwrap();
}

/// Facts of a VM with one vCPU and without a network device.
pub(crate) fn facts() -> Facts {
    Facts {
        snapshot: None,
        ancestors: Vec::new(),
        fork: ForkFacts::default(),
        image: "i".parse().unwrap(),
        kernel: KernelRef {
            name: "k".parse().unwrap(),
            release: "6.12".into(),
            digest: Digest::of(b"k"),
        },
        vcpus: 1,
        max_vcpus: 0,
        cpu_model: CpuModel::Host,
        memory_bytes: 64 << 20,
        nets: 0,
        network: Default::default(),
        created_unix_ms: 0,
        config: Default::default(),
        init: None,
        ephemeral: false,
        auto_remove: false,
        labels: Default::default(),
        volumes: Vec::new(),
        limits: Default::default(),
        request: None,
    }
}

/// A host with one memory node of 1 TiB.
pub(crate) fn nodes() -> Vec<Node> {
    vec![Node { number: None, cpus: Vec::new(), memory_bytes: 1 << 40 }]
}

/// A VM that starts, without a folder.
pub(crate) fn vm() -> Vm {
    let vm_slot = VmSlot { id: VmId::random(), slot: 0, uid: 0x7100_0000, node: 0 };
    let dir = VmDir::at("/nonexistent/vm".into());
    Vm::new(vm_slot, "vm".parse().unwrap(), dir, facts(), memory())
}

/// A reservation of 64 MiB on such a host.
pub(crate) fn memory() -> Reservation {
    Arc::new(Budget::new(&nodes(), 100)).reserve(64 << 20, None).unwrap()
}

/// Stores the image `debian`, unless it exists, and the snapshot `to` of a removed VM on that
/// image. Its RAM has one page for each number in `pages`.
pub(crate) fn snapshot(store: &Store, tenant: &str, to: &str, pages: std::ops::Range<u64>) {
    descendant(store, tenant, to, pages, Vec::new());
}

/// As [`snapshot`], with ancestors.
pub(crate) fn descendant(
    store: &Store,
    tenant: &str,
    to: &str,
    pages: std::ops::Range<u64>,
    ancestors: Vec<Digest>,
) {
    let (vm, saved, spec) = saved(store, to, pages, ancestors);
    saved.commit_paged(&spec, &PagedSpec::of(&tenant.parse().unwrap())).unwrap();
    store.remove_vm(vm).unwrap();
}

/// As [`descendant`], before it is stored; its RAM is a memfd. The VM is to be removed.
pub(crate) fn saved(
    store: &Store,
    to: &str,
    pages: std::ops::Range<u64>,
    ancestors: Vec<Digest>,
) -> (VmId, SavedSnapshot, SnapshotSpec) {
    let name = |text: &str| -> Name { text.parse().unwrap() };
    let disk: Vec<u8> = (0..8_u8).flat_map(|n| [n; 4096]).collect();
    if store.image(&name("debian")).is_err() {
        let scratch = tempfile::tempfile().unwrap();
        let digest = sparse::copy(&mut &disk[..], &scratch, disk.len() as u64).unwrap().digest;
        let (source, config) = (String::new(), ImageConfig::default());
        let spec = ImageSpec { size_bytes: disk.len() as u64, digest, source, config };
        store.put_image_raw(&name("debian"), &spec, &mut disk.as_slice()).unwrap();
    }
    let vm = VmId::random();
    let (layer, data) = store.create_vm_layer(vm, 0).unwrap();
    data.set_len(disk.len() as u64).unwrap();
    data.write_all_at(to.as_bytes(), 0).unwrap();
    let memory_bytes = (pages.end - pages.start) * 4096;
    let mut writer = store.snapshot_writer_in_memory(&name(to), memory_bytes).unwrap();
    let freeze = writer.freeze(&layer).unwrap();
    freeze.map.write_all_at(&[1; 100], 0).unwrap();
    drop((data, freeze.map));
    writer.state().write_all_at(&[2; 300], 0).unwrap();
    for (frame, page) in (0..).zip(pages) {
        let digest = Digest::of(&page.to_le_bytes());
        let bytes: Vec<u8> = (0..128).flat_map(|_| digest.0).collect();
        writer.memory().write_all_at(&bytes, frame * 4096).unwrap();
    }
    let image = store.image(&name("debian")).unwrap().reference();
    let layers: Vec<ChainLayer> = vec![freeze.frozen];
    let spec = SnapshotSpec {
        parent: None,
        ancestors,
        kernel: KernelRef { name: name("6.12"), release: "6.12".into(), digest: Digest([7; 32]) },
        vcpus: 1,
        max_vcpus: 0,
        cpu_model: CpuModel::Host,
        nets: 0,
        memory_bytes,
        agent_version: "0".into(),
        config: ImageConfig::default(),
        labels: [].into(),
        egress: None,
        disks: vec![DiskSpec { image, size_bytes: disk.len() as u64, writable: true, layers }],
    };
    (vm, writer.saved(), spec)
}

/// A daemon that serves the requests of guests to fork themselves, if it is made within a runtime.
pub(crate) fn daemon(config: Config, templates: TemplateCache, nodes: Vec<Node>) -> Arc<Daemon> {
    let groups = GroupStock::open(&config.group_root, &config.run, false);
    groups.limit_disks_of(config.disk_folders());
    groups
        .begin_cpus(&config.main_cpus, &nodes, vec![(Named::Exactly(config.vmm_name()), 0..0)])
        .unwrap();
    let (self_forks, opened) = tokio::sync::mpsc::unbounded_channel();
    let daemon = Arc::new(Daemon::new(config, templates, groups, nodes, self_forks).unwrap());
    if tokio::runtime::Handle::try_current().is_ok() {
        tokio::spawn(crate::ops::self_fork::keep(daemon.clone(), opened));
    }
    daemon
}
