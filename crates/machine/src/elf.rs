//! Cuts symbols and debug sections off a static ELF program, so that the initramfs carries only what is loaded.

/// The part of a 64-bit little-endian ELF file that its program headers name, with the section table dropped; a file
/// that is no such ELF comes back whole. Debug sections lie behind everything that is loaded, so a cut is enough.
pub(crate) fn shear(mut file: Vec<u8>) -> Vec<u8> {
    if let Some(end) = loaded_end(&file) {
        file.truncate(end);
        file[0x28..0x30].fill(0); // e_shoff
        file[0x3c..0x40].fill(0); // e_shnum, e_shstrndx
    }
    file
}

/// Whether a program asks for a dynamic linker (PT_INTERP), which an initramfs does not have.
pub(crate) fn needs_a_linker(file: &[u8]) -> bool {
    const PT_INTERP: [u8; 4] = [3, 0, 0, 0];
    headers(file).is_some_and(|mut headers| headers.any(|header| header.starts_with(&PT_INTERP)))
}

/// The program headers of a 64-bit little-endian ELF file, those that lie within it.
fn headers(file: &[u8]) -> Option<impl Iterator<Item = &[u8]>> {
    if file.get(..6)? != b"\x7fELF\x02\x01" {
        return None;
    }
    let table = usize::try_from(u64::from_le_bytes(file.get(0x20..0x28)?.try_into().ok()?)).ok()?;
    let size = usize::from(u16::from_le_bytes(file.get(0x36..0x38)?.try_into().ok()?));
    let count = usize::from(u16::from_le_bytes(file.get(0x38..0x3a)?.try_into().ok()?));
    Some((0..count).filter_map(move |index| {
        let start = table.checked_add(index.checked_mul(size)?)?;
        file.get(start..start.checked_add(0x38)?)
    }))
}

/// Where the last byte that a program header names ends; `None` when the file is not what we understand.
fn loaded_end(file: &[u8]) -> Option<usize> {
    if file.get(..6)? != b"\x7fELF\x02\x01" {
        return None;
    }
    let table = usize::try_from(u64::from_le_bytes(file.get(0x20..0x28)?.try_into().ok()?)).ok()?;
    let size = usize::from(u16::from_le_bytes(file.get(0x36..0x38)?.try_into().ok()?));
    let count = usize::from(u16::from_le_bytes(file.get(0x38..0x3a)?.try_into().ok()?));
    let mut end = table.checked_add(size.checked_mul(count)?)?.max(0x40);
    for index in 0..count {
        let header = file.get(table + index * size..)?.get(..0x38)?;
        let offset = u64::from_le_bytes(header.get(8..16)?.try_into().ok()?);
        let length = u64::from_le_bytes(header.get(32..40)?.try_into().ok()?);
        end = end.max(usize::try_from(offset.checked_add(length)?).ok()?);
    }
    (end <= file.len() && count > 0).then_some(end)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn a_dynamic_program_is_told_from_a_static_one() {
        assert!(needs_a_linker(&std::fs::read("/bin/true").unwrap()));
        // Tests are linked statically, as all of dayfly.
        let own = std::fs::read(std::env::current_exe().unwrap()).unwrap();
        assert!(!needs_a_linker(&own));
        for length in 0..200 {
            needs_a_linker(&own[..length]);
        }
        assert!(!needs_a_linker(b"#!/bin/sh"));
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
}
