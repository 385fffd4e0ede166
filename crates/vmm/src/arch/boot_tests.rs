//! Kernels that fit into RAM, and one that does not.

use super::*;
use std::io::Write;

const RAM: u64 = 16 << 20;

/// A kernel of one segment at 1 MiB, with an entry in it, that takes `memory_bytes` of memory.
fn kernel(entry: u64, memory_bytes: u64) -> File {
    const CODE: [u8; 16] = [0x90; 16];
    let mut elf = vec![0; 64 + 56];
    elf[..8].copy_from_slice(b"\x7fELF\x02\x01\x01\0");
    (elf[16], elf[18], elf[20], elf[52], elf[54], elf[56]) = (2, 62, 1, 64, 56, 1);
    (elf[64], elf[68]) = (1, 5);
    let start = layout::HIGH_RAM.0;
    let words = [(24, entry), (32, 64), (72, 120), (80, start), (88, start)];
    let sizes = [(96, CODE.len() as u64), (104, memory_bytes), (112, 4096)];
    for (at, value) in words.into_iter().chain(sizes) {
        elf[at..at + 8].copy_from_slice(&value.to_le_bytes());
    }
    elf.extend_from_slice(&CODE);
    let mut file = tempfile::tempfile().unwrap();
    file.write_all(&elf).unwrap();
    file
}

#[test]
fn a_kernel_lies_in_ram_with_its_zeroed_memory() {
    let start = layout::HIGH_RAM;
    let memory =
        GuestMemoryMmap::from_ranges(&[(GuestAddress(0), usize::try_from(RAM).unwrap())]).unwrap();
    let load = |entry, bytes| load(&memory, RAM, kernel(entry, bytes), None, "quiet");
    let room = RAM - start.0;
    assert_eq!(load(start.0, room).unwrap(), start);
    let error = load(start.0, room + 1).unwrap_err().to_string();
    assert!(error.contains("ends at 0x1000001, expected at most 0x1000000"), "{error}");
    // An entry far outside of RAM was accepted, because the kernel claimed that much memory.
    let far = load(start.0 + (1 << 40), 1 << 41).unwrap_err();
    assert!(matches!(far, LoadError::End { ram_end: RAM, .. }), "{far}");
    assert!(matches!(load(start.0 + 16, 16).unwrap_err(), LoadError::Entry { .. }));
}
