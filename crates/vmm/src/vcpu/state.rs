//! The state of a vCPU that KVM keeps: saved from one vCPU, loaded into another.
//!
//! Some orders matter (`Documentation/virt/kvm/api.rst`):
//! - Save: the MP state comes first, because reading it makes KVM process pending INIT and SIPI.
//!   The events come after all registers and MSRs.
//! - Load: CPUID comes before all that it governs. SREGS (with the APIC base) come before the local
//!   APIC, and the local APIC before MSRs. When the VM runs again, clocks, deadlines and events
//!   follow ([`super::clocks`]).
//!
//! There is no nested state, because guests get no VMX or SVM ([`crate::arch::cpuid`]). SREGS2 is
//! not used: it adds only the PDPTRs of 32-bit PAE guests, which KVM reloads from memory.

use super::tsc;
use crate::arch::{cpuid, features, regs};
use kvm_bindings::{
    KVM_MP_STATE_UNINITIALIZED, Msrs, Xsave, kvm_cpuid_entry2, kvm_debugregs, kvm_lapic_state,
    kvm_mp_state, kvm_msr_entry, kvm_regs, kvm_sregs, kvm_vcpu_events, kvm_xcrs, kvm_xsave,
    kvm_xsave2,
};
use kvm_ioctls::{Cap, Kvm, VcpuFd, VmFd};
use serde::{Deserialize, Serialize};
use std::borrow::Cow;
use vmm_sys_util::fam::FamStruct;

/// The time stamp counter (IA32_TSC).
pub(super) const MSR_TSC: u32 = 0x10;
/// Deadline of the local APIC's timer (IA32_TSC_DEADLINE).
pub(super) const MSR_TSC_DEADLINE: u32 = 0x6e0;
/// MSRs that KVM lists but may refuse to give, or to take back on another host. A guest does not
/// need them restored, because they describe the host's CPU and its microcode.
const MAY_BE_REFUSED: &[u32] = &[
    0x10a, // IA32_ARCH_CAPABILITIES
    0x345, // IA32_PERF_CAPABILITIES
    0x8b,  // IA32_BIOS_SIGN_ID
];

/// MSRs that all vCPUs of a VM must have in common. Linux compares IA32_TSC_ADJUST (0x3b) of a CPU
/// that it starts with that of the first one, and corrects it, which would shift the TSC.
const OF_THE_CPU: &[u32] = &[0x3b, 0x8b, 0x10a, 0x345];

/// Most MSRs of a saved vCPU.
pub const MAX_MSRS: usize = 1024;
/// Most CPUID entries of a saved vCPU.
pub const MAX_CPUID: usize = kvm_bindings::KVM_MAX_CPUID_ENTRIES;
/// Most 32-bit words of an XSAVE area: 64 KiB.
pub const MAX_XSAVE_WORDS: usize = 16 << 10;

/// The saved state of a vCPU.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct VcpuState {
    /// CPUID entries (KVM_GET_CPUID2).
    pub cpuid: Vec<kvm_cpuid_entry2>,
    /// MP state: running, halted, or waiting for SIPI.
    pub mp_state: kvm_mp_state,
    /// General registers.
    pub regs: kvm_regs,
    /// Segments, control registers, EFER, APIC base.
    pub sregs: kvm_sregs,
    /// The XSAVE area as 32-bit words; KVM_CAP_XSAVE2 gives its length.
    pub xsave: Vec<u32>,
    /// Extended control registers (XCR0).
    pub xcrs: kvm_xcrs,
    /// Debug registers.
    pub debug: kvm_debugregs,
    /// Register page of the local APIC.
    pub lapic: kvm_lapic_state,
    /// MSRs as `(number, value)`.
    pub msrs: Vec<(u32, u64)>,
    /// Frequency of the guest's TSC, in kHz.
    pub tsc_khz: u32,
    /// The guest's TSC minus the host's, in ticks, if KVM gives it ([`super::clocks`]).
    pub tsc_offset: Option<u64>,
    /// Pending exceptions, interrupts and NMIs.
    pub events: kvm_vcpu_events,
}

impl VcpuState {
    /// The value of an MSR, if it was saved.
    pub(super) fn msr(&self, number: u32) -> Option<u64> {
        self.msrs.iter().find(|(index, _)| *index == number).map(|(_, value)| *value)
    }
}

/// Why a vCPU could not be saved or loaded.
#[derive(Debug, thiserror::Error)]
pub enum StateError {
    /// An ioctl failed; the text is its name.
    #[error("vCPU: {0}")]
    Kvm(&'static str, #[source] kvm_ioctls::Error),
    /// A fresh vCPU could not be prepared.
    #[error("vCPU")]
    Regs(#[from] regs::RegsError),
    /// KVM lists this MSR but does not give its value.
    #[error("vCPU: KVM_GET_MSRS: KVM lists MSR {0:#x} but does not give it")]
    MsrGet(u32),
    /// KVM refused an MSR.
    #[error("vCPU: KVM_SET_MSRS: KVM refused MSR {index:#x} = {value:#x}")]
    MsrSet {
        /// Number of the MSR.
        index: u32,
        /// The value that KVM refused.
        value: u64,
    },
    /// A list of the state is longer than its limit.
    #[error("vCPU state: {got} {what}, at most {max}")]
    TooMany {
        /// The kind of the list's items.
        what: &'static str,
        /// Number of items in the state.
        got: usize,
        /// Most items allowed.
        max: usize,
    },
    /// The state's XSAVE area has another length than this host's, and states whose places differ
    /// between CPUs.
    #[error(
        "vCPU state: XSAVE area of {got} words with states beyond AVX, this host's KVM has \
         {expected} words"
    )]
    Xsave {
        /// 32-bit words of this host's XSAVE area.
        expected: usize,
        /// 32-bit words in the state.
        got: usize,
    },
    /// This host can neither provide the saved TSC frequency nor scale to it.
    #[error("vCPU state: TSC of {wanted} kHz, this host has {host} kHz and cannot scale")]
    TscKhz {
        /// Frequency in the state, in kHz.
        wanted: u32,
        /// Frequency of this host, in kHz.
        host: u32,
    },
}

pub(super) fn on(what: &'static str) -> impl FnOnce(kvm_ioctls::Error) -> StateError {
    move |error| StateError::Kvm(what, error)
}

/// This host's list of MSRs and its XSAVE length, which are equal for all vCPUs.
#[derive(Debug, Clone)]
pub struct HostLimits {
    msrs: Vec<u32>,
    xsave_words: usize,
}

impl HostLimits {
    /// `msrs` come from [`msrs`]; asks KVM for the length of the XSAVE area.
    #[must_use]
    pub fn new(msrs: Vec<u32>, vm: &VmFd) -> Self {
        Self { msrs, xsave_words: xsave_words(vm) }
    }

    /// 32-bit words of this host's XSAVE area, for [`load`].
    #[must_use]
    pub const fn xsave_words(&self) -> usize {
        self.xsave_words
    }
}

/// The MSRs that KVM saves and loads, which are the same for all VMs of a host.
///
/// # Errors
/// KVM_GET_MSR_INDEX_LIST fails.
pub fn msrs(kvm: &Kvm) -> Result<Vec<u32>, StateError> {
    Ok(kvm.get_msr_index_list().map_err(on("KVM_GET_MSR_INDEX_LIST"))?.as_slice().to_vec())
}

/// 32-bit words of an XSAVE area: what KVM_CAP_XSAVE2 says, but at least the 4096 bytes of
/// KVM_SET_XSAVE.
fn xsave_words(vm: &VmFd) -> usize {
    let bytes = usize::try_from(vm.check_extension_int(Cap::Xsave2)).unwrap_or(0);
    bytes.max(size_of::<kvm_xsave>()).div_ceil(4)
}

/// Reads the whole state of a vCPU that does not run.
///
/// # Errors
/// The ioctl or MSR that failed.
pub fn save(vcpu: &VcpuFd, limits: &HostLimits) -> Result<VcpuState, StateError> {
    let mp_state = vcpu.get_mp_state().map_err(on("KVM_GET_MP_STATE"))?;
    let regs = vcpu.get_regs().map_err(on("KVM_GET_REGS"))?;
    let sregs = vcpu.get_sregs().map_err(on("KVM_GET_SREGS"))?;
    let xsave = get_xsave(vcpu, limits.xsave_words)?;
    let xcrs = vcpu.get_xcrs().map_err(on("KVM_GET_XCRS"))?;
    let debug = vcpu.get_debug_regs().map_err(on("KVM_GET_DEBUGREGS"))?;
    let lapic = vcpu.get_lapic().map_err(on("KVM_GET_LAPIC"))?;
    let tsc_khz = vcpu.get_tsc_khz().map_err(on("KVM_GET_TSC_KHZ"))?;
    let msrs = get_msrs(vcpu, &limits.msrs)?;
    let events = vcpu.get_vcpu_events().map_err(on("KVM_GET_VCPU_EVENTS"))?;
    let cpuid = vcpu.get_cpuid2(MAX_CPUID).map_err(on("KVM_GET_CPUID2"))?.as_slice().to_vec();
    let tsc_offset = tsc::offset(vcpu);
    Ok(VcpuState {
        cpuid,
        mp_state,
        regs,
        sregs,
        xsave,
        xcrs,
        debug,
        lapic,
        msrs,
        tsc_khz,
        tsc_offset,
        events,
    })
}

/// Writes the state to a fresh vCPU, except what depends on the instant at which the vCPU continues
/// ([`super::clocks`]).
///
/// `has` is the vCPU's CPUID by KVM_GET_CPUID2, if one is set already. An equal CPUID is not set
/// again.
///
/// # Errors
/// The ioctl or MSR that failed, or the part of `state` that this host cannot take.
pub fn load(
    vcpu: &VcpuFd,
    state: &VcpuState,
    has: Option<&[kvm_cpuid_entry2]>,
    xsave_words_here: usize,
) -> Result<(), StateError> {
    set_cpuid(vcpu, &state.cpuid, has)?;
    set_tsc_khz(vcpu, state.tsc_khz)?;
    vcpu.set_mp_state(state.mp_state).map_err(on("KVM_SET_MP_STATE"))?;
    vcpu.set_regs(&state.regs).map_err(on("KVM_SET_REGS"))?;
    vcpu.set_sregs(&state.sregs).map_err(on("KVM_SET_SREGS"))?;
    set_xsave(vcpu, &state.xsave, xsave_words_here)?;
    vcpu.set_xcrs(&state.xcrs).map_err(on("KVM_SET_XCRS"))?;
    vcpu.set_debug_regs(&state.debug).map_err(on("KVM_SET_DEBUGREGS"))?;
    vcpu.set_lapic(&state.lapic).map_err(on("KVM_SET_LAPIC"))?;
    let timeless: Vec<_> = state
        .msrs
        .iter()
        .filter(|(index, _)| !matches!(*index, MSR_TSC | MSR_TSC_DEADLINE))
        .copied()
        .collect();
    set_msrs(vcpu, &timeless)
}

/// Makes a fresh vCPU one that a guest of the VM with the saved vCPU `beside` can start: it has the
/// same CPU, and waits for INIT and SIPI. Its other registers are those after reset, because INIT
/// and the guest's kernel set what the kernel needs. The guest's addresses in KVM's MSRs (clock,
/// stolen time) belong to one vCPU each, so they stay unset.
///
/// `has` is as for [`load`].
///
/// # Errors
/// The ioctl or MSR that failed.
pub fn load_new(
    vcpu: &VcpuFd,
    id: u8,
    beside: &VcpuState,
    has: Option<&[kvm_cpuid_entry2]>,
) -> Result<(), StateError> {
    let wanted = cpuid::with_apic_id(&beside.cpuid, id);
    set_cpuid(vcpu, &wanted, has)?;
    set_tsc_khz(vcpu, beside.tsc_khz)?;
    regs::prepare_new(vcpu, cpuid::xcr0(&wanted))?;
    let equal = OF_THE_CPU.iter().filter_map(|&index| Some((index, beside.msr(index)?)));
    set_msrs(vcpu, &equal.collect::<Vec<_>>())?;
    let waits = kvm_mp_state { mp_state: KVM_MP_STATE_UNINITIALIZED };
    vcpu.set_mp_state(waits).map_err(on("KVM_SET_MP_STATE"))
}

/// Sets the CPUID of a vCPU that has `has` by KVM_GET_CPUID2, unless it is equal.
fn set_cpuid(
    vcpu: &VcpuFd,
    wanted: &[kvm_cpuid_entry2],
    has: Option<&[kvm_cpuid_entry2]>,
) -> Result<(), StateError> {
    if has.is_some_and(|has| cpuid::alike(has, wanted)) {
        return Ok(());
    }
    let entries = cpuid::for_kvm(wanted).ok_or(StateError::TooMany {
        what: "CPUID entries",
        got: wanted.len(),
        max: MAX_CPUID,
    })?;
    vcpu.set_cpuid2(&entries).map_err(on("KVM_SET_CPUID2"))
}

fn set_tsc_khz(vcpu: &VcpuFd, wanted: u32) -> Result<(), StateError> {
    let host = vcpu.get_tsc_khz().map_err(on("KVM_GET_TSC_KHZ"))?;
    // KVM treats frequencies within 250 ppm as equal, and so does this check.
    if host.abs_diff(wanted) > host / 4000 {
        vcpu.set_tsc_khz(wanted).map_err(|_| StateError::TscKhz { wanted, host })?;
    }
    Ok(())
}

pub(super) fn get_msr(vcpu: &VcpuFd, index: u32) -> Result<u64, StateError> {
    Ok(get_msrs(vcpu, &[index])?.first().map_or(0, |(_, value)| *value))
}

fn get_msrs(vcpu: &VcpuFd, indices: &[u32]) -> Result<Vec<(u32, u64)>, StateError> {
    let mut values = Vec::with_capacity(indices.len());
    let mut rest = indices;
    while !rest.is_empty() {
        let chunk = &rest[..rest.len().min(kvm_bindings::KVM_MAX_MSR_ENTRIES)];
        let entries: Vec<_> =
            chunk.iter().map(|&index| kvm_msr_entry { index, ..Default::default() }).collect();
        let mut msrs = Msrs::from_entries(&entries).map_err(|_| too_many_msrs(indices.len()))?;
        let done = vcpu.get_msrs(&mut msrs).map_err(on("KVM_GET_MSRS"))?.min(chunk.len());
        values.extend(msrs.as_slice()[..done].iter().map(|e| (e.index, e.data)));
        rest = &rest[done..];
        if done < chunk.len() {
            let refused = chunk[done];
            if !MAY_BE_REFUSED.contains(&refused) {
                return Err(StateError::MsrGet(refused));
            }
            rest = &rest[1..];
        }
    }
    Ok(values)
}

pub(super) fn set_msrs(vcpu: &VcpuFd, values: &[(u32, u64)]) -> Result<(), StateError> {
    let mut rest = values;
    while !rest.is_empty() {
        let chunk = &rest[..rest.len().min(kvm_bindings::KVM_MAX_MSR_ENTRIES)];
        let entries: Vec<_> = chunk
            .iter()
            .map(|&(index, data)| kvm_msr_entry { index, data, ..Default::default() })
            .collect();
        let msrs = Msrs::from_entries(&entries).map_err(|_| too_many_msrs(values.len()))?;
        let done = vcpu.set_msrs(&msrs).map_err(on("KVM_SET_MSRS"))?.min(chunk.len());
        rest = &rest[done..];
        if done < chunk.len() {
            let (index, value) = chunk[done];
            // A register that this host does not have was of no use to the guest if it is 0.
            if value != 0 && !MAY_BE_REFUSED.contains(&index) {
                return Err(StateError::MsrSet { index, value });
            }
            rest = &rest[1..];
        }
    }
    Ok(())
}

fn too_many_msrs(got: usize) -> StateError {
    StateError::TooMany { what: "MSRs", got, max: MAX_MSRS }
}

type XsaveTail = <kvm_xsave2 as FamStruct>::Entry;
const XSAVE_HEAD_WORDS: usize = size_of::<kvm_xsave>() / 4;

fn xsave_buffer(words: usize) -> Result<Xsave, StateError> {
    let tail = (words * 4).saturating_sub(size_of::<kvm_xsave>()).div_ceil(size_of::<XsaveTail>());
    Xsave::new(tail).map_err(|_| StateError::TooMany {
        what: "words of XSAVE area",
        got: words,
        max: MAX_XSAVE_WORDS,
    })
}

fn get_xsave(vcpu: &VcpuFd, words: usize) -> Result<Vec<u32>, StateError> {
    let mut area = xsave_buffer(words)?;
    // SAFETY: the buffer is at least as long as KVM_CAP_XSAVE2 says KVM writes; this process
    // enables no further features with arch_prctl(2).
    unsafe { vcpu.get_xsave2(&mut area) }.map_err(on("KVM_GET_XSAVE2"))?;
    let mut out = area.as_fam_struct_ref().xsave.region.to_vec();
    out.extend_from_slice(area.as_slice());
    Ok(out)
}

/// The words of an XSAVE area that say which states it has (XSTATE_BV, Intel's manual, volume 1,
/// 13.4.2).
const XSTATE_BV: std::ops::Range<usize> = 128..130;
/// The states of x87, SSE and AVX in XSTATE_BV.
const UP_TO_AVX: u32 = 0b111;

/// The area of a saved vCPU with this host's length. An area of a host with other states than this
/// one's has another length; up to AVX, every CPU has the states in the same places.
fn fitted(words: &[u32], words_here: usize) -> Result<Cow<'_, [u32]>, StateError> {
    let refused = || StateError::Xsave { expected: words_here, got: words.len() };
    if words.len() < XSAVE_HEAD_WORDS || words_here < XSAVE_HEAD_WORDS {
        return Err(refused());
    }
    if words.len() == words_here {
        return Ok(Cow::Borrowed(words));
    }
    if words[XSTATE_BV][0] & !UP_TO_AVX != 0 || words[XSTATE_BV][1] != 0 {
        return Err(refused());
    }
    let mut fitted = words[..features::XSAVE_OF_AVX_BYTES as usize / 4].to_vec();
    fitted.resize(words_here, 0);
    Ok(Cow::Owned(fitted))
}

fn set_xsave(vcpu: &VcpuFd, words: &[u32], words_here: usize) -> Result<(), StateError> {
    let words = fitted(words, words_here)?;
    let mut area = xsave_buffer(words.len())?;
    let (head, tail) = words.split_at(XSAVE_HEAD_WORDS);
    // SAFETY: only the fixed part is written; the length field of the flexible part stays as it is.
    unsafe { area.as_mut_fam_struct() }.xsave.region.copy_from_slice(head);
    area.as_mut_slice().copy_from_slice(tail);
    // SAFETY: the buffer is as long as KVM_CAP_XSAVE2 says KVM reads, checked above.
    unsafe { vcpu.set_xsave2(&area) }.map_err(on("KVM_SET_XSAVE"))
}

/// Checks that a decoded state keeps the limits that [`load`] relies on.
///
/// # Errors
/// The list that exceeds its limit.
pub fn check(state: &VcpuState) -> Result<(), StateError> {
    let limits = [
        ("CPUID entries", state.cpuid.len(), MAX_CPUID),
        ("MSRs", state.msrs.len(), MAX_MSRS),
        ("words of XSAVE area", state.xsave.len(), MAX_XSAVE_WORDS),
    ];
    for (what, got, max) in limits {
        if got > max {
            return Err(StateError::TooMany { what, got, max });
        }
    }
    Ok(())
}
