//! A client's frames to a running program: input and commands.

use crate::wire::WireError;
use dayfly_api::agent::{FrameKind, WindowSize};
use rustix::io::Errno;
use rustix::process::{Pid, Signal, pidfd_send_signal};
use std::os::fd::OwnedFd;

/// Writes as much of `body` from `taken` on as the program takes. Returns whether the frame is
/// finished.
pub(super) fn feed(stdin: &mut Option<OwnedFd>, body: &[u8], taken: &mut usize) -> bool {
    while let (Some(fd), Some(rest)) = (&stdin, body.get(*taken..).filter(|r| !r.is_empty())) {
        match rustix::io::write(fd, rest) {
            Ok(n) => *taken += n,
            Err(Errno::INTR) => {}
            Err(Errno::AGAIN) => return false,
            // The program has closed its input (or a terminal hung up): the rest is discarded.
            Err(_) => *stdin = None,
        }
    }
    true
}

/// A client's command to a running program, apart from input.
pub(super) enum Order {
    EndInput,
    Resize(WindowSize),
    Signal(Signal),
}

/// The signal with this number; `None` if Linux has none, or libc reserves it (32 and 33).
pub(super) fn signal(number: i32) -> Option<Signal> {
    let known = (1..=31).contains(&number) || (34..=64).contains(&number);
    // SAFETY: 1 to 31 and 34 to 64 are Linux's signals, and libc reserves none of them.
    known.then(|| unsafe { Signal::from_raw_unchecked(number) })
}

/// Signals the process group of a program, or only the program if it has moved to another group.
pub(super) fn signal_group(pid: u32, pidfd: &OwnedFd, signal: Signal) {
    let group = i32::try_from(pid).ok().and_then(Pid::from_raw);
    let sent = group.is_some_and(|g| rustix::process::kill_process_group(g, signal).is_ok());
    if !sent {
        let _ = pidfd_send_signal(pidfd, signal);
    }
}

/// The command in a frame of kind `kind`.
pub(super) fn control(kind: FrameKind, body: &[u8], takes_stdin: bool) -> Result<Order, WireError> {
    match kind {
        FrameKind::StdinEnd if takes_stdin => Ok(Order::EndInput),
        FrameKind::Resize => serde_json::from_slice(body)
            .map(Order::Resize)
            .map_err(|source| WireError::Json { what: "resize", source }),
        FrameKind::Signal => {
            let bytes: [u8; 4] = body.try_into().map_err(|_| WireError::Length {
                what: "signal",
                expected: 4,
                got: body.len(),
            })?;
            signal(i32::from_le_bytes(bytes))
                .map(Order::Signal)
                .ok_or(WireError::Unexpected { expected: "a signal from 1 to 64", got: kind })
        }
        got => {
            let expected =
                if takes_stdin { "stdin, stdin end, resize or signal" } else { "resize or signal" };
            Err(WireError::Unexpected { expected, got })
        }
    }
}
