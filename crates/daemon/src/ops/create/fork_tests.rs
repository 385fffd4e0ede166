//! Forks and snapshots of the microguest on `/dev/kvm`, with real VMMs and pagers.

use crate::base::error::Outcome;
use crate::base::progress::ProgressSender;
use crate::base::time::Asked;
use crate::model::state::Phase;
use crate::ops::create::harness::{ASKED, MEMORY_BYTES, Room, WITHIN, until};
use crate::ops::create::last_lines::console_tail;
use crate::ops::create::{Order, create};
use crate::ops::fork::{fork, fork_point, freeze_notified};
use crate::ops::{power, remove, snapshot};
use crate::vm::Vm;
use crate::vm::registry::Children;
use crate::vmm::agent_link;
use dayfly_api::agent::{FrameKind, HostReply, HostRequest};
use dayfly_api::types::{ErrorCode, ForkRequest, Forked, SnapshotRequest, Source, VmState};
use dayfly_pager::wire::Settings;
use dayfly_units::{Name, VmName};
use dayfly_vmm::arch::layout;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::net::UnixStream;

/// A guest that, as a clone, checks the content it inherited and writes other content, repeatedly.
pub(super) fn generations(left: &str, looks_at: &str) -> String {
    let until = format!("until={:x}", layout::GENERATION.0);
    format!(
        "fill=7:{left} {until} verify=7:{looks_at} fill=8:40 {until} verify=8:40 verify=7:1 \
         fill=9:40 {until} verify=9:40"
    )
}

pub(super) async fn forked(room: &Room, vm: &Arc<Vm>, count: u32) -> (Vec<Arc<Vm>>, Forked) {
    let request = ForkRequest { count, ..ASKED };
    let forked = fork(&room.daemon, vm, request, Asked::now()).await.unwrap();
    let found =
        forked.items.iter().map(|item| room.daemon.registry.find(&item.id.to_string()).unwrap());
    (found.collect(), forked)
}

pub(super) async fn says(vm: &Vm, text: &str) {
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

pub(super) async fn end(room: &Room, vm: &Arc<Vm>) {
    remove::remove(&room.daemon, vm).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn clones_of_a_running_vm_have_what_it_had_and_so_have_theirs() {
    for paged in [false, true] {
        let room = Room::with(0, Settings::default(), &generations("200", "200"), paged).await;
        let parent = room.create(&"parent".parse().unwrap()).await.unwrap().keep();
        says(&parent, "verify ok seed 8\nready").await;
        let (children, forked_vms) = forked(&room, &parent, 3).await;
        assert!(forked_vms.paused_us > 0 && children.len() == 3, "{forked_vms:?}");
        for (child, item) in children.iter().zip(&forked_vms.items) {
            // The clone has the content that its parent filled, not the snapshot's; then it fills
            // anew.
            says(child, "verify ok seed 8\nverify bad page 0\nverify ok seed 9\nready").await;
            assert_eq!((item.forked_from, item.state), (Some(parent.id), VmState::Running));
            let disks = child.live().disks;
            let shared: Vec<_> = disks[0].shared_layers().map(|layer| layer.vm).collect();
            assert_eq!(shared, [parent.id], "the layer that its parent froze: {disks:?}");
            assert_ne!(child.live().disks[0].writable.unwrap().vm, parent.id);
        }
        // The parent still depends on its snapshot, keeps waiting, and is forked again after its
        // first clones have ended.
        end(&room, &children[0]).await;
        assert_eq!(parent.phase(), crate::model::state::Phase::Running);
        assert_eq!(parent.live().disks[0].layers.len(), 2);
        let (grandchildren, _) = forked(&room, &children[1], 2).await;
        // The grandchildren do not need the VMs that they were forked from.
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
    let parent = room.create(&"parent".parse().unwrap()).await.unwrap().keep();
    says(&parent, "verify ok seed 8\nready").await;
    let pager = room.pager();
    assert!(pager.is_filling());
    let (children, _) = forked(&room, &parent, 2).await;
    assert!(pager.is_filling(), "it was waited for");
    says(&children[0], "verify ok seed 8\nverify bad page 0\nverify ok seed 9\nready").await;
    // Missing pages of parent and clones come from one pager, and they end with it.
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
    let parent = room.create(&"parent".parse().unwrap()).await.unwrap().keep();
    says(&parent, "verify ok seed 8\nready").await;
    let refused = async |request: ForkRequest| {
        fork(&room.daemon, &parent, request, Asked::now()).await.unwrap_err().0
    };
    let name: VmName = "twice".parse().unwrap();
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
    // It runs for the fork, and is paused again.
    let (children, _) = forked(&room, &parent, 1).await;
    until("it is paused again", || parent.phase() == Phase::Paused).await;
    power::unpause(&room.daemon, &parent).await.unwrap();
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
    let parent = room.create(&"parent".parse().unwrap()).await.unwrap().keep();
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
        let files =
            std::fs::read_dir(room.daemon.templates.vms_folder().join(parent.id.to_string()))
                .unwrap();
        // Two files for each frozen layer, and the writable one.
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
        let parent = room.create(&format!("parent-{turn}").parse().unwrap()).await.unwrap().keep();
        let mut children = Vec::new();
        // The fork after the sixth merges layers, once it has answered.
        for _ in 0..turn % 2 * 5 {
            children.extend(forked(&room, &parent, 1).await.0);
        }
        let (daemon, vm) = (room.daemon.clone(), parent.clone());
        let last = tokio::spawn(async move { fork(&daemon, &vm, ASKED, Asked::now()).await });
        if turn % 2 == 0 {
            tokio::time::sleep(Duration::from_micros(turn * 400)).await;
            end(&room, &parent).await;
        }
        // The fork ended before its parent did, or it was refused.
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
    // A merge may create a file after the folder, which stays for the clone, was searched.
    let parent = room.create(&"parent".parse().unwrap()).await.unwrap().keep();
    let (children, _) = forked(&room, &parent, 1).await;
    let merging = parent.snapshots.clone().lock_owned().await;
    end(&room, &parent).await;
    let folder = room.daemon.templates.vms_folder().join(parent.id.to_string());
    let late = folder.join("disk0.9.data");
    std::fs::write(&late, "late").unwrap();
    drop(merging);
    until("what came late is gone", || !late.exists()).await;
    assert!(folder.exists(), "a clone depends on what is in it");
    end(&room, &children[0]).await;
    assert!(!folder.exists());
    room.empty().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_vm_depended_on_stays_for_its_fork_although_it_ends_meanwhile() {
    let room = Room::with(0, Settings::default(), &generations("200", "200"), false).await;
    let templates = &room.daemon.templates;
    let first = room.create(&"first".parse().unwrap()).await.unwrap().keep();
    says(&first, "verify ok seed 8\nready").await;
    let (children, _) = forked(&room, &first, 1).await;
    let parent = &children[0];
    says(parent, "verify ok seed 9\nready").await;
    end(&room, &first).await;
    let (process, backing) = (parent.process().unwrap(), parent.backing());
    let written = freeze_notified(&room.daemon, parent, backing.is_some()).await.unwrap();
    assert_eq!(templates.store().shared_layer_owners(), [first.id]);
    process.kill().unwrap();
    parent.wait_gone().await;
    let fork_point = fork_point(parent, &room.daemon, backing, written).await.unwrap();
    assert!(parent.pinned().is_some(), "it has ended, and can start again");
    assert_eq!(
        fork_point.disks[0].disk.shared_layers().map(|layer| layer.vm).collect::<Vec<_>>(),
        [first.id, parent.id]
    );
    drop(fork_point);
    assert_eq!(templates.store().shared_layer_owners(), [first.id]);
    end(&room, parent).await;
    assert_eq!(templates.store().shared_layer_owners(), [], "nor does any other VM");
    room.empty().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_vm_without_an_agent_goes_on_after_its_snapshot() {
    let room = Room::with(0, Settings::default(), &generations("200", "200"), true).await;
    let vm = room.create(&"vm".parse().unwrap()).await.unwrap().keep();
    says(&vm, "verify ok seed 8\nready").await;
    let name: Name = "next".parse().unwrap();
    let request = SnapshotRequest { name: name.clone() };
    let progress = ProgressSender::without_receiver();
    let taken = snapshot::snapshot(room.daemon.clone(), vm.clone(), request, progress).await;
    assert_eq!(taken.unwrap().name, name);
    assert_eq!(vm.phase(), crate::model::state::Phase::Running);
    let (children, _) = forked(&room, &vm, 1).await;
    let clone = born_of(&room, "next").await.unwrap();
    for vm in [&clone, &children[0]] {
        says(vm, "verify ok seed 8\nverify bad page 0\nverify ok seed 9\nready").await;
        end(&room, vm).await;
    }
    end(&room, &vm).await;
    room.empty().await;
}

pub(super) async fn born_of(room: &Room, template: &str) -> Outcome<Arc<Vm>> {
    Ok(create(&room.daemon, Asked::now(), order_of(template)).await?.keep())
}

fn order_of(template: &str) -> Order {
    let source = Source::Snapshot(template.parse().unwrap());
    Order::create(dayfly_api::types::CreateRequest::new(source), Vec::new())
}

/// Makes a VM for `act`, which forks it as the snapshot `kept`. With pages, `kept` is still being
/// stored after `act`, because the VM's memory comes slowly: more slowly each time on a busy host.
async fn while_pending<T>(
    paged: bool,
    act: impl AsyncFn(&Room, &Arc<Vm>) -> T,
) -> (Room, Arc<Vm>, T) {
    for halved in 0..4 {
        let slow = Settings { ahead_bytes_per_s: (1 << 20) >> halved, ..Settings::default() };
        let room = Room::with(0, slow, &generations("800", "10"), paged).await;
        let parent = room.create(&"parent".parse().unwrap()).await.unwrap().keep();
        says(&parent, "verify ok seed 8\nready").await;
        let got = act(&room, &parent).await;
        if !paged || room.daemon.templates.pending().has(&"kept".parse().unwrap()) {
            return (room, parent, got);
        }
    }
    panic!("it was stored each time, as if what is still to come had been waited for");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_fork_becomes_a_template_and_can_be_cloned_before_it_is_stored() {
    let name: Name = "kept".parse().unwrap();
    let asked = |count| ForkRequest { count, template: Some(name.clone()), ..ASKED };
    let begin = async |room: &Room, parent: &Arc<Vm>| {
        let templates = &room.daemon.templates;
        let forked_vms = fork(&room.daemon, parent, asked(0), Asked::now()).await.unwrap();
        assert!(forked_vms.items.is_empty() && forked_vms.paused_us > 0, "{forked_vms:?}");
        let listed = templates.snapshots().unwrap();
        assert_eq!(listed.iter().filter(|s| s.name == name).count(), 1, "{listed:?}");
        let first = born_of(room, "kept").await.unwrap();
        assert_eq!((&first.facts.snapshot, first.facts.fork.from), (&Some(name.clone()), None));
        let pending = templates.snapshot(&name).unwrap().pending;
        (first, pending, templates.open_snapshot(&name).map(drop))
    };
    for paged in [false, true] {
        let (room, parent, (first, pending, opened)) = while_pending(paged, &begin).await;
        let templates = &room.daemon.templates;
        if paged {
            let error = opened.unwrap_err().0;
            assert!(pending && error.message.contains("is being stored"), "{}", error.message);
        }
        // Leaks belong to nothing; these files belong to the pending snapshot.
        assert_eq!(crate::ops::sweep::find(&room.daemon).await.unwrap(), []);
        let error = fork(&room.daemon, &parent, asked(0), Asked::now()).await.unwrap_err().0;
        assert_eq!(error.code, ErrorCode::Conflict, "{}", error.message);
        end(&room, &parent).await;
        says(&first, "verify ok seed 8\nverify bad page 0\nverify ok seed 9\nready").await;
        until("it is stored", || !templates.pending().has(&name)).await;
        let stored = templates.snapshot(&name).unwrap();
        assert!(!stored.pending && stored.layers.len() == 2, "{stored:?}");
        assert_eq!(stored.parent, Some("s".parse().unwrap()));
        assert!(stored.memory_stored_bytes > 0);
        let second = born_of(&room, "kept").await.unwrap();
        says(&second, "verify ok seed 8\nverify bad page 0\nverify ok seed 9\nready").await;
        // The snapshot's memory file is complete, so its parent may be removed.
        templates.remove_snapshot(&"s".parse().unwrap()).unwrap();
        let third = born_of(&room, "kept").await.unwrap();
        says(&third, "verify ok seed 8\nverify bad page 0\nverify ok seed 9\nready").await;
        for vm in [first, second, third] {
            end(&room, &vm).await;
        }
        until("nothing is kept for it", || templates.store().shared_layer_owners().is_empty())
            .await;
        room.empty().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_template_that_is_removed_while_it_is_stored_is_not_stored() {
    let name: Name = "kept".parse().unwrap();
    let request = ForkRequest { count: 1, template: Some(name.clone()), ..ASKED };
    let begin = async |room: &Room, parent: &Arc<Vm>| {
        let templates = &room.daemon.templates;
        // A fork whose clones cannot be created leaves no snapshot either.
        let taken = ForkRequest { name: Some("parent".parse().unwrap()), ..request.clone() };
        let error = fork(&room.daemon, parent, taken, Asked::now()).await.unwrap_err().0;
        assert_eq!(error.code, ErrorCode::Conflict, "{}", error.message);
        until("its name is free", || !templates.pending().has(&name)).await;
        assert_eq!(templates.snapshot(&name).unwrap_err().0.code, ErrorCode::NotFound);
        fork(&room.daemon, parent, request.clone(), Asked::now()).await.unwrap()
    };
    let (room, parent, forked_vms) = while_pending(true, begin).await;
    let templates = &room.daemon.templates;
    templates.remove_snapshot(&name).unwrap();
    let code = born_of(&room, "kept").await.unwrap_err().0.code;
    assert!(
        matches!(code, ErrorCode::State | ErrorCode::NotFound),
        "it is being removed, or was: {code:?}"
    );
    assert_eq!(templates.remove_snapshot(&name).unwrap_err().0.code, ErrorCode::NotFound);
    until("its name is free", || !templates.pending().has(&name)).await;
    assert_eq!(templates.snapshot(&name).unwrap_err().0.code, ErrorCode::NotFound);
    // The clone of the same fork point is not affected.
    let child = room.daemon.registry.find(&forked_vms.items[0].id.to_string()).unwrap();
    says(&child, "verify ok seed 8\nverify bad page 0\nverify ok seed 9\nready").await;
    let forked_vms = fork(&room.daemon, &child, request, Asked::now()).await.unwrap();
    let grandchild = room.daemon.registry.find(&forked_vms.items[0].id.to_string()).unwrap();
    until("it is stored", || !templates.pending().has(&name)).await;
    assert!(!templates.snapshot(&name).unwrap().pending);
    for vm in [parent, child, grandchild] {
        end(&room, &vm).await;
    }
    // The snapshot's name is free before its layers are removed.
    until("no layer is held", || templates.store().shared_layer_owners().is_empty()).await;
    room.empty().await;
}

/// Asks as root of the guest does: through the socket to which the VMM connects root.
async fn asks_for_itself(vm: &Vm, count: u32) -> HostReply {
    let mut stream = UnixStream::connect(vm.dir.guest_socket()).await.unwrap();
    let request = serde_json::to_vec(&HostRequest::Fork { count }).unwrap();
    agent_link::write_frame(&mut stream, FrameKind::Request, &request).await.unwrap();
    let reply = agent_link::read_frame(&mut stream, "a test").await.unwrap().unwrap();
    serde_json::from_slice(&reply.body).unwrap()
}

fn refusal(reply: HostReply) -> String {
    let HostReply::Err { message } = reply else { panic!("expected a refusal, got {reply:?}") };
    message
}

/// Number of regular files below the folders of VMs in run and state, which a guest's clones could
/// multiply.
fn files(room: &Room) -> usize {
    let mut folders = vec![room.daemon.config.vms(), room.daemon.templates.vms_folder()];
    let mut count = 0;
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(folder).unwrap().map(Result::unwrap) {
            if entry.file_type().unwrap().is_dir() {
                folders.push(entry.path())
            } else {
                count += 1
            }
        }
    }
    count
}

#[tokio::test(flavor = "multi_thread")]
async fn dead_clones_count_until_they_are_removed() {
    const MAY: u32 = 2;
    let room = Room::with(0, Settings::default(), &generations("200", "200"), false).await;
    let order = Order { forks: MAY, ..order_of("s") };
    let parent = create(&room.daemon, Asked::now(), order).await.unwrap().keep();
    says(&parent, "verify ok seed 8\nready").await;
    // Clones that the owner makes do not count.
    let (owners, _) = forked(&room, &parent, MAY).await;
    assert_eq!(room.daemon.registry.children(parent.id), Children { alive: 0, ended: 0 });
    // Clones that end by themselves at once, as a hostile guest would make them.
    let mut clones = Vec::new();
    for _ in 0..MAY {
        let HostReply::Forked { ids } = asks_for_itself(&parent, 1).await else {
            panic!("the first clones")
        };
        let clone = room.daemon.registry.find(&ids[0].to_string()).unwrap();
        clone.process().unwrap().kill().unwrap();
        clone.wait_gone().await;
        clones.push(clone);
    }
    let there = Children { alive: 0, ended: MAY };
    until("both have ended", || room.daemon.registry.children(parent.id) == there).await;
    let (vms, before) = (room.daemon.registry.len(), files(&room));
    for _ in 0..4 {
        let why = refusal(asks_for_itself(&parent, 1).await);
        assert!(why.contains("may have 2 at one time, 0 live, 2 ended"), "{why}");
    }
    // Layers may be merged and records written at this moment.
    let same = || files(&room) <= before && room.daemon.registry.len() == vms;
    until("a refusal has left nothing", same).await;
    for bad in [0, MAY + 1, u32::MAX] {
        refusal(asks_for_itself(&parent, bad).await);
    }
    // One removed clone allows one more.
    end(&room, &clones[0]).await;
    assert_eq!(room.daemon.registry.children(parent.id), Children { alive: 0, ended: 1 });
    let HostReply::Forked { ids } = asks_for_itself(&parent, 1).await else {
        panic!("room for one")
    };
    let why = refusal(asks_for_itself(&parent, 1).await);
    assert!(why.contains("1 live, 1 ended"), "{why}");
    clones.push(room.daemon.registry.find(&ids[0].to_string()).unwrap());
    for clone in clones[1..].iter().chain(&owners) {
        end(&room, clone).await;
    }
    // Even if the owner removes them quickly, the guest can make eight more than may exist, and
    // then one in a second. A host that needs seconds for each round refuses none.
    let (begun, mut made) = (Instant::now(), 0);
    for _ in 0..100 {
        match asks_for_itself(&parent, MAY).await {
            HostReply::Forked { ids } => {
                made += ids.len() as u64;
                let most = u64::from(MAY) + 8 + begun.elapsed().as_secs() + 1;
                assert!(made <= most, "{made} clones: nothing held it up");
                for id in ids {
                    end(&room, &room.daemon.registry.find(&id.to_string()).unwrap()).await;
                }
            }
            HostReply::Err { message } => {
                assert!(message.contains("so soon"), "{message}");
                break;
            }
        }
    }
    end(&room, &parent).await;
    room.empty().await;
}
