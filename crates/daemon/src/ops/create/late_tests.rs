//! VMMs that are late, and clients that do not wait for them: the task that works keeps the locks.

use crate::base::time::Asked;
use crate::model::state::Phase;
use crate::ops::awake::awake;
use crate::ops::create::forking::{end, forked, generations, says};
use crate::ops::create::harness::{Room, until};
use crate::ops::fork::fork;
use crate::ops::power;
use crate::vm::Vm;
use crate::vmm::control_link;
use dayfly_api::types::{ErrorCode, ForkRequest, Lifetime};
use dayfly_pager::wire::Settings;
use dayfly_vmm::control::{Answer, Command};
use rustix::process::{Pid, Signal, kill_process};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

/// A room without warm VMMs.
async fn room() -> Room {
    Room::with(0, Settings::default(), &generations("40", "40"), false).await
}

/// Sends a signal to the VMM of `vm`.
fn signal(vm: &Vm, signal: Signal) {
    let pid = i32::try_from(vm.live().process.unwrap().pid).unwrap();
    kill_process(Pid::from_raw(pid).unwrap(), signal).unwrap();
}

/// Whether the vCPUs of `vm` are stopped, as its VMM says.
async fn is_paused(room: &Room, vm: &Vm) -> bool {
    let within = room.daemon.config.deadlines.save;
    match control_link::command(&vm.dir.control(), Command::Status, within).await.unwrap() {
        Answer::Status(status) => status.paused,
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn a_pause_with_a_late_answer_is_settled_by_the_answer() {
    let room = room().await;
    let vm = room.create(&"parent".parse().unwrap()).await.unwrap().keep();
    signal(&vm, Signal::STOP);
    // The clock goes on by itself when nothing else can happen.
    tokio::time::pause();
    let late = power::pause(&room.daemon, &vm).await.unwrap_err().0;
    assert_eq!(late.code, ErrorCode::Timeout);
    assert!(late.message.contains("dayfly rm --force parent"), "{}", late.message);
    // No other task sends commands meanwhile.
    let busy = power::unpause(&room.daemon, &vm).await.unwrap_err().0;
    assert_eq!(busy.code, ErrorCode::Timeout);
    assert!(busy.message.contains("operation before"), "{}", busy.message);
    tokio::time::resume();
    signal(&vm, Signal::CONT);
    drop(vm.take_turn(room.daemon.config.deadlines.save).await.unwrap());
    let said = is_paused(&room, &vm).await;
    assert_eq!((said, vm.shown().state), (true, dayfly_api::types::VmState::Paused));
    power::unpause(&room.daemon, &vm).await.unwrap();
    assert!(!is_paused(&room, &vm).await);
    end(&room, &vm).await;
}

#[tokio::test]
async fn a_vm_that_runs_for_a_snapshot_is_paused_again_unless_it_was_unpaused() {
    let room = room().await;
    let vm = room.create(&"parent".parse().unwrap()).await.unwrap().keep();
    let daemon = &room.daemon;
    power::pause(daemon, &vm).await.unwrap();
    drop(awake(daemon, &vm).await.unwrap());
    until("it is paused again", || vm.phase() == Phase::Paused).await;

    // Its caller goes away before the VMM answers.
    signal(&vm, Signal::STOP);
    tokio::select! {
        biased;
        _ = awake(daemon, &vm) => panic!("a stopped VMM answered"),
        () = std::future::ready(()) => {}
    }
    signal(&vm, Signal::CONT);
    // The abandoned unpause has its turn, if it got that far, and then the pause.
    until("no pause is due", || !vm.pause_due.load(Relaxed)).await;
    drop(vm.take_turn(daemon.config.deadlines.save).await.unwrap());
    until("no pause is due", || !vm.pause_due.load(Relaxed)).await;
    until("it is paused again", || vm.phase() == Phase::Paused).await;

    let for_a_snapshot = awake(daemon, &vm).await.unwrap();
    power::unpause(daemon, &vm).await.unwrap();
    drop(for_a_snapshot);
    // Ends when no pause is due any more.
    daemon.undo.close();
    daemon.undo.wait().await;
    assert_eq!((vm.phase(), is_paused(&room, &vm).await), (Phase::Running, false));
    end(&room, &vm).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_fork_that_its_client_abandons_keeps_the_next_one_waiting() {
    let room = room().await;
    let vm = room.create(&"parent".parse().unwrap()).await.unwrap().keep();
    says(&vm, "verify ok seed 8\nready").await;
    signal(&vm, Signal::STOP);
    let (daemon, parent) = (room.daemon.clone(), vm.clone());
    let request = || ForkRequest {
        count: 1,
        name: None,
        labels: BTreeMap::new(),
        forks: 0,
        egress: None,
        publish: Vec::new(),
        publish_exposed: false,
        lifetime: Lifetime::UNLIMITED,
        limits: None,
        template: None,
    };
    let asked = request();
    let client = tokio::spawn(async move { fork(&daemon, &parent, asked, Asked::now()).await });
    until("the fork has begun", || vm.snapshots.try_lock().is_err()).await;
    client.abort();
    assert!(client.await.unwrap_err().is_cancelled());
    assert!(vm.snapshots.try_lock().is_err(), "the freeze goes on and keeps its lock");
    let (daemon, parent) = (room.daemon.clone(), vm.clone());
    let again = tokio::spawn(async move { fork(&daemon, &parent, request(), Asked::now()).await });
    signal(&vm, Signal::CONT);
    let child = again.await.unwrap().unwrap().items.remove(0);
    let child: Arc<Vm> = room.daemon.registry.find(&child.id.to_string()).unwrap();
    says(&child, "verify ok seed 9\nready").await;
    let (more, _) = forked(&room, &vm, 1).await;
    says(&more[0], "verify ok seed 9\nready").await;
    for vm in [&child, &more[0], &vm] {
        end(&room, vm).await;
    }
    room.empty().await;
}
