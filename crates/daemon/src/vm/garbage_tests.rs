//! Layers of snapshots that are gone: they stay as long as somebody stands on them, and no longer.

use super::failing::{Room, until};
use super::*;
use crate::snapshot::{self, Ready};
use dayfly_pager::wire::Settings;
use dayfly_store::Meter;
use dayfly_vmm::arch::layout;
use std::io::Write;
use tokio::task::{JoinHandle, block_in_place};

/// A room whose daemon collects.
async fn room() -> (Room, JoinHandle<()>) {
    room_of("", Settings::default()).await
}

/// The same with a guest that is told something first.
async fn room_of(first: &str, settings: Settings) -> (Room, JoinHandle<()>) {
    let told = format!("{first}born={:x}", layout::GENERATION.0);
    let room = Room::with(0, settings, &told, true).await;
    let collector = room.daemon.depot.clone().keep_collected(room.daemon.stop.clone());
    (room, tokio::spawn(collector))
}

async fn close(room: Room, collector: JoinHandle<()>) {
    room.empty().await;
    room.daemon.stop.cancel();
    collector.await.unwrap();
}

fn layers(room: &Room) -> usize {
    std::fs::read_dir(room.daemon.depot.store().root().join("layers")).unwrap().count()
}

fn name(name: &str) -> Name {
    name.parse().unwrap()
}

async fn kill(vm: &Vm) {
    vm.process().unwrap().kill().unwrap();
    vm.wait_gone().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn layers_of_a_removed_snapshot_go_with_the_last_vm_on_them() {
    let (room, collector) = room().await;
    let first = room.birth(&name("first")).await.unwrap().keep();
    let second = room.birth(&name("second")).await.unwrap().keep();
    assert_eq!(layers(&room), 1);
    room.daemon.depot.remove_snapshot(&name("s")).unwrap();
    death::remove(&room.daemon, &first).await.unwrap();
    tokio::time::sleep(Duration::from_millis(100)).await;
    assert_eq!(layers(&room), 1, "a VM stands on it");
    // It ends by itself, and stays in the list: nothing asks for a collection.
    kill(&second).await;
    until("its layer is gone", || layers(&room) == 0).await;
    death::remove(&room.daemon, &second).await.unwrap();
    close(room, collector).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_snapshot_is_stored_although_its_vm_ended_and_what_that_was_made_from_is_removed() {
    // Its memory has not arrived when what it was made from is removed.
    let slow = Settings { ahead_bytes_per_s: 2 << 20, ..Settings::default() };
    let (room, collector) = room_of("fill=7:100 ", slow).await;
    let vm = room.birth(&name("vm")).await.unwrap().keep();
    room.daemon.depot.remove_snapshot(&name("s")).unwrap();
    // It writes nothing to its disk: its layer would be the one that it stands on.
    let folder = room.daemon.depot.vms_folder().join(vm.id.to_string());
    let file = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let file = file.filter(|path| path.extension().is_some_and(|end| end == "data")).last().unwrap();
    std::fs::OpenOptions::new().write(true).open(file).unwrap().write_all(b"its own").unwrap();
    snapshot::arrived(&room.daemon, &vm, None).await.unwrap();
    vm.step(Event::Freeze).unwrap();
    let saved = snapshot::save(&room.daemon, &vm, &name("next")).await.unwrap();
    let spec = snapshot::spec(&vm);
    kill(&vm).await;
    let ready = block_in_place(|| Ready::new(&vm.name, saved, &spec)).unwrap();
    // Who collects has time to.
    tokio::time::sleep(Duration::from_millis(200)).await;
    assert_eq!(layers(&room), 1);
    block_in_place(|| ready.store(&room.daemon, &Meter::default())).unwrap();
    assert_eq!(layers(&room), 2);
    let depot = &room.daemon.depot;
    block_in_place(|| depot.open_snapshot(&name("next"))).unwrap();
    depot.remove_snapshot(&name("next")).unwrap();
    until("no layer is left", || layers(&room) == 0).await;
    death::remove(&room.daemon, &vm).await.unwrap();
    close(room, collector).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_snapshot_that_is_removed_while_it_is_opened_does_not_stay_open() {
    for turn in 0..64 {
        let (room, collector) = room().await;
        let depot = room.daemon.depot.clone();
        let opener = std::thread::spawn(move || drop(depot.open_snapshot(&name("s"))));
        tokio::time::sleep(Duration::from_micros(turn * 20)).await;
        room.daemon.depot.remove_snapshot(&name("s")).unwrap();
        opener.join().unwrap();
        until("its layer is gone", || layers(&room) == 0).await;
        close(room, collector).await;
    }
}
