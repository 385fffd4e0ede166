//! `dayfly-packer FD`: a packer that talks to its daemon over descriptor FD
//! ([`dayfly_packer::serve`]).

use dayfly_packer::{jail, serve};
use rustix::fd::{FromRawFd, OwnedFd};
use std::process::ExitCode;

fn main() -> ExitCode {
    let number =
        std::env::args().nth(1).and_then(|text| text.parse::<i32>().ok()).filter(|n| *n > 2);
    let Some(number) = number else {
        eprintln!("usage: dayfly-packer FD (a daemon starts it)");
        return ExitCode::FAILURE;
    };
    // SAFETY: the process that starts this program passes the descriptor, and no other code here
    // knows its number. If it is not open, the first call on it fails.
    let socket = unsafe { OwnedFd::from_raw_fd(number) };
    if let Err(e) = jail::enter() {
        eprintln!("dayfly-packer: its jail: {e}");
        return ExitCode::FAILURE;
    }
    // A thread that panics would leave the others waiting for the daemon, and the daemon for them.
    let report = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        report(panic);
        // SAFETY: _exit(2) ends the process. It runs no code of this process.
        unsafe { libc::_exit(101) }
    }));
    match serve::run(&socket) {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            eprintln!("dayfly-packer: {e}");
            ExitCode::FAILURE
        }
    }
}
