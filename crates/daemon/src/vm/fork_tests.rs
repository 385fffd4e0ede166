//! Forks and snapshots of the microguest on `/dev/kvm`, with real VMMs and pagers.

use super::failing::{MEMORY_BYTES, Room, WITHIN, until};
use super::*;
use crate::fork::{epoch, fork, freeze_told};
use crate::ndjson::Teller;
use crate::snapshot;
use crate::vm::power;
use dayfly_api::types::{ForkRequest, Forked, SnapshotRequest, VmState};
use dayfly_pager::wire::Settings;
use dayfly_vmm::arch::layout;
use std::time::Instant;

/// A guest that, as a clone, looks at what it was left and writes something else, again and again.
fn generations(left: &str, looks_at: &str) -> String {
    let until = format!("until={:x}", layout::GENERATION.0);
    format!(
        "fill=7:{left} {until} verify=7:{looks_at} fill=8:40 {until} verify=8:40 verify=7:1 fill=9:40 {until} verify=9:40"
    )
}

const ASKED: ForkRequest =
    ForkRequest { count: 1, name: None, labels: BTreeMap::new(), forks: 0, template: None };

async fn forked(room: &Room, vm: &Arc<Vm>, count: u32) -> (Vec<Arc<Vm>>, Forked) {
    let request = ForkRequest { count, ..ASKED };
    let forked = fork(&room.daemon, vm, request, Asked::now()).await.unwrap();
    let found = forked.items.iter().map(|item| room.daemon.registry.find(&item.id.to_string()).unwrap());
    (found.collect(), forked)
}

async fn says(vm: &Vm, text: &str) {
    let begun = Instant::now();
    while !console_tail(&vm.dir).contains(text) {
        let (said, phase) = (console_tail(&vm.dir), vm.phase());
        assert!(
            begun.elapsed() < WITHIN,
            "VM {} is {phase:?} and has not said {text:?}, but {said:?}",
            vm.name
        );
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

async fn end(room: &Room, vm: &Arc<Vm>) {
    death::remove(&room.daemon, vm).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn clones_of_a_running_vm_have_what_it_had_and_so_have_theirs() {
    for paged in [false, true] {
        let room = Room::with(0, Settings::default(), &generations("200", "200"), paged).await;
        let parent = room.birth(&"parent".parse().unwrap()).await.unwrap().keep();
        says(&parent, "verify ok seed 8\nready").await;
        let (children, told) = forked(&room, &parent, 3).await;
        assert!(told.paused_us > 0 && children.len() == 3, "{told:?}");
        for (child, item) in children.iter().zip(&told.items) {
            // What its parent filled, not what the snapshot has there; then it fills anew.
            says(child, "verify ok seed 8\nverify bad page 0\nverify ok seed 9\nready").await;
            assert_eq!((item.forked_from, item.state), (Some(parent.id), VmState::Running));
            let disks = child.live().disks;
            let borrowed: Vec<_> = disks[0].borrowed().map(|layer| layer.vm).collect();
            assert_eq!(borrowed, [parent.id], "the layer that its parent froze: {disks:?}");
            assert_ne!(child.live().disks[0].writable.unwrap().vm, parent.id);
        }
        // The parent stands on its snapshot, goes on waiting, and is forked again when its first clones have gone.
        end(&room, &children[0]).await;
        assert_eq!(parent.phase(), super::super::state::Phase::Running);
        assert_eq!(parent.live().disks[0].layers.len(), 2);
        let (grandchildren, _) = forked(&room, &children[1], 2).await;
        // Nobody needs what they were made of.
        end(&room, &parent).await;
        end(&room, &children[1]).await;
        for grandchild in &grandchildren {
            says(grandchild, "verify ok seed 9\ndone").await;
            end(&room, grandchild).await;
        }
        end(&room, &children[2]).await;
        room.empty().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_vm_is_forked_while_its_own_memory_is_still_coming() {
    let settings = Settings { ahead_bytes_per_s: 4096, ..Settings::default() };
    let room = Room::with(0, settings, &generations("800", "10"), true).await;
    let parent = room.birth(&"parent".parse().unwrap()).await.unwrap().keep();
    says(&parent, "verify ok seed 8\nready").await;
    let pager = room.pager();
    assert!(pager.is_filling());
    let (children, _) = forked(&room, &parent, 2).await;
    assert!(pager.is_filling(), "it was waited for");
    says(&children[0], "verify ok seed 8\nverify bad page 0\nverify ok seed 9\nready").await;
    // What is missing beneath them comes from the same pager, and they die with it.
    pager.process().kill().unwrap();
    for vm in children.iter().chain([&parent]) {
        tokio::time::timeout(WITHIN, vm.wait_gone()).await.unwrap();
        assert!(vm.live().exit.unwrap().message.contains("pager"));
        end(&room, vm).await;
    }
    room.empty().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_fork_that_cannot_be_says_why_and_leaves_the_vm_as_it_was() {
    let room = Room::with(0, Settings::default(), &generations("200", "200"), false).await;
    let parent = room.birth(&"parent".parse().unwrap()).await.unwrap().keep();
    says(&parent, "verify ok seed 8\nready").await;
    let refused =
        async |request: ForkRequest| fork(&room.daemon, &parent, request, Asked::now()).await.unwrap_err().0;
    let name: Name = "twice".parse().unwrap();
    for request in [
        ForkRequest { count: 0, ..ASKED },
        ForkRequest { count: 5000, ..ASKED },
        ForkRequest { count: 2, name: Some(name), ..ASKED },
    ] {
        assert_eq!(refused(request).await.code, ErrorCode::Invalid);
    }
    let taken = ForkRequest { name: Some("parent".parse().unwrap()), ..ASKED };
    assert_eq!(refused(taken).await.code, ErrorCode::Conflict);
    let held: u64 = room.daemon.budget.shares().iter().map(|share| share.1).sum();
    let many = u32::try_from(held / MEMORY_BYTES + 1).unwrap().min(4096);
    if u64::from(many) * MEMORY_BYTES > held {
        assert_eq!(refused(ForkRequest { count: many, ..ASKED }).await.code, ErrorCode::Exhausted);
    }
    power::pause(&room.daemon, &parent).await.unwrap();
    let fault = refused(ASKED).await;
    assert_eq!(fault.code, ErrorCode::State);
    assert!(fault.message.contains("cannot fork a VM that is paused"), "{}", fault.message);
    power::unpause(&room.daemon, &parent).await.unwrap();
    let (children, _) = forked(&room, &parent, 1).await;
    says(&children[0], "verify ok seed 9\nready").await;
    parent.update(|live| live.no_snapshot = Some("for a test".to_owned()));
    assert!(refused(ASKED).await.message.contains("for a test"));
    end(&room, &children[0]).await;
    end(&room, &parent).await;
    assert_eq!(refused(ASKED).await.code, ErrorCode::State);
    room.empty().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn layers_that_forks_froze_are_merged() {
    let room = Room::with(0, Settings::default(), &generations("200", "200"), false).await;
    let parent = room.birth(&"parent".parse().unwrap()).await.unwrap().keep();
    says(&parent, "verify ok seed 8\nready").await;
    let chain = || parent.live().disks[0].layers.clone();
    let below = chain();
    let mut last = None;
    for turn in 0..12 {
        let (children, _) = forked(&room, &parent, 1).await;
        if let Some(before) = last.replace(children[0].clone()) {
            end(&room, &before).await;
        }
        let now = chain();
        assert!(now.len() <= below.len() + 5, "turn {turn}: {now:?}");
        assert_eq!(now[..below.len()], below, "what it shares with others");
    }
    until("no file of those that were merged is left", || {
        let files = std::fs::read_dir(room.daemon.depot.vms_folder().join(parent.id.to_string())).unwrap();
        // Two for each frozen one, and the one that it writes.
        files.count() == 2 * (chain().len() - below.len()) + 1
    })
    .await;
    let last = last.unwrap();
    says(&last, "verify ok seed 8\nverify bad page 0\nverify ok seed 9\nready").await;
    end(&room, &last).await;
    end(&room, &parent).await;
    room.empty().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_vm_goes_although_it_is_being_forked_or_its_layers_merged() {
    let room = Room::with(0, Settings::default(), &generations("200", "200"), false).await;
    for turn in 0..16 {
        let parent = room.birth(&format!("parent-{turn}").parse().unwrap()).await.unwrap().keep();
        let mut children = Vec::new();
        // After the sixth of them layers are merged, once it has answered.
        for _ in 0..turn % 2 * 5 {
            children.extend(forked(&room, &parent, 1).await.0);
        }
        let (daemon, vm) = (room.daemon.clone(), parent.clone());
        let last = tokio::spawn(async move { fork(&daemon, &vm, ASKED, Asked::now()).await });
        if turn % 2 == 0 {
            tokio::time::sleep(Duration::from_micros(turn * 400)).await;
            end(&room, &parent).await;
        }
        // It ended before its parent did, or it was refused.
        for item in last.await.unwrap().into_iter().flat_map(|forked| forked.items) {
            children.extend(room.daemon.registry.find(&item.id.to_string()));
        }
        if turn % 2 == 1 {
            end(&room, &parent).await;
        }
        for child in &children {
            end(&room, child).await;
        }
    }
    // What a merge makes when the folder, which is there for the clone's sake, has been looked through.
    let parent = room.birth(&"parent".parse().unwrap()).await.unwrap().keep();
    let (children, _) = forked(&room, &parent, 1).await;
    let merging = parent.snapshots.clone().lock_owned().await;
    end(&room, &parent).await;
    let folder = room.daemon.depot.vms_folder().join(parent.id.to_string());
    let late = folder.join("disk0.9.data");
    std::fs::write(&late, "late").unwrap();
    drop(merging);
    until("what came late is gone", || !late.exists()).await;
    assert!(folder.exists(), "a clone stands on what is in it");
    end(&room, &children[0]).await;
    assert!(!folder.exists());
    room.empty().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_vm_stood_on_stays_for_its_fork_although_it_ends_meanwhile() {
    let room = Room::with(0, Settings::default(), &generations("200", "200"), false).await;
    let depot = &room.daemon.depot;
    let first = room.birth(&"first".parse().unwrap()).await.unwrap().keep();
    says(&first, "verify ok seed 8\nready").await;
    let (children, _) = forked(&room, &first, 1).await;
    let parent = &children[0];
    says(parent, "verify ok seed 9\nready").await;
    end(&room, &first).await;
    let (process, beneath) = (parent.process().unwrap(), parent.beneath());
    let written = freeze_told(&room.daemon, parent, beneath.is_some()).await.unwrap();
    assert_eq!(depot.store().held_vms(), [first.id]);
    process.kill().unwrap();
    parent.wait_gone().await;
    let epoch = epoch(parent, &room.daemon, beneath, written).await.unwrap();
    assert!(parent.pinned().is_none(), "it has ended, and kept nothing");
    assert_eq!(
        epoch.disks[0].disk.borrowed().map(|layer| layer.vm).collect::<Vec<_>>(),
        [first.id, parent.id]
    );
    drop(epoch);
    assert_eq!(depot.store().held_vms(), [], "nor does anybody else");
    end(&room, parent).await;
    room.empty().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_vm_without_an_agent_goes_on_after_its_snapshot() {
    let room = Room::with(0, Settings::default(), &generations("200", "200"), true).await;
    let vm = room.birth(&"vm".parse().unwrap()).await.unwrap().keep();
    says(&vm, "verify ok seed 8\nready").await;
    let name: Name = "next".parse().unwrap();
    let request = SnapshotRequest { name: name.clone() };
    let taken = snapshot::snapshot(room.daemon.clone(), vm.clone(), request, Teller::of_nobody()).await;
    assert_eq!(taken.unwrap().name, name);
    assert_eq!(vm.phase(), crate::vm::state::Phase::Running);
    let (children, _) = forked(&room, &vm, 1).await;
    let clone = born_of(&room, "next").await.unwrap();
    for vm in [&clone, &children[0]] {
        says(vm, "verify ok seed 8\nverify bad page 0\nverify ok seed 9\nready").await;
        end(&room, vm).await;
    }
    end(&room, &vm).await;
    room.empty().await;
}

async fn born_of(room: &Room, template: &str) -> Outcome<Arc<Vm>> {
    let source = Source::Snapshot(template.parse().unwrap());
    let order = Order::create(dayfly_api::types::CreateRequest {
        source,
        name: None,
        labels: BTreeMap::new(),
        forks: 0,
        network: dayfly_api::types::NetworkRequest::default(),
    });
    Ok(birth(&room.daemon, Asked::now(), order).await?.keep())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_fork_becomes_a_template_and_can_be_cloned_before_it_is_stored() {
    for paged in [false, true] {
        let slow = Settings { ahead_bytes_per_s: 1 << 20, ..Settings::default() };
        let room = Room::with(0, slow, &generations("800", "10"), paged).await;
        let depot = &room.daemon.depot;
        let parent = room.birth(&"parent".parse().unwrap()).await.unwrap().keep();
        says(&parent, "verify ok seed 8\nready").await;
        let name: Name = "kept".parse().unwrap();
        let asked = |count| ForkRequest { count, template: Some(name.clone()), ..ASKED };
        let told = fork(&room.daemon, &parent, asked(0), Asked::now()).await.unwrap();
        assert!(told.items.is_empty() && told.paused_us > 0, "{told:?}");
        let listed = depot.snapshots().unwrap();
        assert_eq!(listed.iter().filter(|s| s.name == name).count(), 1, "{listed:?}");
        let first = born_of(&room, "kept").await.unwrap();
        assert_eq!((first.facts.snapshot.clone(), first.facts.fork.from), (Some(name.clone()), None));
        if paged {
            assert!(depot.snapshot(&name).unwrap().forming, "it did not wait for what is still to come");
            let fault = depot.open_snapshot(&name).unwrap_err().0;
            assert!(fault.message.contains("is being stored"), "{}", fault.message);
        }
        // Leaks are what belongs to nobody; this belongs to what is stored.
        assert_eq!(crate::sweep::find(&room.daemon).await.unwrap(), []);
        let fault = fork(&room.daemon, &parent, asked(0), Asked::now()).await.unwrap_err().0;
        assert_eq!(fault.code, ErrorCode::Conflict, "{}", fault.message);
        end(&room, &parent).await;
        says(&first, "verify ok seed 8\nverify bad page 0\nverify ok seed 9\nready").await;
        until("it is stored", || !depot.forming().has(&name)).await;
        let stored = depot.snapshot(&name).unwrap();
        assert!(!stored.forming && stored.layers.len() == 2, "{stored:?}");
        assert_eq!(stored.parent, Some("s".parse().unwrap()));
        assert!(stored.memory_stored_bytes > 0);
        let second = born_of(&room, "kept").await.unwrap();
        says(&second, "verify ok seed 8\nverify bad page 0\nverify ok seed 9\nready").await;
        // Its own memory is what it was made of.
        depot.remove_snapshot(&"s".parse().unwrap()).unwrap();
        let third = born_of(&room, "kept").await.unwrap();
        says(&third, "verify ok seed 8\nverify bad page 0\nverify ok seed 9\nready").await;
        for vm in [first, second, third] {
            end(&room, &vm).await;
        }
        until("nothing is kept for it", || depot.store().held_vms().is_empty()).await;
        room.empty().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_template_that_is_removed_while_it_is_stored_is_not_stored() {
    let slow = Settings { ahead_bytes_per_s: 1 << 20, ..Settings::default() };
    let room = Room::with(0, slow, &generations("800", "10"), true).await;
    let depot = &room.daemon.depot;
    let parent = room.birth(&"parent".parse().unwrap()).await.unwrap().keep();
    says(&parent, "verify ok seed 8\nready").await;
    let name: Name = "kept".parse().unwrap();
    let request = ForkRequest { count: 1, template: Some(name.clone()), ..ASKED };
    // Nor is one whose clones cannot be born.
    let taken = ForkRequest { name: Some("parent".parse().unwrap()), ..request.clone() };
    let fault = fork(&room.daemon, &parent, taken, Asked::now()).await.unwrap_err().0;
    assert_eq!(fault.code, ErrorCode::Conflict, "{}", fault.message);
    until("its name is free", || !depot.forming().has(&name)).await;
    assert_eq!(depot.snapshot(&name).unwrap_err().0.code, ErrorCode::NotFound);
    let told = fork(&room.daemon, &parent, request.clone(), Asked::now()).await.unwrap();
    assert!(depot.forming().has(&name), "it was stored too soon for this test");
    depot.remove_snapshot(&name).unwrap();
    let code = born_of(&room, "kept").await.unwrap_err().0.code;
    assert!(matches!(code, ErrorCode::State | ErrorCode::NotFound), "it is being removed, or was: {code:?}");
    assert_eq!(depot.remove_snapshot(&name).unwrap_err().0.code, ErrorCode::NotFound);
    until("its name is free", || !depot.forming().has(&name)).await;
    assert_eq!(depot.snapshot(&name).unwrap_err().0.code, ErrorCode::NotFound);
    // The clone of the same instant knows nothing of it.
    let child = room.daemon.registry.find(&told.items[0].id.to_string()).unwrap();
    says(&child, "verify ok seed 8\nverify bad page 0\nverify ok seed 9\nready").await;
    let told = fork(&room.daemon, &child, request, Asked::now()).await.unwrap();
    let grandchild = room.daemon.registry.find(&told.items[0].id.to_string()).unwrap();
    until("it is stored", || !depot.forming().has(&name)).await;
    assert!(!depot.snapshot(&name).unwrap().forming);
    for vm in [parent, child, grandchild] {
        end(&room, &vm).await;
    }
    // Its name was free before its layers were.
    until("no layer is held", || depot.store().held_vms().is_empty()).await;
    room.empty().await;
}
