//! The CPUID that guests see: the features that KVM supports and the VM's CPU model has
//! ([`features`]), presented as one socket of cores without hyper-threads, one for each vCPU that
//! the guest or a clone of it may have.
//!
//! Three features are left out on purpose:
//! - nested virtualisation (VMX, SVM), so that there is no nested state to save;
//! - asynchronous page faults, because a "page ready" event would be lost between save and load;
//! - the PMU, because its counters belong to the host.

use super::features;
use dayfly_units::CpuModel;
use kvm_bindings::{CpuId, KVM_MAX_CPUID_ENTRIES, kvm_cpuid_entry2};
use kvm_ioctls::{Cap, Kvm};

/// The CPUID entries that all vCPUs of one VM share: features and topology.
#[derive(Debug, Clone)]
pub struct Template {
    entries: Vec<kvm_cpuid_entry2>,
}

/// CPUID leaf of KVM's paravirtual features.
const KVM_FEATURES: u32 = 0x4000_0001;
/// KVM_FEATURE_ASYNC_PF, _ASYNC_PF_VMEXIT, _ASYNC_PF_INT.
const KVM_ASYNC_PF: u32 = 1 << 4 | 1 << 10 | 1 << 14;

/// Number of APIC id bits that number the cores of a VM with `vcpus` vCPUs.
fn core_bits(vcpus: u8) -> u32 {
    u32::from(vcpus.max(1)).next_power_of_two().trailing_zeros()
}

/// The CPUID that KVM can give any vCPU on this host.
#[derive(Debug)]
pub struct Supported {
    entries: CpuId,
    tsc_deadline: bool,
}

/// This host's CPU lacks features: those that a CPU model needs, or those of a saved guest's CPU.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{of}: this host's CPU lacks {}", listed(.lacks))]
pub struct Lacking {
    /// What needs the features.
    of: String,
    /// The features.
    lacks: Vec<String>,
}

/// The guest would see features that its CPU model does not have.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("CPU model {model}: this host's KVM cannot hide {} from guests", listed(.more))]
pub struct Unhidden {
    model: CpuModel,
    /// The features.
    more: Vec<String>,
}

/// The first few of a list, and how many more there are.
fn listed(all: &[String]) -> String {
    const MOST: usize = 8;
    let first = all[..all.len().min(MOST)].join(", ");
    match all.len().saturating_sub(MOST) {
        0 => first,
        more => format!("{first} and {more} more"),
    }
}

impl Supported {
    /// Asks KVM, which executes CPUID for the answer.
    ///
    /// # Errors
    /// KVM_GET_SUPPORTED_CPUID fails.
    pub fn new(kvm: &Kvm) -> Result<Self, kvm_ioctls::Error> {
        let entries = kvm.get_supported_cpuid(KVM_MAX_CPUID_ENTRIES)?;
        // KVM_GET_SUPPORTED_CPUID leaves the TSC deadline bit out, because it depends on the
        // in-kernel local APIC. All our VMs have that APIC.
        Ok(Self { entries, tsc_deadline: kvm.check_extension(Cap::TscDeadlineTimer) })
    }

    /// The same host, whose vCPUs have `entries`.
    #[must_use]
    pub const fn with_entries(&self, entries: CpuId) -> Self {
        Self { entries, tsc_deadline: self.tsc_deadline }
    }

    /// Checks that this host's CPU has what `model` needs.
    ///
    /// # Errors
    /// Names what it lacks.
    pub fn check(&self, model: CpuModel) -> Result<(), Lacking> {
        let lacks = features::needed(model, self.entries.as_slice());
        if lacks.is_empty() {
            return Ok(());
        }
        Err(Lacking { of: format!("CPU model {model}"), lacks })
    }

    /// Checks that this host's CPU has all features of a saved vCPU, whose CPUID is `saved`.
    ///
    /// # Errors
    /// Names what it lacks.
    pub fn check_saved(&self, saved: &[kvm_cpuid_entry2]) -> Result<(), Lacking> {
        let lacks = features::lacking(saved, self.entries.as_slice(), self.tsc_deadline);
        if lacks.is_empty() {
            return Ok(());
        }
        let of = "the snapshot's CPU (bake with --cpu-model for hosts with other CPUs)".to_owned();
        Err(Lacking { of, lacks })
    }
}

impl Template {
    /// The shared entries for a VM whose guest knows of `vcpus` vCPUs; 0 counts as 1.
    #[must_use]
    pub fn new(supported: &Supported, vcpus: u8, model: CpuModel) -> Self {
        let entries = supported.entries.as_slice();
        Self::from_supported(entries, vcpus.max(1), model, supported.tsc_deadline)
    }

    fn from_supported(
        supported: &[kvm_cpuid_entry2],
        vcpus: u8,
        model: CpuModel,
        tsc_deadline: bool,
    ) -> Self {
        let (bits, count) = (core_bits(vcpus), u32::from(vcpus));
        let mut entries: Vec<_> = supported
            .iter()
            .filter(|e| !matches!(e.function, 0xb | 0x1f | 0x8000_0026))
            .copied()
            .collect();
        features::restrict(model, &mut entries);
        for e in &mut entries {
            match e.function {
                0 => e.eax = e.eax.clamp(0xb, 0x1f),
                1 => {
                    e.ecx &= !(1 << 5); // VMX
                    e.ecx |= 1 << 31; // a hypervisor is present
                    e.ecx = if tsc_deadline { e.ecx | 1 << 24 } else { e.ecx & !(1 << 24) };
                    e.ebx = (e.ebx & 0x0000_ffff) | count << 16;
                    e.edx = if count > 1 { e.edx | 1 << 28 } else { e.edx & !(1 << 28) };
                }
                // Deterministic caches: levels 1 and 2 belong to a core, level 3 to the socket.
                4 if e.eax & 0x1f != 0 => {
                    let sharing = if (e.eax >> 5) & 7 >= 3 { (1 << bits) - 1 } else { 0 };
                    e.eax = (e.eax & 0x0000_3fff) | sharing << 14 | ((1 << bits) - 1) << 26;
                }
                0xa => (e.eax, e.ebx, e.ecx, e.edx) = (0, 0, 0, 0),
                0x8000_0001 => e.ecx &= !(1 << 2), // SVM
                0x8000_0008 => e.ecx = (e.ecx & !0xf0ff) | (count - 1) | bits << 12,
                0x8000_000a => (e.eax, e.ebx, e.ecx, e.edx) = (0, 0, 0, 0),
                0x8000_001d if e.eax & 0x1f != 0 => {
                    let sharing = if (e.eax >> 5) & 7 >= 3 { count - 1 } else { 0 };
                    e.eax = (e.eax & !(0xfff << 14)) | sharing << 14;
                }
                0x8000_0022 => (e.eax, e.ebx, e.ecx, e.edx) = (0, 0, 0, 0),
                KVM_FEATURES => e.eax &= !KVM_ASYNC_PF,
                _ => {}
            }
        }
        // Extended topology: one thread per core, `vcpus` cores per socket.
        let extended = entries.iter().any(|e| e.function == 0 && e.eax >= 0x1f);
        for function in [0xb, 0x1f] {
            if function == 0x1f && !extended {
                continue;
            }
            let level = |index, eax, ebx, kind: u32| kvm_cpuid_entry2 {
                function,
                index,
                flags: kvm_bindings::KVM_CPUID_FLAG_SIGNIFCANT_INDEX,
                eax,
                ebx,
                ecx: kind << 8 | index,
                ..Default::default()
            };
            entries.push(level(0, 0, 1, 1));
            entries.push(level(1, bits, count, 2));
            entries.push(level(2, 0, 0, 0));
        }
        Self { entries }
    }

    /// The CPUID entries of the vCPU with APIC id `id`.
    #[must_use]
    pub fn of(&self, id: u8) -> Vec<kvm_cpuid_entry2> {
        with_apic_id(&self.entries, id)
    }

    /// The bits that a guest may set in XCR0.
    #[must_use]
    pub fn xcr0(&self) -> u64 {
        xcr0(&self.entries)
    }
}

/// The CPUID entries of the vCPU with APIC id `id`, given those of any vCPU of the same VM.
#[must_use]
pub fn with_apic_id(entries: &[kvm_cpuid_entry2], id: u8) -> Vec<kvm_cpuid_entry2> {
    let apic = u32::from(id);
    let mut entries = entries.to_vec();
    for e in &mut entries {
        match e.function {
            1 => e.ebx = (e.ebx & 0x00ff_ffff) | apic << 24,
            0xb | 0x1f => e.edx = apic,
            0x8000_001e => {
                e.eax = apic;
                e.ebx = apic & 0xff; // core id; one thread per core
                e.ecx = 0; // node 0 of one node
            }
            _ => {}
        }
    }
    entries
}

/// The bits that a guest may set in XCR0 (leaf 0xd, EDX:EAX); 0 without XSAVE.
#[must_use]
pub fn xcr0(entries: &[kvm_cpuid_entry2]) -> u64 {
    let leaf = entries.iter().find(|e| e.function == 0xd && e.index == 0);
    leaf.map_or(0, |e| u64::from(e.eax) | u64::from(e.edx) << 32)
}

/// The number of vCPUs of a VM, by the CPUID of any of them: the logical processors of its socket
/// (leaf 1, EBX bits 16 to 23). 1 if the leaf is missing.
#[must_use]
pub fn known_vcpus(entries: &[kvm_cpuid_entry2]) -> u8 {
    let leaf = entries.iter().find(|e| e.function == 1);
    leaf.map_or(1, |e| e.ebx.to_le_bytes()[2].max(1))
}

/// Checks that a vCPU has no features but those that it was given, by the CPUIDs `has`
/// (KVM_GET_CPUID2) and `given`.
///
/// # Errors
/// Names what it has besides: KVM cannot hide them, as PVM cannot.
pub fn check_given(
    model: CpuModel,
    has: &[kvm_cpuid_entry2],
    given: &[kvm_cpuid_entry2],
) -> Result<(), Unhidden> {
    let more = features::lacking(has, given, true);
    if more.is_empty() {
        return Ok(());
    }
    Err(Unhidden { model, more })
}

/// Whether a vCPU with CPUID `is` will have CPUID `wanted` once a guest's other registers are
/// loaded. Both lists come from KVM_GET_CPUID2: `wanted` from the saved vCPU.
///
/// KVM derives some bits from CR4, XCR0 and the APIC base, and updates them whenever one of these
/// is set (`kvm_update_cpuid_runtime`, Linux `arch/x86/kvm/cpuid.c`). These bits are ignored.
#[must_use]
pub fn alike(is: &[kvm_cpuid_entry2], wanted: &[kvm_cpuid_entry2]) -> bool {
    let fixed = |e: &kvm_cpuid_entry2| {
        let mut e = *e;
        match (e.function, e.index) {
            (1, _) => {
                e.ecx &= !(1 << 27); // OSXSAVE
                e.edx &= !(1 << 9); // APIC
            }
            (7, 0) => e.ecx &= !(1 << 4), // OSPKE
            (0xd, 0 | 1) => e.ebx = 0,    // size of the enabled XSAVE area
            _ => {}
        }
        (e.function, e.index, e.flags, e.eax, e.ebx, e.ecx, e.edx)
    };
    is.iter().map(fixed).eq(wanted.iter().map(fixed))
}

/// Converts entries for KVM_SET_CPUID2; `None` if there are more than KVM takes.
#[must_use]
pub fn for_kvm(entries: &[kvm_cpuid_entry2]) -> Option<CpuId> {
    CpuId::from_entries(entries).ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Flips one bit, named as `(entry, register, bit)`.
    fn bit(entries: &mut [kvm_cpuid_entry2], (entry, register, bit): (usize, usize, u32)) {
        let e = &mut entries[entry];
        *[&mut e.eax, &mut e.ebx, &mut e.ecx, &mut e.edx][register] ^= 1 << bit;
    }

    proptest! {
        #[test]
        fn what_kvm_derives_makes_no_difference_and_every_other_bit_does(
            n in 0..5_usize, register in 0..4_usize, b in 0..32_u32,
        ) {
            let is = [
                entry(1, 0, 1, 2, 3, 4), entry(7, 0, 1, 2, 3, 4),
                entry(0xd, 0, 1, 2, 3, 4), entry(0xd, 1, 1, 2, 3, 4),
                entry(0xd, 2, 1, 2, 3, 4),
            ];
            let derived =
                matches!((n, register, b), (0, 2, 27) | (0, 3, 9) | (1, 2, 4) | (2 | 3, 1, _));
            let mut wanted = is;
            bit(&mut wanted, (n, register, b));
            prop_assert_eq!(alike(&is, &wanted), derived);
            prop_assert!(alike(&is, &is) && !alike(&is, &is[..n]));
        }
    }

    #[test]
    fn a_kvm_that_hides_no_features_is_refused_for_a_model() {
        let given = [entry(0, 0, 0xd, 1, 2, 3), entry(1, 0, 0, 0, 1 << 20, 0)];
        // KVM derives OSXSAVE; SSE 4.1 was not given.
        let mut has = given;
        has[1].ecx |= 1 << 27;
        assert_eq!(check_given(CpuModel::V2, &has, &given), Ok(()));
        has[1].ecx |= 1 << 19;
        let error = check_given(CpuModel::V2, &has, &given).unwrap_err().to_string();
        let expected = "CPU model x86-64-v2: this host's KVM cannot hide sse4_1 from guests";
        assert_eq!(error, expected);
    }

    fn entry(
        function: u32,
        index: u32,
        eax: u32,
        ebx: u32,
        ecx: u32,
        edx: u32,
    ) -> kvm_cpuid_entry2 {
        kvm_cpuid_entry2 { function, index, eax, ebx, ecx, edx, ..Default::default() }
    }

    fn find(entries: &[kvm_cpuid_entry2], function: u32, index: u32) -> kvm_cpuid_entry2 {
        *entries.iter().find(|e| e.function == function && e.index == index).unwrap()
    }

    #[test]
    fn every_vcpu_is_a_core_of_one_socket_with_its_own_apic_id() {
        let supported = [
            entry(0, 0, 0x10, 0, 0, 0),
            entry(1, 0, 0, 0x0600_0800, 1 << 5, 0),
            entry(0xb, 0, 7, 7, 7, 7),
            entry(KVM_FEATURES, 0, u32::MAX, 0, 0, 0),
            entry(0x8000_0001, 0, 0, 0, 1 << 2, 0),
            entry(0x8000_0008, 0, 0x3030, 0, 0x7007, 0),
            entry(0x8000_001e, 0, 9, 0x0109, 3, 0),
        ];
        for (vcpus, bits) in [(1u8, 0), (2, 1), (3, 2), (4, 2), (16, 4)] {
            let template = Template::from_supported(&supported, vcpus, CpuModel::Host, true);
            for id in 0..vcpus {
                let e = template.of(id);
                let one = find(&e, 1, 0);
                assert_eq!(one.ebx, u32::from(id) << 24 | u32::from(vcpus) << 16 | 0x0800);
                assert_eq!(one.edx >> 28 & 1, u32::from(vcpus > 1), "HTT");
                assert_eq!((one.ecx >> 5 & 1, one.ecx >> 24 & 1, one.ecx >> 31), (0, 1, 1));
                assert_eq!(find(&e, 0xb, 0).edx, u32::from(id));
                assert_eq!((find(&e, 0xb, 1).eax, find(&e, 0xb, 1).ebx), (bits, u32::from(vcpus)));
                assert_eq!(find(&e, 0x8000_0008, 0).ecx, (u32::from(vcpus) - 1) | (bits << 12));
                assert_eq!(find(&e, 0x8000_001e, 0).eax, u32::from(id));
                assert_eq!(find(&e, 0x8000_0001, 0).ecx & 4, 0, "SVM");
                assert_eq!(find(&e, KVM_FEATURES, 0).eax & KVM_ASYNC_PF, 0);
                assert_eq!(known_vcpus(&e), vcpus);
                let first = with_apic_id(&e, 0);
                assert_eq!(with_apic_id(&first, id), e, "made from another vCPU's entries");
                assert!(id == 0 || first != e);
                assert!(
                    e.iter().all(|e| e.function != 0x1f),
                    "leaf 0x1f lies above the highest leaf"
                );
            }
        }
    }
}
