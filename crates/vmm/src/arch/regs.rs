//! The registers that a vCPU starts with: 64-bit mode, paging on, interrupts off, as Linux's 64-bit
//! boot protocol requires.

use super::layout;
use kvm_bindings::{Msrs, kvm_fpu, kvm_msr_entry, kvm_regs, kvm_segment};
use kvm_ioctls::VcpuFd;
use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};

/// Why a vCPU could not be prepared.
#[derive(Debug, thiserror::Error)]
pub enum RegsError {
    /// Writing GDT, IDT or page tables to guest memory failed.
    #[error("first page tables")]
    Memory(#[from] vm_memory::GuestMemoryError),
    /// An ioctl failed; the text is its name.
    #[error("{0}")]
    Kvm(&'static str, #[source] kvm_ioctls::Error),
    /// KVM refused an MSR.
    #[error("KVM_SET_MSRS: KVM refused MSR {index:#x} = {value:#x}")]
    Msr {
        /// Number of the MSR.
        index: u32,
        /// The value that KVM refused.
        value: u64,
    },
}

fn on(what: &'static str) -> impl FnOnce(kvm_ioctls::Error) -> RegsError {
    move |error| RegsError::Kvm(what, error)
}

const GDT: [u64; 4] = [0, 0x00af_9b00_0000_ffff, 0x00cf_9300_0000_ffff, 0x008f_8b00_0000_ffff];

fn segment(index: u16, type_: u8, s: u8, l: u8, db: u8) -> kvm_segment {
    kvm_segment {
        limit: 0xf_ffff,
        selector: index * 8,
        type_,
        present: 1,
        s,
        l,
        db,
        g: 1,
        ..Default::default()
    }
}

/// Writes the GDT, an empty IDT, and page tables that map 4 GiB onto themselves in 2 MiB pages.
///
/// # Errors
/// Guest memory is too small.
pub fn write_tables(memory: &GuestMemoryMmap) -> Result<(), RegsError> {
    const PRESENT_WRITABLE: u64 = 3;
    const LARGE: u64 = 1 << 7;
    for (n, entry) in (0u64..).zip(GDT) {
        memory.write_obj(entry, GuestAddress(layout::GDT.0 + 8 * n))?;
    }
    memory.write_obj(0u64, layout::IDT)?;
    memory.write_obj(layout::PDPT.0 | PRESENT_WRITABLE, layout::PML4)?;
    for gib in 0..4u64 {
        let directory = layout::PAGE_DIRECTORIES.0 + 4096 * gib;
        memory.write_obj(directory | PRESENT_WRITABLE, GuestAddress(layout::PDPT.0 + 8 * gib))?;
        for n in 0..512u64 {
            let page = gib << 30 | n << 21 | LARGE | PRESENT_WRITABLE;
            memory.write_obj(page, GuestAddress(directory + 8 * n))?;
        }
    }
    Ok(())
}

/// Prepares what every vCPU needs: MSRs, FPU, local interrupt lines, and XCR0 with all bits of
/// `xcr0`.
///
/// Hardware resets XCR0 to 1, and the guest's kernel sets it. Here XCR0 has the kernel's later
/// value from the start, because of QEMU's TCG, under which nested guests run on hosts without
/// usable KVM. TCG does not report a guest's `xsetbv` to the hypervisor, so KVM keeps entering the
/// guest with the old value. A guest that runs with XCR0 1 but expects 7 loses SSE registers at
/// every context switch. On hardware the early value makes no difference.
///
/// # Errors
/// An ioctl fails, or KVM refuses an MSR.
pub fn prepare_any(vcpu: &VcpuFd, xcr0: u64) -> Result<(), RegsError> {
    let fpu = kvm_fpu { fcw: 0x37f, mxcsr: 0x1f80, ..Default::default() };
    vcpu.set_fpu(&fpu).map_err(on("KVM_SET_FPU"))?;
    prepare_new(vcpu, xcr0)
}

/// As [`prepare_any`], for a vCPU whose FPU is as KVM made it, which is as after reset.
///
/// # Errors
/// As [`prepare_any`].
pub fn prepare_new(vcpu: &VcpuFd, xcr0: u64) -> Result<(), RegsError> {
    const MISC_ENABLE: u32 = 0x1a0;
    const MTRR_DEF_TYPE: u32 = 0x2ff;
    let values = [
        (MISC_ENABLE, 1),             // fast string operations
        (MTRR_DEF_TYPE, 1 << 11 | 6), // MTRRs on, everything write-back
    ];
    for (index, data) in values {
        let one = Msrs::from_entries(&[kvm_msr_entry { index, data, ..Default::default() }])
            .map_err(|_| RegsError::Msr { index, value: data })?;
        if vcpu.set_msrs(&one).map_err(on("KVM_SET_MSRS"))? != 1 {
            return Err(RegsError::Msr { index, value: data });
        }
    }
    if xcr0 != 0 {
        let mut xcrs = vcpu.get_xcrs().map_err(on("KVM_GET_XCRS"))?;
        xcrs.nr_xcrs = 1;
        xcrs.xcrs[0].xcr = 0;
        xcrs.xcrs[0].value = xcr0;
        vcpu.set_xcrs(&xcrs).map_err(on("KVM_SET_XCRS"))?;
    }

    // LINT0 takes the PIC's interrupts, LINT1 takes NMIs (Intel SDM volume 3, section 11.5.1).
    let mut lapic = vcpu.get_lapic().map_err(on("KVM_GET_LAPIC"))?;
    set_delivery_mode(&mut lapic.regs, 0x350, 7);
    set_delivery_mode(&mut lapic.regs, 0x360, 4);
    vcpu.set_lapic(&lapic).map_err(on("KVM_SET_LAPIC"))
}

fn set_delivery_mode(regs: &mut [i8], at: usize, mode: u8) {
    // The delivery mode is bits 8 to 10 of a little-endian register.
    regs[at + 1] = i8::from_le_bytes([(regs[at + 1].to_le_bytes()[0] & !7) | mode]);
}

/// Prepares the first vCPU to enter the kernel at `entry`.
///
/// # Errors
/// An ioctl fails.
pub fn prepare_first(vcpu: &VcpuFd, entry: GuestAddress) -> Result<(), RegsError> {
    const CR0_PE: u64 = 1;
    const CR0_PG: u64 = 1 << 31;
    const CR4_PAE: u64 = 1 << 5;
    const EFER_LME_LMA: u64 = 1 << 8 | 1 << 10;
    let mut sregs = vcpu.get_sregs().map_err(on("KVM_GET_SREGS"))?;
    sregs.gdt.base = layout::GDT.0;
    sregs.gdt.limit = u16::try_from(size_of_val(&GDT) - 1).unwrap_or(u16::MAX);
    sregs.idt.base = layout::IDT.0;
    sregs.idt.limit = 7;
    sregs.cs = segment(1, 0xb, 1, 1, 0);
    let data = segment(2, 3, 1, 0, 1);
    (sregs.ds, sregs.es, sregs.fs, sregs.gs, sregs.ss) = (data, data, data, data, data);
    sregs.tr = segment(3, 0xb, 0, 0, 0);
    sregs.cr0 |= CR0_PE | CR0_PG;
    sregs.cr3 = layout::PML4.0;
    sregs.cr4 |= CR4_PAE;
    sregs.efer |= EFER_LME_LMA;
    vcpu.set_sregs(&sregs).map_err(on("KVM_SET_SREGS"))?;
    let regs = kvm_regs {
        rflags: 2,
        rip: entry.0,
        rsp: layout::BOOT_STACK.0,
        rbp: layout::BOOT_STACK.0,
        rsi: layout::BOOT_PARAMS.0,
        ..Default::default()
    };
    vcpu.set_regs(&regs).map_err(on("KVM_SET_REGS"))
}
