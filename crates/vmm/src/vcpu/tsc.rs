//! The TSC offset of a vCPU (KVM_VCPU_TSC_OFFSET,
//! `Documentation/virt/kvm/devices/vcpu.rst`).

use kvm_bindings::{KVM_VCPU_TSC_CTRL, KVM_VCPU_TSC_OFFSET, kvm_device_attr};
use kvm_ioctls::VcpuFd;
use std::os::fd::AsRawFd;

/// KVM_SET_DEVICE_ATTR and KVM_GET_DEVICE_ATTR: `_IOW(0xAE, 0xe1 and 0xe2, struct kvm_device_attr)`
/// of 24 bytes. kvm-ioctls has neither for vCPUs of x86-64.
const KVM_SET_DEVICE_ATTR: libc::Ioctl = 0x4018_aee1;
const KVM_GET_DEVICE_ATTR: libc::Ioctl = 0x4018_aee2;

/// Writes `offset` as the vCPU's TSC offset (KVM_SET_DEVICE_ATTR), or reads it
/// (KVM_GET_DEVICE_ATTR).
fn offset_ioctl(
    vcpu: &VcpuFd,
    request: libc::Ioctl,
    offset: &mut u64,
) -> Result<(), kvm_ioctls::Error> {
    let attr = kvm_device_attr {
        group: KVM_VCPU_TSC_CTRL,
        attr: u64::from(KVM_VCPU_TSC_OFFSET),
        addr: std::ptr::from_mut(offset).addr() as u64,
        flags: 0,
    };
    // SAFETY: `attr` and the u64 its `addr` points to outlive the call, which reads or writes those
    // eight bytes.
    let result = unsafe { libc::ioctl(vcpu.as_raw_fd(), request, &raw const attr) };
    if result == 0 { Ok(()) } else { Err(kvm_ioctls::Error::last()) }
}

/// The guest's TSC minus the host's, in ticks; `None` if KVM has no such attribute.
pub(super) fn offset(vcpu: &VcpuFd) -> Option<u64> {
    let mut offset = 0;
    offset_ioctl(vcpu, KVM_GET_DEVICE_ATTR, &mut offset).ok().map(|()| offset)
}

/// Sets the guest's TSC minus the host's, in ticks.
pub(super) fn set_offset(vcpu: &VcpuFd, mut offset: u64) -> Result<(), kvm_ioctls::Error> {
    offset_ioctl(vcpu, KVM_SET_DEVICE_ATTR, &mut offset)
}
