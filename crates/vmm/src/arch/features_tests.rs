//! Tests of [`super`]: models take away what they do not have, and a saved CPU is compared bit by
//! bit.

use super::*;
use dayfly_units::CpuModel;
use proptest::prelude::*;

fn new(function: u32, index: u32, registers: [u32; 4]) -> kvm_cpuid_entry2 {
    let [eax, ebx, ecx, edx] = registers;
    let indexed = matches!(function, 4 | 7 | 0xb | 0xd | 0x14 | 0x1d | 0x8000_001d);
    let flags = if indexed { KVM_CPUID_FLAG_SIGNIFCANT_INDEX } else { 0 };
    kvm_cpuid_entry2 { function, index, flags, eax, ebx, ecx, edx, ..Default::default() }
}

/// A CPU with every bit of every leaf that anything here looks at, and of some others.
fn all() -> Vec<kvm_cpuid_entry2> {
    let leaves = [
        (0, 0),
        (1, 0),
        (2, 0),
        (4, 0),
        (4, 1),
        (6, 0),
        (7, 0),
        (7, 1),
        (7, 2),
        (0xa, 0),
        (0xb, 0),
        (0xd, 0),
        (0xd, 1),
        (0xd, 2),
        (0xd, 5),
        (0x14, 0),
        (0x19, 0),
        (0x1d, 0),
        (0x4000_0000, 0),
        (0x4000_0001, 0),
        (0x8000_0000, 0),
        (0x8000_0001, 0),
        (0x8000_0002, 0),
        (0x8000_0003, 0),
        (0x8000_0004, 0),
        (0x8000_0005, 0),
        (0x8000_0006, 0),
        (0x8000_0007, 0),
        (0x8000_0008, 0),
        (0x8000_001d, 0),
        (0x8000_001e, 0),
        (0x8000_0021, 0),
    ];
    leaves.iter().map(|&(function, index)| new(function, index, [u32::MAX; 4])).collect()
}

fn restricted(model: CpuModel) -> Vec<kvm_cpuid_entry2> {
    let mut entries = all();
    restrict(model, &mut entries);
    entries
}

/// The lowest host for a model: a CPU with what the model needs and nothing else.
fn lowest(model: CpuModel) -> Vec<kvm_cpuid_entry2> {
    let mut entries: Vec<_> = all().into_iter().map(|e| new(e.function, e.index, [0; 4])).collect();
    for (place, features) in OF_MODELS {
        let e = entries.iter_mut().find(|e| (e.function, e.index) == (place.0, place.1)).unwrap();
        for (bit, _, class) in *features {
            if class.is_needed(level(model).unwrap()) {
                match place.2 {
                    Eax => e.eax |= 1 << bit,
                    Ebx => e.ebx |= 1 << bit,
                    Ecx => e.ecx |= 1 << bit,
                    Edx => e.edx |= 1 << bit,
                }
            }
        }
    }
    entries
}

#[test]
fn a_model_has_what_its_level_names_and_nothing_above_it() {
    let (v2, v3) = (restricted(CpuModel::V2), restricted(CpuModel::V3));
    let has = |entries: &[_], place, bit: u32| bits(entries, place) >> bit & 1 == 1;
    // SSE 4.2, POPCNT, CMPXCHG16B; LAHF.
    for bit in [20, 23, 13] {
        assert!(has(&v2, (1, 0, Ecx), bit) && has(&v3, (1, 0, Ecx), bit));
    }
    assert!(has(&v2, (0x8000_0001, 0, Ecx), 0));
    // AVX, FMA, F16C, MOVBE, XSAVE; AVX2, BMI1, BMI2; LZCNT.
    let of_v3 = [28, 12, 29, 22, 26].map(|bit| ((1, 0, Ecx), bit));
    let more = [5, 3, 8].map(|bit| ((7, 0, Ebx), bit));
    for (place, bit) in of_v3.into_iter().chain(more).chain([((0x8000_0001, 0, Ecx), 5)]) {
        assert!(!has(&v2, place, bit) && has(&v3, place, bit), "{}", name((place, bit)));
    }
    // AVX-512F, SHA, PKU, LA57, PCID, 3DNow!, VMX; the states of AVX-512 and of AMX.
    let above = [
        ((7, 0, Ebx), 16),
        ((7, 0, Ebx), 29),
        ((7, 0, Ecx), 3),
        ((7, 0, Ecx), 16),
        ((1, 0, Ecx), 17),
        ((0x8000_0001, 0, Edx), 31),
        ((1, 0, Ecx), 5),
        ((0xd, 0, Eax), 5),
        ((0xd, 0, Eax), 18),
        ((7, 1, Eax), 4),
    ];
    for (place, bit) in above {
        assert!(!has(&v2, place, bit) && !has(&v3, place, bit), "{}", name((place, bit)));
    }
    // Mitigations stay.
    assert!(has(&v2, (7, 0, Edx), 26) && has(&v3, (0x8000_0008, 0, Ebx), 12));
    assert_eq!(v2.iter().filter(|e| e.function == 0xd).count(), 0, "no XSAVE at this level");
    assert_eq!(entry(&v3, 0xd, 0).ecx, XSAVE_OF_AVX_BYTES);
    assert!(entry(&v3, 0xd, 5) == kvm_cpuid_entry2::default());
    let brand: Vec<u8> = [2, 3, 4]
        .map(|n| entry(&v3, 0x8000_0000 | n, 0))
        .iter()
        .flat_map(|e| [e.eax, e.ebx, e.ecx, e.edx].map(u32::to_le_bytes).concat())
        .collect();
    assert!(brand.starts_with(b"dayfly x86-64-v3\0"));
    assert_eq!(restricted(CpuModel::Host).len(), all().len());
}

/// Whatever else a host has, a guest of a level sees the same features on all of them, if they keep
/// the same.
#[test]
fn each_bit_of_a_model_is_in_the_table() {
    for model in [CpuModel::V2, CpuModel::V3] {
        let (least, most) = (lowest(model), restricted(model));
        assert_eq!(needed(model, &least), Vec::<String>::new());
        let mut seen = least.clone();
        restrict(model, &mut seen);
        for (place, _) in COMPARED {
            let (least, seen) = (bits(&least, *place), bits(&seen, *place));
            assert_eq!(least, seen, "{place:?}: a model keeps what it needs");
            let allowed = allowed(*place, level(model).unwrap());
            assert_eq!(bits(&most, *place) & !allowed, 0, "{place:?}");
        }
    }
}

#[test]
fn what_a_host_lacks_of_a_needed_level_is_named() {
    let mut here = all();
    assert_eq!(needed(CpuModel::V3, &here), Vec::<String>::new());
    here.iter_mut().find(|e| e.function == 7 && e.index == 0).unwrap().ebx &= !(1 << 5);
    assert_eq!(needed(CpuModel::V3, &here), ["avx2"]);
    assert_eq!(needed(CpuModel::V2, &here), Vec::<String>::new());
    assert_eq!(needed(CpuModel::Host, &[]), Vec::<String>::new());
    assert!(needed(CpuModel::V2, &[]).contains(&"sse4_2".to_owned()));
}

#[test]
fn vendor_addresses_timer_and_layout_are_compared() {
    let here = all();
    assert_eq!(lacking(&here, &here, true), Vec::<String>::new());
    assert_eq!(lacking(&here, &here, false), ["tsc_deadline_timer"]);
    let with = |function, index, change: fn(&mut kvm_cpuid_entry2)| {
        let mut saved = all();
        change(saved.iter_mut().find(|e| (e.function, e.index) == (function, index)).unwrap());
        lacking(&saved, &here, true)
    };
    let text = with(0, 0, |e| (e.ebx, e.edx, e.ecx) = (0x756e_6547, 0x4965_6e69, 0x1b_5b1b));
    let says = "the vendor GenuineI\\x1b[\\x1b\\x00 (this one is ";
    assert!(text.len() == 1 && text[0].starts_with(says), "nothing reaches a terminal: {text:?}");
    // KVM does not look at this index, so the features are compared.
    let mut moved = here.clone();
    moved[1].index = 7;
    let mut less = here.clone();
    less[1].ecx &= !(1 << 20);
    assert_eq!(moved[1].function, 1);
    assert_eq!(lacking(&moved, &less, true), ["sse4_2"]);
    let narrower = |change: fn(&mut kvm_cpuid_entry2)| {
        let mut here = all();
        change(here.iter_mut().find(|e| e.function == 0x8000_0008).unwrap());
        lacking(&all(), &here, true)
    };
    let text = narrower(|e| e.eax = 40);
    assert_eq!(text, ["255 bits of physical addresses (this one has 40)"]);
    assert_eq!(with(0xd, 5, |e| e.ebx = 1088), ["the layout of state 5 in an XSAVE area"]);
    assert_eq!(with(0xd, 5, |e| (e.eax, e.ebx) = (0, 0)), Vec::<String>::new());
}

proptest! {
    /// Each bit of a compared register that only the saved CPU has is named, and no other.
    #[test]
    fn a_bit_that_is_missing_here_is_named(which in 0..COMPARED.len(), bit in 0..32_u32) {
        let (place, derived) = COMPARED[which];
        let mut here = all();
        let e = here.iter_mut().find(|e| (e.function, e.index) == (place.0, place.1)).unwrap();
        let register = match place.2 {
            Eax => &mut e.eax,
            Ebx => &mut e.ebx,
            Ecx => &mut e.ecx,
            Edx => &mut e.edx,
        };
        *register &= !(1 << bit);
        let expected = if derived >> bit & 1 == 1 { vec![] } else { vec![name((place, bit))] };
        prop_assert_eq!(lacking(&all(), &here, true), expected);
        prop_assert_eq!(lacking(&here, &all(), true), Vec::<String>::new());
    }
}
