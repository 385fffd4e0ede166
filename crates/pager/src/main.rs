//! `dayfly-pager FD`: a pager that talks to its daemon over descriptor FD
//! ([`dayfly_pager::serve`]).
//!
//! After its start it opens nothing by path and runs as another user ([`dayfly_pager::jail`]).

use dayfly_pager::{jail, say, serve};
use dayfly_sys::populate::Mapped;
use rustix::fd::{FromRawFd, OwnedFd};
use std::process::ExitCode;

fn main() -> ExitCode {
    let number =
        std::env::args().nth(1).and_then(|text| text.parse::<i32>().ok()).filter(|n| *n > 2);
    let Some(number) = number else {
        say!("usage: dayfly-pager FD (a daemon starts it)");
        return ExitCode::FAILURE;
    };
    // SAFETY: the process that starts this program passes the descriptor, and no other code here
    // knows its number. If it is not open, the first call on it fails.
    let socket = unsafe { OwnedFd::from_raw_fd(number) };
    // Now, because most pagers wait before they get a plan.
    Mapped::find().touch();
    let descriptors = match jail::enter() {
        Ok(descriptors) => descriptors,
        Err(e) => {
            say!("its jail: {e}");
            return ExitCode::FAILURE;
        }
    };
    match serve::run(socket, descriptors) {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            say!("{e}");
            ExitCode::FAILURE
        }
    }
}
