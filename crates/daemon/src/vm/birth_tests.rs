//! Births that fail at each of their steps, with a real VMM and the microguest on `/dev/kvm`.

use super::*;
use crate::config::Config;
use crate::depot::Depot;
use crate::fixture;
use crate::pagers::{Pager, Pagers};
use crate::rehearsal;
use crate::vm::registry::{FIRST_UID, Seat};
use crate::vm::step::injected;
use dayfly_pager::wire::Settings;
use dayfly_store::{DiskSpec, ImageConfig, ImageSpec, KernelSpec, PagedSpec, SnapshotSpec, Store, sparse};
use dayfly_vmm::arch::layout;
use dayfly_vmm::config::{BootConfig, DiskConfig, Shape};
use dayfly_vmm::control::Client;
use dayfly_vmm::memory::working_set::{self, Record, Run};
use std::os::fd::AsFd;
use std::path::PathBuf;
use std::time::{Duration, Instant};

pub(super) const MEMORY_BYTES: u64 = 64 << 20;
/// For guests that are emulated, on a host with other things to do; only what hangs takes as long.
pub(super) const WITHIN: Duration = Duration::from_secs(120);

/// The program that is built beside this test's.
fn vmm() -> PathBuf {
    let own = std::env::current_exe().unwrap();
    let vmm = own.ancestors().nth(2).unwrap().join("dayfly-vmm");
    assert!(vmm.is_file(), "{}: build the programs first: cargo build --release", vmm.display());
    vmm
}

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
    snapshot: Name,
}

impl Room {
    async fn new(pool: usize) -> Self {
        let told = format!("born={:x}", layout::GENERATION.0);
        Self::with(pool, Settings::default(), &told, false).await
    }

    /// With a snapshot of a guest that was told `told`, its RAM in pages or in a file.
    pub(super) async fn with(pool: usize, settings: Settings, told: &str, paged: bool) -> Self {
        Self::expecting(pool, settings, told, paged, None).await
    }

    /// With a working set, too.
    async fn expecting(
        pool: usize,
        settings: Settings,
        told: &str,
        paged: bool,
        record: Option<&Record>,
    ) -> Self {
        let folder = tempfile::Builder::new().prefix("births").tempdir_in("/dev/shm").unwrap();
        let config = Config { vmm: vmm(), pool, ..fixture::config(folder.path()) };
        std::fs::create_dir_all(config.vms()).unwrap();
        std::fs::create_dir_all(&config.state).unwrap();
        let store = Store::open(&config.state).unwrap();
        let nodes = dayfly_host::numa::nodes().unwrap();
        let mut pagers = Pagers::new(&config);
        pagers.settings = settings;
        let daemon = Arc::new(Daemon::new(config, Depot::new(store, pagers), nodes).unwrap());
        let snapshot: Name = "s".parse().unwrap();
        bake(&daemon, &snapshot, told, paged, record).await;
        Self { _folder: folder, daemon, snapshot }
    }

    fn order(&self, name: &Name) -> Order {
        Order {
            origin: Origin::Source(Source::Snapshot(self.snapshot.clone())),
            name: Some(name.clone()),
            labels: BTreeMap::new(),
            forks: 0,
            ephemeral: false,
            part: Part::User,
            network: None,
            next: None,
        }
    }

    pub(super) async fn birth(&self, name: &Name) -> Outcome<Newborn> {
        birth(&self.daemon, Asked::now(), self.order(name)).await
    }

    /// Who fills the snapshot, which is open.
    pub(super) fn pager(&self) -> Arc<Pager> {
        let open = self.daemon.depot.known_snapshot(&self.snapshot).unwrap();
        open.pager.as_ref().unwrap().pager().clone()
    }

    /// Nothing is left of any VM; what waits in the pool is not one.
    pub(super) async fn empty(&self) {
        let daemon = &self.daemon;
        until("VMs are forgotten", || daemon.registry.is_empty()).await;
        until("memory is returned", || daemon.budget.shares().iter().all(|share| share.0 == 0)).await;
        until("seats are those of the pool", || daemon.registry.seats().len() == daemon.pool.waiting().0)
            .await;
        let left = |path: PathBuf| std::fs::read_dir(path).unwrap().count();
        until("folders are those of the pool", || left(daemon.config.vms()) == daemon.pool.waiting().0).await;
        // A fork that was under way may leave some to be removed a little later.
        until("no VM's layers are left", || left(daemon.depot.vms_folder()) <= daemon.pool.waiting().0).await;
    }
}

/// Guests that wait do so by counting: what a test that failed leaves would take the CPUs from all that follow.
impl Drop for Room {
    fn drop(&mut self) {
        for process in self.daemon.registry.all().iter().filter_map(|vm| vm.process()) {
            let _ended_already = process.kill();
        }
    }
}

/// A snapshot of a guest that was told `told` and is ready.
async fn bake(daemon: &Arc<Daemon>, name: &Name, told: &str, paged: bool, record: Option<&Record>) {
    let store = daemon.depot.store();
    let guest: Name = "guest".parse().unwrap();
    let elf = dayfly_microguest::elf();
    let spec = KernelSpec {
        release: "guest".into(),
        vmlinux_bytes: elf.len() as u64,
        initrd_bytes: 0,
        digest: dayfly_store::Digest::of(elf),
    };
    store.put_kernel(&guest, &spec, &mut zstd::encode_all(elf, 1).unwrap().as_slice()).unwrap();
    let disk = tempfile::tempfile().unwrap();
    disk.set_len(1 << 20).unwrap();
    let spec = ImageSpec {
        size_bytes: 1 << 20,
        digest: sparse::digest(&disk).unwrap().digest,
        source: "nothing".into(),
        config: ImageConfig::default(),
    };
    store.put_image_raw(&guest, &spec, &mut &disk).unwrap();
    let (image, kernel) = (store.image(&guest).unwrap(), store.kernel(&guest).unwrap());
    let (image_ref, kernel_ref) = (image.reference(), kernel.reference());

    let seat: Seat = daemon.registry.seat(0).unwrap();
    let (writable, data) = store.create_vm_layer(seat.id, 0).unwrap();
    let mut fds = Fds::default();
    let disk = DiskConfig {
        size_bytes: 1 << 20,
        base_fd: fds.add(image.disk),
        layers: Vec::new(),
        writable_fd: Some(fds.add(data)),
    };
    let start = Start::Boot(BootConfig {
        kernel_fd: fds.add(kernel.vmlinux),
        initrd_fd: None,
        cmdline: told.to_owned(),
        memory_bytes: MEMORY_BYTES,
        vcpus: 1,
        disks: vec![disk],
        nets: 0,
    });
    let launched = launch::launch(daemon, seat, start, fds, false).unwrap();
    let dir = daemon.config.vm(seat.id);
    until("the guest is ready", || console_tail(&dir).ends_with("ready")).await;
    let mut control = Client::connect(&dir.control(), Some(WITHIN)).unwrap();
    control.pause().unwrap();
    let mut writer = store.snapshot_writer(name).unwrap();
    let freeze = writer.freeze(&writable).unwrap();
    let page_map = tempfile::tempfile().unwrap();
    let (state, memory) = (writer.state().as_fd(), writer.memory().as_fd());
    let files = [state, memory, page_map.as_fd(), freeze.map.as_fd(), freeze.next_data.as_fd()];
    control.save(&files).unwrap();
    let disk =
        DiskSpec { image: image_ref, size_bytes: 1 << 20, writable: true, layers: vec![freeze.frozen] };
    let spec = SnapshotSpec {
        parent: None,
        kernel: kernel_ref,
        vcpus: 1,
        nets: 0,
        memory_bytes: MEMORY_BYTES,
        agent_version: String::new(),
        config: ImageConfig::default(),
        labels: BTreeMap::new(),
        disks: vec![disk],
    };
    if paged {
        let mut prepared = writer.saved().prepare(&spec, &[]).unwrap();
        if let Some(record) = record {
            prepared.keep_working_set(&working_set::encode(record)).unwrap();
        }
        prepared.commit_paged(&PagedSpec::of(&daemon.depot.tenant())).unwrap();
    } else {
        assert!(record.is_none(), "only where pages are stored");
        writer.saved().commit(&spec).unwrap();
    }
    launched.process.kill().unwrap();
    launched.process.wait(Some(WITHIN)).unwrap();
    std::fs::remove_dir_all(dir.path()).unwrap();
    store.remove_vm(seat.id).unwrap();
    daemon.registry.unseat(seat);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_birth_that_fails_at_any_step_returns_everything_and_names_the_step() {
    let room = Room::new(0).await;
    for step in [Step::Source, Step::Memory, Step::Vmm, Step::Guest, Step::Identity] {
        let name: Name = format!("cold-{}", step as u8).parse().unwrap();
        injected::order(&name, step);
        let fault = room.birth(&name).await.unwrap_err();
        assert!(fault.0.message.contains(step.text()), "{step:?}: {fault}");
        room.empty().await;
        // The name is free, and nothing stands in the way of another.
        let newborn = room.birth(&name).await.unwrap();
        assert_eq!(newborn.vm().name, name);
        newborn.end().await.unwrap();
        room.empty().await;
    }
    let name: Name = "taken".parse().unwrap();
    let holder = room.birth(&name).await.unwrap();
    let fault = room.birth(&name).await.unwrap_err();
    assert!(fault.0.message.starts_with(Step::Name.text()), "{fault}");
    assert_eq!(room.daemon.budget.shares().iter().map(|share| share.0).sum::<u64>(), MEMORY_BYTES);
    holder.end().await.unwrap();
    room.empty().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn so_does_one_whose_clone_was_ready() {
    let room = Room::new(8).await;
    let daemon = room.daemon.clone();
    let keeper = tokio::spawn(crate::vm::pool::keep(daemon.clone()));
    let template = Template::of(&daemon.depot.open_snapshot(&room.snapshot).unwrap()).unwrap();
    for step in [Step::Source, Step::Memory, Step::Guest, Step::Identity] {
        daemon.pool.expect(&template).await;
        let name: Name = format!("ready-{}", step as u8).parse().unwrap();
        injected::order(&name, step);
        let fault = room.birth(&name).await.unwrap_err();
        assert!(fault.0.message.contains(step.text()), "{step:?}: {fault}");
        room.empty().await;
        let newborn = room.birth(&name).await.unwrap();
        newborn.end().await.unwrap();
        room.empty().await;
    }
    // One that is killed while it waits is replaced, by the birth itself if need be.
    daemon.pool.expect(&template).await;
    let scanned = dayfly_host::process::scan("dayfly-vmm").unwrap();
    let seats = daemon.registry.seats();
    // Another may be under way, with a seat and no process yet.
    let waiting: Vec<_> = scanned.iter().filter(|found| seats.contains(&found.vm)).collect();
    assert!(!waiting.is_empty());
    for found in waiting {
        Process::open(found.process).unwrap().unwrap().kill().unwrap();
    }
    let newborn = room.birth(&"after".parse().unwrap()).await.unwrap();
    newborn.end().await.unwrap();
    room.empty().await;
    daemon.stop.cancel();
    keeper.await.unwrap();
    assert_eq!(daemon.registry.seats(), []);
    room.empty().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn layers_are_made_ahead_for_as_many_shells_as_wait() {
    let room = Room::new(8).await;
    let daemon = room.daemon.clone();
    let shape = Template::of(&daemon.depot.open_snapshot(&room.snapshot).unwrap()).unwrap().shape;
    for _ in 0..5 {
        assert!(daemon.pool.take_shell(shape, 0).is_none());
    }
    let layers = || {
        let staged = daemon.depot.store().staged().unwrap();
        let names = staged.iter().flat_map(|stage| std::fs::read_dir(stage).unwrap());
        names.filter(|name| name.as_ref().unwrap().file_name().to_string_lossy().starts_with("vm")).count()
    };
    assert_eq!(layers(), 0);
    let keeper = tokio::spawn(crate::vm::pool::keep(daemon.clone()));
    until("shells", || daemon.pool.waiting() == (5, 0)).await;
    assert_eq!(layers(), 5);
    daemon.stop.cancel();
    keeper.await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn more_memory_than_there_is_is_refused_and_says_how_much_is_missing() {
    let room = Room::new(0).await;
    let held: u64 = room.daemon.budget.shares().iter().map(|share| share.1 - share.1 % MEMORY_BYTES).sum();
    let _most: Vec<_> =
        (0..held / MEMORY_BYTES).map_while(|_| room.daemon.budget.reserve(MEMORY_BYTES, None).ok()).collect();
    let fault = room.birth(&"large".parse().unwrap()).await.unwrap_err();
    assert_eq!(fault.0.code, ErrorCode::Exhausted);
    assert!(fault.0.message.contains("are missing"), "{fault}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_zygote_that_was_killed_is_replaced() {
    let room = Room::new(0).await;
    let name: Name = "first".parse().unwrap();
    room.birth(&name).await.unwrap().end().await.unwrap();
    let zygote = room.daemon.zygotes.pids()[0];
    rustix::process::kill_process(
        rustix::process::Pid::from_raw(i32::try_from(zygote).unwrap()).unwrap(),
        rustix::process::Signal::KILL,
    )
    .unwrap();
    for n in 0..3 {
        let name: Name = format!("after-{n}").parse().unwrap();
        room.birth(&name).await.unwrap().end().await.unwrap();
    }
    assert_ne!(room.daemon.zygotes.pids()[0], zygote);
    room.empty().await;
}

/// How many threads of a process are jailed; none where one is not. KVM keeps a thread of its own in it, which runs nothing of ours.
fn jailed(pid: u32, uid: u32) -> usize {
    let threads = std::fs::read_dir(format!("/proc/{pid}/task")).unwrap();
    let status =
        threads.map(|thread| std::fs::read_to_string(thread.unwrap().path().join("status")).unwrap());
    let ours: Vec<String> = status.filter(|status| !status.starts_with("Name:\tkvm-")).collect();
    let user = format!("Uid:\t{uid}\t{uid}\t{uid}\t{uid}\n");
    let all = ours.iter().all(|status| {
        [&user, "CapPrm:\t0000000000000000", "Seccomp:\t2"].iter().all(|line| status.contains(*line))
    });
    if all { ours.len() } else { 0 }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_vmm_of_another_shape_than_the_last_is_made_anew_and_no_thread_of_it_is_root() {
    let room = Room::new(0).await;
    let daemon = &room.daemon;
    // Twice each: the first is guessed wrong, the second right.
    for vcpus in [2, 2, 1, 1, 4] {
        daemon.zygotes.prepare(0);
        let seat = daemon.registry.seat(0).unwrap();
        let shape = Shape { memory_bytes: MEMORY_BYTES, vcpus, disks: 1, nets: 0 };
        let start = Start::Shell { shape, record: false };
        let launched = launch::launch(daemon, seat, start, Fds::default(), false).unwrap();
        let dir = daemon.config.vm(seat.id);
        let status = Client::connect(&dir.control(), Some(WITHIN)).unwrap().status().unwrap();
        assert_eq!(status.shape, shape);
        // A thread becomes the VM's user when it begins its work, which is no later than its guest.
        let (pid, uid) = (launched.process.id().pid, FIRST_UID + seat.slot);
        until("main, devices and vCPUs are the VM's user", || jailed(pid, uid) == 2 + usize::from(vcpus))
            .await;
        launched.process.kill().unwrap();
        launched.process.wait(Some(WITHIN)).unwrap();
        std::fs::remove_dir_all(dir.path()).unwrap();
        daemon.registry.unseat(seat);
    }
    room.empty().await;
}

/// Fills 2 MiB, gets ready, and when it has become a clone looks whether that is still there.
fn remembers() -> String {
    format!("fill=7:200 until={:x} verify=7:200", layout::GENERATION.0)
}

/// With a snapshot of a guest that fills 8 MiB and, as a clone, looks at 64 KiB, and a pager that fetches hardly anything but what is asked for.
async fn never_whole() -> Room {
    let settings = Settings { ahead_bytes_per_s: 4096, ..Settings::default() };
    let told = format!("fill=7:800 until={:x} verify=7:10", layout::GENERATION.0);
    Room::with(0, settings, &told, true).await
}

const REMEMBERED: &str = "verify ok seed 7\ndone";

#[tokio::test(flavor = "multi_thread")]
async fn clones_run_before_their_memory_has_arrived() {
    let room = Room::with(0, Settings::default(), &remembers(), true).await;
    let mut newborns = Vec::new();
    for n in 0..3 {
        newborns.push(room.birth(&format!("early-{n}").parse().unwrap()).await.unwrap());
    }
    let open = room.daemon.depot.known_snapshot(&room.snapshot).unwrap();
    let pager = open.pager.as_ref().unwrap().pager().clone();
    for newborn in &newborns {
        let dir = &newborn.vm().dir;
        until("a guest has its memory", || console_tail(dir).ends_with(REMEMBERED)).await;
    }
    pager.whole(WITHIN).await.unwrap();
    assert!(open.filling().is_none());
    // All is there: the pager ends, and clones need none.
    until("the pager ends", || !pager.process().is_alive().unwrap()).await;
    let late = room.birth(&"late".parse().unwrap()).await.unwrap();
    let dir = late.vm().dir.clone();
    until("a guest has its memory", || console_tail(&dir).ends_with(REMEMBERED)).await;
    for newborn in newborns.into_iter().chain([late]) {
        newborn.end().await.unwrap();
    }
    room.empty().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pager_that_dies_takes_its_clones_along_and_is_replaced() {
    let room = never_whole().await;
    let first = room.birth(&"first".parse().unwrap()).await.unwrap();
    let pager = room.pager();
    assert!(pager.is_filling());
    pager.process().kill().unwrap();
    let vm = first.vm();
    tokio::time::timeout(WITHIN, vm.wait_gone()).await.unwrap();
    let exit = vm.live().exit.unwrap();
    assert_eq!(exit.reason, ExitKind::Failed);
    assert!(exit.message.contains("pager"), "{}", exit.message);
    first.end().await.unwrap();
    until("the snapshot is not open any more", || room.daemon.depot.known_snapshot(&room.snapshot).is_none())
        .await;
    let second = room.birth(&"second".parse().unwrap()).await.unwrap();
    let dir = second.vm().dir.clone();
    until("a guest has its memory", || console_tail(&dir).ends_with(REMEMBERED)).await;
    second.end().await.unwrap();
    room.empty().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pager_of_a_snapshot_that_was_removed_ends_with_its_last_clone() {
    let room = never_whole().await;
    let clone = room.birth(&"last".parse().unwrap()).await.unwrap();
    let pager = room.pager();
    room.daemon.depot.remove_snapshot(&room.snapshot).unwrap();
    // Its clone has all that it wants, and still runs when nobody else knows of the snapshot.
    let dir = clone.vm().dir.clone();
    until("a guest has its memory", || console_tail(&dir).ends_with(REMEMBERED)).await;
    assert!(clone.vm().live().exit.is_none());
    assert!(pager.is_filling() && pager.process().is_alive().unwrap(), "it has left its clone");
    clone.end().await.unwrap();
    until("the pager ends", || !pager.process().is_alive().unwrap()).await;
    room.empty().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_clone_that_is_recorded_has_nothing_laid_ready() {
    // The guest touches nothing from 40 MiB on; what is laid ready would be noted.
    let runs = vec![Run { first: 10_240, pages: 2048, written: true }];
    let expected = Record { runs, order: Vec::new() };
    let told = format!("born={:x}", layout::GENERATION.0);
    let room = Room::expecting(0, Settings::default(), &told, true, Some(&expected)).await;
    let template = room.daemon.depot.open_snapshot(&room.snapshot).unwrap();
    // What is noted is compared with the file.
    template.pager.as_ref().unwrap().pager().whole(WITHIN).await.unwrap();
    let order = Order {
        part: Part::Touched,
        network: None,
        origin: Origin::Template(template),
        ..room.order(&"noted".parse().unwrap())
    };
    let newborn = birth(&room.daemon, Asked::now(), order).await.unwrap();
    let record = rehearsal::noted(&room.daemon, &newborn.vm()).await.unwrap();
    assert!(!record.runs.is_empty() && !record.order.is_empty(), "{record:?}");
    let beyond = record.runs.iter().filter(|run| run.first + run.pages > 10_240);
    assert_eq!(beyond.count(), 0, "{record:?}");
    newborn.end().await.unwrap();
    room.empty().await;
}
