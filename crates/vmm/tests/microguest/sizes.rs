//! A clone with more vCPUs than its snapshot has.

use crate::harness::{Snapshot, Vmm};
use crate::room::{BINARY, MIB, Room, threads};
use dayfly_microguest::cpus;
use dayfly_units::needs;
use dayfly_vmm::arch::{cpuid, layout};
use dayfly_vmm::config::{MAX_VCPUS, Shape};
use dayfly_vmm::control::ExitReason;
use dayfly_vmm::state::{self, VmState};
use kvm_bindings::KVM_MP_STATE_UNINITIALIZED;
use std::path::Path;

fn read(snapshot: &Snapshot) -> VmState {
    state::decode(&std::fs::read(&snapshot.state).unwrap()).unwrap()
}

/// The same snapshot for VMMs with this number of vCPUs.
fn of(snapshot: &Snapshot, vcpus: u8) -> Snapshot {
    Snapshot { shape: Shape { vcpus, ..snapshot.shape }, ..snapshot.clone() }
}

fn restored(room: &Room, name: &str, of: &Snapshot, orders: [u8; 16]) -> Vmm {
    Vmm::restore(Path::new(BINARY), &room.path(name), of, orders, false)
}

/// A saved guest of one vCPU that knows of `max_vcpus` and starts others when it is ordered to.
fn snapshot(room: &Room, max_vcpus: u8) -> Snapshot {
    let words = format!("cpus={:x}", layout::GENERATION.0);
    let mut vm = room.boot_sized("small", &words, 64 * MIB, (1, max_vcpus), false);
    vm.wait_for("ready\n", 30);
    let snapshot = vm.save(&room.path("snapshot"));
    assert_eq!(snapshot.shape.known_vcpus(), max_vcpus);
    snapshot
}

#[test]
fn a_snapshot_of_one_vcpu_serves_any_number_up_to_that_which_its_guest_knows() {
    if !needs::kvm() {
        return;
    }
    let room = Room::new();
    let small = snapshot(&room, MAX_VCPUS);
    let first = read(&small).vcpus[0].clone();
    for vcpus in [1, 2, 4, MAX_VCPUS] {
        let name = format!("of {vcpus}");
        // The guest starts all of them, and tries those that do not exist.
        let mut clone = restored(&room, &name, &of(&small, vcpus), cpus(vcpus, MAX_VCPUS, 0));
        clone.wait_for(&format!("cpus {vcpus:x} up {vcpus:x}\n"), 120);
        let named = threads(&clone);
        let threads = named.iter().filter(|(name, _)| name.starts_with("vcpu")).count();
        assert_eq!(threads, usize::from(vcpus));
        // What it has started goes on in a snapshot of it, whose least size is its own.
        let saved = clone.save(&room.path(&format!("{name}, saved")));
        assert_eq!(saved.shape.vcpus, vcpus);
        let state = read(&saved);
        assert_eq!(state.vcpus.len(), usize::from(vcpus));
        for (id, vcpu) in (0..).zip(&state.vcpus) {
            assert_ne!(vcpu.mp_state.mp_state, KVM_MP_STATE_UNINITIALIZED);
            assert_eq!(vcpu.tsc_khz, first.tsc_khz);
            assert_eq!(vcpu.tsc_offset, state.vcpus[0].tsc_offset, "one TSC for all");
            let wanted = cpuid::with_apic_id(&state.vcpus[0].cpuid, id);
            assert!(cpuid::alike(&vcpu.cpuid, &wanted), "vCPU {id}");
        }
        drop(clone);
        if vcpus == 4 {
            let mut again = restored(&room, "again", &saved, cpus(4, MAX_VCPUS, 1));
            again.wait_for("cpus 4 up 4\n", 120);
            // And it can grow once more.
            let mut more = restored(&room, "more", &of(&saved, 6), cpus(6, MAX_VCPUS, 2));
            more.wait_for("cpus 6 up 6\n", 120);
            let fewer = of(&saved, 3);
            let (record, _) = restored(&room, "fewer", &fewer, cpus(3, 3, 3)).wait_exit(10);
            assert!(record.message.contains("vCPUs: expected 3"), "{}", record.message);
        }
    }
}

#[test]
fn a_vcpu_that_the_guest_does_not_start_waits_and_is_saved_so() {
    if !needs::kvm() {
        return;
    }
    let room = Room::new();
    let small = snapshot(&room, 4);
    let mut clone = restored(&room, "lazy", &of(&small, 4), cpus(2, 2, 0));
    clone.wait_for("cpus 2 up 2\n", 60);
    let saved = clone.save(&room.path("saved"));
    let state = read(&saved);
    let waits = |vcpu: &dayfly_vmm::vcpu::state::VcpuState| {
        vcpu.mp_state.mp_state == KVM_MP_STATE_UNINITIALIZED
    };
    assert_eq!(state.vcpus.iter().map(waits).collect::<Vec<_>>(), [false, false, true, true]);
    // A clone of it may start the rest.
    let mut later = restored(&room, "later", &saved, cpus(4, 4, 1));
    later.wait_for("cpus 4 up 4\n", 60);
}

#[test]
fn more_vcpus_than_the_guest_knows_of_are_refused_with_the_next_step() {
    if !needs::kvm() {
        return;
    }
    let room = Room::new();
    let small = snapshot(&room, 1);
    let (record, _) = restored(&room, "grown", &of(&small, 4), cpus(4, 4, 0)).wait_exit(10);
    assert_eq!(record.reason, ExitReason::Failed);
    let expected = "vCPUs: expected 1 to 1, those that the snapshot's guest knows of, got 4; bake";
    assert!(record.message.contains(expected), "{}", record.message);
}
