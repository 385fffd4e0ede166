//! The ELF kernel inside a vmlinuz.
//!
//! A bzImage says where its compressed payload is (Documentation/arch/x86/boot.rst, `payload_offset`, from boot protocol
//! 2.08). The payload is the compressed vmlinux; behind it, but for gzip, which has it anyway, stands the length of the
//! unpacked kernel in four bytes. All of it is checked against the file's bounds and capped before it is believed.

use std::borrow::Cow;
use std::io::Read;

use super::MAX_KERNEL_BYTES;

/// Largest block of LZ4's legacy framing.
const LZ4_BLOCK_BYTES: usize = 8 << 20;

/// Why a file is not a kernel that can be started.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum VmlinuxError {
    /// A field is not what a kernel has there.
    #[error("{field} at byte {at}: expected {expected}, got {got}")]
    Field {
        /// Which field.
        field: &'static str,
        /// Where in the file.
        at: u64,
        /// What is accepted.
        expected: String,
        /// What was found.
        got: String,
    },
    /// The payload is compressed by something that is not read here.
    #[error(
        "payload at byte {at}: compression {name} is not supported; expected zstd, lz4, gzip, xz or none. \
         Unpack it with the kernel's scripts/extract-vmlinux and give the vmlinux"
    )]
    Compression {
        /// Where in the file.
        at: u64,
        /// Which.
        name: String,
    },
    /// The payload is damaged.
    #[error("payload at byte {at}: {what}")]
    Payload {
        /// Where in the file.
        at: u64,
        /// What the decoder says.
        what: String,
    },
}

fn field<T>(
    field: &'static str,
    at: usize,
    expected: impl ToString,
    got: impl ToString,
) -> Result<T, VmlinuxError> {
    let (expected, got) = (expected.to_string(), got.to_string());
    Err(VmlinuxError::Field { field, at: at as u64, expected, got })
}

/// `N` bytes at `at`.
fn bytes<const N: usize>(file: &[u8], at: usize, name: &'static str) -> Result<[u8; N], VmlinuxError> {
    match file.get(at..).and_then(|rest| rest.first_chunk::<N>()) {
        Some(found) => Ok(*found),
        None => field(name, at, format!("{N} bytes"), format!("the end of the file at {}", file.len())),
    }
}

fn u16_at(file: &[u8], at: usize, name: &'static str) -> Result<u16, VmlinuxError> {
    bytes(file, at, name).map(u16::from_le_bytes)
}

fn u32_at(file: &[u8], at: usize, name: &'static str) -> Result<u32, VmlinuxError> {
    bytes(file, at, name).map(u32::from_le_bytes)
}

fn u64_at(file: &[u8], at: usize, name: &'static str) -> Result<u64, VmlinuxError> {
    bytes(file, at, name).map(u64::from_le_bytes)
}

/// The ELF kernel in `file`: a bzImage, or an ELF file already.
///
/// # Errors
/// [`VmlinuxError`], naming field and place.
pub fn unpack_vmlinux(file: &[u8]) -> Result<Cow<'_, [u8]>, VmlinuxError> {
    if file.starts_with(b"\x7fELF") {
        check_elf(file, "kernel")?;
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
        return field("unpacked length", start + length - 4, format!("at most {MAX_KERNEL_BYTES}"), stated);
    }
    let elf = decompress(payload, body, start as u64, stated)?;
    if elf.len() as u64 != stated {
        return field("unpacked length", start + length - 4, format!("{stated} bytes"), elf.len());
    }
    check_elf(&elf, "unpacked kernel")?;
    Ok(Cow::Owned(elf))
}

/// Unpacks by the payload's first bytes, to at most `cap` bytes and one.
fn decompress(payload: &[u8], body: &[u8], at: u64, cap: u64) -> Result<Vec<u8>, VmlinuxError> {
    let failed = |e: std::io::Error| VmlinuxError::Payload { at, what: e.to_string() };
    let unsupported = |name: &str| VmlinuxError::Compression { at, name: name.to_owned() };
    let reader: Box<dyn Read + '_> = match payload {
        // Its default limit on the window, 128 MiB, is what the kernel's own decoder takes.
        [0x28, 0xb5, 0x2f, 0xfd, ..] => {
            Box::new(zstd::Decoder::with_buffer(body).map_err(failed)?.single_frame())
        }
        // gzip's own trailer is the length.
        [0x1f, 0x8b, ..] => Box::new(flate2::bufread::GzDecoder::new(payload)),
        [0xfd, b'7', b'z', b'X', b'Z', 0, ..] => Box::new(liblzma::bufread::XzDecoder::new(body)),
        [0x02, 0x21, 0x4c, 0x18, ..] => return lz4_legacy(&body[4..], at + 4, cap),
        [0x5d, 0, 0, ..] => return Err(unsupported("lzma")),
        [b'B', b'Z', b'h', ..] => return Err(unsupported("bzip2")),
        [0x89, b'L', b'Z', b'O', ..] => return Err(unsupported("lzo")),
        [0x7f, b'E', b'L', b'F', ..] => return Ok(payload.to_vec()),
        other => {
            return Err(unsupported(&format!("starting with {}", hex::encode(&other[..other.len().min(6)]))));
        }
    };
    let mut out = Vec::new();
    reader.take(cap + 1).read_to_end(&mut out).map_err(failed)?;
    Ok(out)
}

/// LZ4's legacy frame (lz4_Frame_format.md): blocks of at most 8 MiB unpacked, each after its packed length.
fn lz4_legacy(mut rest: &[u8], mut at: u64, cap: u64) -> Result<Vec<u8>, VmlinuxError> {
    let mut out = Vec::new();
    let mut block = vec![0; LZ4_BLOCK_BYTES];
    while let Some((length, data)) = rest.split_first_chunk::<4>() {
        let length = u32::from_le_bytes(*length) as usize;
        let Some(packed) = data.get(..length) else {
            let what = format!("LZ4 block: expected {length} bytes, got {}", data.len());
            return Err(VmlinuxError::Payload { at, what });
        };
        let unpacked = lz4_flex::block::decompress_into(packed, &mut block)
            .map_err(|e| VmlinuxError::Payload { at, what: format!("LZ4 block: {e}") })?;
        out.extend_from_slice(&block[..unpacked]);
        if out.len() as u64 > cap {
            return Ok(out);
        }
        at += 4 + length as u64;
        rest = &data[length..];
    }
    if rest.is_empty() {
        return Ok(out);
    }
    Err(VmlinuxError::Payload {
        at,
        what: format!("LZ4 block: expected 4 bytes of length, got {}", rest.len()),
    })
}

/// An ELF file of x86-64 whose program headers lie inside it (elf(5)).
fn check_elf(elf: &[u8], name: &'static str) -> Result<(), VmlinuxError> {
    let ident: [u8; 6] = bytes(elf, 0, name)?;
    if &ident != b"\x7fELF\x02\x01" {
        return field(name, 0, "a 64-bit little-endian ELF file", hex::encode(ident));
    }
    let machine = u16_at(elf, 18, "ELF machine")?;
    if machine != 62 {
        return field("ELF machine", 18, "62 (x86-64)", machine);
    }
    let table = u64_at(elf, 32, "ELF program headers")?;
    let (size, count) = (u16_at(elf, 54, "ELF program headers")?, u16_at(elf, 56, "ELF program headers")?);
    let inside =
        |start: u64, length: u64| start.checked_add(length).is_some_and(|end| end <= elf.len() as u64);
    if size != 56 || count == 0 || !inside(table, u64::from(size) * u64::from(count)) {
        let got = format!("{count} of {size} bytes at {table}");
        return field("ELF program headers", 32, "at least one, of 56 bytes, inside the file", got);
    }
    let table = usize::try_from(table).unwrap_or(usize::MAX);
    for at in (0..usize::from(count)).map(|i| table + i * 56) {
        let (offset, length) = (u64_at(elf, at + 8, "ELF segment")?, u64_at(elf, at + 32, "ELF segment")?);
        if u32_at(elf, at, "ELF segment")? == 1 && !inside(offset, length) {
            let expected = format!("a segment inside {} bytes", elf.len());
            return field("ELF segment", at, expected, format!("{length} bytes at {offset}"));
        }
    }
    Ok(())
}

/// An agent is started by the bare kernel: a static ELF file of x86-64, or a script of one.
pub(super) fn check_agent(file: &[u8]) -> Result<(), VmlinuxError> {
    check_elf(file, "agent")?;
    let (table, count) = (u64_at(file, 32, "ELF program headers")?, u16_at(file, 56, "ELF program headers")?);
    let table = usize::try_from(table).unwrap_or(usize::MAX);
    for at in (0..usize::from(count)).map(|i| table + i * 56) {
        // PT_INTERP
        if u32_at(file, at, "ELF segment")? == 3 {
            return field("agent", at, "a static program", "one that needs a dynamic loader");
        }
    }
    Ok(())
}

/// The release in the kernel's banner, `Linux version <release> (…`.
///
/// # Errors
/// [`VmlinuxError::Field`] where there is none.
pub fn release_of(elf: &[u8]) -> Result<String, VmlinuxError> {
    const BANNER: &[u8] = b"Linux version ";
    let word = |b: u8| b.is_ascii_alphanumeric() || b"._+~-".contains(&b);
    let mut from = 0;
    while let Some(at) = find(&elf[from..], BANNER) {
        let start = from + at + BANNER.len();
        let text: Vec<u8> = elf[start..].iter().copied().take(65).take_while(|b| word(*b)).collect();
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
