//! 64-bit little-endian ELF files (elf(5)): checks of kernels and programs, and a cut that leaves
//! only what is loaded.

use crate::error::FormatError;
use crate::fields::{bytes, field, u16_at, u32_at, u64_at};

/// Length of a program header in bytes.
const HEADER_BYTES: usize = 0x38;
/// `p_type` of the program header that names the dynamic loader.
const PT_INTERP: [u8; 4] = 3_u32.to_le_bytes();
/// Longest path of a dynamic loader in bytes, which is also the limit of Linux (PATH_MAX).
const MAX_LOADER_BYTES: usize = 4096;

/// Checks for an x86-64 ELF file whose program headers lie inside the file (elf(5)).
///
/// # Errors
/// [`FormatError::Field`], whose field is `name` if the file is not such an ELF file at all.
pub fn check(elf: &[u8], name: &'static str) -> Result<(), FormatError> {
    let ident: [u8; 6] = bytes(elf, 0, name)?;
    if &ident != b"\x7fELF\x02\x01" {
        return field(name, 0, "a 64-bit little-endian ELF file", hex::encode(ident));
    }
    let machine = u16_at(elf, 18, "ELF machine")?;
    if machine != 62 {
        return field("ELF machine", 18, "62 (x86-64)", machine);
    }
    let table = u64_at(elf, 32, "ELF program headers")?;
    let (size, count) =
        (u16_at(elf, 54, "ELF program headers")?, u16_at(elf, 56, "ELF program headers")?);
    let inside = |start: u64, length: u64| {
        start.checked_add(length).is_some_and(|end| end <= elf.len() as u64)
    };
    if size != 56 || count == 0 || !inside(table, u64::from(size) * u64::from(count)) {
        let got = format!("{count} of {size} bytes at {table}");
        return field("ELF program headers", 32, "at least one, of 56 bytes, inside the file", got);
    }
    let table = usize::try_from(table).unwrap_or(usize::MAX);
    for at in (0..usize::from(count)).map(|i| table + i * 56) {
        let (offset, length) =
            (u64_at(elf, at + 8, "ELF segment")?, u64_at(elf, at + 32, "ELF segment")?);
        if u32_at(elf, at, "ELF segment")? == 1 && !inside(offset, length) {
            let expected = format!("a segment inside {} bytes", elf.len());
            return field("ELF segment", at, expected, format!("{length} bytes at {offset}"));
        }
    }
    Ok(())
}

/// Checks a program that the kernel starts without a dynamic loader: a static x86-64 ELF file.
///
/// # Errors
/// [`FormatError::Field`], whose field is `name` for a program with a loader.
pub fn check_static(file: &[u8], name: &'static str) -> Result<(), FormatError> {
    check(file, name)?;
    let Some(table) = Table::of(file) else { return Ok(()) };
    match (0..table.count).find(|index| table.header(*index).is_some_and(is_interpreter)) {
        Some(index) => field(
            name,
            table.start + index * table.size,
            "a static program",
            "one that needs a dynamic loader",
        ),
        None => Ok(()),
    }
}

/// The dynamic loader that a program names (PT_INTERP), as text for people. `None` for a static
/// program and for a file of another format.
#[must_use]
pub fn loader(file: &[u8]) -> Option<String> {
    let table = Table::of(file)?;
    let header =
        (0..table.count).filter_map(|index| table.header(index)).find(|h| is_interpreter(h))?;
    let start = word(header, 8).and_then(|offset| file.get(offset..)).unwrap_or_default();
    let name = start.split(|b| *b == 0).next().unwrap_or_default();
    let name = name.get(..name.len().min(MAX_LOADER_BYTES)).unwrap_or_default();
    Some(String::from_utf8_lossy(name).chars().filter(|c| !c.is_control()).collect())
}

/// Removes symbols and debug sections, so that an initramfs holds only the loaded parts of a
/// program: cuts the file after the last byte that its program headers name, and drops the section
/// table. Another file is returned unchanged. A cut is enough, because debug sections lie after
/// everything that is loaded.
#[must_use]
pub fn shear(mut file: Vec<u8>) -> Vec<u8> {
    if let Some(end) = loaded_end(&file) {
        file.truncate(end);
        file[0x28..0x30].fill(0); // e_shoff
        file[0x3c..0x40].fill(0); // e_shnum, e_shstrndx
    }
    file
}

/// The table of program headers, which may lie outside the file.
struct Table<'f> {
    file: &'f [u8],
    start: usize,
    size: usize,
    count: usize,
}

impl<'f> Table<'f> {
    /// The table of a 64-bit little-endian ELF file.
    fn of(file: &'f [u8]) -> Option<Self> {
        if file.get(..6)? != b"\x7fELF\x02\x01" {
            return None;
        }
        let half = |at: usize| -> Option<usize> {
            Some(usize::from(u16::from_le_bytes(file.get(at..at + 2)?.try_into().ok()?)))
        };
        Some(Self { file, start: word(file, 0x20)?, size: half(0x36)?, count: half(0x38)? })
    }

    /// A program header, unless it lies outside the file.
    fn header(&self, index: usize) -> Option<&'f [u8]> {
        let start = self.start.checked_add(index.checked_mul(self.size)?)?;
        self.file.get(start..start.checked_add(HEADER_BYTES)?)
    }
}

fn is_interpreter(header: &[u8]) -> bool {
    header.starts_with(&PT_INTERP)
}

/// A 64-bit number that fits into a `usize`.
fn word(bytes: &[u8], at: usize) -> Option<usize> {
    usize::try_from(u64::from_le_bytes(bytes.get(at..at + 8)?.try_into().ok()?)).ok()
}

/// Offset after the last byte that a program header names; `None` if the file is no such ELF file.
fn loaded_end(file: &[u8]) -> Option<usize> {
    let table = Table::of(file)?;
    // 0x40 bytes are the file's own header, which `shear` changes.
    let mut end = table.start.checked_add(table.size.checked_mul(table.count)?)?.max(0x40);
    for index in 0..table.count {
        let header = table.header(index)?;
        end = end.max(word(header, 8)?.checked_add(word(header, 32)?)?);
    }
    (end <= file.len() && table.count > 0).then_some(end)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn a_dynamic_program_names_its_loader_and_a_static_one_does_not() {
        assert!(loader(&std::fs::read("/bin/true").unwrap()).unwrap().starts_with("/lib"));
        // Tests are linked statically, like all programs of dayfly.
        let own = std::fs::read(std::env::current_exe().unwrap()).unwrap();
        assert_eq!(loader(&own), None);
        assert_eq!(check_static(&own, "test"), Ok(()));
        for length in 0..200 {
            let _ = loader(&own[..length]);
        }
        assert_eq!(loader(b"#!/bin/sh"), None);
    }

    #[test]
    fn a_shorn_program_still_runs_and_is_smaller() {
        let whole = std::fs::read(std::env::current_exe().unwrap()).unwrap();
        let before = whole.len();
        let shorn = shear(whole);
        assert!(shorn.len() < before, "{} of {before}", shorn.len());
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("shorn");
        std::fs::write(&path, shorn).unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
        let out = std::process::Command::new(&path).arg("--list").output().unwrap();
        assert!(out.status.success());
        assert!(String::from_utf8(out.stdout).unwrap().contains("a_shorn_program"));
    }

    #[test]
    fn what_is_no_elf_stays_whole_at_every_length() {
        let whole = std::fs::read("/proc/self/exe").unwrap()[..4096].to_vec();
        for length in 0..256 {
            assert_eq!(shear(whole[..length].to_vec()), &whole[..length], "cut at {length}");
        }
        assert_eq!(shear(b"#!/bin/sh\n".to_vec()), b"#!/bin/sh\n");
    }

    #[test]
    fn a_loader_s_name_is_cut_and_has_no_control_characters() {
        let mut file = vec![0; 0x40 + HEADER_BYTES];
        file[..6].copy_from_slice(b"\x7fELF\x02\x01");
        file[0x20] = 0x40;
        file[0x36] = 0x38;
        file[0x38] = 1;
        file[0x40] = 3;
        let name_at = file.len();
        file[0x48..0x50].copy_from_slice(&(name_at as u64).to_le_bytes());
        assert_eq!(loader(&file).as_deref(), Some(""), "no byte of a name");
        let named = [&file[..], b"/lib/\x1b[2Jld.so\0more"].concat();
        assert_eq!(loader(&named).as_deref(), Some("/lib/[2Jld.so"));
        let endless = [file.clone(), vec![b'x'; 10_000]].concat();
        assert_eq!(loader(&endless).unwrap().len(), MAX_LOADER_BYTES);
        // A name outside the file: the program needs a loader all the same.
        file[0x48..0x50].fill(0xff);
        assert_eq!(loader(&file).as_deref(), Some(""));
    }
}
