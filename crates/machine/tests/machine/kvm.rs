//! A guest of seven bytes, which shows that `/dev/kvm` in the machine works.

use kvm_bindings::kvm_userspace_memory_region;
use kvm_ioctls::{Kvm, VcpuExit};
use std::process::ExitCode;

/// Adds two numbers in real mode, writes the sum to port 0x10 and prints it. The VM has an irqchip,
/// like dayfly's VMs.
pub(crate) fn run_tiny_guest() -> ExitCode {
    // mov al, 40; add al, 2; out 0x10, al; hlt (in which the irqchip would wait for ever)
    let code = [0xb0, 40, 0x04, 2, 0xe6, 0x10, 0xf4];
    let vm = Kvm::new().unwrap().create_vm().unwrap();
    // SAFETY: an anonymous mapping of one page at an address that the kernel chooses, kept until
    // this process ends.
    let page = unsafe {
        libc::mmap(
            std::ptr::null_mut(),
            4096,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
            -1,
            0,
        )
    };
    assert_ne!(page, libc::MAP_FAILED);
    // SAFETY: the page is writable, longer than the code, and no other code uses it yet.
    unsafe { std::ptr::copy_nonoverlapping(code.as_ptr(), page.cast::<u8>(), code.len()) };
    let region = kvm_userspace_memory_region {
        slot: 0,
        flags: 0,
        guest_phys_addr: 0x1000,
        memory_size: 4096,
        userspace_addr: page.addr() as u64,
    };
    // SAFETY: the region is the mapping above, which outlives the VM.
    unsafe { vm.set_user_memory_region(region) }.unwrap();
    vm.create_irq_chip().unwrap();
    let mut vcpu = vm.create_vcpu(0).unwrap();
    let mut segments = vcpu.get_sregs().unwrap();
    segments.cs.base = 0;
    segments.cs.selector = 0;
    vcpu.set_sregs(&segments).unwrap();
    let mut registers = vcpu.get_regs().unwrap();
    registers.rip = 0x1000;
    registers.rflags = 2;
    vcpu.set_regs(&registers).unwrap();
    match vcpu.run().unwrap() {
        VcpuExit::IoOut(0x10, data) => {
            println!("{}", data[0]);
            ExitCode::SUCCESS
        }
        other => {
            println!("unexpected exit {other:?}");
            ExitCode::FAILURE
        }
    }
}
