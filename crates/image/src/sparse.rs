//! Sparse files: reading only what has data, and the digest that names a disk by its content.

use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::{FileExt, MetadataExt};

const PAGE: usize = 4096;
/// Bytes read at once.
const CHUNK: usize = 1 << 20;

/// What a pass over a sparse file found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SparseSummary {
    /// See [`sparse_digest`].
    pub digest: blake3::Hash,
    /// The file's length in bytes, holes included.
    pub size_bytes: u64,
    /// Bytes in 4 KiB pages that are not all zero.
    pub content_bytes: u64,
}

/// The digest of a file's content, the same as the store's: BLAKE3 over, for each 4 KiB page that is not all zero, in order, the
/// page's index (u64, little-endian) and its bytes (fewer than 4096 in a last, partial page), and at the end the file's length
/// (u64, little-endian).
///
/// It does not depend on which zeroes are holes.
///
/// # Errors
/// When the file cannot be read.
pub fn sparse_digest(file: &File) -> io::Result<blake3::Hash> {
    summarise(file).map(|s| s.digest)
}

/// The same pass, with sizes.
///
/// # Errors
/// When the file cannot be read.
pub fn summarise(file: &File) -> io::Result<SparseSummary> {
    let mut hasher = blake3::Hasher::new();
    // Indices and pages are gathered so that BLAKE3 gets long runs, which it hashes several times faster.
    let mut run = Vec::with_capacity((CHUNK / PAGE) * (PAGE + 8));
    let mut content_bytes = 0;
    for_each_data(file, |offset, bytes| {
        run.clear();
        for (index, page) in (offset / PAGE as u64..).zip(bytes.chunks(PAGE)) {
            if is_zero(page) {
                continue;
            }
            content_bytes += PAGE as u64;
            run.extend_from_slice(&u64::to_le_bytes(index));
            run.extend_from_slice(page);
        }
        hasher.update(&run);
        Ok(())
    })?;
    let size_bytes = file.metadata()?.size();
    hasher.update(&size_bytes.to_le_bytes());
    Ok(SparseSummary { digest: hasher.finalize(), size_bytes, content_bytes })
}

/// Whether every byte is zero.
pub(crate) fn is_zero(bytes: &[u8]) -> bool {
    let (words, tail) = bytes.as_chunks::<16>();
    words.iter().all(|w| u128::from_ne_bytes(*w) == 0) && tail.iter().all(|b| *b == 0)
}

/// Makes a hole of everything that is not data: written zeroes, and room that was allocated but never written.
///
/// # Errors
/// When the file cannot be read or the file system cannot make holes.
pub(crate) fn punch_zeroes(file: &File) -> io::Result<()> {
    let size = file.metadata()?.size();
    let mut holes: Vec<(u64, u64)> = Vec::new();
    let mut end = 0;
    for_each_data(file, |offset, bytes| {
        for (at, page) in (offset..).step_by(PAGE).zip(bytes.chunks(PAGE)) {
            if !is_zero(page) {
                if at > end {
                    holes.push((end, at - end));
                }
                end = at + PAGE as u64;
            }
        }
        Ok(())
    })?;
    if size > end {
        holes.push((end, size - end));
    }
    let flags = rustix::fs::FallocateFlags::PUNCH_HOLE | rustix::fs::FallocateFlags::KEEP_SIZE;
    for (start, length) in holes {
        rustix::fs::fallocate(file, flags, start, length)?;
    }
    Ok(())
}

/// Calls `each` with (offset, bytes) for the parts of `file` that are not holes, in order. Offsets are multiples of
/// 4 KiB, and so is every length but the last's.
///
/// # Errors
/// When the file cannot be read, or `each` fails.
pub(crate) fn for_each_data(
    file: &File,
    mut each: impl FnMut(u64, &[u8]) -> io::Result<()>,
) -> io::Result<()> {
    let size = file.metadata()?.size();
    let mut buffer = vec![0; CHUNK];
    let mut at = 0;
    while at < size {
        let start = match rustix::fs::seek(file.as_fd(), rustix::fs::SeekFrom::Data(at)) {
            Ok(start) => start,
            Err(rustix::io::Errno::NXIO) => return Ok(()),
            Err(error) => return Err(error.into()),
        };
        let end = rustix::fs::seek(file.as_fd(), rustix::fs::SeekFrom::Hole(start))?.min(size);
        // Never behind `at`: two neighbouring extents may share a page on file systems with smaller blocks.
        at = at.max(start - start % PAGE as u64);
        while at < end {
            let rest = usize::try_from((size - at).min(CHUNK as u64)).unwrap_or(CHUNK);
            let want = match usize::try_from((end - at).next_multiple_of(PAGE as u64)) {
                Ok(extent) => rest.min(extent),
                Err(_) => rest,
            };
            file.read_exact_at(&mut buffer[..want], at)?;
            each(at, &buffer[..want])?;
            at += want as u64;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// The definition, word for word.
    fn by_definition(bytes: &[u8]) -> blake3::Hash {
        let mut hasher = blake3::Hasher::new();
        for (index, page) in bytes.chunks(PAGE).enumerate() {
            if page.iter().any(|b| *b != 0) {
                hasher.update(&(index as u64).to_le_bytes());
                hasher.update(page);
            }
        }
        hasher.update(&(bytes.len() as u64).to_le_bytes());
        hasher.finalize()
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        #[test]
        fn the_digest_is_as_defined_and_blind_to_holes(
            pages in proptest::collection::vec((0u8..3, any::<u8>()), 0..40),
            tail in 0usize..PAGE,
        ) {
            // 0: hole, 1: written zeroes, 2: content
            let file = tempfile::tempfile().unwrap();
            let mut bytes = vec![0; pages.len() * PAGE];
            for (i, (kind, fill)) in pages.iter().enumerate() {
                let page = &mut bytes[i * PAGE..(i + 1) * PAGE];
                if *kind == 2 {
                    page[usize::from(*fill)] = fill | 1;
                }
                if *kind > 0 {
                    file.write_all_at(page, (i * PAGE) as u64).unwrap();
                }
            }
            bytes.extend(std::iter::repeat_n(7, tail));
            file.write_all_at(&bytes[pages.len() * PAGE..], (pages.len() * PAGE) as u64).unwrap();
            file.set_len(bytes.len() as u64).unwrap();
            let before = summarise(&file).unwrap();
            prop_assert_eq!(before.digest, by_definition(&bytes));
            prop_assert_eq!(before.size_bytes, bytes.len() as u64);
            punch_zeroes(&file).unwrap();
            prop_assert_eq!(summarise(&file).unwrap(), before);
            let mut now = vec![0; bytes.len()];
            file.read_exact_at(&mut now, 0).unwrap();
            prop_assert_eq!(now, bytes);
        }
    }
}
