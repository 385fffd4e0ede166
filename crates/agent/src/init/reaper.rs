//! The main thread's life after boot: reap orphans, and take the signals that mean "end the machine".
//!
//! Programs are waited for by the threads that started them. Here only this thread's own children are reaped
//! (`__WNOTHREAD`), and those are exactly the orphans: the kernel gives them to the first thread of process 1.

use std::convert::Infallible;

/// What tools send to process 1 for a power-off.
const POWER_OFF: [i32; 3] = [libc::SIGTERM, libc::SIGUSR2, libc::SIGPWR];

/// Reaps for good. `bystander`: another process is init and decides about power.
pub(super) fn run<E>(bystander: bool) -> Result<Infallible, E> {
    // SAFETY: a sigset_t is plain data that sigemptyset initialises; the calls only write to it.
    let wanted = unsafe {
        let mut set: libc::sigset_t = std::mem::zeroed();
        libc::sigemptyset(&raw mut set);
        for signal in POWER_OFF.into_iter().chain([libc::SIGCHLD, libc::SIGINT]) {
            libc::sigaddset(&raw mut set, signal);
        }
        set
    };
    loop {
        reap();
        // SAFETY: waits for one of `wanted`, all of which are blocked in every thread; no siginfo is asked for.
        let signal = unsafe { libc::sigwaitinfo(&raw const wanted, std::ptr::null_mut()) };
        if signal < 0 || signal == libc::SIGCHLD {
            continue;
        }
        if bystander {
            // The image's init ends everything before a power-off; the machine goes on until it does.
            if signal == libc::SIGTERM {
                std::process::exit(0);
            }
            continue;
        }
        crate::power::end(signal == libc::SIGINT);
    }
}

fn reap() {
    loop {
        let mut status = 0;
        // SAFETY: waitpid writes one int to `status`. It is waited for any child of this thread, without blocking.
        let pid = unsafe { libc::waitpid(-1, &raw mut status, libc::WNOHANG | libc::__WNOTHREAD) };
        if pid <= 0 {
            return;
        }
    }
}
