//! How a VMM ends: one [`ExitRecord`] in the exit file, then `_exit`. The first thread that calls
//! [`end`] or gets a fatal signal writes the record. Others wait, because the end of the process
//! would cut off a record that is half-written.
//!
//! Between `claim` and `_exit` a thread makes system calls only. It takes no lock, so it ends the
//! process whatever the threads that wait hold.
//!
//! No thread unwinds and none is joined, because the kernel frees everything at exit and a thread
//! that still runs can only do harm.

use crate::control::{ExitReason, ExitRecord};
use dayfly_units::error::chain;
use std::fmt::Write as _;
use std::sync::atomic::{AtomicI32, AtomicU32, Ordering};

static EXIT_FD: AtomicI32 = AtomicI32::new(-1);
/// The thread that ends the process (gettid(2)); 0 if there is none yet.
static ENDING: AtomicU32 = AtomicU32::new(0);

/// Sets the descriptor of the exit file. Before this call a record goes to standard error only.
pub fn set_file(fd: i32) {
    EXIT_FD.store(fd, Ordering::SeqCst);
}

/// Writes the record and ends the process. The status is 1 for [`ExitReason::Failed`], else 0.
pub fn end(reason: ExitReason, message: &str) -> ! {
    let record = ExitRecord { reason, message: message.to_owned() };
    let json = serde_json::to_vec(&record).unwrap_or_default();
    let failed = reason == ExitReason::Failed;
    let text = if failed { format!("dayfly-vmm: {message}\n") } else { String::new() };
    claim();
    write_all(&json);
    write_fd(2, text.as_bytes());
    exit_now(i32::from(failed))
}

/// Returns in the first thread that ends the process. Another thread waits here until the process
/// has ended. A thread that is here again ends the process, because it was interrupted while it
/// wrote its record. Async-signal-safe.
fn claim() {
    // SAFETY: a call without arguments.
    let thread = unsafe { libc::syscall(libc::SYS_gettid) };
    let thread = u32::try_from(thread).unwrap_or(u32::MAX);
    match ENDING.compare_exchange(0, thread, Ordering::SeqCst, Ordering::SeqCst) {
        Ok(_) => {}
        Err(first) if first == thread => exit_now(1),
        Err(first) => loop {
            let no_time_limit = std::ptr::null::<libc::timespec>();
            // SAFETY: the word is a static. It keeps the value `first`, so that the call returns
            // only if a signal interrupts it.
            unsafe {
                libc::syscall(
                    libc::SYS_futex,
                    ENDING.as_ptr(),
                    libc::FUTEX_WAIT | libc::FUTEX_PRIVATE_FLAG,
                    first,
                    no_time_limit,
                );
            }
        },
    }
}

/// Ends the process because of `error`; the record has the whole chain of causes.
pub fn fail(error: &dyn std::error::Error) -> ! {
    end(ExitReason::Failed, &chain(error))
}

/// Makes a panic in any thread end the process, and makes the record of a fatal signal name the
/// address. A forbidden system call leaves no record: the kernel kills the process
/// ([`crate::seccomp`]).
pub fn install_handlers() {
    std::panic::set_hook(Box::new(|info| {
        let thread = std::thread::current();
        end(
            ExitReason::Failed,
            &format!("a bug in dayfly-vmm: thread {:?}: {info}", thread.name().unwrap_or("?")),
        );
    }));
    for signal in [libc::SIGXFSZ, libc::SIGBUS, libc::SIGSEGV, libc::SIGILL] {
        // SAFETY: a zeroed sigaction is a valid one; the handler only uses async-signal-safe calls
        // (write, gettid, futex, _exit) and the memory of its frame.
        unsafe {
            let mut action: libc::sigaction = std::mem::zeroed();
            let handler: extern "C" fn(i32, *mut libc::siginfo_t, *mut libc::c_void) =
                on_fatal_signal;
            action.sa_sigaction = handler as usize;
            action.sa_flags = libc::SA_SIGINFO;
            libc::sigaction(signal, &raw const action, std::ptr::null_mut());
        }
    }
}

/// A fixed buffer for formatting in a signal handler, which may not allocate.
struct Line {
    bytes: [u8; 256],
    len: usize,
}

impl std::fmt::Write for Line {
    fn write_str(&mut self, text: &str) -> std::fmt::Result {
        for &byte in text.as_bytes() {
            let slot = self.bytes.get_mut(self.len).ok_or(std::fmt::Error)?;
            *slot = byte;
            self.len += 1;
        }
        Ok(())
    }
}

extern "C" fn on_fatal_signal(signal: i32, info: *mut libc::siginfo_t, _: *mut libc::c_void) {
    claim();
    let mut line = Line { bytes: [0; 256], len: 0 };
    let _ = if signal == libc::SIGXFSZ {
        let text = r#"{"reason":"failed","message":"a write past the limit on a file's size"}"#;
        line.write_str(text)
    } else {
        // SAFETY: the kernel passes a valid siginfo_t; for memory signals its union starts with
        // the faulting address.
        let at = unsafe { (*info).si_addr() }.addr();
        write!(
            line,
            concat!(
                r#"{{"reason":"failed","message":"signal {signal} at address {at:#x}: "#,
                r#"guest memory's file was truncated or unreadable, or a bug in dayfly-vmm"}}"#
            ),
            signal = signal,
            at = at
        )
    };
    write_all(&line.bytes[..line.len]);
    write_fd(2, &line.bytes[..line.len]);
    write_fd(2, b"\n");
    exit_now(1)
}

fn write_all(bytes: &[u8]) {
    let fd = EXIT_FD.load(Ordering::SeqCst);
    if fd >= 0 {
        write_fd(fd, bytes);
    }
}

fn write_fd(fd: i32, mut bytes: &[u8]) {
    while !bytes.is_empty() {
        // SAFETY: writes `bytes.len()` bytes from a live slice; a bad descriptor is an error, not
        // undefined behaviour.
        let n = unsafe { libc::write(fd, bytes.as_ptr().cast(), bytes.len()) };
        match usize::try_from(n) {
            Ok(n) if n > 0 => bytes = &bytes[n..],
            _ => return,
        }
    }
}

fn exit_now(status: i32) -> ! {
    // SAFETY: ends the process without running destructors, as meant.
    unsafe { libc::_exit(status) }
}
