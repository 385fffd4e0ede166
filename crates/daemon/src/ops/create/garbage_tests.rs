//! Layers of removed snapshots stay as long as a user of them exists, and no longer.

use crate::model::state::Event;
use crate::ops::create::harness::{Room, until};
use crate::ops::publish::{self, Ready};
use crate::ops::remove;
use crate::ops::save::{self, Saved};
use crate::templates::cache::TemplateCache;
use crate::vm::Vm;
use dayfly_pager::wire::Settings;
use dayfly_store::Meter;
use dayfly_units::{Name, failpoint};
use dayfly_vmm::arch::layout;
use std::io::Write;
use std::sync::Arc;
use tokio::task::{JoinHandle, block_in_place};

/// A fixture whose daemon collects garbage.
async fn room() -> (Room, JoinHandle<()>) {
    room_of("", Settings::default()).await
}

/// As [`room`], with a guest whose command line begins with `first`.
async fn room_of(first: &str, settings: Settings) -> (Room, JoinHandle<()>) {
    let command_line = format!("{first}born={:x}", layout::GENERATION.0);
    let room = Room::with(0, settings, &command_line, true).await;
    let collector = room.daemon.templates.clone().keep_collected(room.daemon.stop.clone());
    (room, tokio::spawn(collector))
}

async fn close(room: Room, collector: JoinHandle<()>) {
    room.empty().await;
    room.daemon.stop.cancel();
    collector.await.unwrap();
}

fn layers(room: &Room) -> usize {
    std::fs::read_dir(room.daemon.templates.store().root().join("layers")).unwrap().count()
}

fn name(name: &str) -> Name {
    name.parse().unwrap()
}

async fn kill(vm: &Vm) {
    vm.process().unwrap().kill().unwrap();
    vm.wait_gone().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn layers_of_a_removed_snapshot_are_removed_after_the_last_vm_on_them() {
    let (room, collector) = room().await;
    let first = room.create(&"first".parse().unwrap()).await.unwrap().keep();
    let second = room.create(&"second".parse().unwrap()).await.unwrap().keep();
    assert_eq!(layers(&room), 1);
    room.daemon.templates.remove_snapshot(&name("s")).unwrap();
    remove::remove(&room.daemon, &first).await.unwrap();
    block_in_place(|| room.daemon.templates.collect());
    assert_eq!(layers(&room), 1, "a VM depends on it");
    // It ends by itself and stays in the list, so it can start again.
    kill(&second).await;
    block_in_place(|| room.daemon.templates.collect());
    assert_eq!(layers(&room), 1, "a VM that has ended depends on it");
    // No caller asks for a collection.
    remove::remove(&room.daemon, &second).await.unwrap();
    until("its layer is gone", || layers(&room) == 0).await;
    close(room, collector).await;
}

/// A VM that was saved, with its own layer, after its snapshot was removed.
async fn saved(room: &Room) -> (Arc<Vm>, Saved) {
    let vm = room.create(&"vm".parse().unwrap()).await.unwrap().keep();
    room.daemon.templates.remove_snapshot(&name("s")).unwrap();
    // Without a write to its disk, its new layer would equal the snapshot's.
    let folder = room.daemon.templates.vms_folder().join(vm.id.to_string());
    let file = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let file =
        file.filter(|path| path.extension().is_some_and(|end| end == "data")).last().unwrap();
    std::fs::OpenOptions::new().write(true).open(file).unwrap().write_all(b"its own").unwrap();
    save::arrived(&room.daemon, &vm, None).await.unwrap();
    vm.step(Event::Freeze).unwrap();
    let saved = save::save(&room.daemon, &vm, &name("next")).await.unwrap();
    (vm, saved)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_snapshot_is_stored_although_its_vm_ended_and_what_that_was_made_from_is_removed() {
    // The VM's memory is incomplete when its snapshot is removed.
    let slow = Settings { ahead_bytes_per_s: 2 << 20, ..Settings::default() };
    let (room, collector) = room_of("fill=7:100 ", slow).await;
    let (vm, saved) = saved(&room).await;
    let spec = publish::spec(&vm);
    kill(&vm).await;
    let ready = block_in_place(|| Ready::new(&vm.name, saved, &spec)).unwrap();
    block_in_place(|| room.daemon.templates.collect());
    assert_eq!(layers(&room), 1);
    block_in_place(|| ready.store(&room.daemon, None, &Meter::default())).unwrap();
    assert_eq!(layers(&room), 2);
    let templates = &room.daemon.templates;
    block_in_place(|| templates.open_snapshot(&name("next"))).unwrap();
    templates.remove_snapshot(&name("next")).unwrap();
    remove::remove(&room.daemon, &vm).await.unwrap();
    until("no layer is left", || layers(&room) == 0).await;
    close(room, collector).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_vm_that_ended_before_its_snapshot_is_stored_keeps_the_layers_until_it_is_removed() {
    let (room, collector) = room().await;
    let (vm, saved) = saved(&room).await;
    let spec = publish::spec(&vm);
    kill(&vm).await;
    let (daemon, templates) = (&room.daemon, &room.daemon.templates);
    // The result has a pin too.
    block_in_place(|| {
        drop(publish::store(daemon, &vm, saved, &spec, &Arc::default()).unwrap());
        templates.remove_snapshot(&name("next")).unwrap();
        templates.collect();
    });
    assert_eq!(layers(&room), 2, "the VM that has ended depends on both");
    remove::remove(daemon, &vm).await.unwrap();
    until("no layer is left", || layers(&room) == 0).await;
    close(room, collector).await;
}

/// Each step of an opening and of a removal at which the other one may happen.
const MEETINGS: [&str; 4] = [
    "daemon.open_snapshot.loaded",
    "daemon.remove_snapshot.removed",
    "daemon.remove_snapshot.layers",
    "daemon.remove_snapshot.pages",
];

#[tokio::test(flavor = "multi_thread")]
async fn a_snapshot_that_is_removed_while_it_is_opened_does_not_stay_open() {
    let group = failpoint::Group::new();
    let open = |templates: &TemplateCache| drop(templates.open_snapshot(&name("s")));
    let remove = |templates: &TemplateCache| templates.remove_snapshot(&name("s")).unwrap();
    for point in MEETINGS {
        let (room, collector) = room().await;
        let templates = room.daemon.templates.clone();
        let opens = point.starts_with("daemon.open");
        let held = block_in_place(|| group.hold(point, 1));
        let first = std::thread::spawn(move || {
            group.join();
            if opens { open(&templates) } else { remove(&templates) }
        });
        until(point, || held.is_reached()).await;
        let templates = &room.daemon.templates;
        block_in_place(|| if opens { remove(templates) } else { open(templates) });
        drop(held);
        first.join().unwrap();
        until("its layer is gone", || layers(&room) == 0).await;
        close(room, collector).await;
    }
}
