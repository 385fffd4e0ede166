//! Keeps KVM's static keys as they are, so that the kernel's code is not patched while guests run.
//!
//! The kernel patches its own code when the first VM is made and the last one goes (`preempt_notifier_key` in the scheduler), and
//! whenever the number of local APICs that their guests have not enabled leaves or reaches zero (`apic_sw_disabled` in KVM: every VM's birth). QEMU's
//! TCG with a thread per CPU loses that race now and then: a CPU takes the patch's breakpoint after the patch has ended, "Oops: int3".
//! One VM with one vCPU that never runs, held as long as the machine lives, keeps both keys set.

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};

// linux/kvm.h: _IO(KVMIO, 0x01), _IO(KVMIO, 0x60), _IO(KVMIO, 0x41) with KVMIO = 0xAE.
const KVM_CREATE_VM: libc::c_ulong = 0xae01;
const KVM_CREATE_IRQCHIP: libc::c_ulong = 0xae60;
const KVM_CREATE_VCPU: libc::c_ulong = 0xae41;

fn ask(fd: RawFd, request: libc::c_ulong) -> io::Result<i32> {
    // SAFETY: these three requests take a number as their argument, here 0, and touch no memory of ours.
    let result = unsafe { libc::ioctl(fd, request, 0) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}

fn made(fd: RawFd, request: libc::c_ulong) -> io::Result<OwnedFd> {
    let new = ask(fd, request)?;
    // SAFETY: KVM_CREATE_VM and KVM_CREATE_VCPU return a fresh descriptor that nobody else owns.
    Ok(unsafe { OwnedFd::from_raw_fd(new) })
}

/// Makes the VM; it is there as long as what is returned.
pub(crate) fn hold() -> io::Result<[OwnedFd; 2]> {
    let kvm = File::options().read(true).write(true).open("/dev/kvm")?;
    let vm = made(kvm.as_raw_fd(), KVM_CREATE_VM)?;
    // With an irqchip in the kernel the vCPU gets a local APIC, which is disabled until a guest enables it.
    ask(vm.as_raw_fd(), KVM_CREATE_IRQCHIP)?;
    let vcpu = made(vm.as_raw_fd(), KVM_CREATE_VCPU)?;
    Ok([vm, vcpu])
}
