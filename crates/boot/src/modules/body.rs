//! Opens, reads and unpacks the files of a modules' folder.

use crate::error::{BootError, on};
use rustix::fs::{Mode, OFlags, ResolveFlags, open, openat2};
use std::fs::File;
use std::io::{self, Read};
use std::path::Path;

/// Largest unpacked module in bytes, far above those of distributions.
const MAX_MODULE_BYTES: u64 = 64 << 20;

/// Opens the regular file `path` of `folder`. A path that leads out of `folder` is refused, because
/// a hostile package may have links to files of the user.
fn open_in(folder: &Path, path: &str) -> Result<File, BootError> {
    let whole = folder.join(path);
    let opened = open(folder, OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())
        .and_then(|dir| {
            // Without NONBLOCK, opening a FIFO waits for a writer.
            let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::CLOEXEC;
            let inside = ResolveFlags::BENEATH | ResolveFlags::NO_MAGICLINKS;
            openat2(dir, path, flags, Mode::empty(), inside)
        });
    let file = File::from(opened.map_err(|e| on("open", &whole)(e.into()))?);
    let kind = file.metadata().map_err(on("read", &whole))?.file_type();
    if kind.is_file() {
        return Ok(file);
    }
    let got = if kind.is_dir() { "a folder" } else { "a pipe, a socket or a device" };
    let (expected, got) = ("a regular file".to_owned(), got.to_owned());
    Err(BootError::Tree { path: whole, expected, got })
}

/// Reads at most one byte more than `cap`, which shows that the content is longer.
fn read_past(reader: impl Read, cap: u64) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    reader.take(cap + 1).read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// Reads the file `path` of `folder` as it is, packed or not. A path that leads out of `folder` is
/// refused.
///
/// # Errors
/// [`BootError::Io`], and [`BootError::Tree`] for no regular file, or one longer than `cap` bytes.
pub fn packed(folder: &Path, path: &str, cap: u64) -> Result<Vec<u8>, BootError> {
    let whole = folder.join(path);
    let bytes = read_past(open_in(folder, path)?, cap).map_err(on("read", &whole))?;
    if bytes.len() as u64 > cap {
        let (expected, got) = (format!("a file of at most {cap} bytes"), "more".to_owned());
        return Err(BootError::Tree { path: whole, expected, got });
    }
    Ok(bytes)
}

/// Opens and unpacks the module `path` of `folder`. A path that leads out of `folder` is refused.
///
/// # Errors
/// [`BootError::Io`], and [`BootError::Tree`] for a file that is no ELF module, or longer than
/// 64 MiB.
pub(super) fn unpack(folder: &Path, path: &str) -> Result<Vec<u8>, BootError> {
    let whole = folder.join(path);
    let file = open_in(folder, path)?;
    let failed = on("unpack", &whole);
    let reader: Box<dyn Read> = match path.rsplit('.').next() {
        Some("xz") => Box::new(liblzma::read::XzDecoder::new(file)),
        Some("zst") => Box::new(zstd::Decoder::new(file).map_err(&failed)?),
        Some("gz") => Box::new(flate2::read::GzDecoder::new(file)),
        _ => Box::new(file),
    };
    let bytes = read_past(reader, MAX_MODULE_BYTES).map_err(&failed)?;
    if bytes.len() as u64 > MAX_MODULE_BYTES || !bytes.starts_with(b"\x7fELF") {
        let start = hex::encode(&bytes[..bytes.len().min(4)]);
        return Err(BootError::Tree {
            path: whole.clone(),
            expected: format!("an ELF module of at most {MAX_MODULE_BYTES} bytes"),
            got: format!("{} bytes beginning {start}", bytes.len()),
        });
    }
    Ok(bytes)
}

/// Removes the signature that `scripts/sign-file` appended (include/linux/module_signature.h).
///
/// On an emulated CPU, checking the signature takes longer than the rest of loading the module. The
/// signature adds no security there: an attacker who can change the initramfs can change the kernel
/// too.
#[must_use]
pub fn without_signature(mut body: Vec<u8>) -> Vec<u8> {
    const MARK: &[u8] = b"~Module signature appended~\n";
    // struct module_signature: eight bytes, then the signature's length, big-endian.
    const RECORD_BYTES: usize = 12;
    let end = body.strip_suffix(MARK).and_then(|rest| {
        let length: [u8; 4] = rest.get(rest.len().checked_sub(4)?..)?.try_into().ok()?;
        rest.len()
            .checked_sub(RECORD_BYTES)?
            .checked_sub(usize::try_from(u32::from_be_bytes(length)).ok()?)
    });
    body.truncate(end.unwrap_or(body.len()));
    body
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn signatures_are_cut_off_and_nothing_else_is() {
        let mark = b"~Module signature appended~\n";
        let signed = [b"module".as_slice(), b"pkcs7", &[0; 8], &5u32.to_be_bytes(), mark].concat();
        assert_eq!(without_signature(signed.clone()), b"module");
        for length in 0..signed.len() {
            assert_eq!(without_signature(signed[..length].to_vec()), &signed[..length], "{length}");
        }
        // A length that points before the start of the file.
        let hostile = [b"m".as_slice(), &[0; 8], &u32::MAX.to_be_bytes(), mark].concat();
        assert_eq!(without_signature(hostile.clone()), hostile);
        assert_eq!(without_signature(mark.to_vec()), mark);
    }

    #[test]
    fn a_packed_file_is_read_up_to_its_limit() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("a"), b"1234").unwrap();
        assert_eq!(packed(folder.path(), "a", 4).unwrap(), b"1234");
        let text = packed(folder.path(), "a", 3).unwrap_err().to_string();
        assert!(text.ends_with("expected a file of at most 3 bytes, got more"), "{text}");
    }

    #[test]
    fn only_elf_files_up_to_the_limit_are_modules() {
        let folder = tempfile::tempdir().unwrap();
        let write = |name: &str, bytes: Vec<u8>| {
            std::fs::write(folder.path().join(name), bytes).unwrap();
            unpack(folder.path(), name).map_err(|e| e.to_string())
        };
        assert_eq!(write("a.ko", b"\x7fELF a".to_vec()).unwrap(), b"\x7fELF a");
        let text = write("b.ko", b"text".to_vec()).unwrap_err();
        assert!(
            text.ends_with(
                "expected an ELF module of at most 67108864 bytes, got 4 bytes \
            beginning 74657874"
            ),
            "{text}"
        );
        // A small file that unpacks to more than the limit is not unpacked to the end.
        let bomb = b"\x7fELF".chain(std::io::repeat(0).take(80 << 20));
        let text = write("c.ko.zst", zstd::encode_all(bomb, 1).unwrap()).unwrap_err();
        assert!(text.contains("got 67108865 bytes"), "{text}");
    }
}
