//! The main thread after boot: it reaps orphans and handles the signals that end the machine.
//!
//! The thread that started a program waits for it. The main thread reaps only its own children
//! (`__WNOTHREAD`). Those are the orphans, because the kernel reparents orphans to the first thread
//! of PID 1; and the programs whose thread has ended ([`crate::exec::adopted`]).

use std::convert::Infallible;

/// Signals that tools send to PID 1 for a power-off.
const POWER_OFF: [i32; 3] = [libc::SIGTERM, libc::SIGUSR2, libc::SIGPWR];

/// Reaps forever. `bystander`: another process is init and decides about power.
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
        // SAFETY: waits for one of `wanted`, all of which are blocked in every thread; the null
        // pointer requests no siginfo.
        let signal = unsafe { libc::sigwaitinfo(&raw const wanted, std::ptr::null_mut()) };
        if signal < 0 || signal == libc::SIGCHLD {
            continue;
        }
        if bystander {
            // The image's init sends SIGTERM to every process before a power-off: only the agent
            // ends here, and init ends the machine.
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
        // SAFETY: waitpid writes one int to `status`. The call covers any child of this thread and
        // does not block.
        let pid = unsafe { libc::waitpid(-1, &raw mut status, libc::WNOHANG | libc::__WNOTHREAD) };
        if pid <= 0 {
            return;
        }
        crate::exec::adopted::reaped(pid, status);
    }
}
