//! The requests of ioctl(2) that VMMs make.

use kvm_bindings::{
    kvm_clock_data, kvm_cpuid2, kvm_debugregs, kvm_device_attr, kvm_dirty_log, kvm_irqchip,
    kvm_lapic_state, kvm_mp_state, kvm_msrs, kvm_pit_state2, kvm_regs, kvm_sregs,
    kvm_userspace_memory_region, kvm_vcpu_events, kvm_xcrs, kvm_xsave,
};

const NONE: u32 = 0;
const WRITE: u32 = 1;
const READ: u32 = 2;
const BOTH: u32 = 3;

/// A request of KVM (include/uapi/linux/kvm.h): type 0xAE, number `number`, argument `T`.
#[expect(clippy::cast_possible_truncation, reason = "sizes have 14 bits")]
const fn kvm<T>(direction: u32, number: u32) -> u32 {
    direction << 30 | (size_of::<T>() as u32) << 16 | 0xae00 | number
}

/// The low half of a request's number, which is all that the kernel takes.
#[expect(clippy::cast_possible_truncation, reason = "as the kernel takes it: unsigned int")]
pub(super) const fn low_half(request: u64) -> u32 {
    request as u32
}

pub(super) const GET_DIRTY_LOG: u32 = kvm::<kvm_dirty_log>(WRITE, 0x42);
pub(super) const SET_USER_MEMORY_REGION: u32 = kvm::<kvm_userspace_memory_region>(WRITE, 0x46);
pub(super) const GET_IRQCHIP: u32 = kvm::<kvm_irqchip>(BOTH, 0x62);
pub(super) const SET_IRQCHIP: u32 = kvm::<kvm_irqchip>(READ, 0x63);
pub(super) const SET_CLOCK: u32 = kvm::<kvm_clock_data>(WRITE, 0x7b);
pub(super) const GET_CLOCK: u32 = kvm::<kvm_clock_data>(READ, 0x7c);
pub(super) const RUN: u32 = kvm::<()>(NONE, 0x80);
pub(super) const GET_REGS: u32 = kvm::<kvm_regs>(READ, 0x81);
pub(super) const SET_REGS: u32 = kvm::<kvm_regs>(WRITE, 0x82);
pub(super) const GET_SREGS: u32 = kvm::<kvm_sregs>(READ, 0x83);
pub(super) const SET_SREGS: u32 = kvm::<kvm_sregs>(WRITE, 0x84);
pub(super) const GET_MSRS: u32 = kvm::<kvm_msrs>(BOTH, 0x88);
pub(super) const SET_MSRS: u32 = kvm::<kvm_msrs>(WRITE, 0x89);
pub(super) const GET_LAPIC: u32 = kvm::<kvm_lapic_state>(READ, 0x8e);
pub(super) const SET_LAPIC: u32 = kvm::<kvm_lapic_state>(WRITE, 0x8f);
pub(super) const SET_CPUID2: u32 = kvm::<kvm_cpuid2>(WRITE, 0x90);
pub(super) const GET_CPUID2: u32 = kvm::<kvm_cpuid2>(BOTH, 0x91);
pub(super) const GET_MP_STATE: u32 = kvm::<kvm_mp_state>(READ, 0x98);
pub(super) const SET_MP_STATE: u32 = kvm::<kvm_mp_state>(WRITE, 0x99);
pub(super) const GET_PIT2: u32 = kvm::<kvm_pit_state2>(READ, 0x9f);
pub(super) const SET_PIT2: u32 = kvm::<kvm_pit_state2>(WRITE, 0xa0);
pub(super) const GET_VCPU_EVENTS: u32 = kvm::<kvm_vcpu_events>(READ, 0x9f);
pub(super) const SET_VCPU_EVENTS: u32 = kvm::<kvm_vcpu_events>(WRITE, 0xa0);
pub(super) const GET_DEBUGREGS: u32 = kvm::<kvm_debugregs>(READ, 0xa1);
pub(super) const SET_DEBUGREGS: u32 = kvm::<kvm_debugregs>(WRITE, 0xa2);
pub(super) const SET_TSC_KHZ: u32 = kvm::<()>(NONE, 0xa2);
pub(super) const GET_TSC_KHZ: u32 = kvm::<()>(NONE, 0xa3);
pub(super) const SET_XSAVE: u32 = kvm::<kvm_xsave>(WRITE, 0xa5);
pub(super) const GET_XCRS: u32 = kvm::<kvm_xcrs>(READ, 0xa6);
pub(super) const SET_XCRS: u32 = kvm::<kvm_xcrs>(WRITE, 0xa7);
pub(super) const KVMCLOCK_CTRL: u32 = kvm::<()>(NONE, 0xad);
pub(super) const GET_XSAVE2: u32 = kvm::<kvm_xsave>(READ, 0xcf);
/// `struct kvm_pre_fault_memory` has 64 bytes.
pub(super) const PRE_FAULT_MEMORY: u32 = kvm::<[u64; 8]>(BOTH, 0xd5);
pub(super) const SET_DEVICE_ATTR: u32 = kvm::<kvm_device_attr>(WRITE, 0xe1);
pub(super) const GET_DEVICE_ATTR: u32 = kvm::<kvm_device_attr>(WRITE, 0xe2);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_have_the_numbers_of_the_kernels_headers() {
        // As `printf("%#x", KVM_…)` in C prints them.
        assert_eq!(RUN, 0xae80);
        assert_eq!((GET_REGS, GET_SREGS), (0x8090_ae81, 0x8138_ae83));
        assert_eq!((SET_XSAVE, GET_XSAVE2), (0x5000_aea5, 0x9000_aecf));
        assert_eq!((GET_CPUID2, SET_IRQCHIP), (0xc008_ae91, 0x8208_ae63));
        assert_eq!((SET_DEVICE_ATTR, PRE_FAULT_MEMORY), (0x4018_aee1, 0xc040_aed5));
    }
}
