//! KVM_PRE_FAULT_MEMORY (Linux 6.11): does ahead what KVM does at a vCPU's first touch of a page.

use crate::arch::layout;
use dayfly_units::PAGE_SIZE;
use kvm_ioctls::VcpuFd;
use std::io;
use std::os::fd::AsRawFd;

// linux/kvm.h: _IOWR(KVMIO, 0xd5, struct kvm_pre_fault_memory)
const KVM_PRE_FAULT_MEMORY: libc::c_ulong = 0xc040_aed5;

#[repr(C)]
struct KvmPreFaultMemory {
    gpa: u64,
    size: u64,
    flags: u64,
    padding: [u64; 5],
}

/// Makes KVM allocate a vCPU's MMU before its first instruction: some forty pages and the roots of
/// its tables. A request for any page does this, even if KVM then reports that it maps nothing
/// ahead. It is half the time of a clone's first KVM_RUN.
pub fn roots(vcpu: &VcpuFd) {
    // The page is one that every clone has written already. If the ioctl fails, KVM_RUN does the
    // work.
    let _ = range(vcpu, layout::GENERATION.0, PAGE_SIZE);
}

/// Makes KVM map the range for the guest.
///
/// # Errors
/// When KVM cannot: an older kernel, no nested paging, or no such memory.
pub fn range(vcpu: &VcpuFd, gpa: u64, size: u64) -> io::Result<()> {
    let mut range = KvmPreFaultMemory { gpa, size, flags: 0, padding: [0; 5] };
    while range.size > 0 {
        let left = range.size;
        // SAFETY: the ioctl reads and writes one struct kvm_pre_fault_memory, which `range` is laid
        // out as.
        if unsafe { libc::ioctl(vcpu.as_raw_fd(), KVM_PRE_FAULT_MEMORY, &raw mut range) } < 0 {
            let error = io::Error::last_os_error();
            let again = matches!(error.raw_os_error(), Some(libc::EINTR | libc::EAGAIN));
            if !again || range.size == left {
                return Err(error);
            }
        }
    }
    Ok(())
}
