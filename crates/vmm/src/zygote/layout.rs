//! What a pre-forked VMM makes anew of its address layout, most of which it inherits from its
//! zygote.
//!
//! The kernel places mappings from the top of the address space downwards. So an inaccessible
//! mapping of a random length moves RAM and the stacks of threads, which are made after it. The
//! programs, the heap and the first stack stay where they are in the zygote, and mappings of a few
//! pages may fill gaps between them.

use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous};
use rustix::rand::{GetRandomFlags, getrandom};

/// The bits of the number of pages by which mappings move: up to 1 TiB.
const SHIFT_BITS: u32 = 28;

/// Moves all later mappings by a random number of pages, and gives this thread, and the threads
/// that it makes, a random stack protector. Returns by how many bytes mappings move.
///
/// The process has one thread, and no function of C that has checked its stack protector on entry
/// returns after this.
pub(super) fn vary() -> u64 {
    let mut random = [[0; 8]; 2];
    let bytes = random.as_flattened_mut();
    if !matches!(getrandom(bytes, GetRandomFlags::empty()), Ok(16)) {
        return 0;
    }
    let [canary, shift] = random.map(u64::from_le_bytes);
    set_stack_protector(canary);
    let pages = (shift & ((1 << SHIFT_BITS) - 1)) + 1;
    let bytes = pages * dayfly_units::PAGE_SIZE;
    let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
    let Ok(len) = usize::try_from(bytes) else { return 0 };
    // SAFETY: a new mapping at an address of the kernel's choice, which nothing accesses.
    let mapped = unsafe { mmap_anonymous(std::ptr::null_mut(), len, ProtFlags::empty(), flags) };
    mapped.map_or(0, |_| bytes)
}

/// Writes the value that glibc's stack protector compares. New threads copy it.
fn set_stack_protector(value: u64) {
    // SAFETY: on x86-64, glibc keeps the value at offset 0x28 of the thread's block, to which fs
    // points (the ABI of -fstack-protector). Its lowest byte is zero, so that no string has it.
    // Rust's functions do not check it, and `vary` states why no function of C does.
    unsafe {
        std::arch::asm!("mov fs:[0x28], {}", in(reg) value & !0xff, options(nostack));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The address of a new mapping, which fits no gap of this process, the stack protector, and
    /// the bytes of the shift, in a fork that varied its layout.
    fn of_a_fork() -> (u64, u64, u64) {
        let (from, to) = std::io::pipe().unwrap();
        // SAFETY: the child makes system calls, and leaves through _exit.
        let pid = unsafe { libc::fork() };
        if pid == 0 {
            let bytes = vary();
            let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
            // SAFETY: a new mapping, at an address of the kernel's choice.
            let at =
                unsafe { mmap_anonymous(std::ptr::null_mut(), 4 << 30, ProtFlags::READ, flags) };
            let canary: u64;
            // SAFETY: reads the thread's block.
            unsafe { std::arch::asm!("mov {}, fs:[0x28]", out(reg) canary, options(nostack)) };
            let at = at.map_or(0, |at| at.addr() as u64);
            let numbers = [at, canary, bytes].map(u64::to_le_bytes);
            let sent = rustix::io::write(&to, numbers.as_flattened());
            // SAFETY: ends the child without running destructors.
            unsafe { libc::_exit(i32::from(sent != Ok(24))) };
        }
        drop(to);
        let mut numbers = [[0; 8]; 3];
        std::io::Read::read_exact(&mut { from }, numbers.as_flattened_mut()).unwrap();
        // SAFETY: waits for the child that was made above.
        unsafe { libc::waitpid(pid, std::ptr::null_mut(), 0) };
        let [at, canary, bytes] = numbers.map(u64::from_le_bytes);
        (at, canary, bytes)
    }

    #[test]
    fn two_forks_of_one_process_have_neither_mappings_nor_stack_protector_in_common() {
        let forks: Vec<_> = (0..4).map(|_| of_a_fork()).collect();
        for (n, (at, canary, bytes)) in forks.iter().enumerate() {
            assert!(*at != 0 && *bytes > 0 && *bytes <= 1 << 40, "{at:#x} {bytes:#x}");
            for (other_at, other_canary, _) in &forks[..n] {
                assert!(at != other_at && canary != other_canary, "{forks:x?}");
            }
        }
    }
}
