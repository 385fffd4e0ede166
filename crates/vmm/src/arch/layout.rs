//! The guest-physical address space.
//!
//! RAM lies below 3 GiB, and the rest from 4 GiB on. The hole between them holds MMIO.
//!
//! | address | content |
//! |---|---|
//! | 0x500 | GDT; an empty IDT at 0x520 |
//! | 0x7000 | boot parameters ("zero page") |
//! | 0x9000-0xf000 | first page tables: PML4, PDPT, four page directories |
//! | 0x20000 | kernel command line |
//! | 0x9fc00 | end of usable low memory |
//! | 0xe0000 | RSDP, then the other ACPI tables |
//! | 0xff000 | page of the VM generation id; at 0xffff0, a BIOS's reset vector: code that resets |
//! | 0x100000 | RAM: kernel at its link address, initramfs at the end of RAM below 3 GiB |
//! | 0xd0000000 | virtio-mmio windows, 4 KiB each ([`crate::virtio`]) |
//! | 0xfec00000, 0xfee00000 | I/O APIC, local APICs |
//! | 0xfffbc000 | identity map page and TSS that KVM needs on Intel CPUs |

use vm_memory::GuestAddress;

/// Guest address of the GDT.
pub const GDT: GuestAddress = GuestAddress(0x500);
/// Guest address of the empty IDT.
pub const IDT: GuestAddress = GuestAddress(0x520);
/// Guest address of the boot parameters, which `%rsi` holds at the kernel's entry.
pub const BOOT_PARAMS: GuestAddress = GuestAddress(0x7000);
/// Stack pointer at the kernel's entry. Linux sets its own stack before using one.
pub const BOOT_STACK: GuestAddress = GuestAddress(0x8ff0);
/// First level of the page tables at the kernel's entry.
pub const PML4: GuestAddress = GuestAddress(0x9000);
/// Second level of the page tables.
pub const PDPT: GuestAddress = GuestAddress(0xa000);
/// Third level of the page tables: four page directories of 2 MiB pages, which map 4 GiB.
pub const PAGE_DIRECTORIES: GuestAddress = GuestAddress(0xb000);
/// Guest address of the kernel command line.
pub const CMDLINE: GuestAddress = GuestAddress(0x2_0000);
/// Longest command line in bytes, terminating zero included: `COMMAND_LINE_SIZE` of x86 Linux.
pub const CMDLINE_MAX_BYTES: usize = 2048;
/// End of usable memory below 640 KiB.
pub const LOW_RAM_END: u64 = 0x9_fc00;
/// Guest address of the RSDP; the other ACPI tables follow it.
pub const ACPI: GuestAddress = GuestAddress(0xe_0000);
/// End of the space for ACPI tables.
pub const ACPI_END: u64 = 0xf_f000;
/// The page whose first 16 bytes are the VM generation id.
pub const GENERATION: GuestAddress = GuestAddress(0xf_f000);
/// The first instruction of a PC's CPU. A kernel that wants the BIOS to reboot jumps here in real
/// mode.
pub const RESET_VECTOR: GuestAddress = GuestAddress(0xf_fff0);
/// Start of RAM above the legacy area.
pub const HIGH_RAM: GuestAddress = GuestAddress(0x10_0000);
/// End of RAM below the MMIO hole.
pub const HOLE_START: u64 = 0xc000_0000;
/// Start of RAM above the MMIO hole.
pub const HOLE_END: u64 = 0x1_0000_0000;
/// Guest address of the I/O APIC's registers.
pub const IOAPIC: u32 = 0xfec0_0000;
/// Guest address of the local APICs' registers.
pub const LAPIC: u32 = 0xfee0_0000;
/// KVM's identity map page (`KVM_SET_IDENTITY_MAP_ADDR`).
pub const KVM_IDENTITY_MAP: u64 = 0xfffb_c000;
/// KVM's three TSS pages (`KVM_SET_TSS_ADDR`).
pub const KVM_TSS: usize = 0xfffb_d000;

/// I/O port of COM1's first register, of eight.
pub const PORT_COM1: u16 = 0x3f8;
/// COM1's interrupt.
pub const GSI_COM1: u32 = 4;
/// Interrupt of the Generic Event Device; it reports a new VM generation id.
pub const GSI_GENERATION: u32 = 9;
/// I/O port of the keyboard controller's command register.
pub const PORT_I8042: u16 = 0x64;
/// I/O port of pvpanic.
pub const PORT_PVPANIC: u16 = 0x505;
/// I/O port of the ACPI sleep control register.
pub const PORT_SLEEP_CONTROL: u16 = 0x600;
/// I/O port of the ACPI sleep status register.
pub const PORT_SLEEP_STATUS: u16 = 0x601;
/// I/O port of the ACPI reset register.
pub const PORT_RESET: u16 = 0x602;
/// The value that resets the VM when written to [`PORT_RESET`].
pub const RESET_VALUE: u8 = 6;
/// SLP_TYP value of S5.
pub const SLEEP_TYPE_S5: u8 = 5;

/// Least RAM of a VM, in bytes.
pub const MIN_MEMORY_BYTES: u64 = 64 << 20;
/// Most RAM of a VM, in bytes: 1 TiB.
pub const MAX_MEMORY_BYTES: u64 = 1 << 40;
/// RAM of a VM is a multiple of this many bytes.
pub const MEMORY_STEP_BYTES: u64 = 2 << 20;

/// The RAM regions of a VM with `memory_bytes`, in rising order:
/// `(guest address, offset in the memory file, length)`, in bytes. A memory file is RAM without the
/// hole.
#[must_use]
pub fn ram(memory_bytes: u64) -> Vec<(GuestAddress, u64, u64)> {
    let low = memory_bytes.min(HOLE_START);
    let mut regions = vec![(GuestAddress(0), 0, low)];
    if memory_bytes > low {
        regions.push((GuestAddress(HOLE_END), low, memory_bytes - low));
    }
    regions
}
