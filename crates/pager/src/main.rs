//! `dayfly-pager FD`: a pager that talks with its daemon over descriptor FD ([`dayfly_pager::serve`]).
//!
//! It opens nothing by path once it has begun, and keeps one capability: to end the VMMs that it serves, which have users of their own.

use dayfly_pager::serve;
use dayfly_pager::uffd::Descriptors;
use rustix::fd::{FromRawFd, OwnedFd};
use rustix::process::{Resource, Rlimit, chroot, getrlimit, setrlimit};
use rustix::thread::{CapabilitySet, CapabilitySets, set_capabilities, set_no_new_privs};
use std::io;
use std::process::ExitCode;

/// As many as there may be packs, and three for each of some thousand clones.
const MAX_OPEN_FDS: u64 = 65_536;

fn main() -> ExitCode {
    let number = std::env::args().nth(1).and_then(|text| text.parse::<i32>().ok()).filter(|n| *n > 2);
    let Some(number) = number else {
        eprintln!("usage: dayfly-pager FD (a daemon starts it)");
        return ExitCode::FAILURE;
    };
    // SAFETY: who starts this program gives it the descriptor and nobody else in it knows the number; one that is not open fails in
    // the first call.
    let socket = unsafe { OwnedFd::from_raw_fd(number) };
    let descriptors = match enter() {
        Ok(descriptors) => descriptors,
        Err(e) => {
            eprintln!("dayfly-pager: its jail: {e}");
            return ExitCode::FAILURE;
        }
    };
    match serve::run(socket, descriptors) {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            eprintln!("dayfly-pager: {e}");
            ExitCode::FAILURE
        }
    }
}

/// Gives up what it does not need.
fn enter() -> io::Result<Descriptors> {
    let descriptors = Descriptors::open()?;
    // As many as may be, where that is less.
    let most = getrlimit(Resource::Nofile).maximum.map_or(MAX_OPEN_FDS, |most| most.min(MAX_OPEN_FDS));
    setrlimit(Resource::Nofile, Rlimit { current: Some(most), maximum: Some(most) })?;
    // A folder in which nothing has a name but descriptors' numbers.
    chroot("/proc/self/fdinfo")?;
    rustix::process::chdir("/")?;
    let kill = CapabilitySet::KILL;
    let sets = CapabilitySets { effective: kill, permitted: kill, inheritable: CapabilitySet::empty() };
    set_capabilities(None, sets)?;
    set_no_new_privs(true)?;
    Ok(descriptors)
}
