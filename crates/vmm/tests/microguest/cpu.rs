//! Guests of a CPU model, and saved guests whose CPU has more than this host's.

use crate::harness::{Snapshot, write_file};
use crate::room::Room;
use dayfly_microguest::End;
use dayfly_units::{CpuModel, needs};
use dayfly_vmm::arch::cpuid::Supported;
use dayfly_vmm::config::Shape;
use dayfly_vmm::control::ExitReason;
use dayfly_vmm::state::{self, VmState};
use kvm_bindings::kvm_cpuid_entry2;
use kvm_ioctls::Kvm;

fn leaf(state: &VmState, function: u32, index: u32) -> Option<&kvm_cpuid_entry2> {
    state.vcpus[1].cpuid.iter().find(|e| (e.function, e.index) == (function, index))
}

fn read(snapshot: &Snapshot) -> VmState {
    state::decode(&std::fs::read(&snapshot.state).unwrap()).unwrap()
}

/// The same snapshot with another state.
fn with(room: &Room, name: &str, snapshot: &Snapshot, state: &VmState) -> Snapshot {
    let path = room.path(name);
    write_file(&path, &state::encode(state).unwrap());
    Snapshot { state: path, ..snapshot.clone() }
}

#[test]
fn a_guest_of_a_level_has_its_features_and_its_clones_go_on() {
    if !needs::kvm() {
        return;
    }
    let room = Room::new();
    let supported = Supported::new(&Kvm::new().unwrap()).unwrap();
    for model in [CpuModel::V2, CpuModel::V3] {
        let mut vm = room.boot_of(model);
        if let Err(lacking) = supported.check(model) {
            let (record, _) = vm.wait_exit(10);
            let expected = format!("CPU model {model}: this host's CPU lacks ");
            assert!(lacking.to_string().starts_with(&expected), "{lacking}");
            assert!(record.message.contains(&lacking.to_string()), "{}", record.message);
            continue;
        }
        vm.wait_for("ready\n", 30);
        let snapshot = vm.save(&room.path(&format!("snapshot of {model}")));
        let state = read(&snapshot);
        let one = leaf(&state, 1, 0).unwrap();
        assert_eq!(one.ecx >> 20 & 1, 1, "SSE 4.2");
        assert_eq!(one.ecx >> 28 & 1, u32::from(model == CpuModel::V3), "AVX");
        assert_eq!(leaf(&state, 7, 0).map_or(0, |e| e.ebx & !0x0010_01a9), 0, "nothing above v3");
        assert_eq!(leaf(&state, 0xd, 0).is_some(), model == CpuModel::V3, "XSAVE");
        assert_eq!(leaf(&state, 0x8000_0002, 0).unwrap().eax, u32::from_le_bytes(*b"dayf"));
        // In a VMM that was made for the model, and in one that was made for the host's own.
        for (seed, cpu_model) in [(0x71, model), (0x72, CpuModel::Host)] {
            let shape = Shape { cpu_model, ..snapshot.shape };
            let of = Snapshot { shape, ..snapshot.clone() };
            let name = format!("clone of {model} as {cpu_model}");
            let mut clone = room.clone(&name, &of, seed, End::Not);
            clone.wait_for(&format!("obeyed {seed:x}\n"), 60);
            let again = clone.save(&room.path(&format!("{name}, saved")));
            let cpuid = read(&again).vcpus[1].cpuid.clone();
            assert!(cpuid == state.vcpus[1].cpuid, "a clone has the CPU of its snapshot");
        }
    }
}

#[test]
fn a_guest_whose_cpu_has_more_than_this_host_s_is_refused_by_name() {
    if !needs::kvm() {
        return;
    }
    let room = Room::new();
    let (_parent, snapshot) = room.snapshot(2, false);
    let refused = |name: &str, change: &dyn Fn(&mut VmState), expected: &str| {
        let mut state = read(&snapshot);
        change(&mut state);
        let of = with(&room, &format!("{name}.state"), &snapshot, &state);
        let (record, _) = room.clone(name, &of, 0x73, End::Not).wait_exit(10);
        assert_eq!(record.reason, ExitReason::Failed);
        assert!(record.message.contains(expected), "{name}: {}", record.message);
    };
    let more = |function, index, change: &'static dyn Fn(&mut kvm_cpuid_entry2)| {
        move |state: &mut VmState| {
            let cpuid = &mut state.vcpus[1].cpuid;
            let found = cpuid.iter_mut().find(|e| (e.function, e.index) == (function, index));
            change(found.unwrap());
        }
    };
    // Bits that no CPU has.
    let says = "lacks CPUID 0x1.0 Ecx bit 16";
    refused("a feature", &more(1, 0, &|e| e.ecx |= 1 << 16), says);
    refused("a vendor", &more(0, 0, &|e| e.ebx = 0x1b5b_1b5b), "the vendor [\\x1b[\\x1b");
    refused("addresses", &more(0x8000_0008, 0, &|e| e.eax |= 0xff), "255 bits of physical");
    refused("KVM", &more(0x4000_0001, 0, &|e| e.eax = u32::MAX), "CPUID 0x40000001.0 Eax bit ");
}

/// Another host's CPU may have fewer or more states than this one's.
#[test]
fn an_xsave_area_of_another_length_fits_if_its_states_are_up_to_avx() {
    if !needs::kvm() {
        return;
    }
    let room = Room::new();
    let (_parent, snapshot) = room.snapshot(1, false);
    let longer = |name: &str, states: u32| {
        let mut state = read(&snapshot);
        let area = &mut state.vcpus[0].xsave;
        area.extend([0x5a5a_5a5a; 64]);
        area[128] = area[128] & 0b111 | states;
        with(&room, &format!("{name}.state"), &snapshot, &state)
    };
    let mut clone = room.clone("up to AVX", &longer("up to AVX", 0), 0x74, End::Not);
    clone.wait_for("obeyed 74\n", 60);
    let of = longer("beyond", 1 << 9);
    let (record, _) = room.clone("beyond", &of, 0x75, End::Not).wait_exit(10);
    assert!(record.message.contains("with states beyond AVX"), "{}", record.message);
}
