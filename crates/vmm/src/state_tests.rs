//! No bytes make `decode` panic, and damaged bytes are refused.

use super::*;
use crate::virtio::{BalloonState, KindState, QueueRegisters, TransportState};
use dayfly_units::sealed::{HEADER_BYTES, seal};
use kvm_bindings::{
    kvm_cpuid_entry2, kvm_debugregs, kvm_lapic_state, kvm_mp_state, kvm_regs, kvm_sregs,
    kvm_vcpu_events, kvm_xcrs,
};
use proptest::prelude::*;

fn vcpu(seed: u64) -> VcpuState {
    VcpuState {
        cpuid: vec![kvm_cpuid_entry2 { function: 1, eax: 2, ..Default::default() }; 3],
        mp_state: kvm_mp_state::default(),
        regs: kvm_regs { rip: seed, ..Default::default() },
        sregs: kvm_sregs::default(),
        xsave: vec![7; 1024],
        xcrs: kvm_xcrs::default(),
        debug: kvm_debugregs::default(),
        lapic: kvm_lapic_state::default(),
        msrs: vec![(0x10, seed), (0x6e0, 0)],
        tsc_khz: 2_000_000,
        tsc_offset: Some(seed.wrapping_neg()),
        events: kvm_vcpu_events::default(),
    }
}

fn sample() -> VmState {
    VmState {
        memory_bytes: 256 << 20,
        holes: vec![(0, 1 << 20), (4 << 20, 8 << 20)],
        vcpus: vec![vcpu(1), vcpu(2)],
        irqchips: [0, 1, 2].map(|chip_id| kvm_irqchip { chip_id, ..Default::default() }),
        pit: kvm_pit_state2::default(),
        clock: kvm_clock_data { clock: 5, ..Default::default() },
        serial: SerialSave { received: vec![1, 2, 3], ..SerialSave::default() },
        devices: DeviceStates { devices: Vec::new() },
    }
}

/// A VM with a balloon, as version 2 has it.
fn sample_with_balloon() -> VmState {
    let queue = QueueRegisters { size: 32, desc: 0x1000, ready: true, ..Default::default() };
    let transport = TransportState {
        status: 15,
        interrupt_status: 2,
        driver_features: 1 << 32 | 1 << 5,
        foreign_features: false,
        device_features_sel: 0,
        driver_features_sel: 1,
        queue_sel: 3,
        queues: vec![queue; 4],
    };
    let kind = KindState::Balloon(BalloonState { target_pages: 512, actual_pages: 300 });
    let devices = vec![DeviceState { device_id: 5, transport, kind }];
    VmState { devices: DeviceStates { devices }, ..sample() }
}

#[test]
fn what_was_encoded_decodes() {
    let bytes = encode(&sample()).unwrap();
    let state = decode(&bytes).unwrap();
    assert_eq!((state.vcpus[1].regs.rip, state.vcpus[1].msrs[0]), (2, (0x10, 2)));
    assert_eq!(encode(&state).unwrap(), bytes);
}

#[test]
fn every_truncation_is_refused() {
    let bytes = encode(&sample()).unwrap();
    for len in 0..bytes.len() {
        assert!(decode(&bytes[..len]).is_err(), "truncated to {len} of {} bytes", bytes.len());
    }
    // Truncated before the seal: the envelope is whole, the payload is not.
    let payload = &bytes[HEADER_BYTES..];
    for len in 0..payload.len() {
        assert!(decode(&seal(&MAGIC, VERSION, &payload[..len])).is_err(), "payload of {len} bytes");
    }
    let mut longer = payload.to_vec();
    longer.push(0);
    assert!(matches!(
        decode(&seal(&MAGIC, VERSION, &longer)),
        Err(DecodeError::Trailing { extra: 1, .. })
    ));
}

#[test]
fn every_flipped_bit_of_the_header_is_refused() {
    let bytes = encode(&sample()).unwrap();
    for bit in 0..HEADER_BYTES * 8 {
        let mut flipped = bytes.clone();
        flipped[bit / 8] ^= 1 << (bit % 8);
        assert!(matches!(decode(&flipped), Err(DecodeError::Seal(_))), "flipped bit {bit}");
    }
}

#[test]
fn a_foreign_version_is_named_as_one() {
    let text = decode(&seal(&MAGIC, VERSION + 1, b"")).unwrap_err().to_string();
    assert_eq!(
        text,
        format!("state file: version at byte 40: expected 1 to {VERSION}, got {}", VERSION + 1)
    );
}

#[test]
fn what_no_vm_has_is_refused() {
    let refused = |change: &dyn Fn(&mut VmState)| {
        let mut state = sample();
        change(&mut state);
        decode(&encode(&state).unwrap()).unwrap_err()
    };
    assert!(matches!(refused(&|s| s.vcpus.clear()), DecodeError::Vcpus(0)));
    assert!(matches!(refused(&|s| s.vcpus = vec![vcpu(1); 17]), DecodeError::Vcpus(17)));
    assert!(matches!(refused(&|s| s.memory_bytes += 1), DecodeError::Memory(_)));
    assert!(matches!(refused(&|s| s.memory_bytes = u64::MAX), DecodeError::Memory(_)));
    assert!(matches!(refused(&|s| s.holes = vec![(0, 1); MAX_HOLES + 1]), DecodeError::Memory(_)));
    assert!(matches!(
        refused(&|s| s.irqchips[2].chip_id = 1),
        DecodeError::Irqchip { at: 2, got: 1 }
    ));
    assert!(matches!(refused(&|s| s.serial.received = vec![0; 65]), DecodeError::Serial(65)));
    assert!(matches!(refused(&|s| s.vcpus[0].msrs = vec![(0, 0); 1025]), DecodeError::Vcpu(_)));
    assert!(matches!(
        refused(&|s| s.vcpus[0].xsave = vec![0; (16 << 10) + 1]),
        DecodeError::Vcpu(_)
    ));
}

/// A change of the encoding without a new version makes old snapshots unreadable, or worse, wrongly
/// readable. When this fails, raise `VERSION`, and put the digest printed here in its place.
#[test]
fn the_encoding_of_this_version_has_not_changed() {
    let of = |state: &VmState| {
        let bytes = encode(state).unwrap();
        let digest: String = bytes[64..96].iter().map(|byte| format!("{byte:02x}")).collect();
        (bytes[40], digest)
    };
    let (version, digest) = of(&sample());
    assert_eq!(
        (version, digest.as_str()),
        (1, "2a8528fec1fdb2744a072b31198e6ada26218d885cf55da79e00f5f0d5813ed7")
    );
    let (version, digest) = of(&sample_with_balloon());
    assert_eq!(
        (version, digest.as_str()),
        (2, "a20eac5f5f46612ce518a28eb58cae6949bc34a18051514c2ca298fffb2451c7")
    );
}

#[test]
fn the_state_of_version_1_is_read() {
    let bytes = encode(&sample()).unwrap();
    let frozen = crate::golden::golden("state-1", &bytes);
    assert!(frozen == bytes);
    let state = decode(&frozen).unwrap();
    assert_eq!((state.vcpus[1].regs.rip, state.vcpus[1].msrs[0]), (2, (0x10, 2)));
    assert_eq!((state.holes, state.serial.received), (sample().holes, vec![1, 2, 3]));
}

#[test]
fn the_state_of_version_2_is_read() {
    let bytes = encode(&sample_with_balloon()).unwrap();
    let frozen = crate::golden::golden("state-2", &bytes);
    assert!(frozen == bytes);
    assert_eq!(decode(&frozen).unwrap().devices, sample_with_balloon().devices);
}

proptest! {
    #[test]
    fn no_sealed_bytes_panic(payload in proptest::collection::vec(any::<u8>(), 0..4096)) {
        let _ = decode(&seal(&MAGIC, VERSION, &payload));
    }

    #[test]
    fn no_changed_state_panics(
        changes in proptest::collection::vec((any::<usize>(), any::<u8>()), 1..20),
    ) {
        let bytes = encode(&sample()).unwrap();
        let mut payload = bytes[HEADER_BYTES..].to_vec();
        for (at, byte) in changes {
            let at = at % payload.len();
            payload[at] = byte;
        }
        if let Ok(state) = decode(&seal(&MAGIC, VERSION, &payload)) {
            prop_assert!(state.vcpus.len() <= usize::from(MAX_VCPUS));
        }
    }
}
