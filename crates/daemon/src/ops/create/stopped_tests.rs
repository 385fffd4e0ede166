//! A restart of the daemon while VMMs are stopped (SIGSTOP), with real VMMs on `/dev/kvm`.

use super::create;
use super::harness::{Room, WITHIN, until};
use crate::base::config::{Config, Deadlines};
use crate::base::time::Asked;
use crate::daemon::Daemon;
use crate::fixture;
use crate::model::state::Phase;
use crate::ops::adopt::adopt;
use crate::ops::{power, remove};
use crate::templates::cache::TemplateCache;
use crate::templates::pagers::Pagers;
use crate::vm::Vm;
use dayfly_api::types::ErrorCode;
use dayfly_store::Store;
use rustix::process::Signal;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// VMs that the daemon of `room` has left. They end with the test.
struct Left(Vec<Arc<Vm>>);

impl Left {
    async fn of(room: &Room, count: usize) -> Self {
        let mut vms = Self(Vec::new());
        for n in 0..count {
            let vm = room.create(&format!("vm-{n}").parse().unwrap()).await.unwrap().keep();
            // That daemon writes no record of it any more.
            room.daemon.registry.forget(&vm);
            vms.0.push(vm);
        }
        vms
    }
}

impl Drop for Left {
    fn drop(&mut self) {
        for process in self.0.iter().filter_map(|vm| vm.process()) {
            let _ended_already = process.kill();
        }
    }
}

/// Pauses a VM of a daemon with a short time limit, which a VMM on a busy host may exceed.
async fn pause(daemon: &Arc<Daemon>, vm: &Arc<Vm>) {
    let begun = Instant::now();
    while let Err(late) = power::pause(daemon, vm).await {
        assert!(late.0.code == ErrorCode::Timeout && begun.elapsed() < WITHIN, "{late}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn stopped_vmms_survive_a_restart_delay_no_other_and_are_adopted_when_they_continue() {
    let room = Room::new(0).await;
    let vms = Left::of(&room, 11).await;
    let (healthy, stopped) = vms.0.split_first().unwrap();
    let signal = |vm: &Vm, signal| vm.process().unwrap().signal(signal).unwrap();
    stopped.iter().for_each(|vm| signal(vm, Signal::STOP));
    // The next daemon has another store, because the one before has locked its own.
    let state = tempfile::tempdir().unwrap();
    let deadlines = Deadlines { control: Duration::from_secs(2), ..Deadlines::default() };
    let config = Config { state: state.path().into(), deadlines, ..room.daemon.config.clone() };
    let templates = TemplateCache::new(Store::open(&config.state).unwrap(), Pagers::new(&config));
    let next = fixture::daemon(config, templates, room.daemon.nodes.clone());
    let mut asking = adopt(&next).await.unwrap();
    assert_eq!(asking.join_next().await.unwrap().unwrap(), healthy.id, "it waits for no other");
    let of = |vm: &Vm| next.registry.find(&vm.id.to_string()).unwrap();
    pause(&next, &of(healthy)).await;
    for vm in stopped {
        let vm = of(vm);
        vm.waiting().wait_for(Option::is_some).await.unwrap();
        let refused = power::pause(&next, &vm).await.unwrap_err();
        assert_eq!((refused.0.code, vm.phase()), (ErrorCode::State, Phase::Running));
    }
    let (removed, rest) = stopped.split_first().unwrap();
    remove::remove(&next, &of(removed)).await.unwrap();
    rest.iter().for_each(|vm| signal(vm, Signal::CONT));
    for _ in stopped {
        asking.join_next().await.unwrap().unwrap();
    }
    for vm in rest.iter().map(|vm| of(vm)) {
        assert_eq!((vm.problem(), vm.phase(), vm.live().exit), (None, Phase::Running, None));
        pause(&next, &vm).await;
    }
    for vm in next.registry.all() {
        remove::remove(&next, &vm).await.unwrap();
    }
    until("their processes are gone", || vms.0.iter().all(|vm| vm.is_gone())).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn without_a_record_no_vm_is_created() {
    let room = Room::new(0).await;
    let mut order = room.order(&"long".parse().unwrap());
    order.labels = [("a".to_owned(), "x".repeat(1 << 20))].into();
    let refused = create(&room.daemon, Asked::now(), order).await.unwrap_err();
    assert_eq!(refused.0.code, ErrorCode::Invalid);
    assert!(refused.0.message.contains("labels"), "{refused}");
    room.empty().await;
}
