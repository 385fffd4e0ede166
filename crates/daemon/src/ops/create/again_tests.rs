//! VMs that ended and start again, with real VMMs on `/dev/kvm`.
//!
//! The guest ([`dayfly_microguest`], `grow=`) writes 64 blocks when it boots, and a clone of it
//! writes blocks of its disk without end. So the disk of a clone that boots again differs in at
//! most 64 blocks from what it was when the clone ended.

use super::again::{restart, start};
use super::forking::{end, forked, says};
use super::harness::{Room, until};
use super::last_lines::console_tail;
use super::{Order, Origin, create};
use crate::base::config::VmDir;
use crate::base::error::Outcome;
use crate::base::progress::ProgressSender;
use crate::base::time::Asked;
use crate::daemon::Daemon;
use crate::model::state::Phase;
use crate::ops::{expiry, inspect, remove, snapshot};
use crate::vm::Vm;
use crate::vm::record::{self, Record};
use crate::vmm::again::open;
use dayfly_api::agent::{FrameKind, Ready, Reply, encode};
use dayfly_api::types::{
    BootSource, ErrorCode, ExitKind, Lifetime, SnapshotRequest, Source, VmState,
};
use dayfly_units::CpuModel;
use dayfly_vmm::arch::layout;
use dayfly_vmm::config::Start;
use dayfly_vmm::disk::{Disk, DiskSpec, IoList, LayerSpec};
use dayfly_vmm::fds::{Descriptors, Received};
use std::io::Write;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::Duration;

const BLOCK: usize = 4096;
/// Blocks that the guest writes when it boots.
const GROWN: usize = 0x40;

/// Reports that a guest that boots is ready, as an agent would. An agent without a version is none,
/// so the daemon sends it nothing.
async fn report_ready(dir: &VmDir) {
    let mut socket = None;
    until("a guest boots", || {
        // The console of the boot before may be there still, its socket without a listener.
        socket = console_tail(dir).ends_with("ready").then(|| UnixStream::connect(dir.ready()));
        matches!(socket, Some(Ok(_)))
    })
    .await;
    let ready =
        Ready { version: String::new(), kernel: String::new(), uptime_us: 0, sealed: false };
    let json = serde_json::to_vec(&Reply::Ready(ready)).unwrap();
    socket.unwrap().unwrap().write_all(&encode(FrameKind::Reply, &json)).unwrap();
}

/// Boots a VM whose clones write blocks without end.
async fn booted(room: &Room, lifetime: Lifetime) -> Arc<Vm> {
    let kernel = room.store_kernel(&format!("grow={:x}:40:1:1:c", layout::GENERATION.0));
    let (memory_bytes, image) = (super::harness::MEMORY_BYTES, "guest".parse().unwrap());
    let boot = BootSource {
        image,
        kernel: Some(kernel),
        memory_bytes,
        vcpus: 1,
        init: None,
        cpu_model: CpuModel::Host,
    };
    let name = "parent".parse().unwrap();
    let labels = [("tier".to_owned(), "web".to_owned())].into();
    let origin = Origin::Source(Source::Boot(boot));
    let order = Order { origin, labels, lifetime, ..room.order(&name) };
    let daemon = room.daemon.clone();
    let made = tokio::spawn(async move { create(&daemon, Asked::now(), order).await });
    let all = || room.daemon.registry.all();
    until("it is reserved", || !all().is_empty()).await;
    report_ready(&all()[0].dir).await;
    made.await.unwrap().unwrap().keep()
}

/// Starts a VM that has ended, whose guest reports that it is ready.
async fn started(daemon: &Arc<Daemon>, vm: &Arc<Vm>) -> Outcome<Arc<Vm>> {
    let never = async {
        report_ready(&vm.dir).await;
        std::future::pending().await
    };
    tokio::select! {
        started = start(daemon, vm) => started,
        () = never => unreachable!("it is pending"),
    }
}

fn bytes(disk: &Disk) -> Vec<u8> {
    let mut all = vec![0; usize::try_from(disk.size_bytes()).unwrap()];
    disk.read(0, &IoList::of(&mut all)).unwrap();
    all
}

/// The disk of a VM that has ended.
fn content(daemon: &Daemon, vm: &Vm) -> Vec<u8> {
    let again = open(&daemon.templates, vm).unwrap();
    let Start::Boot(boot) = again.start else { panic!("a boot") };
    let spec = Received::new(again.fds.0).take_disk(&boot.disks[0]).unwrap();
    bytes(&Disk::open_again(spec).unwrap())
}

/// The disk of a snapshot.
fn content_of(daemon: &Daemon, snapshot: &str) -> Vec<u8> {
    let open = daemon.templates.open_snapshot(&snapshot.parse().unwrap()).unwrap();
    let disk = &open.disks[0];
    let layers = disk.layers.iter().map(|layer| LayerSpec {
        data: layer.data.try_clone().unwrap().into(),
        map: layer.map.try_clone().unwrap().into(),
    });
    let layers = layers.collect();
    let base = disk.base.try_clone().unwrap().into();
    let trees = Vec::new();
    bytes(
        &Disk::open(DiskSpec { size_bytes: disk.size_bytes, base, layers, writable: None, trees })
            .unwrap(),
    )
}

/// The number of blocks in which two disks differ.
fn differing(one: &[u8], other: &[u8]) -> usize {
    one.chunks(BLOCK).zip(other.chunks(BLOCK)).filter(|(one, other)| one != other).count()
}

fn recorded(vm: &Vm) -> Phase {
    Record::read(&vm.dir, vm.id).unwrap().live.phase
}

#[tokio::test(flavor = "multi_thread")]
async fn a_killed_vm_boots_from_its_own_disks_and_can_be_saved_and_forked() {
    let room = Room::new(0).await;
    let daemon = &room.daemon;
    let parent = booted(&room, Lifetime::UNLIMITED).await;
    let (clones, _) = forked(&room, &parent, 1).await;
    let clone = clones[0].clone();
    says(&clone, "churning").await;
    until("it has written many blocks", || {
        daemon.templates.vm_bytes(clone.id, &clone.live().disks) > (4 * GROWN * BLOCK) as u64
    })
    .await;
    let traffic = inspect::details(daemon, &clone).await.disk_traffic;
    assert_eq!(traffic.len(), clone.live().disks.len());
    assert!(traffic[0].writes > 0 && traffic[0].written_bytes > (3 * GROWN * BLOCK) as u64);
    remove::kill(daemon, &clone).await.unwrap();
    // The last figures stay, although the VMM was killed.
    let last = inspect::details(daemon, &clone).await.disk_traffic;
    assert!(last.len() == traffic.len() && last[0].writes >= traffic[0].writes, "{last:?}");
    assert_eq!(clone.live().exit.map(|exit| exit.disk_traffic), Some(last));
    let before = content(daemon, &clone);
    let zero = vec![0; before.len()];
    assert!(differing(&before, &zero) > 3 * GROWN);

    let again = started(daemon, &clone).await.unwrap();
    assert_eq!((again.id, &again.name, again.phase()), (clone.id, &clone.name, Phase::Running));
    assert_eq!((&again.facts.labels, again.facts.snapshot.as_ref()), (&clone.facts.labels, None));
    assert!(!Arc::ptr_eq(&again, &clone) && Arc::ptr_eq(&find(daemon, &clone), &again));
    assert_eq!((recorded(&again), again.shown().state), (Phase::Running, VmState::Running));
    says(&again, "ready").await;
    assert!(again.live().creation_us > 0, "its start is on its bill");
    // A VM that runs stays as it is.
    assert!(Arc::ptr_eq(&start(daemon, &again).await.unwrap(), &again));

    // The map of the snapshot's layer is what the VMM takes for the blocks of the used layer.
    let request = SnapshotRequest { name: "after".parse().unwrap() };
    let progress = ProgressSender::without_receiver();
    snapshot::snapshot(daemon.clone(), again.clone(), request, progress).await.unwrap();
    let saved = content_of(daemon, "after");
    assert!(differing(&before, &saved) <= GROWN, "{}", differing(&before, &saved));
    let (grandchildren, _) = forked(&room, &again, 1).await;
    end(&room, &grandchildren[0]).await;

    // It ends and starts again, now over a stored layer and without its parent.
    end(&room, &parent).await;
    remove::kill(daemon, &again).await.unwrap();
    until("its end is recorded", || recorded(&again) == Phase::Exited).await;
    assert!(differing(&saved, &content(daemon, &again)) <= GROWN);
    let third = started(daemon, &again).await.unwrap();
    assert_eq!(third.phase(), Phase::Running);

    // A task that still has the ended VM cannot remove the files of the one that runs, and does not
    // write its record.
    for ended in [&clone, &again] {
        let refused = remove::remove(daemon, ended).await.unwrap_err();
        assert_eq!(refused.0.code, ErrorCode::State, "{refused}");
        record::note(&daemon.registry, ended).await;
    }
    assert_eq!((recorded(&third), third.phase()), (Phase::Running, Phase::Running));
    end(&room, &third).await;
    room.empty().await;
}

fn find(daemon: &Daemon, vm: &Vm) -> Arc<Vm> {
    daemon.registry.find(&vm.id.to_string()).unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_vm_that_cannot_be_started_is_refused_with_the_reason_and_stays_as_it_was() {
    let room = Room::new(0).await;
    let daemon = &room.daemon;
    let vm = booted(&room, Lifetime::UNLIMITED).await;
    remove::kill(daemon, &vm).await.unwrap();
    let exit = vm.live().exit;
    let refused = async |says: &str| {
        let refused = start(daemon, &vm).await.unwrap_err();
        assert_eq!(refused.0.code, ErrorCode::State, "{refused}");
        assert!(refused.0.message.contains(says), "{says}: {refused}");
        assert!(Arc::ptr_eq(&find(daemon, &vm), &vm) && vm.live().exit == exit);
    };
    let one = vm.snapshots.clone().lock_owned().await;
    refused("a snapshot or a fork of it is under way").await;
    drop(one);
    vm.update(|live| live.no_snapshot = Some("interrupted".into()));
    refused("its disks are not known: interrupted").await;
    vm.update(|live| (live.no_snapshot, live.zeroes_written) = (None, false));
    refused("a VMM of an earlier version").await;
    vm.update(|live| live.zeroes_written = true);
    daemon.templates.remove_kernel(&vm.facts.kernel.name).unwrap();
    refused("kernel").await;
    // Another one of the same name.
    let other = room.store_kernel("count");
    assert_eq!(other, vm.facts.kernel.name);
    refused("expected the one that the VM had").await;
    daemon.templates.remove_kernel(&other).unwrap();
    room.store_kernel(&format!("grow={:x}:40:1:1:c", layout::GENERATION.0));
    until("its end is recorded", || recorded(&vm) == Phase::Exited).await;
    let again = started(daemon, &vm).await.unwrap();
    end(&room, &again).await;

    let lifetime = Lifetime { ttl_ms: None, auto_remove: true };
    let brief = booted(&room, lifetime).await;
    let refused = restart(daemon, &brief, Duration::ZERO).await.unwrap_err();
    assert!(refused.0.message.contains("--rm"), "{refused}");
    assert_eq!(brief.phase(), Phase::Running);
    end(&room, &brief).await;
    room.empty().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_start_that_fails_leaves_a_vm_that_can_be_started_and_one_that_is_removed_nothing() {
    let room = Room::new(0).await;
    let daemon = &room.daemon;
    let lifetime = Lifetime { ttl_ms: Some(3_600_000), auto_remove: false };
    let vm = booted(&room, lifetime).await;
    let deadline = vm.live().deadline.unwrap();
    remove::kill(daemon, &vm).await.unwrap();
    let begin = || {
        let (daemon, vm) = (daemon.clone(), vm.clone());
        tokio::spawn(async move { start(&daemon, &find(&daemon, &vm)).await })
    };
    // The VMM is killed from outside while its guest boots.
    let failing = begin();
    until("its VMM runs", || find(daemon, &vm).process().is_some()).await;
    let starting = find(daemon, &vm);
    assert_eq!((starting.phase(), recorded(&starting)), (Phase::Starting, Phase::Exited));
    let longer_ms = Some(7_200_000);
    expiry::change(daemon, &starting, longer_ms).await.unwrap();
    assert_eq!(recorded(&starting), Phase::Exited, "the next daemon keeps its disks");
    let twice = start(daemon, &starting).await.unwrap_err();
    assert!(twice.0.message.contains("it is starting"), "{twice}");
    starting.process().unwrap().kill().unwrap();
    let failed = failing.await.unwrap().unwrap_err();
    assert!(failed.0.message.contains("was not started"), "{failed}");
    let ended = find(daemon, &vm);
    assert_eq!(ended.phase(), Phase::Exited);
    assert_eq!(ended.live().exit.unwrap().reason, ExitKind::Lost);
    until("its end is recorded", || recorded(&ended) == Phase::Exited).await;

    let again = started(daemon, &ended).await.unwrap();
    let anew = again.live().deadline.unwrap();
    assert!(anew.boot_us > deadline.boot_us && anew.ttl_ms == longer_ms, "{anew:?}");
    let restarted = async {
        let restarted = restart(daemon, &again, Duration::ZERO).await.unwrap();
        assert!(!Arc::ptr_eq(&restarted, &again));
        restarted
    };
    let ready = async {
        until("it starts again", || !Arc::ptr_eq(&find(daemon, &vm), &again)).await;
        until("its VMM runs", || find(daemon, &vm).process().is_some()).await;
        expiry::change(daemon, &find(daemon, &vm), Some(10_800_000)).await.unwrap();
        report_ready(&vm.dir).await;
    };
    let (restarted, ()) = tokio::join!(restarted, ready);
    assert_eq!(restarted.live().deadline.unwrap().ttl_ms, Some(10_800_000));
    remove::kill(daemon, &restarted).await.unwrap();

    // Removed while it starts.
    let failing = begin();
    until("its VMM runs", || find(daemon, &vm).process().is_some()).await;
    end(&room, &find(daemon, &vm)).await;
    assert!(failing.await.unwrap().is_err());
    room.empty().await;
}
