//! How a VMM ends: exactly one [`ExitRecord`] in the exit file, then `_exit`, from whichever thread comes first.
//!
//! Nothing unwinds and nothing is joined: the kernel frees everything, and a thread that still ran could only do harm.

use crate::control::{ExitReason, ExitRecord};
use std::fmt::Write as _;
use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};

static EXIT_FD: AtomicI32 = AtomicI32::new(-1);
static ENDED: AtomicBool = AtomicBool::new(false);

/// Says where the record goes. Until then records go to standard error only.
pub fn set_file(fd: i32) {
    EXIT_FD.store(fd, Ordering::SeqCst);
}

/// Writes the record and ends the process: status 0 when guest or daemon asked for the end, 1 when something failed.
pub fn end(reason: ExitReason, message: &str) -> ! {
    if ENDED.swap(true, Ordering::SeqCst) {
        // Another thread is ending the process right now.
        loop {
            std::thread::park();
        }
    }
    let record = ExitRecord { reason, message: message.to_owned() };
    let json = serde_json::to_vec(&record).unwrap_or_default();
    write_all(&json);
    if reason == ExitReason::Failed {
        let mut text = format!("dayfly-vmm: {message}");
        text.push('\n');
        write_fd(2, text.as_bytes());
    }
    exit_now(i32::from(reason == ExitReason::Failed))
}

/// Ends the process because of `error`, with its whole chain of causes.
pub fn fail(error: &dyn std::error::Error) -> ! {
    end(ExitReason::Failed, &chain(error))
}

/// An error and its causes in one line.
#[must_use]
pub fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut next = error.source();
    while let Some(cause) = next {
        let cause_text = cause.to_string();
        // Some libraries repeat their cause in their own text.
        if !text.ends_with(&cause_text) {
            let _ = write!(text, ": {cause_text}");
        }
        next = cause.source();
    }
    text
}

/// Makes a panic of any thread the end of the process, and names the system call or address behind a fatal signal.
pub fn install_handlers() {
    std::panic::set_hook(Box::new(|info| {
        let thread = std::thread::current();
        end(
            ExitReason::Failed,
            &format!("a bug in dayfly-vmm: thread {:?}: {info}", thread.name().unwrap_or("?")),
        );
    }));
    for signal in [libc::SIGSYS, libc::SIGBUS, libc::SIGSEGV, libc::SIGILL] {
        // SAFETY: a zeroed sigaction is a valid one; the handler only uses async-signal-safe calls (write, _exit)
        // and memory of its own frame.
        unsafe {
            let mut action: libc::sigaction = std::mem::zeroed();
            let handler: extern "C" fn(i32, *mut libc::siginfo_t, *mut libc::c_void) = on_fatal_signal;
            action.sa_sigaction = handler as usize;
            action.sa_flags = libc::SA_SIGINFO;
            libc::sigaction(signal, &raw const action, std::ptr::null_mut());
        }
    }
}

/// A fixed buffer to format into where nothing may be allocated.
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
    if !ENDED.swap(true, Ordering::SeqCst) {
        let mut line = Line { bytes: [0; 256], len: 0 };
        let _ = if signal == libc::SIGSYS {
            // SAFETY: the kernel passes a valid siginfo_t; for SIGSYS, offset 24 holds si_syscall (asm-generic/siginfo.h:
            // after signo, errno, code and padding come the call's address at 16 and its number at 24).
            let number = unsafe { info.cast::<u8>().add(24).cast::<i32>().read_unaligned() };
            write!(
                line,
                r#"{{"reason":"failed","message":"the seccomp filter refused system call {number}"}}"#
            )
        } else {
            // SAFETY: as above; for memory signals the union starts with the faulting address.
            let at = unsafe { (*info).si_addr() }.addr();
            write!(
                line,
                r#"{{"reason":"failed","message":"signal {signal} at address {at:#x}: guest memory's file was truncated or unreadable, or a bug in dayfly-vmm"}}"#
            )
        };
        write_all(&line.bytes[..line.len]);
        write_fd(2, &line.bytes[..line.len]);
        write_fd(2, b"\n");
    }
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
        // SAFETY: writes `bytes.len()` bytes from a live slice; a bad descriptor is an error, not undefined behaviour.
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
