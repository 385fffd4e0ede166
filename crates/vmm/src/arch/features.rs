//! The features of CPUs: which a [`CpuModel`] has, and which of a saved guest's CPU this host
//! lacks.
//!
//! CPUID has features as bits of registers. A guest looks at them once, when it boots, and patches
//! its kernel accordingly. So a saved guest runs only where each of its features is there.
//!
//! A model keeps what it names and takes away everything else, features of later CPUs included. A
//! feature is needed by the model, or is kept if this host has it: mitigations, and what every
//! server of that level has although the level does not name it.

use dayfly_units::CpuModel;
use kvm_bindings::{KVM_CPUID_FLAG_SIGNIFCANT_INDEX, kvm_cpuid_entry2};

/// A register of a CPUID leaf.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Register {
    Eax,
    Ebx,
    Ecx,
    Edx,
}
use Register::{Eax, Ebx, Ecx, Edx};

impl Register {
    const fn of(self, e: &kvm_cpuid_entry2) -> u32 {
        match self {
            Eax => e.eax,
            Ebx => e.ebx,
            Ecx => e.ecx,
            Edx => e.edx,
        }
    }
}

/// A register whose bits are features: leaf, sub-leaf, register.
type Place = (u32, u32, Register);

/// A bit of a register, and its name in Linux.
type Named = (u32, &'static str);
/// The same, for a feature of models.
type OfModel = (u32, &'static str, Class);

/// What a feature is to a model of some level or above.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Class {
    /// The model needs it (System V ABI for x86-64, 3.1.1).
    Needed(Level),
    /// The model has it if this host has it.
    Kept(Level),
}
use Class::{Kept, Needed};

impl Class {
    fn is_needed(self, model: Level) -> bool {
        matches!(self, Needed(level) if level <= model)
    }

    fn is_allowed(self, model: Level) -> bool {
        let (Needed(level) | Kept(level)) = self;
        level <= model
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Level {
    Base,
    V2,
    V3,
}
use Level::{Base, V2, V3};

const fn level(model: CpuModel) -> Option<Level> {
    match model {
        CpuModel::Host => None,
        CpuModel::V2 => Some(V2),
        CpuModel::V3 => Some(V3),
    }
}

/// KVM's own features for guests.
const KVM: Place = (0x4000_0001, 0, Eax);

/// The features of models.
#[rustfmt::skip]
const OF_MODELS: &[(Place, &[OfModel])] = &[
    ((1, 0, Edx), &[
        (0, "fpu", Needed(Base)), (1, "vme", Kept(Base)), (2, "de", Kept(Base)),
        (3, "pse", Kept(Base)), (4, "tsc", Kept(Base)), (5, "msr", Kept(Base)),
        (6, "pae", Kept(Base)), (7, "mce", Kept(Base)), (8, "cx8", Needed(Base)),
        (9, "apic", Kept(Base)), (11, "sep", Kept(Base)), (12, "mtrr", Kept(Base)),
        (13, "pge", Kept(Base)), (14, "mca", Kept(Base)), (15, "cmov", Needed(Base)),
        (16, "pat", Kept(Base)), (17, "pse36", Kept(Base)), (19, "clflush", Kept(Base)),
        (23, "mmx", Needed(Base)), (24, "fxsr", Needed(Base)), (25, "sse", Needed(Base)),
        (26, "sse2", Needed(Base)), (28, "ht", Kept(Base)),
    ]),
    ((1, 0, Ecx), &[
        (0, "pni", Needed(V2)), (1, "pclmulqdq", Kept(V2)), (9, "ssse3", Needed(V2)),
        (12, "fma", Needed(V3)), (13, "cx16", Needed(V2)), (19, "sse4_1", Needed(V2)),
        (20, "sse4_2", Needed(V2)), (21, "x2apic", Kept(Base)), (22, "movbe", Needed(V3)),
        (23, "popcnt", Needed(V2)), (24, "tsc_deadline_timer", Kept(Base)),
        (25, "aes", Kept(V2)), (26, "xsave", Needed(V3)), (27, "osxsave", Kept(V3)),
        (28, "avx", Needed(V3)), (29, "f16c", Needed(V3)), (30, "rdrand", Kept(V3)),
        (31, "hypervisor", Kept(Base)),
    ]),
    ((6, 0, Eax), &[(2, "arat", Kept(Base))]),
    ((7, 0, Ebx), &[
        (0, "fsgsbase", Kept(V3)), (3, "bmi1", Needed(V3)), (5, "avx2", Needed(V3)),
        (7, "smep", Kept(V3)), (8, "bmi2", Needed(V3)), (20, "smap", Kept(V3)),
    ]),
    ((7, 0, Edx), &[
        (10, "md_clear", Kept(Base)), (26, "spec_ctrl", Kept(Base)),
        (27, "intel_stibp", Kept(Base)), (29, "arch_capabilities", Kept(Base)),
        (31, "spec_ctrl_ssbd", Kept(Base)),
    ]),
    ((0xd, 0, Eax), &[
        (0, "state of x87", Kept(V3)), (1, "state of SSE", Kept(V3)),
        (2, "state of AVX", Needed(V3)),
    ]),
    ((0xd, 1, Eax), &[(0, "xsaveopt", Kept(V3))]),
    (KVM, &[
        (0, "KVM clocksource", Kept(Base)), (1, "KVM nop_io_delay", Kept(Base)),
        (3, "KVM clocksource2", Kept(Base)), (5, "KVM steal_time", Kept(Base)),
        (6, "KVM pv_eoi", Kept(Base)), (7, "KVM pv_unhalt", Kept(Base)),
        (9, "KVM pv_tlb_flush", Kept(Base)), (11, "KVM pv_send_ipi", Kept(Base)),
        (12, "KVM poll_control", Kept(Base)), (13, "KVM pv_sched_yield", Kept(Base)),
        (24, "KVM clocksource_stable", Kept(Base)),
    ]),
    // AMD repeats bits of leaf 1 here.
    ((0x8000_0001, 0, Edx), &[
        (0, "fpu", Kept(Base)), (1, "vme", Kept(Base)), (2, "de", Kept(Base)),
        (3, "pse", Kept(Base)), (4, "tsc", Kept(Base)), (5, "msr", Kept(Base)),
        (6, "pae", Kept(Base)), (7, "mce", Kept(Base)), (8, "cx8", Kept(Base)),
        (9, "apic", Kept(Base)), (11, "syscall", Needed(Base)), (12, "mtrr", Kept(Base)),
        (13, "pge", Kept(Base)), (14, "mca", Kept(Base)), (15, "cmov", Kept(Base)),
        (16, "pat", Kept(Base)), (17, "pse36", Kept(Base)), (20, "nx", Kept(Base)),
        (23, "mmx", Kept(Base)), (24, "fxsr", Kept(Base)), (27, "rdtscp", Kept(V2)),
        (29, "lm", Needed(Base)),
    ]),
    ((0x8000_0001, 0, Ecx), &[
        (0, "lahf_lm", Needed(V2)), (1, "cmp_legacy", Kept(Base)), (5, "abm", Needed(V3)),
        (22, "topoext", Kept(Base)),
    ]),
    ((0x8000_0007, 0, Edx), &[(8, "nonstop_tsc", Kept(Base))]),
    ((0x8000_0008, 0, Ebx), &[
        (12, "ibpb", Kept(Base)), (14, "ibrs", Kept(Base)), (15, "stibp", Kept(Base)),
        (24, "amd_ssbd", Kept(Base)), (25, "virt_ssbd", Kept(Base)),
    ]),
];

/// Names of features that no model but the host's has.
#[rustfmt::skip]
const OTHERS: &[(Place, &[Named])] = &[
    ((1, 0, Ecx), &[(3, "monitor"), (17, "pcid")]),
    ((7, 0, Ebx), &[
        (1, "tsc_adjust"), (4, "hle"), (9, "erms"), (10, "invpcid"), (11, "rtm"), (14, "mpx"),
        (16, "avx512f"), (17, "avx512dq"), (18, "rdseed"), (19, "adx"), (21, "avx512ifma"),
        (23, "clflushopt"), (24, "clwb"), (28, "avx512cd"), (29, "sha_ni"), (30, "avx512bw"),
        (31, "avx512vl"),
    ]),
    ((7, 0, Ecx), &[
        (1, "avx512vbmi"), (2, "umip"), (3, "pku"), (5, "waitpkg"), (6, "avx512_vbmi2"),
        (8, "gfni"), (9, "vaes"), (10, "vpclmulqdq"), (11, "avx512_vnni"),
        (12, "avx512_bitalg"), (14, "avx512_vpopcntdq"), (16, "la57"), (22, "rdpid"),
    ]),
    ((7, 0, Edx), &[
        (4, "fsrm"), (14, "serialize"), (22, "amx_bf16"), (24, "amx_tile"), (25, "amx_int8"),
    ]),
    ((7, 1, Eax), &[(4, "avx_vnni"), (5, "avx512_bf16")]),
    ((0xd, 0, Eax), &[
        (5, "state of AVX-512"), (9, "state of protection keys"), (18, "state of AMX"),
    ]),
    ((0xd, 1, Eax), &[(1, "xsavec"), (2, "xgetbv1"), (3, "xsaves")]),
    ((0x8000_0001, 0, Ecx), &[(6, "sse4a"), (7, "misalignsse"), (8, "3dnowprefetch")]),
    ((0x8000_0001, 0, Edx), &[(22, "mmxext"), (25, "fxsr_opt"), (26, "pdpe1gb")]),
    ((0x8000_0008, 0, Ebx), &[(0, "clzero"), (2, "xsaveerptr")]),
];

/// The registers whose bits are features, with the bits that say nothing of the host's CPU: KVM
/// derives them from other registers, or the VMM sets them itself.
const COMPARED: &[(Place, u32)] = &[
    ((1, 0, Ecx), 1 << 3 | 1 << 24 | 1 << 27 | 1 << 31),
    ((1, 0, Edx), 1 << 9 | 1 << 28),
    ((6, 0, Eax), 0),
    ((7, 0, Ebx), 0),
    ((7, 0, Ecx), 1 << 4),
    ((7, 0, Edx), 0),
    ((7, 1, Eax), 0),
    ((7, 1, Ebx), 0),
    ((7, 1, Ecx), 0),
    ((7, 1, Edx), 0),
    ((7, 2, Edx), 0),
    ((0xd, 0, Eax), 0),
    ((0xd, 0, Edx), 0),
    ((0xd, 1, Eax), 0),
    ((0xd, 1, Ecx), 0),
    ((0xd, 1, Edx), 0),
    (KVM, 0),
    ((0x8000_0001, 0, Ecx), 1 << 1 | 1 << 22),
    ((0x8000_0001, 0, Edx), 1 << 9),
    ((0x8000_0007, 0, Edx), 0),
    ((0x8000_0008, 0, Ebx), 0),
    ((0x8000_0021, 0, Eax), 0),
];

/// Bit of leaf 1, ECX: the local APIC's timer takes a deadline.
const TSC_DEADLINE: u32 = 1 << 24;

/// The entry that KVM takes for this leaf: the first, whatever its index if that says nothing.
fn entry(entries: &[kvm_cpuid_entry2], function: u32, index: u32) -> kvm_cpuid_entry2 {
    let any = |e: &kvm_cpuid_entry2| e.flags & KVM_CPUID_FLAG_SIGNIFCANT_INDEX == 0;
    let found = entries.iter().find(|e| e.function == function && (any(e) || e.index == index));
    found.copied().unwrap_or_default()
}

fn bits(entries: &[kvm_cpuid_entry2], (function, index, register): Place) -> u32 {
    register.of(&entry(entries, function, index))
}

/// The name of a feature, for people.
fn name((place, bit): (Place, u32)) -> String {
    let of_models = OF_MODELS.iter().filter(|(at, _)| *at == place).flat_map(|(_, bits)| *bits);
    let others = OTHERS.iter().filter(|(at, _)| *at == place).flat_map(|(_, bits)| *bits);
    let mut names = of_models.map(|(at, name, _)| (*at, *name)).chain(others.copied());
    if let Some((_, name)) = names.find(|(at, _)| *at == bit) {
        return name.to_owned();
    }
    let (function, index, register) = place;
    format!("CPUID {function:#x}.{index} {register:?} bit {bit}")
}

/// The names of the bits of `bits`.
fn names(place: Place, bits: u32) -> impl Iterator<Item = String> {
    (0..32).filter(move |bit| bits >> bit & 1 == 1).map(move |bit| name((place, bit)))
}

/// The features that `model` needs and the CPU `supported` lacks.
#[must_use]
pub fn needed(model: CpuModel, supported: &[kvm_cpuid_entry2]) -> Vec<String> {
    let Some(level) = level(model) else { return Vec::new() };
    let lacks = |(place, features): &(Place, &[OfModel])| {
        let has = bits(supported, *place);
        let wanted = features.iter().filter(|(_, _, class)| class.is_needed(level));
        let wanted = wanted.fold(0, |bits, (bit, ..)| bits | 1 << bit);
        names(*place, wanted & !has).collect::<Vec<_>>()
    };
    OF_MODELS.iter().flat_map(lacks).collect()
}

/// The bits of a register that a model of `level` may have.
fn allowed(place: Place, level: Level) -> u32 {
    OF_MODELS
        .iter()
        .filter(|(at, _)| *at == place)
        .flat_map(|(_, features)| *features)
        .filter(|(_, _, class)| class.is_allowed(level))
        .fold(0, |bits, (bit, ..)| bits | 1 << bit)
}

/// The bytes of an XSAVE area with the states of x87, SSE and AVX: where the one of AVX ends on
/// every CPU (Intel's manual, volume 1, 13.4).
pub const XSAVE_OF_AVX_BYTES: u32 = 832;

/// Takes away from `entries` what `model` does not have.
pub fn restrict(model: CpuModel, entries: &mut Vec<kvm_cpuid_entry2>) {
    let Some(level) = level(model) else { return };
    let mut brand = [0; 48];
    let text = format!("dayfly {model}");
    brand[..text.len()].copy_from_slice(text.as_bytes());
    entries.retain_mut(|e| {
        let keep = |register| allowed((e.function, e.index, register), level);
        let (eax, ebx, ecx, edx) = (keep(Eax), keep(Ebx), keep(Ecx), keep(Edx));
        match (e.function, e.index) {
            // Vendor and highest leaves, caches, frequencies, topology: no features.
            (0 | 2 | 4 | 0xb | 0x15 | 0x16 | 0x1f, _)
            | (0x4000_0000 | 0x8000_0000 | 0x8000_0005 | 0x8000_0006, _)
            | (0x8000_001d | 0x8000_001e, _) => {}
            // Family, model, stepping, and what this vCPU is.
            (1 | 0x8000_0001, _) => (e.ecx, e.edx) = (e.ecx & ecx, e.edx & edx),
            // The numbers of address bits, and topology.
            (0x8000_0008, _) => (e.ebx, e.edx) = (e.ebx & ebx, 0),
            (0xd, 0) if level >= V3 => {
                (e.eax, e.edx) = (e.eax & eax, 0);
                (e.ebx, e.ecx) = (XSAVE_OF_AVX_BYTES, XSAVE_OF_AVX_BYTES);
            }
            (0xd, 1) if level >= V3 => (e.eax, e.ebx, e.ecx, e.edx) = (e.eax & eax, 0, 0, 0),
            (0xd, 2) if level >= V3 => {}
            (6 | 7 | 0x8000_0007, 0) | (0x4000_0001, _) => {
                (e.eax, e.ebx) = (e.eax & eax, e.ebx & ebx);
                (e.ecx, e.edx) = (e.ecx & ecx, e.edx & edx);
            }
            (0x8000_0002..=0x8000_0004, _) => {
                let at = (e.function - 0x8000_0002) as usize * 16;
                let word = |n: usize| {
                    let at = at + 4 * n;
                    u32::from_le_bytes([brand[at], brand[at + 1], brand[at + 2], brand[at + 3]])
                };
                (e.eax, e.ebx, e.ecx, e.edx) = (word(0), word(1), word(2), word(3));
            }
            _ => return false,
        }
        true
    });
}

/// What the CPU of a saved guest has and this host's lacks: the guest cannot run here. `supported`
/// is what KVM supports here, `tsc_deadline` whether its local APIC has that timer.
#[must_use]
pub fn lacking(
    saved: &[kvm_cpuid_entry2],
    supported: &[kvm_cpuid_entry2],
    tsc_deadline: bool,
) -> Vec<String> {
    let mut lacks = Vec::new();
    let vendor = |entries: &[_]| {
        let e = entry(entries, 0, 0);
        let text = [e.ebx, e.edx, e.ecx].map(u32::to_le_bytes).concat();
        text.escape_ascii().to_string()
    };
    let (theirs, ours) = (vendor(saved), vendor(supported));
    if theirs != ours {
        lacks.push(format!("the vendor {theirs} (this one is {ours})"));
    }
    // The size of a physical address, which the guest's page tables may use.
    let [theirs, ours] = [saved, supported].map(|e| bits(e, (0x8000_0008, 0, Eax)) & 0xff);
    if theirs > ours {
        lacks.push(format!("{theirs} bits of physical addresses (this one has {ours})"));
    }
    for &(place, derived) in COMPARED {
        let more = bits(saved, place) & !bits(supported, place) & !derived;
        lacks.extend(names(place, more));
    }
    if bits(saved, (1, 0, Ecx)) & TSC_DEADLINE != 0 && !tsc_deadline {
        lacks.push("tsc_deadline_timer".to_owned());
    }
    // Where the guest's XSAVE areas have the states beyond AVX.
    for e in saved.iter().filter(|e| e.function == 0xd && e.index >= 2) {
        let here = entry(supported, 0xd, e.index);
        if (e.eax, e.ebx) != (0, 0) && (e.eax, e.ebx) != (here.eax, here.ebx) {
            lacks.push(format!("the layout of state {} in an XSAVE area", e.index));
        }
    }
    lacks
}

#[cfg(test)]
#[path = "features_tests.rs"]
mod tests;
