//! VMMs that their guests took over, on `/dev/kvm`: a test keeps what such a VMM would keep of its
//! disk layer, and writes to it after a fork or a snapshot.

use crate::base::progress::ProgressSender;
use crate::base::time::Asked;
use crate::model::state::Phase;
use crate::ops::create::harness::{Room, WITHIN, until};
use crate::ops::create::last_lines::console_tail;
use crate::ops::create::{Order, Origin, create};
use crate::ops::fork::fork;
use crate::ops::{remove, snapshot};
use crate::vm::Vm;
use dayfly_api::types::{ExitKind, ForkRequest, Lifetime, SnapshotRequest, Source};
use dayfly_pager::wire::Settings;
use dayfly_store::{ChainLayer, Meter, Scope, VmLayer};
use dayfly_sys::writers::{Writers, writers};
use dayfly_units::Name;
use dayfly_vmm::arch::layout;
use prometheus_client::registry::Registry;
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
use std::collections::BTreeMap;
use std::fs::File;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::sync::Arc;

const AT: usize = 3 * 4096;
const BEFORE: [u8; 100] = [0x5a; 100];
const AFTER: [u8; 100] = [0xa5; 100];

/// What a VMM keeps of a layer's file.
enum Kept {
    Descriptor(File),
    /// The address of a shared mapping, and its length.
    Mapping(usize, usize),
}

impl Kept {
    fn of(file: File, mapped: bool) -> Self {
        if !mapped {
            return Self::Descriptor(file);
        }
        let len = usize::try_from(file.metadata().unwrap().len()).unwrap();
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping at an address of the kernel's choice, which only `self` uses.
        let at = unsafe { mmap(std::ptr::null_mut(), len, protection, MapFlags::SHARED, file, 0) };
        Self::Mapping(at.unwrap().addr(), len)
    }

    fn write(&self, bytes: &[u8; 100]) {
        match self {
            Self::Descriptor(file) => file.write_all_at(bytes, AT as u64).unwrap(),
            Self::Mapping(at, len) => {
                assert!(AT + bytes.len() <= *len);
                let to = std::ptr::with_exposed_provenance_mut::<u8>(at + AT);
                // SAFETY: within the mapping, to which no reference exists.
                unsafe { to.copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
            }
        }
    }
}

impl Drop for Kept {
    fn drop(&mut self) {
        if let Self::Mapping(at, len) = *self {
            let at = std::ptr::with_exposed_provenance_mut(at);
            // SAFETY: the mapping of `of`, to which no reference exists.
            unsafe { munmap(at, len) }.unwrap();
        }
    }
}

fn bytes(file: &File) -> [u8; 100] {
    let mut bytes = [0; 100];
    file.read_exact_at(&mut bytes, AT as u64).unwrap();
    bytes
}

async fn says(vm: &Vm, text: &str) {
    until(text, || console_tail(&vm.dir).contains(text)).await;
}

/// A daemon and a running VM.
async fn running() -> (Room, Arc<Vm>) {
    // The guest says `ready` in each generation of clones.
    let waits = vec![format!("until={:x}", layout::GENERATION.0); 8].join(" ");
    let room = Room::with(0, Settings::default(), &waits, true).await;
    let vm = room.create(&"parent".parse().unwrap()).await.unwrap().keep();
    (room, vm)
}

async fn forked(room: &Room, vm: &Arc<Vm>) -> Arc<Vm> {
    let request = ForkRequest {
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
    let forked = fork(&room.daemon, vm, request, Asked::now()).await.unwrap();
    room.daemon.registry.find(&forked.items[0].id.to_string()).unwrap()
}

async fn snapshotted(room: &Room, vm: &Arc<Vm>, name: &Name) {
    let (request, progress) =
        (SnapshotRequest { name: name.clone() }, ProgressSender::without_receiver());
    snapshot::snapshot(room.daemon.clone(), vm.clone(), request, progress).await.unwrap();
}

fn writable(vm: &Vm) -> VmLayer {
    vm.live().disks[0].writable.unwrap()
}

/// The last frozen layer of a clone, which another VM froze.
fn shared(vm: &Vm) -> VmLayer {
    match vm.live().disks[0].layers.last() {
        Some(ChainLayer::Shared(layer)) => *layer,
        other => panic!("{other:?}"),
    }
}

fn copied(room: &Room) -> String {
    let (mut registry, mut text) = (Registry::default(), String::new());
    room.daemon.metrics.register(&mut registry);
    prometheus_client::encoding::text::encode(&mut text, &registry).unwrap();
    let line = text.lines().find(|line| line.starts_with("copied_layers_total"));
    line.unwrap().rsplit(' ').next().unwrap().to_owned()
}

/// Asserts that the VM was ended because it kept its layer.
async fn ended(vm: &Arc<Vm>) {
    tokio::time::timeout(WITHIN, vm.wait_gone()).await.unwrap();
    let exit = vm.live().exit.unwrap();
    assert_eq!(exit.reason, ExitKind::Failed, "{exit:?}");
    assert!(exit.message.contains("can still write to a disk layer"), "{exit:?}");
}

async fn end(room: &Room, vms: &[&Arc<Vm>]) {
    for vm in vms {
        remove::remove(&room.daemon, vm).await.unwrap();
    }
    room.empty().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_vmm_that_keeps_a_forked_layer_changes_no_clone_and_is_ended() {
    for mapped in [false, true] {
        let (room, vm) = running().await;
        let store = room.daemon.templates.store();
        let kept = Kept::of(store.open_vm_layer(&writable(&vm), true).unwrap(), mapped);
        kept.write(&BEFORE);
        let child = forked(&room, &vm).await;
        kept.write(&AFTER);
        assert_eq!(bytes(&store.open_frozen_layer(&shared(&child)).unwrap().data), BEFORE);
        ended(&vm).await;
        assert_eq!(copied(&room), "1");
        // The clone, and a clone of it, go on with the copy.
        says(&child, "ready").await;
        let grandchild = forked(&room, &child).await;
        kept.write(&AFTER);
        let layers = grandchild.live().disks[0].shared_layers().collect::<Vec<_>>();
        assert_eq!(layers.len(), 2, "{layers:?}");
        assert_eq!(bytes(&store.open_frozen_layer(&layers[0]).unwrap().data), BEFORE);
        assert_eq!((child.phase(), grandchild.phase()), (Phase::Running, Phase::Running));
        end(&room, &[&vm, &child, &grandchild]).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_vmm_that_keeps_a_published_layer_changes_no_snapshot_and_is_ended() {
    for mapped in [false, true] {
        let (room, vm) = running().await;
        let store = room.daemon.templates.store();
        let kept = Kept::of(store.open_vm_layer(&writable(&vm), true).unwrap(), mapped);
        kept.write(&BEFORE);
        let name: Name = "next".parse().unwrap();
        snapshotted(&room, &vm, &name).await;
        kept.write(&AFTER);
        ended(&vm).await;
        let open = store.open_snapshot_pages(&room.daemon.templates.tenant(), &name).unwrap();
        assert_eq!(bytes(&open.disks[0].layers.last().unwrap().data), BEFORE);
        let report = store.verify(&Scope::All, &Meter::default()).unwrap();
        assert_eq!(report.damage.len(), 0, "{:?}", report.damage);
        let origin = Origin::Source(Source::Snapshot(name.clone()));
        let order = Order { origin, ..room.order(&"later".parse().unwrap()) };
        let clone = create(&room.daemon, Asked::now(), order).await.unwrap().keep();
        says(&clone, "ready").await;
        assert_eq!(copied(&room), "1");
        end(&room, &[&vm, &clone]).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_layers_of_an_honest_vmm_are_neither_copied_nor_writable() {
    // A process that another test starts has copies of all descriptors until it executes its
    // program. If it has that of the layer, the layer is copied.
    for _ in 0..5 {
        if honest().await {
            return;
        }
    }
    panic!("the layers were copied each time");
}

/// Checks the layers of an honest VMM; false if another process could write to one.
async fn honest() -> bool {
    let (room, vm) = running().await;
    let store = room.daemon.templates.store();
    let layer = writable(&vm);
    let file = store.open_vm_layer(&layer, false).unwrap();
    let inode = file.metadata().unwrap().ino();
    assert_eq!(writers(&file).unwrap(), Writers::Some, "its VMM writes to it");
    let child = forked(&room, &vm).await;
    if copied(&room) != "0" {
        end(&room, &[&vm, &child]).await;
        return false;
    }
    assert_eq!(writers(&file).unwrap(), Writers::None);
    let of_child = store.open_frozen_layer(&layer).unwrap();
    assert_eq!(of_child.data.metadata().unwrap().ino(), inode);
    assert_eq!(writers(&of_child.map).unwrap(), Writers::None);
    snapshotted(&room, &vm, &"next".parse().unwrap()).await;
    let was_copied = copied(&room) != "0";
    assert!(was_copied || vm.phase() == Phase::Running);
    end(&room, &[&vm, &child]).await;
    !was_copied
}

#[tokio::test(flavor = "multi_thread")]
async fn a_vmm_of_an_earlier_version_gets_the_copy_and_goes_on() {
    let (room, vm) = running().await;
    let store = room.daemon.templates.store();
    vm.update(|live| live.read_only_layers = false);
    for turn in 1..=3 {
        let file = store.open_vm_layer(&writable(&vm), false).unwrap();
        let child = forked(&room, &vm).await;
        assert_eq!(copied(&room), turn.to_string());
        assert_eq!(writers(&file).unwrap(), Writers::None, "its VMM has the former file");
        says(&child, "ready").await;
        remove::remove(&room.daemon, &child).await.unwrap();
    }
    snapshotted(&room, &vm, &"next".parse().unwrap()).await;
    assert_eq!((copied(&room).as_str(), vm.phase()), ("4", Phase::Running));
    end(&room, &[&vm]).await;
}
