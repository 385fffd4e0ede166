//! Creations that fail at each step, with a real VMM and the microguest on `/dev/kvm`.

use crate::base::time::Asked;
use crate::daemon::Daemon;
use crate::model::step::{Step, injected};
use crate::ops::create::harness::{MEMORY_BYTES, Room, WITHIN, until};
use crate::ops::create::last_lines::console_tail;
use crate::ops::create::{Order, Origin, create};
use crate::ops::keeper::{self, give_back};
use crate::ops::recording;
use crate::vmm::launch::Fds;
use crate::vmm::requested::Requested;
use crate::vmm::sizes::Template;
use crate::vmm::source::Purpose;
use dayfly_api::types::{ErrorCode, ExitKind};
use dayfly_host::process::Process;
use dayfly_pager::wire::Settings;
use dayfly_units::{CpuModel, VmName};
use dayfly_vmm::arch::layout;
use dayfly_vmm::config::{Shape, Start};
use dayfly_vmm::control::Client;
use dayfly_vmm::memory::working_set::{Record, Run};
use std::time::{Duration, Instant};

#[tokio::test(flavor = "multi_thread")]
async fn a_creation_that_fails_at_any_step_returns_everything_and_names_the_step() {
    let room = Room::new(0).await;
    for step in [Step::Source, Step::Memory, Step::Vmm, Step::Guest, Step::Identity] {
        let name: VmName = format!("cold-{}", step as u8).parse().unwrap();
        injected::order(&name, step);
        let error = room.create(&name).await.unwrap_err();
        assert!(error.0.message.contains(step.text()), "{step:?}: {error}");
        room.empty().await;
        // The name is free again, and the next creation succeeds.
        let guard = room.create(&name).await.unwrap();
        assert_eq!(guard.vm().name, name.into());
        guard.end().await.unwrap();
        room.empty().await;
    }
    let name: VmName = "taken".parse().unwrap();
    let holder = room.create(&name).await.unwrap();
    let error = room.create(&name).await.unwrap_err();
    assert!(error.0.message.starts_with(Step::Name.text()), "{error}");
    assert_eq!(room.daemon.budget.shares().iter().map(|share| share.0).sum::<u64>(), MEMORY_BYTES);
    holder.end().await.unwrap();
    room.empty().await;
}

/// Waits until a warm clone waits, for longer than a client that expects to need one: the pool's
/// work has a low priority.
async fn is_ready(daemon: &Daemon, template: &Template) {
    daemon.pool.expect(template).await;
    until("a warm clone waits", || daemon.pool.waiting().1 > 0).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn so_does_one_from_a_ready_clone() {
    let room = Room::new(8).await;
    let daemon = room.daemon.clone();
    let keeper = tokio::spawn(keeper::keep(daemon.clone(), Requested::default()));
    let template = Template::of(&daemon.templates.open_snapshot(&room.snapshot).unwrap()).unwrap();
    for step in [Step::Source, Step::Memory, Step::Guest, Step::Identity] {
        is_ready(&daemon, &template).await;
        let name: VmName = format!("ready-{}", step as u8).parse().unwrap();
        injected::order(&name, step);
        let error = room.create(&name).await.unwrap_err();
        assert!(error.0.message.contains(step.text()), "{step:?}: {error}");
        room.empty().await;
        let guard = room.create(&name).await.unwrap();
        guard.end().await.unwrap();
        room.empty().await;
    }
    // A warm VMM that is killed while it waits is replaced, by the request itself if necessary.
    is_ready(&daemon, &template).await;
    let scanned = dayfly_host::process::scan("dayfly-vmm").unwrap();
    let vm_slots = daemon.registry.vm_slots();
    // Another may be in progress, with a slot and no process yet.
    let waiting: Vec<_> = scanned.iter().filter(|found| vm_slots.contains(&found.vm)).collect();
    assert!(!waiting.is_empty());
    for found in waiting {
        if let Some(process) = Process::open(found.process).unwrap() {
            process.kill().unwrap();
        }
    }
    let guard = room.create(&"after".parse().unwrap()).await.unwrap();
    guard.end().await.unwrap();
    room.empty().await;
    daemon.stop.cancel();
    keeper.await.unwrap();
    assert_eq!(daemon.registry.vm_slots(), []);
    room.empty().await;
}

/// A taken warm VMM whose name was refused is given back.
#[tokio::test(flavor = "multi_thread")]
async fn a_warm_vmm_is_given_back_only_if_it_lives_and_the_pool_is_open() {
    let room = Room::new(8).await;
    let daemon = room.daemon.clone();
    let keeper = tokio::spawn(keeper::keep(daemon.clone(), Requested::default()));
    let template = Template::of(&daemon.templates.open_snapshot(&room.snapshot).unwrap()).unwrap();
    let take = async || {
        is_ready(&daemon, &template).await;
        (0..daemon.nodes.len()).find_map(|node| daemon.pool.take(&template, node)).unwrap()
    };
    let has = |id| daemon.registry.vm_slots().contains(&id);
    let living = take().await;
    let id = living.vm_slot.id;
    give_back(&daemon, living).await;
    let again = daemon.pool.remove(id).unwrap();
    assert!(has(id) && again.process.is_alive().unwrap());
    give_back(&daemon, again).await;

    let dead = take().await;
    dead.process.kill().unwrap();
    dead.process.wait(Some(WITHIN)).unwrap();
    let id = dead.vm_slot.id;
    give_back(&daemon, dead).await;
    assert!(daemon.pool.remove(id).is_none(), "it is dead");
    // Its watcher may have removed it, and then returns its slot a little later.
    until("the slot of a dead VMM is free", || !has(id)).await;

    let late = take().await;
    let (id, process) = (late.vm_slot.id, late.process.clone());
    daemon.stop.cancel();
    keeper.await.unwrap();
    give_back(&daemon, late).await;
    assert!(!has(id) && !process.is_alive().unwrap(), "the pool is closed");
    assert_eq!(daemon.pool.waiting(), (0, 0));
}

#[tokio::test(flavor = "multi_thread")]
async fn layers_are_made_ahead_for_as_many_warm_vmms_as_wait() {
    let room = Room::new(8).await;
    let daemon = room.daemon.clone();
    let shape =
        Template::of(&daemon.templates.open_snapshot(&room.snapshot).unwrap()).unwrap().shape;
    for _ in 0..5 {
        assert!(daemon.pool.take_warm_vmm(shape, 0).is_none());
    }
    let layers = || {
        let staged = daemon.templates.store().staged().unwrap();
        let names = staged.iter().flat_map(|stage| std::fs::read_dir(stage).unwrap());
        names
            .filter(|name| name.as_ref().unwrap().file_name().to_string_lossy().starts_with("vm"))
            .count()
    };
    assert_eq!(layers(), 0);
    let keeper = tokio::spawn(keeper::keep(daemon.clone(), Requested::default()));
    let (begun, mut asked) = (Instant::now(), Instant::now());
    while daemon.pool.waiting() != (5, 0) {
        assert!(begun.elapsed() < WITHIN, "warm VMMs: {:?}", daemon.pool.waiting());
        // The demand fades after some seconds, in which a busy host makes fewer.
        if asked.elapsed() > Duration::from_secs(10) {
            asked = Instant::now();
            let taken = (0..5).filter_map(|_| daemon.pool.take_warm_vmm(shape, 0));
            for warm in taken.collect::<Vec<_>>() {
                give_back(&daemon, warm).await;
            }
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    assert_eq!(layers(), 5);
    daemon.stop.cancel();
    keeper.await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn more_memory_than_there_is_is_refused_and_says_how_much_is_missing() {
    let room = Room::new(0).await;
    let held: u64 =
        room.daemon.budget.shares().iter().map(|share| share.1 - share.1 % MEMORY_BYTES).sum();
    let _most: Vec<_> = (0..held / MEMORY_BYTES)
        .map_while(|_| room.daemon.budget.reserve(MEMORY_BYTES, None).ok())
        .collect();
    let error = room.create(&"large".parse().unwrap()).await.unwrap_err();
    assert_eq!(error.0.code, ErrorCode::Exhausted);
    assert!(error.0.message.contains("are missing"), "{error}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_zygote_that_was_killed_is_replaced() {
    let room = Room::new(0).await;
    let name: VmName = "first".parse().unwrap();
    room.create(&name).await.unwrap().end().await.unwrap();
    let zygote = room.daemon.launcher.zygotes.pids()[0];
    rustix::process::kill_process(
        rustix::process::Pid::from_raw(i32::try_from(zygote).unwrap()).unwrap(),
        rustix::process::Signal::KILL,
    )
    .unwrap();
    for n in 0..3 {
        let name: VmName = format!("after-{n}").parse().unwrap();
        room.create(&name).await.unwrap().end().await.unwrap();
    }
    assert_ne!(room.daemon.launcher.zygotes.pids()[0], zygote);
    room.empty().await;
}

/// The number of threads of a process if all are jailed, otherwise 0. KVM's kernel thread in the
/// process does not count.
fn jailed(pid: u32, uid: u32) -> usize {
    let threads = std::fs::read_dir(format!("/proc/{pid}/task")).unwrap();
    // A thread may end before it is looked at.
    let status = threads
        .filter_map(|thread| std::fs::read_to_string(thread.unwrap().path().join("status")).ok());
    let ours: Vec<String> = status.filter(|status| !status.starts_with("Name:\tkvm-")).collect();
    let user = format!("Uid:\t{uid}\t{uid}\t{uid}\t{uid}\n");
    let all = ours.iter().all(|status| {
        [&user, "CapPrm:\t0000000000000000", "Seccomp:\t2"]
            .iter()
            .all(|line| status.contains(*line))
    });
    if all { ours.len() } else { 0 }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_vmm_of_another_shape_than_the_last_is_made_anew_and_no_thread_of_it_is_root() {
    let room = Room::new(0).await;
    let daemon = &room.daemon;
    // Twice each: the first time the pre-forked VMM has another shape, the second time the right
    // one.
    for (vcpus, disks) in [(2, 1), (2, 1), (1, 1), (1, 1), (1, 0), (1, 0), (1, 2), (4, 2)] {
        daemon.launcher.zygotes.prepare(0);
        let vm_slot = daemon.registry.vm_slot(0).unwrap();
        let shape = Shape {
            memory_bytes: MEMORY_BYTES,
            vcpus,
            max_vcpus: 0,
            disks,
            nets: 0,
            cpu_model: CpuModel::Host,
        };
        let start = Start::WarmVmm { shape, record: false };
        let launched =
            daemon.launcher.launch(vm_slot, start, Fds::default(), false, false).unwrap();
        let dir = daemon.config.vm(vm_slot.id);
        let status = Client::connect(&dir.control(), Some(WITHIN)).unwrap().status().unwrap();
        assert_eq!(status.shape, shape);
        // A thread becomes the VM's user when it begins its work, at the latest with its guest.
        let (pid, uid) = (launched.process.id().pid, vm_slot.uid);
        until("main, devices, vCPUs, and disks if it has any, are the VM's user", || {
            jailed(pid, uid) == 2 + usize::from(vcpus) + usize::from(disks > 0)
        })
        .await;
        launched.process.kill().unwrap();
        launched.process.wait(Some(WITHIN)).unwrap();
        std::fs::remove_dir_all(dir.path()).unwrap();
        daemon.registry.release_unused(vm_slot);
    }
    room.empty().await;
}

/// Fills 2 MiB, gets ready, and as a clone checks that the content is still there.
fn remembers() -> String {
    format!("fill=7:200 until={:x} verify=7:200", layout::GENERATION.0)
}

/// With a snapshot of a guest that fills 8 MiB and, as a clone, reads 64 KiB. The pager fetches
/// hardly more than the touched pages.
async fn never_whole() -> Room {
    let settings = Settings { ahead_bytes_per_s: 4096, ..Settings::default() };
    let command_line = format!("fill=7:800 until={:x} verify=7:10", layout::GENERATION.0);
    Room::with(0, settings, &command_line, true).await
}

const REMEMBERED: &str = "verify ok seed 7\ndone";

#[tokio::test(flavor = "multi_thread")]
async fn clones_run_before_their_memory_has_arrived() {
    let room = Room::with(0, Settings::default(), &remembers(), true).await;
    let mut guards = Vec::new();
    for n in 0..3 {
        guards.push(room.create(&format!("early-{n}").parse().unwrap()).await.unwrap());
    }
    let open = room.daemon.templates.known_snapshot(&room.snapshot).unwrap();
    let pager = open.pager.as_ref().unwrap().pager().clone();
    for guard in &guards {
        let dir = &guard.vm().dir;
        until("a guest has its memory", || console_tail(dir).ends_with(REMEMBERED)).await;
    }
    pager.whole(WITHIN).await.unwrap();
    assert!(open.filling().is_none());
    // All pages are there: the pager ends, and clones need none.
    until("the pager ends", || !pager.process().is_alive().unwrap()).await;
    let late = room.create(&"late".parse().unwrap()).await.unwrap();
    let dir = late.vm().dir.clone();
    until("a guest has its memory", || console_tail(&dir).ends_with(REMEMBERED)).await;
    for guard in guards.into_iter().chain([late]) {
        guard.end().await.unwrap();
    }
    room.empty().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pager_that_dies_takes_its_clones_along_and_is_replaced() {
    let room = never_whole().await;
    let first = room.create(&"first".parse().unwrap()).await.unwrap();
    let pager = room.pager();
    assert!(pager.is_filling());
    let vm = first.vm();
    assert_eq!(vm.live().pager, Some(pager.process().id()));
    assert_eq!(
        crate::vm::record::Record::of(&vm).live.pager,
        Some(pager.process().id()),
        "a later daemon asks for it"
    );
    pager.process().kill().unwrap();
    tokio::time::timeout(WITHIN, vm.wait_gone()).await.unwrap();
    let exit = vm.live().exit.unwrap();
    assert_eq!(exit.reason, ExitKind::Failed);
    assert!(exit.message.contains("pager"), "{}", exit.message);
    first.end().await.unwrap();
    until("the snapshot is not open any more", || {
        room.daemon.templates.known_snapshot(&room.snapshot).is_none()
    })
    .await;
    let second = room.create(&"second".parse().unwrap()).await.unwrap();
    let dir = second.vm().dir.clone();
    until("a guest has its memory", || console_tail(&dir).ends_with(REMEMBERED)).await;
    second.end().await.unwrap();
    room.empty().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pager_of_a_snapshot_that_was_removed_ends_with_its_last_clone() {
    let room = never_whole().await;
    let clone = room.create(&"last".parse().unwrap()).await.unwrap();
    let pager = room.pager();
    room.daemon.templates.remove_snapshot(&room.snapshot).unwrap();
    // The clone has its pages, and still runs although the snapshot is removed.
    let dir = clone.vm().dir.clone();
    until("a guest has its memory", || console_tail(&dir).ends_with(REMEMBERED)).await;
    assert!(clone.vm().live().exit.is_none());
    assert!(pager.is_filling() && pager.process().is_alive().unwrap(), "it has left its clone");
    clone.end().await.unwrap();
    until("the pager ends", || !pager.process().is_alive().unwrap()).await;
    room.empty().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_clone_that_is_recorded_has_nothing_prefetched() {
    // The guest touches no page above 40 MiB; prefetched pages would be recorded.
    let runs = vec![Run { first: 10_240, pages: 2048, written: true }];
    let expected = Record { runs, order: Vec::new() };
    let command_line = format!("born={:x}", layout::GENERATION.0);
    let room = Room::expecting(0, Settings::default(), &command_line, true, Some(&expected)).await;
    let template = room.daemon.templates.open_snapshot(&room.snapshot).unwrap();
    // Recorded pages are compared with the memory file.
    template.pager.as_ref().unwrap().pager().whole(WITHIN).await.unwrap();
    let order = Order {
        purpose: Purpose::Touched,
        network: None,
        volumes: None,
        origin: Origin::Template(template),
        ..room.order(&"noted".parse().unwrap())
    };
    let guard = create(&room.daemon, Asked::now(), order).await.unwrap();
    let record = recording::noted(&room.daemon, &guard.vm()).await.unwrap();
    assert!(!record.runs.is_empty() && !record.order.is_empty(), "{record:?}");
    let beyond = record.runs.iter().filter(|run| run.first + run.pages > 10_240);
    assert_eq!(beyond.count(), 0, "{record:?}");
    guard.end().await.unwrap();
    room.empty().await;
}
