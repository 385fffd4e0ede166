//! KVM_PRE_FAULT_MEMORY (Linux 6.11): what KVM would do at a vCPU's first touch of a page, done before.

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

/// Has KVM make what a vCPU needs of its MMU before its first instruction, some forty pages and the roots of its tables: asking for any
/// page does, even where KVM then says that it maps nothing ahead. Half of what the first KVM_RUN of a clone took.
pub fn roots(vcpu: &VcpuFd) {
    // The page is one that every clone has written already. Where it cannot be done ahead, KVM_RUN does it.
    let _ = range(vcpu, layout::GENERATION.0, PAGE_SIZE);
}

/// KVM maps the range for the guest.
///
/// # Errors
/// It cannot: an older kernel, no nested paging, or no such memory.
pub fn range(vcpu: &VcpuFd, gpa: u64, size: u64) -> io::Result<()> {
    let mut range = KvmPreFaultMemory { gpa, size, flags: 0, padding: [0; 5] };
    while range.size > 0 {
        let left = range.size;
        // SAFETY: the ioctl reads and writes one struct kvm_pre_fault_memory, which `range` is laid out as.
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
