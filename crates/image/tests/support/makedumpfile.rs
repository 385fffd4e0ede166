//! The frames as makedumpfile classifies them: the pages that it leaves out of a dump.

use super::class::Class;
use super::fixture::Fixture;
use super::kpageflags::{HUGE, SLAB};
use std::fs::{self, File};
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::{Command, Stdio};

/// makedumpfile's view of all pages.
pub struct Dumps {
    no_free: Vec<u8>,
    no_free_cache: Vec<u8>,
    no_free_user: Vec<u8>,
}

impl Dumps {
    /// Runs makedumpfile, once for each guest.
    pub fn of(fixture: &Fixture) -> Self {
        let core = fixture.folder.join("core");
        let without = |level: u32| {
            let kept = fixture.folder.join(format!("kept-{level}"));
            if !kept.exists() {
                if !core.exists() {
                    write_core(fixture, &core);
                }
                fs::write(&kept, dump(&core, &fixture.folder.join("dump"), level)).unwrap();
            }
            fs::read(kept).unwrap()
        };
        // Dump levels: 2 and 4 leave out page cache, 8 user data, 16 free pages.
        let (no_free, no_free_cache, no_free_user) =
            (without(16), without(16 | 2 | 4), without(16 | 8));
        let _ = fs::remove_file(core);
        Self { no_free, no_free_cache, no_free_user }
    }

    /// The class of a page.
    pub fn class(&self, pfn: u64) -> Class {
        let has = |bitmap: &[u8]| {
            let byte = usize::try_from(pfn / 8).unwrap();
            bitmap.get(byte).is_some_and(|byte| byte >> (pfn % 8) & 1 == 1)
        };
        if !has(&self.no_free) {
            Class::Free
        } else if !has(&self.no_free_cache) {
            Class::Cache
        } else if !has(&self.no_free_user) {
            Class::User
        } else {
            Class::Kernel
        }
    }

    /// The class of a page under 6.12. Debian 12's makedumpfile 1.7.2 (2022) does not know three
    /// properties of that kernel:
    ///
    /// - The length of a compound page, of which it leaves out only the first page.
    /// - Slab as a page type: some slab looks anonymous.
    /// - Huge pages as a page type: huge pages look like the kernel's memory.
    ///
    /// In these cases the kernel's own flags are used.
    pub fn class_of_6_12(&self, fixture: &Fixture, pfn: u64) -> Class {
        let flags = fixture.flags.of(pfn);
        if flags & HUGE != 0 {
            Class::User
        } else if flags & SLAB != 0 {
            Class::Kernel
        } else {
            self.class(fixture.flags.head(pfn))
        }
    }
}

/// Writes an ELF core of the frozen memory. Its note and the address of the direct map come from
/// /proc/kcore.
fn write_core(fixture: &Fixture, path: &Path) {
    const HEADERS: u64 = 64 << 10;
    let (note, direct_map) = kcore(&fixture.kcore);
    let extents = fixture.extents();
    let mut file = File::create(path).unwrap();
    let mut header = vec![0x7f, b'E', b'L', b'F', 2, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0];
    // ET_CORE, x86-64, version, entry, program headers, no sections; flags, sizes, counts.
    header.extend([4_u16, 62].map(u16::to_le_bytes).concat());
    header.extend(1_u32.to_le_bytes());
    header.extend([0_u64, 64, 0].map(u64::to_le_bytes).concat());
    header.extend(0_u32.to_le_bytes());
    let count = u16::try_from(extents.len()).unwrap() + 1;
    header.extend([64_u16, 56, count, 0, 0, 0].map(u16::to_le_bytes).concat());
    let mut program = |kind: u32, offset: u64, address: u64, phys: u64, bytes: u64| {
        header.extend(kind.to_le_bytes());
        header.extend(7_u32.to_le_bytes());
        header.extend([offset, address, phys, bytes, bytes, 0].map(u64::to_le_bytes).concat());
    };
    let note_at = 64 + 56 * u64::from(count);
    program(4, note_at, 0, 0, note.len() as u64);
    for extent in &extents {
        program(1, HEADERS + extent.offset, direct_map + extent.guest, extent.guest, extent.bytes);
    }
    header.extend(note);
    file.write_all(&header).unwrap();
    let ram = fixture.ram();
    let mut buffer = vec![0; 1 << 20];
    for at in (0..fixture.spec.memory_mib).map(|mib| mib << 20) {
        ram.read_exact_at(&mut buffer, at).unwrap();
        file.write_all_at(&buffer, HEADERS + at).unwrap();
    }
}

/// Reads the first bytes of /proc/kcore: the VMCOREINFO note, and the virtual address of
/// guest-physical address 0.
fn kcore(bytes: &[u8]) -> (Vec<u8>, u64) {
    let u64_at = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap());
    let u16_at = |at: usize| u16::from_le_bytes(bytes[at..at + 2].try_into().unwrap());
    let programs =
        (0..usize::from(u16_at(56))).map(|n| usize::try_from(u64_at(32)).unwrap() + n * 56);
    let direct_maps =
        programs.filter(|&at| bytes[at] == 1).map(|at| (u64_at(at + 16), u64_at(at + 24)));
    // The kernel's image has addresses in the top 2 GiB. Memory that is mapped in pieces has a
    // physical address of -1.
    let direct_map = direct_maps
        .filter(|&(address, phys)| address < 0xffff_ffff_8000_0000 && phys < 1 << 52)
        .map(|(address, phys)| address - phys)
        .next()
        .expect("kcore has the direct map");
    let name = b"VMCOREINFO\0\0";
    let at = bytes.windows(name.len()).position(|w| w == name).expect("kcore has the note") - 12;
    let length = u32::from_le_bytes(bytes[at + 4..at + 8].try_into().unwrap()) as usize;
    (bytes[at..(at + 24 + length).next_multiple_of(4)].to_vec(), direct_map)
}

/// The pages in a dump of `level`, one bit for each page number. The bits are the second bitmap of
/// makedumpfile's own format (its IMPLEMENTATION, "kdump-compressed"), whose blocks follow those of
/// the two headers.
fn dump(core: &Path, to: &Path, level: u32) -> Vec<u8> {
    let mut tool = Command::new("makedumpfile");
    tool.arg("-d")
        .arg(level.to_string())
        .arg(core)
        .arg(to)
        .stdout(Stdio::null())
        .stderr(Stdio::piped());
    let said = tool.output().expect("makedumpfile");
    assert!(said.status.success(), "makedumpfile: {}", String::from_utf8_lossy(&said.stderr));
    let file = File::open(to).unwrap();
    let mut header = vec![0; 4096];
    file.read_exact_at(&mut header, 0).unwrap();
    assert_eq!(&header[..8], b"KDUMP   ");
    // Signature, version, six names of 65 bytes, padding, a time of two words, status.
    let at = (12 + 6 * 65_usize).next_multiple_of(8) + 16 + 4;
    let field = |n: usize| {
        u64::from(u32::from_le_bytes(header[at + 4 * n..at + 4 * n + 4].try_into().unwrap()))
    };
    let (block, sub_header_blocks, bitmap_blocks) = (field(0), field(1), field(2));
    let mut bitmap = vec![0; usize::try_from(bitmap_blocks / 2 * block).unwrap()];
    file.read_exact_at(&mut bitmap, (1 + sub_header_blocks + bitmap_blocks / 2) * block).unwrap();
    fs::remove_file(to).unwrap();
    bitmap
}
