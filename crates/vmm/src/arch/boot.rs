//! The boot loader's work: kernel, initramfs, command line and boot parameters go into guest memory
//! by Linux's 64-bit boot protocol (`Documentation/arch/x86/boot.rst`).

use super::layout;
use linux_loader::loader::bootparam::{boot_e820_entry, boot_params};
use linux_loader::loader::{Elf, KernelLoader};
use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};

/// The largest initramfs, in bytes.
const INITRD_MAX_BYTES: u64 = 512 << 20;

/// Why the guest's kernel could not be loaded.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    /// The file is not an uncompressed x86-64 ELF.
    #[error("kernel: {what} at byte {at}: expected {expected}, got {got}")]
    NotElf {
        /// The header field that differs.
        what: &'static str,
        /// Offset of the field in the file, in bytes.
        at: usize,
        /// The value that the field must have.
        expected: String,
        /// The value that the file has.
        got: String,
    },
    /// The ELF loader refused the kernel.
    #[error("kernel: {0}")]
    Kernel(#[from] linux_loader::loader::Error),
    /// The entry point lies outside the loaded kernel.
    #[error(
        "kernel: entry point {entry:#x}: expected between {start:#x} and {end:#x}, \
         the RAM the kernel lies in"
    )]
    Entry {
        /// Guest address of the entry point.
        entry: u64,
        /// Lowest address allowed.
        start: u64,
        /// First address past the kernel.
        end: u64,
    },
    /// The kernel does not fit into the RAM below the hole.
    #[error(
        "kernel: its memory ends at {end:#x}, expected at most {ram_end:#x}, the end of low RAM; \
         give the VM more memory"
    )]
    End {
        /// First address past the kernel, with the memory that the kernel expects to be zero.
        end: u64,
        /// End of the RAM below the hole.
        ram_end: u64,
    },
    /// The command line is too long.
    #[error("command line: {got} bytes, at most {max}")]
    Cmdline {
        /// Its length in bytes, without a terminating zero.
        got: usize,
        /// Largest length allowed, in bytes.
        max: usize,
    },
    /// The command line contains a zero byte.
    #[error("command line: a zero byte at {at}")]
    CmdlineZero {
        /// Offset of the zero byte.
        at: usize,
    },
    /// The initramfs does not fit between the kernel and the end of low RAM, or exceeds 512 MiB.
    #[error(
        "initramfs: {got} bytes do not fit between the kernel's end \
         {kernel_end:#x} and {ram_end:#x}"
    )]
    Initrd {
        /// Length of the initramfs in bytes.
        got: u64,
        /// First guest address past the kernel.
        kernel_end: u64,
        /// End of RAM below 3 GiB, as a guest address.
        ram_end: u64,
    },
    /// Reading the kernel or the initramfs failed.
    #[error("{what}")]
    File {
        /// What was being read, for the error's text.
        what: &'static str,
        /// The cause.
        #[source]
        source: std::io::Error,
    },
    /// Writing to guest memory failed.
    #[error("writing {what} to guest memory")]
    Memory {
        /// What was being written, for the error's text.
        what: &'static str,
        /// The cause.
        #[source]
        source: vm_memory::GuestMemoryError,
    },
}

/// Loads everything but the ACPI tables into `memory` and returns the kernel's entry point.
///
/// # Errors
/// The kernel is not an x86-64 ELF, a file cannot be read, or something does not fit.
pub fn load(
    memory: &GuestMemoryMmap,
    memory_bytes: u64,
    mut kernel: File,
    initrd: Option<File>,
    cmdline: &str,
) -> Result<GuestAddress, LoadError> {
    check_elf(&mut kernel)?;
    let loaded = Elf::load(memory, None, &mut kernel, Some(layout::HIGH_RAM))?;
    let (entry, kernel_end) = (loaded.kernel_load, loaded.kernel_end);
    if entry.0 < layout::HIGH_RAM.0 || entry.0 >= kernel_end {
        return Err(LoadError::Entry {
            entry: entry.0,
            start: layout::HIGH_RAM.0,
            end: kernel_end,
        });
    }
    let ram_end = memory_bytes.min(layout::HOLE_START);
    if kernel_end > ram_end {
        return Err(LoadError::End { end: kernel_end, ram_end });
    }
    let initrd =
        initrd.map(|file| load_initrd(memory, memory_bytes, file, kernel_end)).transpose()?;

    if cmdline.len() >= layout::CMDLINE_MAX_BYTES {
        return Err(LoadError::Cmdline { got: cmdline.len(), max: layout::CMDLINE_MAX_BYTES - 1 });
    }
    if let Some(at) = cmdline.bytes().position(|byte| byte == 0) {
        return Err(LoadError::CmdlineZero { at });
    }
    let mut text = cmdline.as_bytes().to_vec();
    text.push(0);
    let fails = |what| move |source| LoadError::Memory { what, source };
    memory.write_slice(&text, layout::CMDLINE).map_err(fails("the command line"))?;

    let params = params(memory_bytes, u32::try_from(cmdline.len()).unwrap_or(0), initrd);
    memory.write_obj(params, layout::BOOT_PARAMS).map_err(fails("the boot parameters"))?;
    memory.write_slice(&reset_code(), layout::RESET_VECTOR).map_err(fails("the reset vector"))?;
    Ok(entry)
}

/// Real-mode code that writes the ACPI reset register.
///
/// Linux without `reboot=t` takes hardware-reduced ACPI as a sign of EFI (`efi_reboot_required`),
/// finds no EFI, and jumps to the BIOS's reset vector. This code lies there instead of a BIOS.
fn reset_code() -> [u8; 9] {
    let [low, high] = layout::PORT_RESET.to_le_bytes();
    // mov dx, PORT_RESET; mov al, RESET_VALUE; out dx, al; 1: hlt; jmp 1b
    [0xba, low, high, 0xb0, layout::RESET_VALUE, 0xee, 0xf4, 0xeb, 0xfd]
}

fn check_elf(kernel: &mut File) -> Result<(), LoadError> {
    let fails = |source| LoadError::File { what: "reading the kernel", source };
    let mut head = [0; 20];
    kernel.seek(SeekFrom::Start(0)).map_err(fails)?;
    kernel.read_exact(&mut head).map_err(fails)?;
    let fields: [(&'static str, usize, &[u8], &str); 3] = [
        ("ELF magic", 0, b"\x7fELF", "\\x7fELF (an uncompressed vmlinux)"),
        ("ELF class and byte order", 4, &[2, 1], "\\x02\\x01 (64 bits, little-endian)"),
        ("ELF machine", 18, &[62, 0], "\\x3e\\x00 (x86-64)"),
    ];
    for (what, at, want, expected) in fields {
        let got = &head[at..at + want.len()];
        if got != want {
            let (expected, got) = (expected.to_owned(), got.escape_ascii().to_string());
            return Err(LoadError::NotElf { what, at, expected, got });
        }
    }
    Ok(())
}

/// Puts the initramfs at the end of RAM below the MMIO hole. Returns its guest address and its
/// length in bytes.
fn load_initrd(
    memory: &GuestMemoryMmap,
    memory_bytes: u64,
    mut file: File,
    kernel_end: u64,
) -> Result<(u32, u32), LoadError> {
    let fails = |source| LoadError::File { what: "reading the initramfs", source };
    let len = file.metadata().map_err(fails)?.len();
    let ram_end = memory_bytes.min(layout::HOLE_START);
    let refused = || LoadError::Initrd { got: len, kernel_end, ram_end };
    let start = ram_end.checked_sub(len).ok_or_else(refused)? & !(dayfly_units::PAGE_SIZE - 1);
    if len > INITRD_MAX_BYTES || start < kernel_end {
        return Err(refused());
    }
    file.seek(SeekFrom::Start(0)).map_err(fails)?;
    let bytes = usize::try_from(len).map_err(|_| refused())?;
    memory
        .read_exact_volatile_from(GuestAddress(start), &mut file, bytes)
        .map_err(|source| LoadError::Memory { what: "the initramfs", source })?;
    Ok((u32::try_from(start).map_err(|_| refused())?, u32::try_from(len).map_err(|_| refused())?))
}

fn params(memory_bytes: u64, cmdline_bytes: u32, initrd: Option<(u32, u32)>) -> boot_params {
    const RAM: u32 = 1;
    const RESERVED: u32 = 2;
    let mut params = boot_params::default();
    params.hdr.boot_flag = 0xaa55;
    params.hdr.header = 0x5372_6448; // "HdrS"
    params.hdr.type_of_loader = 0xff; // no assigned loader id
    params.hdr.kernel_alignment = 0x20_0000;
    params.hdr.cmd_line_ptr = u32::try_from(layout::CMDLINE.0).unwrap_or(0);
    params.hdr.cmdline_size = cmdline_bytes;
    if let Some((start, len)) = initrd {
        params.hdr.ramdisk_image = start;
        params.hdr.ramdisk_size = len;
    }
    params.acpi_rsdp_addr = layout::ACPI.0;

    let mut map = vec![
        (0, layout::LOW_RAM_END, RAM),
        (layout::LOW_RAM_END, layout::HIGH_RAM.0 - layout::LOW_RAM_END, RESERVED),
    ];
    for (start, _, len) in layout::ram(memory_bytes) {
        let skip = layout::HIGH_RAM.0.saturating_sub(start.0);
        map.push((start.0 + skip, len - skip, RAM));
    }
    for (slot, (addr, size, kind)) in params.e820_table.iter_mut().zip(&map) {
        *slot = boot_e820_entry { addr: *addr, size: *size, r#type: *kind };
    }
    params.e820_entries = u8::try_from(map.len()).unwrap_or(0);
    params
}

#[cfg(test)]
#[path = "boot_tests.rs"]
mod tests;
