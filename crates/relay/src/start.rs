//! From the command line to a relay in its jail.

use crate::arguments::{Arguments, StreamArguments};
use crate::serve::Relay;
use crate::streams::{FDS_OF_STREAM, Streams};
use crate::{filter, jail};
use rustix::fd::AsRawFd;
use std::convert::Infallible;
use std::io;

const FILTER: &str = "the filter of system calls";
const EVENTS: &str = "waiting for events";

/// Why the program ended with an error.
#[derive(Debug, thiserror::Error)]
#[error("{what}")]
pub struct RunError {
    what: &'static str,
    #[source]
    source: io::Error,
}

fn failed(what: &'static str) -> impl FnOnce(io::Error) -> RunError {
    move |source| RunError { what, source }
}

/// Jails this process and serves until the VM ends. Ends the process then.
///
/// # Errors
/// [`RunError`].
pub fn run(arguments: Arguments) -> Result<Infallible, RunError> {
    let user = arguments.user;
    let inherited = arguments.ports.iter().map(|port| port.socket.as_raw_fd());
    let last = inherited.chain([arguments.vmm.as_raw_fd()]).max().unwrap_or(2);
    let ports: Vec<u16> = arguments.ports.iter().map(|port| port.guest_port).collect();
    jail::tidy(last, &arguments.vmm).map_err(failed("jail: descriptors"))?;
    jail::limit(jail::fds_of(&arguments.limits), last).map_err(failed("jail: limits"))?;
    let mut relay = Relay::new(arguments).map_err(failed("preparing"))?;
    jail::enter(user, &ports).map_err(failed("jail"))?;
    let allowed = filter::Allowed {
        guests: relay.guests().pointers(),
        last_inherited: last,
        has_udp: relay.has_udp(),
    };
    let program = filter::compile(&allowed);
    program.and_then(|program| filter::install(&program)).map_err(failed(FILTER))?;
    if let Err(e) = relay.serve() {
        // The filter does not allow to close inherited descriptors.
        std::mem::forget(relay);
        return Err(failed(EVENTS)(e));
    }
    end()
}

/// Jails this process and serves streams until the last one has ended. Ends the process then.
///
/// # Errors
/// [`RunError`].
pub fn run_streams(arguments: StreamArguments) -> Result<Infallible, RunError> {
    let StreamArguments { control, vmm, most, user } = arguments;
    let last = control.as_raw_fd().max(vmm.as_raw_fd());
    let served = most as u64 * FDS_OF_STREAM;
    jail::tidy(last, &vmm).map_err(failed("jail: descriptors"))?;
    jail::limit(served, last).map_err(failed("jail: limits"))?;
    let mut streams = Streams::new(control, vmm, most).map_err(failed("preparing"))?;
    jail::enter(user, &[]).map_err(failed("jail"))?;
    let program = filter::compile_for_streams(last);
    program.and_then(|program| filter::install(&program)).map_err(failed(FILTER))?;
    if let Err(e) = streams.serve() {
        // As above.
        std::mem::forget(streams);
        return Err(failed(EVENTS)(e));
    }
    end()
}

fn end() -> ! {
    // SAFETY: ends the process. Nothing needs to be undone, and the filter has no call with which
    // the end of a Rust program gives back the stack of signal handlers.
    unsafe { libc::_exit(0) }
}
