//! Makes snapshots of the microguest: plays the daemon's part of a bake, which knows guests with an agent only.

use crate::common::{MIB, now_us};
use crate::room::Room;
use anyhow::{Context, Result, bail};
use dayfly_host::process::Process;
use dayfly_host::spawn::{FIRST_FD, Namespaces, Program, Spawn, Stdio};
use dayfly_store::{
    BlockHint, Committed, DiskSpec, ImageConfig, ImageSpec, KernelSpec, Known, Merged, PagedSpec,
    SnapshotSpec, Store, VmLayer, sparse,
};
use dayfly_units::{Name, VmId};
use dayfly_vmm::config::{BootConfig, DiskConfig, FdNumber, JailConfig, Start, VmmConfig};
use dayfly_vmm::control::Client;
use dayfly_vmm::disk::{Merge, page_map};
use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::time::{Duration, Instant};

/// Where VMs of the bench's daemon will not be: its users start lower.
pub const UID: u32 = 190_000;
pub const WITHIN: Duration = Duration::from_secs(60);

/// A VMM, killed when it is dropped.
pub struct Vmm(Process);

impl Drop for Vmm {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait(Some(WITHIN));
    }
}

/// Descriptors of a process, numbered.
#[derive(Default)]
pub struct Fds(Vec<(OwnedFd, FdNumber)>);

impl Fds {
    pub fn add(&mut self, fd: impl Into<OwnedFd>) -> FdNumber {
        let number = FIRST_FD + FdNumber::try_from(self.0.len()).unwrap_or(FdNumber::MAX - FIRST_FD);
        self.0.push((fd.into(), number));
        number
    }
}

/// Boots the microguest with `words`, whose `born=` or `until=` makes it say that it is ready, and keeps it as the snapshot `name`, without
/// an agent. The store must not be open elsewhere.
pub fn bake(room: &Room, name: &Name, memory_bytes: u64, words: &str) -> Result<()> {
    let store = Store::open(&room.state())?;
    Bake { room, store: &store, memory_bytes, disk_bytes: MIB, tenant: None }.bake(name, words)
}

/// How snapshots are baked.
#[derive(Clone, Copy)]
pub struct Bake<'a> {
    pub room: &'a Room,
    pub store: &'a Store,
    pub memory_bytes: u64,
    /// Bytes of the empty disk; the first bake in a store decides.
    pub disk_bytes: u64,
    /// As [`Keep::tenant`].
    pub tenant: Option<&'a Name>,
}

impl Bake<'_> {
    /// As [`bake`], in a store that is open here.
    pub fn bake(&self, name: &Name, words: &str) -> Result<()> {
        let Self { room, store, memory_bytes, .. } = *self;
        let guest: Name = "microguest".parse()?;
        if store.kernel(&guest).is_err() {
            publish(store, &guest, self.disk_bytes)?;
        }
        let (image, kernel) = (store.image(&guest)?, store.kernel(&guest)?);
        let (image_ref, kernel_ref, size_bytes) =
            (image.reference(), kernel.reference(), image.manifest.disk.bytes);

        let id = VmId::random();
        let folder = tempfile::Builder::new().prefix("bake").tempdir_in(room.run())?;
        let (writable, data) = store.create_vm_layer(id, 0)?;
        let mut fds = Fds::default();
        let disk = DiskConfig {
            size_bytes,
            base_fd: fds.add(image.disk),
            layers: Vec::new(),
            writable_fd: Some(fds.add(data)),
        };
        let start = Start::Boot(BootConfig {
            kernel_fd: fds.add(kernel.vmlinux),
            initrd_fd: None,
            cmdline: words.to_owned(),
            memory_bytes,
            vcpus: 1,
            disks: vec![disk],
            nets: 0,
        });
        let _vmm = spawn(room, folder.path(), id, start, fds)?;
        wait_ready(folder.path())?;
        let disk = DiskSpec { image: image_ref, size_bytes, writable: true, layers: Vec::new() };
        let spec = SnapshotSpec {
            parent: None,
            kernel: kernel_ref,
            vcpus: 1,
            nets: 0,
            memory_bytes,
            // There is none: the daemon counts its clones as ready once they run.
            agent_version: String::new(),
            config: ImageConfig::default(),
            labels: Default::default(),
            disks: vec![disk],
        };
        save(store, folder.path(), name, spec, &writable, Keep { tenant: self.tenant, flat: true })?;
        store.remove_vm(id)?;
        Ok(())
    }
}

/// How a snapshot is kept.
#[derive(Clone, Copy)]
pub struct Keep<'a> {
    /// In whose namespace RAM's pages go, as the daemon does it; `None`: RAM is a file, which the floor can map.
    pub tenant: Option<&'a Name>,
    /// Whether long chains are flattened, as the daemon does it.
    pub flat: bool,
}

/// What a snapshot of a VM came to.
pub struct Saved {
    pub committed: Committed,
    /// The data of the layer that was frozen.
    pub top: File,
    /// The layer that the VM, which stands, writes from now on.
    pub writable: VmLayer,
    /// Microseconds of the VMM's part, and of the store's.
    pub save_us: u64,
    pub commit_us: u64,
}

/// Stops the VM in `folder`, whose disk's frozen layers are in `spec` and which writes to `writable`, and keeps it as a snapshot.
pub fn save(
    store: &Store,
    folder: &Path,
    name: &Name,
    mut spec: SnapshotSpec,
    writable: &VmLayer,
    keep: Keep<'_>,
) -> Result<Saved> {
    let mut control = Client::connect(&folder.join("control.sock"), Some(WITHIN))?;
    let ended = || {
        let exit = std::fs::read_to_string(folder.join("exit.json")).unwrap_or_default();
        format!("the VMM's exit record: {exit:?}")
    };
    control.pause().with_context(ended)?;
    let begun = now_us();
    let mut writer = store.snapshot_writer(name)?;
    let freeze = writer.freeze(writable)?;
    let page_map = tempfile::tempfile()?;
    let (state, memory) = (writer.state().as_fd(), writer.memory().as_fd());
    let files = [state, memory, page_map.as_fd(), freeze.map.as_fd(), freeze.next_data.as_fd()];
    control.save(&files).with_context(ended)?;
    let saved_us = now_us();
    spec.disks[0].layers.push(freeze.frozen);
    let top = store.open_vm_layer(writable, false)?;
    let saved = if keep.flat { writer.saved().merging(merge) } else { writer.saved() };
    let committed = match keep.tenant {
        Some(tenant) => {
            let hints = hints(&page_map, spec.memory_bytes)?;
            let known = Known { hints: &hints, ..Known::default() };
            saved.commit_paged(&spec, &PagedSpec { tenant, known })?
        }
        None => saved.commit(&spec)?,
    };
    Ok(Saved {
        committed,
        top,
        writable: freeze.next,
        save_us: saved_us - begun,
        commit_us: now_us() - saved_us,
    })
}

/// What layers are as one, as the daemon tells the store.
fn merge(maps: &[BorrowedFd<'_>]) -> Result<Merged, Box<dyn std::error::Error + Send + Sync>> {
    let merge = Merge::of(maps)?;
    let map = merge.map().encode();
    Ok(Merged { map, runs: Box::new(merge.into_runs()) })
}

fn hints(page_map: &File, memory_bytes: u64) -> Result<Vec<(u32, BlockHint)>> {
    let runs = page_map::record::read(page_map, memory_bytes)?;
    let of_run = |run: page_map::Run| {
        let at = move |n| BlockHint { disk: run.disk, layer: run.layer, block: run.block + n };
        (0..run.count).map(move |n| (run.first + n, at(n)))
    };
    Ok(runs.into_iter().flat_map(of_run).collect())
}

/// The microguest as a kernel, and an empty disk.
fn publish(store: &Store, name: &Name, disk_bytes: u64) -> Result<()> {
    let elf = dayfly_microguest::elf();
    let spec = KernelSpec {
        release: name.to_string(),
        vmlinux_bytes: elf.len() as u64,
        initrd_bytes: 0,
        digest: blake3::hash(elf).into(),
    };
    store.put_kernel(name, &spec, &mut zstd::encode_all(elf, 1)?.as_slice())?;
    let disk = tempfile::tempfile()?;
    disk.set_len(disk_bytes)?;
    let digest = sparse::digest(&disk)?.digest;
    let spec = ImageSpec {
        size_bytes: disk_bytes,
        digest,
        source: "dayfly-bench: nothing but zeroes".to_owned(),
        config: ImageConfig::default(),
    };
    store.put_image_raw(name, &spec, &mut &disk)?;
    Ok(())
}

/// A jailed VMM as the daemon starts it.
pub fn spawn(room: &Room, folder: &Path, id: VmId, start: Start, mut fds: Fds) -> Result<Vmm> {
    let root = folder.join("root");
    std::fs::create_dir(&root)?;
    let make = |name: &str| File::options().append(true).create_new(true).open(folder.join(name));
    let config = VmmConfig {
        id,
        jail: Some(JailConfig { root: root.clone(), uid: UID, gid: UID }),
        kvm_fd: Some(fds.add(File::options().read(true).write(true).open("/dev/kvm")?)),
        control_fd: fds.add(UnixListener::bind(folder.join("control.sock"))?),
        link_fd: None,
        background: false,
        vsock_fd: fds.add(UnixListener::bind(root.join("vsock.sock"))?),
        vsock_path: "/vsock.sock".into(),
        console_fd: fds.add(make("console.log")?),
        console_max_bytes: MIB,
        exit_fd: fds.add(make("exit.json")?),
        start,
    };
    let path = folder.join("config.json");
    std::fs::write(&path, serde_json::to_vec(&config)?)?;
    let config_fd = fds.add(File::open(&path)?);
    let mut spawn = Spawn::new(Program::Path(room.vmm()), room.vmm_name());
    for argument in ["--config-fd", &config_fd.to_string(), "--id", &id.to_string()] {
        spawn.argv.push(argument.into());
    }
    spawn.namespaces = Namespaces::ALL;
    spawn.fds = fds.0;
    spawn.stderr = Stdio::Inherit;
    Ok(Vmm(Process::from_child(spawn.run()?)?))
}

/// Waits until the guest says that it is ready, and then until it surely waits.
pub fn wait_ready(folder: &Path) -> Result<()> {
    let begun = Instant::now();
    loop {
        let console = std::fs::read_to_string(folder.join("console.log")).context("the guest's console")?;
        if console.ends_with("ready\n") {
            break;
        }
        if begun.elapsed() > WITHIN {
            let exit = std::fs::read_to_string(folder.join("exit.json")).unwrap_or_default();
            bail!("the guest is not ready; console {console:?}, exit record {exit:?}");
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    // A handful of instructions.
    std::thread::sleep(Duration::from_millis(100));
    Ok(())
}
