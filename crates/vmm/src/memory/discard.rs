//! Freeing the host's memory behind pages of RAM whose content the guest does not need.

use super::dump::PAGE;
use std::io;
use vm_memory::VolatileSlice;

/// Frees this process's own copy of every whole page in `piece`, with madvise(2) MADV_DONTNEED.
/// Returns the length of these pages in bytes.
///
/// What such a page reads as afterwards depends on its mapping:
///
/// - anonymous memory: zeroes.
/// - a mapping of a memory file: the page of that file, which all clones share.
/// - a mapping of a memory file that a pager fills: the page of that file. If the page has not
///   arrived, the next touch waits for the pager, as the first one did.
/// - memory that the recorder serves: the page of the snapshot.
///
/// So a page shows only what this guest has had in memory before, or zeroes.
///
/// # Errors
/// The error of madvise(2); pages at the front may have been freed.
pub fn discard(piece: &VolatileSlice<'_>) -> io::Result<usize> {
    let guard = piece.ptr_guard_mut();
    let start = guard.as_ptr();
    // Inwards, because the rest of a page at either end is in use.
    let skipped = start.addr().next_multiple_of(PAGE) - start.addr();
    let len = piece.len().saturating_sub(skipped) / PAGE * PAGE;
    if len == 0 {
        return Ok(0);
    }
    // SAFETY: the `len` bytes from `skipped` on lie within `piece`, which is guest memory: no Rust
    // reference to them exists, and any thread may change them at any time. The mapping stays.
    let result = unsafe { libc::madvise(start.add(skipped).cast(), len, libc::MADV_DONTNEED) };
    if result == 0 { Ok(len) } else { Err(io::Error::last_os_error()) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::anonymous;
    use proptest::prelude::*;
    use vm_memory::{Bytes, GuestAddress, GuestMemoryBackend};

    const RAM: u64 = 64 << 20;
    const PAGES: usize = 16;

    proptest! {
        #[test]
        fn exactly_the_whole_pages_are_freed(
            start in 0_usize..PAGES * PAGE,
            len in 0_usize..PAGES * PAGE,
        ) {
            let len = len.min(PAGES * PAGE - start);
            let memory = anonymous(RAM).unwrap();
            memory.write_slice(&[7; PAGES * PAGE], GuestAddress(0)).unwrap();
            let piece = memory.get_slice(GuestAddress(start as u64), len).unwrap();
            let freed = discard(&piece).unwrap();
            let mut now = vec![0; PAGES * PAGE];
            memory.read_slice(&mut now, GuestAddress(0)).unwrap();
            let whole = |page: usize| page * PAGE >= start && (page + 1) * PAGE <= start + len;
            for (page, bytes) in now.chunks(PAGE).enumerate() {
                let expected = if whole(page) { 0 } else { 7 };
                prop_assert!(bytes.iter().all(|byte| *byte == expected), "page {page}");
            }
            prop_assert_eq!(freed, (0..PAGES).filter(|page| whole(*page)).count() * PAGE);
        }
    }
}
