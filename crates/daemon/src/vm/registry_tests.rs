use super::*;
use crate::fixture::{self, memory};
use crate::model::exit::exit_now;
use crate::model::state::Phase;
use dayfly_api::types::ExitKind;
use dayfly_units::CpuModel;
use proptest::prelude::*;
use std::collections::HashSet;
use std::path::Path;

fn config() -> Config {
    fixture::config(Path::new("/"))
}

fn facts() -> Facts {
    Facts {
        snapshot: None,
        ancestors: Vec::new(),
        fork: crate::model::facts::ForkFacts::default(),
        image: "i".parse().unwrap(),
        kernel: dayfly_store::KernelRef {
            name: "k".parse().unwrap(),
            release: "6.12".into(),
            digest: dayfly_store::Digest::of(b"k"),
        },
        config: Default::default(),
        vcpus: 1,
        max_vcpus: 0,
        cpu_model: CpuModel::Host,
        memory_bytes: 64 << 20,
        nets: 0,
        network: Default::default(),
        created_unix_ms: 0,
        init: None,
        ephemeral: false,
        auto_remove: false,
        labels: Default::default(),
        volumes: Vec::new(),
        limits: Default::default(),
        request: None,
    }
}

fn name(text: &str) -> Option<VmName> {
    Some(text.parse().unwrap())
}

#[test]
fn a_name_is_reserved_once_and_free_after_the_vm_is_forgotten() {
    let registry = Registry::default();
    let vm = registry.reserve(&config(), name("a"), facts(), memory(), None).unwrap();
    let again = registry.reserve(&config(), name("a"), facts(), memory(), None);
    assert_eq!(
        again.unwrap_err(),
        ReserveError::Taken { name: "a".parse().unwrap(), holder: vm.id }
    );
    assert_eq!(registry.len(), 1, "a refused reservation leaves nothing");
    registry.forget(&vm);
    registry.forget(&vm);
    assert!(registry.is_empty());
    registry.reserve(&config(), name("a"), facts(), memory(), None).unwrap();
}

#[test]
fn a_vm_that_starts_again_takes_the_place_of_the_ended_one_which_can_do_nothing_any_more() {
    let registry = Registry::default();
    let ended = registry.reserve(&config(), name("a"), facts(), memory(), None).unwrap();
    drop(ended.ended(exit_now(ExitKind::PowerOff, "off")));
    registry.release_slot(&ended);
    let vm = registry.restart(&ended, facts(), memory()).unwrap();
    assert_eq!((vm.id, &vm.name, vm.phase()), (ended.id, &ended.name, Phase::Starting));
    assert!(registry.holds(&vm) && !registry.holds(&ended));
    assert!(Arc::ptr_eq(&registry.find("a").unwrap(), &vm));
    assert_eq!(
        registry.restart(&ended, facts(), memory()).unwrap_err(),
        RestartError::Gone("a".parse().unwrap())
    );
    registry.forget(&ended);
    registry.release_slot(&ended);
    let other = registry.reserve(&config(), name("b"), facts(), memory(), None).unwrap();
    assert!(registry.holds(&vm) && other.slot != vm.slot);
    registry.forget(&vm);
    assert!(!registry.has(vm.id));
}

#[test]
fn a_name_that_reads_as_an_id_is_refused() {
    let refused =
        Registry::default().reserve(&config(), name("0123456789ab"), facts(), memory(), None);
    assert!(matches!(refused, Err(ReserveError::LooksLikeAnId(_))));
}

#[test]
fn a_vm_is_found_by_id_name_and_unique_start() {
    let registry = Registry::default();
    let vms: Vec<_> = (0..40)
        .map(|i| {
            registry.reserve(&config(), name(&format!("vm-{i}")), facts(), memory(), None).unwrap()
        })
        .collect();
    for vm in &vms {
        assert_eq!(registry.find(vm.name.as_str()).unwrap().id, vm.id);
        let id = vm.id.to_string();
        for len in 1..=id.len() {
            let start = &id[..len];
            let fits = vms.iter().filter(|v| v.id.to_string().starts_with(start)).count();
            match registry.find(start) {
                Ok(found) => assert_eq!((found.id, fits), (vm.id, 1), "{start}"),
                Err(FindError::Several { count, .. }) => assert_eq!(count, fits, "{start}"),
                Err(e) => panic!("{start}: {e}"),
            }
        }
    }
    for nothing in ["", "zzz", "0123456789abc", "vm-40", "../x", "A"] {
        assert!(matches!(registry.find(nothing), Err(FindError::None(_))), "{nothing:?}");
    }
}

#[test]
fn a_slot_outlives_no_process_and_is_never_shared() {
    let registry = Registry::default();
    let a = registry.reserve(&config(), None, facts(), memory(), None).unwrap();
    let b = registry.reserve(&config(), None, facts(), memory(), None).unwrap();
    assert_ne!(a.slot, b.slot);
    drop(a.ended(exit_now(ExitKind::Killed, "test")));
    registry.release_slot(&a);
    let c = registry.reserve(&config(), None, facts(), memory(), None).unwrap();
    assert_eq!(c.slot, a.slot, "slots are reused");
    // Forgetting the exited VM later must not release the slot a second time.
    registry.forget(&a);
    let d = registry.reserve(&config(), None, facts(), memory(), None).unwrap();
    assert!(![b.slot, c.slot].contains(&d.slot));
}

#[test]
fn a_warm_vmm_keeps_its_slot_until_a_vm_takes_it_or_it_is_given_back() {
    let registry = Registry::default();
    let (first, second) = (registry.vm_slot(0).unwrap(), registry.vm_slot(0).unwrap());
    assert_ne!((first.id, first.slot), (second.id, second.slot));
    assert!(registry.is_empty() && registry.vm_slots().len() == 2);
    let other = registry.reserve(&config(), name("a"), facts(), memory(), None).unwrap();
    let taken = registry.reserve(&config(), name("a"), facts(), memory(), Some(first));
    assert!(matches!(taken, Err(ReserveError::Taken { .. })));
    assert_eq!(registry.vm_slots().len(), 2, "a refused reservation leaves the slot");
    let vm = registry.reserve(&config(), name("b"), facts(), memory(), Some(first)).unwrap();
    assert_eq!((vm.id, vm.slot), (first.id, first.slot));
    assert_eq!(registry.vm_slots(), [second.id]);
    registry.release_unused(first);
    registry.release_unused(second);
    registry.release_unused(second);
    // Only the second slot is free again.
    let next = registry.vm_slot(0).unwrap();
    assert_eq!(next.slot, second.slot);
    assert!(![vm.slot, other.slot].contains(&registry.vm_slot(0).unwrap().slot));
}

proptest! {
    #[test]
    fn slots_in_use_are_distinct(steps in proptest::collection::vec((0u8..3, 0u32..50), 0..200)) {
        let mut slots = Slots::default();
        let mut used = HashSet::new();
        for (step, n) in steps {
            match step {
                0 => prop_assert!(used.insert(slots.take().unwrap())),
                1 => prop_assert_eq!(slots.take_exactly(n), used.insert(n)),
                _ => if used.remove(&n) { slots.give_back(n) },
            }
        }
    }
}
