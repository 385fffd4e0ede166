use crate::fixture::{Vm, bake, name, store};
use crate::{ChainLayer, Pin, Store, VmLayer};
use std::path::Path;
use std::time::{Duration, Instant};

/// Freezes the layer that the VM writes, as a fork does.
fn freeze(store: &Store, vm: &mut Vm) -> VmLayer {
    let mut freezing = store.freezing();
    let freeze = freezing.freeze(&vm.writable).unwrap();
    freezing.keep();
    let frozen = vm.writable;
    vm.chain.push(freeze.frozen);
    vm.writable = freeze.next;
    frozen
}

fn hold(store: &Store, layers: &[VmLayer]) -> Pin {
    store.pin("a clone", &[], &[], layers).unwrap()
}

#[test]
fn while_a_vm_may_need_every_layer_none_is_deleted_and_all_unused_ones_are_afterwards() {
    let root = tempfile::tempdir().unwrap();
    let store = store(root.path());
    let (garbage, wanted) = std::sync::mpsc::channel();
    store.when_garbage(move || garbage.send(()).unwrap());
    bake(&store, "s", 1).unwrap();
    let mut vm = Vm::boot(&store);
    let layers = [freeze(&store, &mut vm), freeze(&store, &mut vm)];
    let clone = hold(&store, &layers[..1]);
    let first = store.pin_every_layer("VM x", [name("debian")].into());
    let second = first.clone();
    store.remove_snapshot(&name("s")).unwrap();
    assert_eq!(store.gc().unwrap().layers, []);
    store.remove_vm_layer(&layers[1]).unwrap();
    store.remove_vm(vm.id).unwrap();
    drop((clone, first));
    assert!(store.every_layer_is_pinned());
    assert_eq!([files(root.path(), &layers[0]), files(root.path(), &layers[1])], [2, 2]);
    assert_eq!(store.shared_layer_owners(), [vm.id], "the sweep leaves them");
    // A VM that is adopted now finds the layers.
    let adopted = hold(&store, &layers[..1]);
    assert!(wanted.try_recv().is_err());
    drop(second);
    wanted.try_recv().expect("gc is asked for");
    assert_eq!(store.gc().unwrap().layers.len(), 1);
    assert_eq!([files(root.path(), &layers[0]), files(root.path(), &layers[1])], [2, 0]);
    drop(adopted);
    assert_eq!((store.shared_layer_owners(), store.vm_folders().unwrap()), (vec![], vec![]));
}

fn files(root: &Path, layer: &VmLayer) -> usize {
    let has = |name: String| root.join("vms").join(layer.vm.to_string()).join(name).exists();
    usize::from(has(layer.data_name())) + usize::from(has(layer.map_name()))
}

/// All permutations of `n` indexes.
fn orders(n: usize) -> Vec<Vec<usize>> {
    let Some(last) = n.checked_sub(1) else { return vec![vec![]] };
    let with_last = |order: Vec<usize>| {
        (0..n)
            .map(move |place| [&order[..place], &[last], &order[place..]].concat())
            .collect::<Vec<_>>()
    };
    orders(last).into_iter().flat_map(with_last).collect()
}

#[test]
fn a_layer_stays_as_long_as_its_vm_or_a_clone_needs_it() {
    let all = orders(6);
    assert_eq!(all.len(), 720);
    for order in all {
        let root = tempfile::tempdir().unwrap();
        let store = store(root.path());
        let mut vm = Vm::boot(&store);
        let layers = [freeze(&store, &mut vm), freeze(&store, &mut vm)];
        // A pin on each layer, a pin on both, and a second pin on the first layer.
        let mut pins = vec![Some(hold(&store, &layers[..1])), Some(hold(&store, &layers))];
        pins.push(pins[1].clone());
        let mut needed = [[true, true, true, true], [true, false, true, true]];
        for step in order {
            match step {
                0..3 => {
                    pins[step] = None;
                    needed.iter_mut().for_each(|needed| needed[step + 1] = false);
                }
                3 | 4 => {
                    store.remove_vm_layer(&layers[step - 3]).unwrap();
                    needed[step - 3][0] = false;
                }
                _ => {
                    store.remove_vm(vm.id).unwrap();
                    needed.iter_mut().for_each(|needed| needed[0] = false);
                }
            }
            for (layer, needed) in layers.iter().zip(&needed) {
                let expected = if needed.contains(&true) { 2 } else { 0 };
                assert_eq!(files(root.path(), layer), expected, "{layer:?}, needed by {needed:?}");
            }
        }
        assert_eq!((store.shared_layer_owners(), store.vm_folders().unwrap()), (vec![], vec![]));
    }
}

#[test]
fn a_clone_that_commits_takes_nothing_away_from_its_parent() {
    let root = tempfile::tempdir().unwrap();
    let store = store(root.path());
    let mut parent = Vm::boot(&store);
    let frozen = freeze(&store, &mut parent);
    let mut clone = Vm::boot(&store);
    clone.chain = vec![ChainLayer::Shared(frozen)];
    let pin = hold(&store, &[frozen]);
    clone.snapshot(&store, "of-the-clone", 1).unwrap();
    drop(pin);
    assert_eq!(files(root.path(), &frozen), 2);
    parent.snapshot(&store, "of-the-parent", 1).unwrap();
    assert_eq!(files(root.path(), &frozen), 0);
    let layers = |of: &str| store.snapshot(&name(of)).unwrap().layer_ids();
    assert_eq!(
        layers("of-the-clone")[0],
        layers("of-the-parent")[0],
        "the same content is stored once"
    );
}

#[test]
fn a_store_that_is_opened_again_releases_what_was_released_before() {
    let root = tempfile::tempdir().unwrap();
    let (vm, layers) = {
        let store = store(root.path());
        let mut vm = Vm::boot(&store);
        let layers = [freeze(&store, &mut vm), freeze(&store, &mut vm), freeze(&store, &mut vm)];
        let pin = hold(&store, &layers[..1]);
        store.remove_vm_layer(&layers[0]).unwrap();
        // Forgotten, as when a daemon is killed.
        std::mem::forget(pin);
        (vm, layers)
    };
    let store = Store::open(root.path()).unwrap();
    let pin = hold(&store, &layers[..2]);
    let left = || layers.each_ref().map(|layer| files(root.path(), layer));
    assert_eq!(left(), [2, 2, 2]);
    store.keep_vm_layers(vm.id, &[layers[1], layers[2], vm.writable]).unwrap();
    assert_eq!(left(), [2, 2, 2], "a clone depends on the first");
    let again = pin.clone();
    drop(pin);
    assert_eq!(left(), [2, 2, 2]);
    drop(again);
    assert_eq!(left(), [0, 2, 2]);
    store.keep_vm_layers(vm.id, &[layers[2], vm.writable]).unwrap();
    assert_eq!(left(), [0, 0, 2], "nothing references it");
    assert!(store.open_vm_layer(&vm.writable, true).is_ok());
    store.remove_vm(vm.id).unwrap();
    assert_eq!(store.vm_folders().unwrap(), []);
}

#[test]
fn the_last_release_removes_it() {
    let root = tempfile::tempdir().unwrap();
    let store = store(root.path());
    for _ in 0..200 {
        let mut vm = Vm::boot(&store);
        let layers = [freeze(&store, &mut vm), freeze(&store, &mut vm)];
        let pins = [hold(&store, &layers[..1]), hold(&store, &layers), hold(&store, &layers[1..])];
        std::thread::scope(|scope| {
            scope.spawn(|| store.remove_vm(vm.id).unwrap());
            for pin in pins {
                scope.spawn(|| drop(pin));
            }
        });
        assert_eq!((store.shared_layer_owners(), store.vm_folders().unwrap()), (vec![], vec![]));
    }
}

#[test]
fn a_vm_goes_although_its_layers_are_just_being_frozen() {
    let root = tempfile::tempdir().unwrap();
    let store = store(root.path());
    for shared in [false, true] {
        for _ in 0..300 {
            let mut vm = Vm::boot(&store);
            let _pin = shared.then(|| hold(&store, &[freeze(&store, &mut vm)]));
            let (id, mut layer) = (vm.id, vm.writable);
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    for _ in 0..4 {
                        let mut freezing = store.freezing();
                        let Ok(freeze) = freezing.freeze(&layer) else { return };
                        freezing.keep();
                        layer = freeze.next;
                    }
                });
                scope.spawn(|| store.remove_vm(id).unwrap());
            });
            // A second removal, as the caller that froze layers does once it learns that the VM is
            // gone.
            store.remove_vm(id).unwrap();
        }
        assert_eq!((store.shared_layer_owners(), store.vm_folders().unwrap()), (vec![], vec![]));
    }
}

#[test]
fn what_was_pinned_while_its_vm_went_is_there() {
    let root = tempfile::tempdir().unwrap();
    let store = store(root.path());
    let mut pinned = 0;
    for turn in 0..2000 {
        let mut vm = Vm::boot(&store);
        let layers = [freeze(&store, &mut vm), freeze(&store, &mut vm)];
        let both = std::sync::Barrier::new(2);
        let pin = std::thread::scope(|scope| {
            scope.spawn(|| {
                both.wait();
                store.remove_vm(vm.id).unwrap();
            });
            both.wait();
            // At each point of the removal on the other thread.
            let (begun, late) = (Instant::now(), Duration::from_nanos(turn % 200 * 500));
            while begun.elapsed() < late {
                std::hint::spin_loop();
            }
            let pin = store.pin("a clone", &[], &[], &layers).ok();
            if pin.is_some() {
                layers.iter().for_each(|layer| drop(store.open_frozen_layer(layer).unwrap()));
            }
            pin
        });
        pinned += usize::from(pin.is_some());
        drop(pin);
        assert_eq!((store.shared_layer_owners(), store.vm_folders().unwrap()), (vec![], vec![]));
    }
    println!("{pinned} of 2000 were pinned in time");
}
