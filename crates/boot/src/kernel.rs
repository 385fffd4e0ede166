//! Extracts the ELF kernel from a vmlinuz.
//!
//! A bzImage states the place of its compressed payload (Documentation/arch/x86/boot.rst,
//! `payload_offset`, from boot protocol 2.08). The payload is the compressed vmlinux. The four
//! bytes after it are the unpacked length; only gzip has that length in its own trailer. Every
//! field is checked against the file's bounds and against a limit before use.

use crate::elf;
use crate::error::FormatError;
use crate::fields::{bytes, field, u16_at, u32_at};
use crate::files::MAX_KERNEL_BYTES;
use crate::payload::decompress;
use std::borrow::Cow;

/// Returns the ELF kernel in `file`, which is a bzImage or already an ELF file.
///
/// # Errors
/// [`FormatError`], with field and byte offset.
pub fn unpack_vmlinux(file: &[u8]) -> Result<Cow<'_, [u8]>, FormatError> {
    if file.starts_with(b"\x7fELF") {
        elf::check(file, "kernel")?;
        return Ok(Cow::Borrowed(file));
    }
    let flag = u16_at(file, 0x1fe, "boot flag")?;
    if flag != 0xaa55 {
        return field("boot flag", 0x1fe, "0xaa55, or an ELF file", format!("{flag:#06x}"));
    }
    let magic: [u8; 4] = bytes(file, 0x202, "setup header")?;
    if &magic != b"HdrS" {
        return field("setup header", 0x202, "HdrS", magic.escape_ascii());
    }
    let version = u16_at(file, 0x206, "boot protocol")?;
    if version < 0x0208 {
        return field("boot protocol", 0x206, "0x0208 or later", format!("{version:#06x}"));
    }
    let [sectors] = bytes(file, 0x1f1, "setup sectors")?;
    let sectors = if sectors == 0 { 4 } else { usize::from(sectors) };
    let offset = u32_at(file, 0x248, "payload offset")? as usize;
    let length = u32_at(file, 0x24c, "payload length")? as usize;
    let start = (sectors + 1) * 512 + offset;
    let Some(payload) = start.checked_add(length).and_then(|end| file.get(start..end)) else {
        let expected = format!("a payload inside the file of {} bytes", file.len());
        return field("payload length", 0x24c, expected, format!("{length} bytes at {start}"));
    };
    let Some((body, stated)) = payload.split_last_chunk::<4>() else {
        return field("payload length", 0x24c, "more than 4 bytes", length);
    };
    let stated = u64::from(u32::from_le_bytes(*stated));
    if stated > MAX_KERNEL_BYTES {
        return field(
            "unpacked length",
            start + length - 4,
            format!("at most {MAX_KERNEL_BYTES}"),
            stated,
        );
    }
    let elf = decompress(payload, body, start as u64, stated)?;
    if elf.len() as u64 != stated {
        return field("unpacked length", start + length - 4, format!("{stated} bytes"), elf.len());
    }
    elf::check(&elf, "unpacked kernel")?;
    Ok(Cow::Owned(elf))
}

/// Returns the release in the kernel's banner, `Linux version <release> (…`.
///
/// # Errors
/// [`FormatError::Field`] if there is no banner.
pub fn release_of(elf: &[u8]) -> Result<String, FormatError> {
    const BANNER: &[u8] = b"Linux version ";
    let word = |b: u8| b.is_ascii_alphanumeric() || b"._+~-".contains(&b);
    let mut from = 0;
    while let Some(at) = find(&elf[from..], BANNER) {
        let start = from + at + BANNER.len();
        let text: Vec<u8> =
            elf[start..].iter().copied().take(65).take_while(|b| word(*b)).collect();
        if text.first().is_some_and(u8::is_ascii_digit) && text.len() <= 64 {
            return Ok(String::from_utf8_lossy(&text).into_owned());
        }
        from = start;
    }
    field("banner", 0, "\"Linux version \" and a release", "none")
}

fn find(hay: &[u8], needle: &[u8]) -> Option<usize> {
    let first = *needle.first()?;
    let mut from = 0;
    while let Some(at) = hay.get(from..)?.iter().position(|b| *b == first) {
        if hay[from + at..].starts_with(needle) {
            return Some(from + at);
        }
        from += at + 1;
    }
    None
}

#[cfg(test)]
#[path = "kernel_tests.rs"]
mod tests;
