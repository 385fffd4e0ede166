//! Keeps KVM's static keys constant, so that the kernel does not patch its code while guests run.
//!
//! The kernel patches its own code on two occasions:
//!
//! - The first VM is created or the last one is destroyed (`preempt_notifier_key` in the
//!   scheduler).
//! - The number of local APICs that guests have not enabled becomes or leaves zero
//!   (`apic_sw_disabled` in KVM). That happens at every VM's creation.
//!
//! QEMU's TCG with a thread per CPU sometimes loses that race: a CPU takes the patch's breakpoint
//! after the patch has ended, "Oops: int3". One VM with one vCPU that never runs keeps both keys
//! set. It exists as long as the machine runs.

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};

// linux/kvm.h: _IO(KVMIO, 0x01), _IO(KVMIO, 0x60), _IO(KVMIO, 0x41) with KVMIO = 0xAE.
const KVM_CREATE_VM: libc::c_ulong = 0xae01;
const KVM_CREATE_IRQCHIP: libc::c_ulong = 0xae60;
const KVM_CREATE_VCPU: libc::c_ulong = 0xae41;

fn ask(fd: RawFd, request: libc::c_ulong) -> io::Result<i32> {
    // SAFETY: these three requests take a number as their argument, here 0, and touch no memory of
    // this process.
    let result = unsafe { libc::ioctl(fd, request, 0) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}

fn made(fd: RawFd, request: libc::c_ulong) -> io::Result<OwnedFd> {
    let new = ask(fd, request)?;
    // SAFETY: KVM_CREATE_VM and KVM_CREATE_VCPU return a new descriptor that no other code owns.
    Ok(unsafe { OwnedFd::from_raw_fd(new) })
}

/// Creates the VM, which exists as long as the returned descriptors.
pub(crate) fn hold() -> io::Result<[OwnedFd; 2]> {
    let kvm = File::options().read(true).write(true).open("/dev/kvm")?;
    let vm = made(kvm.as_raw_fd(), KVM_CREATE_VM)?;
    // With an irqchip in the kernel, the vCPU gets a local APIC, which is disabled until a guest
    // enables it.
    ask(vm.as_raw_fd(), KVM_CREATE_IRQCHIP)?;
    let vcpu = made(vm.as_raw_fd(), KVM_CREATE_VCPU)?;
    Ok([vm, vcpu])
}
