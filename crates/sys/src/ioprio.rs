//! I/O priorities of threads (ioprio_set(2)). BFQ obeys them; other schedulers know only the class.

use std::io;

// linux/ioprio.h
const WHO_PROCESS: libc::c_int = 1;
const CLASS_BEST_EFFORT: libc::c_int = 2;
const CLASS_SHIFT: u32 = 13;
const LOWEST: libc::c_int = 7;

/// Gives the calling thread the lowest priority of the best-effort class. Its I/O is served after
/// that of other threads, but is never starved, unlike that of the idle class.
///
/// # Errors
/// The kernel has no block layer.
pub fn lowest_best_effort() -> io::Result<()> {
    let priority = CLASS_BEST_EFFORT << CLASS_SHIFT | LOWEST;
    // SAFETY: the call takes three integers; 0 is the calling thread.
    let result = unsafe { libc::syscall(libc::SYS_ioprio_set, WHO_PROCESS, 0, priority) };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernel_reports_the_priority_that_was_set() {
        lowest_best_effort().unwrap();
        // SAFETY: the call takes two integers; 0 is the calling thread.
        let got = unsafe { libc::syscall(libc::SYS_ioprio_get, WHO_PROCESS, 0) };
        assert_eq!(got, 2 << 13 | 7);
    }
}
