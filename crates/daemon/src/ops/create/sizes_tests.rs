//! VMs with more vCPUs than their snapshot, on `/dev/kvm`.

use crate::base::progress::ProgressSender;
use crate::base::time::Asked;
use crate::ops::create::harness::{ASKED, Room, until};
use crate::ops::create::last_lines::console_tail;
use crate::ops::create::{Order, create};
use crate::ops::fork::fork;
use crate::ops::{keeper, remove, snapshot};
use crate::vm::Vm;
use crate::vmm::requested::Requested;
use crate::vmm::sizes::Template;
use dayfly_api::types::{ErrorCode, SnapshotRequest};
use dayfly_pager::wire::Settings;
use dayfly_units::Name;
use dayfly_vmm::arch::layout;
use dayfly_vmm::config::MAX_VCPUS;
use std::sync::Arc;

/// A daemon whose snapshot has one vCPU; its clones start `vcpus`.
async fn room(pool: usize, vcpus: u8) -> Room {
    let words = format!("cpus={:x}:{vcpus:x}", layout::GENERATION.0);
    Room::with(pool, Settings::default(), &words, true).await
}

fn order(room: &Room, name: &str, vcpus: Option<u8>) -> Order {
    Order { vcpus, ..room.order(&name.parse().unwrap()) }
}

async fn created(room: &Room, name: &str, vcpus: Option<u8>) -> Arc<Vm> {
    create(&room.daemon, Asked::now(), order(room, name, vcpus)).await.unwrap().keep()
}

async fn runs(vm: &Vm, vcpus: u8) {
    let says = format!("cpus {vcpus:x} up {vcpus:x}\n");
    until(&says, || console_tail(&vm.dir).contains(says.trim_end())).await;
}

async fn refused(room: &Room, vcpus: u8) -> String {
    let error = create(&room.daemon, Asked::now(), order(room, "refused", Some(vcpus)));
    let error = error.await.err().unwrap();
    assert_eq!(error.0.code, ErrorCode::Invalid);
    error.0.message
}

#[tokio::test(flavor = "multi_thread")]
async fn a_clone_that_was_made_larger_keeps_its_size_in_forks_and_snapshots() {
    let mut room = room(0, 4).await;
    let vm = created(&room, "large", Some(4)).await;
    runs(&vm, 4).await;
    let shown = vm.shown();
    assert_eq!((shown.vcpus, shown.cpus_online), (4, None));
    let forked = fork(&room.daemon, &vm, ASKED, Asked::now()).await.unwrap();
    let child = room.daemon.registry.find(&forked.items[0].id.to_string()).unwrap();
    assert_eq!((child.facts.vcpus, child.facts.max_vcpus), (4, MAX_VCPUS));
    runs(&child, 4).await;
    let name: Name = "larger".parse().unwrap();
    let (request, progress) =
        (SnapshotRequest { name: name.clone() }, ProgressSender::without_receiver());
    let made = snapshot::snapshot(room.daemon.clone(), vm.clone(), request, progress);
    let made = made.await.unwrap();
    assert_eq!((made.vcpus, made.max_vcpus), (4, MAX_VCPUS));

    room.snapshot = name;
    let again = created(&room, "again", None).await;
    assert_eq!(again.facts.vcpus, 4, "the least of its snapshot");
    runs(&again, 4).await;
    assert_eq!(created(&room, "more", Some(5)).await.facts.vcpus, 5);
    let few = refused(&room, 3).await;
    assert!(few.contains("snapshot larger: vcpus: expected 4 to 16, got 3: its guest"), "{few}");
    let many = refused(&room, 17).await;
    assert!(many.ends_with("vcpus: expected 4 to 16, got 17: no VM has more"), "{many}");
    for vm in room.daemon.registry.all() {
        remove::remove(&room.daemon, &vm).await.unwrap();
    }
    room.empty().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_pool_makes_clones_of_the_size_that_is_asked_for() {
    let room = room(8, 2).await;
    let daemon = room.daemon.clone();
    let keeper = tokio::spawn(keeper::keep(daemon.clone(), Requested::default()));
    let first = created(&room, "first", Some(2)).await;
    runs(&first, 2).await;
    let open = daemon.templates.open_snapshot(&room.snapshot).unwrap();
    let template = Template::of(&open).unwrap().sized(2);
    daemon.pool.expect(&template).await;
    until("a warm clone waits", || daemon.pool.waiting().1 > 0).await;
    let second = created(&room, "second", Some(2)).await;
    let phases = second.live().timeline;
    assert!(phases.iter().any(|(phase, _)| phase.ends_with("the clone was ready")), "{phases:?}");
    runs(&second, 2).await;
    // One of another size is not taken for it.
    let small = created(&room, "small", None).await;
    assert_eq!(small.facts.vcpus, 1);
    drop(open);
    for vm in room.daemon.registry.all() {
        remove::remove(&room.daemon, &vm).await.unwrap();
    }
    daemon.stop.cancel();
    keeper.await.unwrap();
    room.empty().await;
}
