//! VMs of the test: all are clones of one snapshot, whose guest writes to memory and disk.

use crate::testbed::{Testbed, own_programs, until};
use anyhow::{Context, Result, bail, ensure};
use dayfly_api::agent::{FrameKind, READY_PORT, Ready, Reply, encode};
use dayfly_api::client::ProgressStream;
use dayfly_api::types::{
    BootSource, CreateRequest, Lifetime, NetworkRequest, Progress, Publish, SnapshotRequest,
    Source, Vm, VmLimits, VmState,
};
use dayfly_store::{Digest, ImageConfig, ImageSpec, KernelSpec, Store, sparse};
use dayfly_units::{CpuModel, Name, VmId};
use dayfly_vmm::arch::layout;
use std::io::Write;
use std::os::unix::fs::MetadataExt as _;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;

/// RAM: the guest writes the pages from 32 to 64 MiB.
pub const MEMORY_BYTES: u64 = 72 << 20;
/// The guest writes 8,192 blocks.
const DISK_BYTES: u64 = 32 << 20;
/// The image and the kernel.
pub const GUEST: &str = "guest";
/// The snapshot.
pub const BASE: &str = "base";

/// Why the daemon could not do a long operation.
#[derive(Debug)]
pub struct Refused(String);

impl std::fmt::Display for Refused {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.fmt(f)
    }
}

impl std::error::Error for Refused {}

pub fn name(text: &str) -> Result<Name> {
    Ok(text.parse()?)
}

/// Stores the guest `called`. No daemon may run. Its clones check all slots, and then do `then`
/// ([`dayfly_microguest`], `grow=`).
pub fn store(bed: &Testbed, called: &str, then: char) -> Result<()> {
    // 64 slots before the snapshot.
    store_words(bed, called, &format!("grow={:x}:40:1:1:{then}", layout::GENERATION.0))
}

/// Stores the guest `called`, which obeys `words`. No daemon may run.
pub fn store_words(bed: &Testbed, called: &str, words: &str) -> Result<()> {
    std::fs::create_dir_all(bed.state())?;
    let (store, guest) = (Store::open(&bed.state())?, name(called)?);
    let (elf, words) = (dayfly_microguest::elf(), dayfly_microguest::initramfs(words));
    let both = [elf, &words].concat();
    let spec = KernelSpec {
        release: GUEST.to_owned(),
        vmlinux_bytes: elf.len() as u64,
        initrd_bytes: words.len() as u64,
        digest: Digest::of(&both),
        modules: None,
    };
    store.put_kernel(&guest, &spec, &mut zstd::encode_all(both.as_slice(), 1)?.as_slice())?;
    let disk = tempfile::tempfile()?;
    disk.set_len(DISK_BYTES)?;
    let spec = ImageSpec {
        size_bytes: DISK_BYTES,
        digest: sparse::digest(&disk)?.digest,
        source: "zeroes".to_owned(),
        config: ImageConfig::default(),
    };
    store.put_image_raw(&guest, &spec, &mut &disk)?;
    Ok(())
}

/// A testbed with the snapshot [`BASE`], whose daemon runs.
pub async fn testbed() -> Result<Testbed> {
    testbed_of(own_programs()).await
}

/// As [`testbed`], with a daemon from the folder `programs`.
pub async fn testbed_of(programs: PathBuf) -> Result<Testbed> {
    let mut bed = Testbed::new()?;
    bed.programs = programs;
    store(&bed, GUEST, 'c')?;
    bed.start().await?;
    base(&bed, GUEST, BASE).await?;
    Ok(bed)
}

/// Boots the guest `called`, and takes the snapshot `to` of it.
pub async fn base(bed: &Testbed, called: &str, to: &str) -> Result<()> {
    let vm = boot(bed, called, MEMORY_BYTES, "ready\n").await?;
    snapshot(bed, vm.id, to).await?;
    bed.client.remove_vm(&vm.id.to_string(), true).await?;
    Ok(())
}

/// Boots the guest `called`, which is ready when its console ends with `says`.
pub async fn boot(bed: &Testbed, called: &str, memory_bytes: u64, says: &str) -> Result<Vm> {
    let (image, kernel) = (name(called)?, Some(name(called)?));
    let cpu_model = CpuModel::Host;
    let boot = BootSource { image, kernel, memory_bytes, vcpus: 1, init: None, cpu_model };
    let request = request(Source::Boot(boot), "first");
    let created = async { Ok(bed.client.create(&request).await?) };
    let (vm, ()) = tokio::try_join!(created, report_ready(bed, says))?;
    Ok(vm)
}

fn request(source: Source, name: &str) -> CreateRequest {
    CreateRequest {
        source,
        name: name.parse().ok(),
        labels: [].into(),
        forks: 0,
        lifetime: Lifetime::UNLIMITED,
        network: NetworkRequest::default(),
        volumes: Vec::new(),
        limits: Default::default(),
        vcpus: None,
    }
}

/// Reports that the guest that boots is ready, as an agent would, when its console ends with
/// `says`: the daemon waits for it. An agent without a version is none, so the daemon sends it
/// nothing.
pub async fn report_ready(bed: &Testbed, says: &str) -> Result<()> {
    let mut booting = None;
    until("a guest boots", async || {
        let vms = bed.client.vms(true).await?;
        let ready = vms.into_iter().filter(|vm| console(bed, vm.id).ends_with(says));
        // The console of an earlier boot has a socket on which no daemon listens.
        let socket = |vm: Vm| {
            UnixStream::connect(bed.of_vm(vm.id, &format!("root/vsock.sock_{READY_PORT}"))).ok()
        };
        booting = ready.filter_map(socket).next();
        Ok(booting.is_some())
    })
    .await?;
    let mut socket = booting.context("a guest boots")?;
    let (version, kernel) = (String::new(), GUEST.to_owned());
    let ready = Reply::Ready(Ready { version, kernel, uptime_us: 0, sealed: false });
    socket.write_all(&encode(FrameKind::Reply, &serde_json::to_vec(&ready)?))?;
    Ok(())
}

/// Starts a VM that has ended. Its guest boots, and does nothing then.
pub async fn start_again(bed: &Testbed, id: VmId) -> Result<()> {
    let word = id.to_string();
    let started = async { Ok(bed.client.start(&word).await?) };
    let (vm, ()) = tokio::try_join!(started, report_ready(bed, "ready\n"))?;
    ensure!(vm.id == id && vm.state == VmState::Running, "expected VM {id} that runs: {vm:?}");
    Ok(())
}

/// What the guest of a VM has written to its console.
pub fn console(bed: &Testbed, id: VmId) -> String {
    std::fs::read_to_string(bed.of_vm(id, "console.log")).unwrap_or_default()
}

/// Creates a clone of [`BASE`], and waits until it writes.
pub async fn create(bed: &Testbed, called: &str) -> Result<Vm> {
    create_from(bed, BASE, called).await
}

/// Creates a clone of [`BASE`], and pauses it before its guest has written half of its blocks, so
/// that it needs more memory and space when it goes on. A busy host may be late: then the clone is
/// replaced.
pub async fn create_paused(bed: &Testbed, called: &str) -> Result<Vm> {
    for _ in 0..20 {
        let vm = create(bed, called).await?;
        bed.client.pause(&vm.id.to_string()).await?;
        if used(bed, vm.id) < DISK_BYTES / 2 {
            return Ok(vm);
        }
        bed.client.remove_vm(&vm.id.to_string(), true).await?;
    }
    bail!("VM {called}: its guest had written most of its blocks each time when it was paused")
}

/// Bytes of the first writable layer of a VM.
pub fn used(bed: &Testbed, id: VmId) -> u64 {
    let path = bed.state().join(format!("vms/{id}/disk0.0.data"));
    std::fs::metadata(path).map_or(0, |found| found.blocks() * 512)
}

/// Creates a clone of a snapshot, and waits until it writes.
pub async fn create_from(bed: &Testbed, snapshot: &str, called: &str) -> Result<Vm> {
    let vm = clone(bed, snapshot, called).await?;
    has_right_content(bed, vm.id).await?;
    until("the guest writes", async || Ok(console(bed, vm.id).ends_with("churning\n"))).await?;
    Ok(vm)
}

/// Creates a clone of a snapshot.
pub async fn clone(bed: &Testbed, snapshot: &str, called: &str) -> Result<Vm> {
    let request = request(Source::Snapshot(name(snapshot)?), called);
    bed.client.create(&request).await.with_context(|| format!("a clone of {snapshot}"))
}

/// A clone of the snapshot [`BASE`] that publishes these ports, which is ready.
pub async fn create_published(
    bed: &Testbed,
    called: &str,
    publish: Vec<Publish>,
    limits: VmLimits,
) -> Result<Vm> {
    let request = request(Source::Snapshot(name(BASE)?), called);
    let network = NetworkRequest { publish, ..NetworkRequest::default() };
    Ok(bed.client.create(&CreateRequest { network, limits, ..request }).await?)
}

/// As [`create`], with limits.
pub async fn create_limited(bed: &Testbed, called: &str, limits: VmLimits) -> Result<Vm> {
    let request = request(Source::Snapshot(name(BASE)?), called);
    let vm = bed.client.create(&CreateRequest { limits, ..request }).await?;
    has_right_content(bed, vm.id).await?;
    until("the guest writes", async || Ok(console(bed, vm.id).ends_with("churning\n"))).await?;
    Ok(vm)
}

/// Waits until a new clone has checked its memory and its disk.
pub async fn has_right_content(bed: &Testbed, id: VmId) -> Result<()> {
    let mut said = String::new();
    until("a clone has checked its content", async || {
        said = console(bed, id);
        Ok(said.contains("failed") || said.contains("found ") && said.ends_with('\n'))
    })
    .await
    .with_context(|| format!("its console: {said:?}"))?;
    ensure!(!said.contains("failed"), "clone {id} has wrong content; its console: {said:?}");
    Ok(())
}

/// Takes a snapshot of a VM, which goes on.
pub async fn snapshot(bed: &Testbed, vm: VmId, called: &str) -> Result<()> {
    let request = SnapshotRequest { name: name(called)? };
    let stream = bed.client.snapshot_vm(&vm.to_string(), &request).await;
    made(stream?).await
}

/// Reads a long operation's reports to their end.
pub async fn made(mut stream: ProgressStream) -> Result<()> {
    while let Some(progress) = stream.next().await? {
        match progress {
            Progress::Snapshot(_) | Progress::Collected(_) => return Ok(()),
            Progress::Failed(error) => return Err(Refused(error.message).into()),
            _ => {}
        }
    }
    bail!("the daemon ended in the middle")
}

/// Checks that a clone of a snapshot has the right content.
pub async fn is_whole(bed: &Testbed, called: &str) -> Result<()> {
    let vm = clone(bed, called, &format!("clone-{called}")).await?;
    has_right_content(bed, vm.id).await.with_context(|| format!("snapshot {called}"))?;
    bed.client.remove_vm(&vm.id.to_string(), true).await?;
    Ok(())
}
