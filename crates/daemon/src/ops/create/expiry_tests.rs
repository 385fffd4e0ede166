//! Times to live, with real VMMs on `/dev/kvm`.

use crate::base::time::Asked;
use crate::model::deadline::Deadline;
use crate::model::events::Read;
use crate::model::state::Phase;
use crate::ops::create::forking::{end, generations};
use crate::ops::create::harness::{Room, until};
use crate::ops::create::{Order, create};
use crate::ops::fork::{fork, fork_for_guest};
use crate::ops::{expiry, own_program, remove, stop};
use crate::vm::Vm;
use crate::vm::record::Record;
use dayfly_api::types::{ErrorCode, EventKind, ExitKind, ForkRequest, Lifetime};
use dayfly_pager::wire::Settings;
use std::collections::BTreeMap;
use std::sync::Arc;

async fn born(room: &Room, name: &str, ttl_ms: Option<u64>, auto_remove: bool) -> Arc<Vm> {
    let lifetime = Lifetime { ttl_ms, auto_remove };
    let order = Order { lifetime, ..room.order(&name.parse().unwrap()) };
    create(&room.daemon, Asked::now(), order).await.unwrap().keep()
}

fn recorded(vm: &Vm) -> Option<Deadline> {
    Record::read(&vm.dir, vm.id).unwrap().live.deadline
}

const LONG_MS: u64 = 3_600_000;

#[tokio::test(flavor = "multi_thread")]
async fn a_vm_ends_at_its_deadline_for_the_reason_ttl() {
    let room = Room::new(0).await;
    let (brief, fleeting) =
        tokio::join!(born(&room, "brief", Some(1), false), born(&room, "fleeting", Some(1), true));
    for vm in [&brief, &fleeting] {
        assert_eq!(stop::wait(vm).await.reason, ExitKind::Ttl);
        assert!(vm.shown().ends_unix_ms.is_some());
    }
    until("the end is recorded", || {
        Record::read(&brief.dir, brief.id).unwrap().live.phase == Phase::Exited
    })
    .await;
    let refused = expiry::change(&room.daemon, &brief, Some(LONG_MS)).await.unwrap_err();
    assert_eq!(refused.0.code, ErrorCode::State, "{refused}");
    until("it is removed", || room.daemon.registry.find("fleeting").is_err()).await;
    assert!(room.daemon.registry.find("brief").is_ok(), "it stays listed");
    remove::remove(&room.daemon, &brief).await.unwrap();
    room.empty().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_time_to_live_is_changed_and_recorded() {
    let room = Room::new(0).await;
    let vm = born(&room, "v", Some(LONG_MS), false).await;
    let first = recorded(&vm).unwrap();
    assert_eq!(vm.shown().ends_unix_ms, Some(first.unix_ms));
    for wrong in [0, expiry::MAX_TTL_MS + 1] {
        let refused = expiry::change(&room.daemon, &vm, Some(wrong)).await.unwrap_err();
        assert_eq!(refused.0.code, ErrorCode::Invalid);
        assert!(refused.0.message.contains(&format!("got {wrong}")), "{refused}");
    }
    expiry::change(&room.daemon, &vm, Some(2 * LONG_MS)).await.unwrap();
    assert!(recorded(&vm).unwrap().boot_us >= first.boot_us + LONG_MS * 1000);
    expiry::change(&room.daemon, &vm, None).await.unwrap();
    assert_eq!((recorded(&vm), vm.shown().ends_unix_ms), (None, None));
    expiry::change(&room.daemon, &vm, Some(1)).await.unwrap();
    assert_eq!(stop::wait(&vm).await.reason, ExitKind::Ttl);
    remove::remove(&room.daemon, &vm).await.unwrap();
    room.empty().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_vm_to_be_removed_at_its_end_is_gone_when_a_kill_is_answered() {
    let room = Room::new(0).await;
    let vm = born(&room, "v", None, true).await;
    let waiting = {
        let vm = vm.clone();
        tokio::spawn(async move { stop::wait(&vm).await })
    };
    remove::kill(&room.daemon, &vm).await.unwrap();
    assert!(room.daemon.registry.find("v").is_err());
    assert_eq!(waiting.await.unwrap().reason, ExitKind::Killed);
    // Killed from outside: the daemon's task removes it.
    let vm = born(&room, "v", None, true).await;
    vm.process().unwrap().kill().unwrap();
    until("it is removed", || room.daemon.registry.find("v").is_err()).await;
    room.empty().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_removal_after_a_program_waits_for_those_that_follow_it() {
    let room = Room::new(0).await;
    let vm = born(&room, "v", None, true).await;
    let follows = vm.followers.clone().read_owned().await;
    let removal = {
        let (daemon, vm) = (room.daemon.clone(), vm.clone());
        tokio::spawn(async move { own_program::remove_when_read(&daemon, &vm).await })
    };
    // The waiting writer has what is left of the lock.
    until("the removal waits", || vm.followers.try_read().is_err()).await;
    assert!(room.daemon.registry.holds(&vm) && vm.phase() == Phase::Running);
    drop(follows);
    removal.await.unwrap();
    room.empty().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_vm_that_is_removed_while_it_runs_has_ended_before() {
    let room = Room::new(0).await;
    let vm = born(&room, "v", None, false).await;
    let events = &room.daemon.events;
    let first = events.end();
    remove::remove(&room.daemon, &vm).await.unwrap();
    vm.wait_gone().await;
    room.empty().await;
    let kinds = || {
        let all = (first..events.end()).map(|position| match events.read(position) {
            Read::Event(event) => (event.kind, event.exit.as_ref().map(|exit| exit.reason)),
            _ => panic!("an event that is not kept"),
        });
        all.collect::<Vec<_>>()
    };
    // Its bill is closed while the rest of it is removed, or after that.
    let is_bill = |of: &(EventKind, Option<ExitKind>)| of.0 == EventKind::Billed;
    until("its bill is closed", || kinds().iter().any(is_bill)).await;
    let (bills, others): (Vec<_>, Vec<_>) = kinds().into_iter().partition(is_bill);
    assert_eq!(bills, [(EventKind::Billed, Some(ExitKind::Killed))]);
    assert_eq!(others, [(EventKind::Exited, Some(ExitKind::Killed)), (EventKind::Removed, None)]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_clone_has_the_lifetime_of_its_request_and_that_of_a_guest_ends_with_its_parent() {
    let room = Room::with(0, Settings::default(), &generations("40", "40"), false).await;
    let vm = born(&room, "parent", Some(LONG_MS), true).await;
    let deadline = vm.live().deadline.unwrap();
    let forked = async |lifetime, by_guest| {
        let (name, labels) = (None, BTreeMap::new());
        let request = ForkRequest {
            count: 1,
            name,
            labels,
            forks: 0,
            egress: None,
            publish: Vec::new(),
            publish_exposed: false,
            lifetime,
            limits: None,
            template: None,
        };
        let forked = if by_guest {
            fork_for_guest(&room.daemon, &vm, request, Asked::now()).await
        } else {
            fork(&room.daemon, &vm, request, Asked::now()).await
        };
        let forked = forked.unwrap();
        room.daemon.registry.find(&forked.items[0].id.to_string()).unwrap()
    };
    let stays = forked(Lifetime::UNLIMITED, false).await;
    assert!(stays.live().deadline.is_none() && !stays.facts.auto_remove);
    let ends = forked(Lifetime { ttl_ms: None, auto_remove: true }, true).await;
    assert!(ends.facts.auto_remove);
    assert_eq!((ends.live().deadline, recorded(&ends)), (Some(deadline), Some(deadline)));
    for vm in [&stays, &ends, &vm] {
        end(&room, vm).await;
    }
    room.empty().await;
}
