//! Snapshots of the microguest, booted and taken by the daemon through its API.
//!
//! The daemon waits until the agent of a guest that boots reports that it is ready. The microguest
//! has none, so the testbed reports in its place, with an empty version: the daemon then knows that
//! there is no agent, and neither seals the guest nor gives it an identity.

use super::daemon::Testbed;
use super::host::{MIB, now_us};
use crate::prelude::*;
use crate::requests::{create, made};
use dayfly_api::agent::{FrameKind, READY_PORT, Ready, Reply, encode};
use dayfly_api::types::{BootSource, Snapshot, SnapshotRequest, Source};
use dayfly_store::{ImageConfig, ImageSpec, KernelSpec, Store, sparse};
use dayfly_units::CpuModel;
use dayfly_vmm::arch::layout;
use std::fs::File;
use std::io::Write;
use std::os::unix::net::UnixStream;

/// How long a guest may take to be ready.
const WITHIN: Duration = Duration::from_secs(60);
/// The label of a VM that is baked.
const LABEL: &str = "dayfly.bench";
/// The namespace of the daemon's pages.
const TENANT: &str = "default";

/// A guest that is baked.
#[derive(Debug, Clone)]
pub struct Guest {
    /// The name of the snapshot.
    pub name: Name,
    /// RAM.
    pub memory_bytes: u64,
    /// What the guest obeys; it prints `ready` before the snapshot is taken.
    pub words: String,
    /// Bytes of its empty disk.
    pub disk_bytes: u64,
}

impl Guest {
    /// With a disk that is hardly used.
    pub fn new(name: &str, memory_bytes: u64, words: impl Into<String>) -> Result<Self> {
        Ok(Self { name: name.parse()?, memory_bytes, words: words.into(), disk_bytes: MIB })
    }

    /// A guest of 256 MiB that only has to be created: it writes 64 pages before the snapshot, and
    /// writes to one port after it.
    pub fn idle(name: &str) -> Result<Self> {
        Self::idle_of(name, 256 * MIB)
    }

    /// The same with other RAM.
    pub fn idle_of(name: &str, memory_bytes: u64) -> Result<Self> {
        Self::new(name, memory_bytes, format!("fill=7:40 born={:x}", layout::GENERATION.0))
    }

    /// A guest that touches `mib` of its memory after its creation, and then halts.
    pub fn touching(mib: u64) -> Result<Self> {
        let pages = mib * MIB / PAGE_SIZE;
        let words = format!("until={:x} say=b touch={pages:x}", layout::GENERATION.0);
        Self::new(&format!("touch-{mib}"), (mib + 64) * MIB, words)
    }
}

/// A snapshot that was taken.
#[derive(Debug)]
pub struct Taken {
    /// What the daemon says of it.
    pub snapshot: Snapshot,
    /// Microseconds until the VMM had saved the VM.
    pub save_us: u64,
    /// Microseconds from then until the snapshot was in the store.
    pub commit_us: u64,
}

impl Testbed {
    /// A testbed whose store has snapshots of `guests`. The daemon that made them is stopped: the
    /// next one has none of them in memory.
    pub async fn baked(places: &Places, guests: &[Guest]) -> Result<Self> {
        Self::baked_in(&std::env::temp_dir(), places, guests, &["--pool", "0"]).await
    }

    /// The same with its store below a folder, baked by a daemon with these arguments.
    pub async fn baked_in(
        below: &Path,
        places: &Places,
        guests: &[Guest],
        arguments: &[&str],
    ) -> Result<Self> {
        let mut testbed = Self::new(places, below)?;
        let store = testbed.store()?;
        guests.iter().try_for_each(|guest| publish(&store, guest))?;
        drop(store);
        testbed.start(arguments).await?;
        for guest in guests {
            testbed.bake_one(guest).await.with_context(|| format!("baking {}", guest.name))?;
        }
        testbed.stop()?;
        Ok(testbed)
    }

    async fn bake_one(&self, guest: &Guest) -> Result<()> {
        let boot = BootSource {
            image: image_name(guest.disk_bytes)?,
            kernel: Some(guest.name.clone()),
            memory_bytes: guest.memory_bytes,
            vcpus: 1,
            cpu_model: CpuModel::Host,
            init: None,
        };
        let request = create(Source::Boot(boot), &[LABEL]);
        let created = async { Ok(self.client.create(&request).await?) };
        let (vm, ()) = tokio::try_join!(created, self.report_ready())?;
        self.snapshot(vm.id, &guest.name).await?;
        self.remove(vm.id).await.map(drop)
    }

    /// Reports that the one guest that boots is ready, as an agent would.
    async fn report_ready(&self) -> Result<()> {
        let begun = Instant::now();
        let id = loop {
            let vms = self.client.vms(true).await?;
            let baked = vms.iter().find(|vm| vm.labels.contains_key(LABEL));
            if let Some(vm) = baked.filter(|vm| self.console(vm.id).ends_with("ready\n")) {
                break vm.id;
            }
            if begun.elapsed() > WITHIN {
                let console = baked.map(|vm| self.console(vm.id));
                bail!("the guest is not ready after {WITHIN:?}; its console: {console:?}");
            }
            tokio::time::sleep(Duration::from_millis(2)).await;
        };
        // The guest waits a handful of instructions after it has printed the word.
        tokio::time::sleep(Duration::from_millis(100)).await;
        let (version, kernel) = (String::new(), "microguest".to_owned());
        let ready = Reply::Ready(Ready { version, kernel, uptime_us: 0, sealed: false });
        let path = self.of_vm(id, &format!("root/vsock.sock_{READY_PORT}"));
        let mut socket = UnixStream::connect(&path).with_context(|| path.display().to_string())?;
        socket.write_all(&encode(FrameKind::Reply, &serde_json::to_vec(&ready)?))?;
        Ok(())
    }

    /// Takes a snapshot of a VM, which goes on.
    pub async fn snapshot(&self, vm: VmId, name: &Name) -> Result<Taken> {
        let request = SnapshotRequest { name: name.clone() };
        let begun = now_us();
        let made = made(self.client.snapshot_vm(&vm.to_string(), &request).await?).await;
        let made = made.with_context(|| format!("snapshot {name}"))?;
        let (save_us, commit_us) =
            (made.stored_from_us.saturating_sub(begun), now_us() - made.stored_from_us);
        Ok(Taken { snapshot: made.snapshot, save_us, commit_us })
    }

    /// The RAM of a snapshot in a file, which the floor maps. No daemon may run.
    pub(super) fn memory_of(&self, name: &Name) -> Result<PathBuf> {
        let path = self.folder().join(format!("{name}.ram"));
        if !path.exists() {
            let file = File::options().read(true).write(true).create_new(true).open(&path)?;
            self.store()?.open_snapshot_pages(&TENANT.parse()?, name)?.materialise(&file)?;
        }
        Ok(path)
    }

    /// The daemon's store. No daemon may run.
    pub fn store(&self) -> Result<Store> {
        Ok(Store::open(&self.state())?)
    }
}

/// Stores a kernel for a guest, which has the guest's words as its initramfs, and an empty disk.
fn publish(store: &Store, guest: &Guest) -> Result<()> {
    let image = image_name(guest.disk_bytes)?;
    if store.image(&image).is_err() {
        publish_disk(store, &image, guest.disk_bytes)?;
    }
    let (elf, words) = (dayfly_microguest::elf(), dayfly_microguest::initramfs(&guest.words));
    let both = [elf, &words].concat();
    let spec = KernelSpec {
        release: "microguest".to_owned(),
        vmlinux_bytes: elf.len() as u64,
        initrd_bytes: words.len() as u64,
        digest: blake3::hash(&both).into(),
        modules: None,
    };
    let packed = zstd::encode_all(both.as_slice(), 1)?;
    store.put_kernel(&guest.name, &spec, &mut packed.as_slice())?;
    Ok(())
}

/// The name of the empty disk of `disk_bytes`.
fn image_name(disk_bytes: u64) -> Result<Name> {
    Ok(format!("empty-{}", disk_bytes / MIB).parse()?)
}

fn publish_disk(store: &Store, name: &Name, bytes: u64) -> Result<()> {
    let disk = tempfile::tempfile()?;
    disk.set_len(bytes)?;
    let spec = ImageSpec {
        size_bytes: bytes,
        digest: sparse::digest(&disk)?.digest,
        source: "dayfly-bench: nothing but zeroes".to_owned(),
        config: ImageConfig::default(),
    };
    store.put_image_raw(name, &spec, &mut &disk)?;
    Ok(())
}
