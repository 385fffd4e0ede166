//! From the command line to a server in its jail.

use crate::arguments::{Arguments, Caller};
use crate::jail::{self, JailError};
use crate::options::Options;
use crate::owner::Id;
use crate::serve::{ServeError, say, serve_after};
use crate::{filter, options};
use rustix::process::{getegid, geteuid};
use std::io::Write;

/// Why the program ended with an error.
#[derive(Debug, thiserror::Error)]
pub enum RunError {
    /// The program runs as root without the caller's ids.
    #[error("started as root: expected --uid and --gid of the caller")]
    NoCaller,
    /// The program does not run as root and cannot become another user.
    #[error(
        "started as user {}:{}, not as root: expected no other --uid and --gid, got {}:{}",
        own.0, own.1, asked.0, asked.1
    )]
    OtherCaller {
        /// The process's user and group.
        own: (u32, u32),
        /// Those of the command line.
        asked: (u32, u32),
    },
    /// The jail could not be entered.
    #[error(transparent)]
    Jail(#[from] JailError),
    /// Serving failed.
    #[error(transparent)]
    Serve(#[from] ServeError),
}

/// The caller to become, if this process is root; else its own ids.
fn caller(given: Option<Caller>) -> Result<Caller, RunError> {
    let (user, group) = (geteuid().as_raw(), getegid().as_raw());
    let own = Caller { user: Id(user), group: Id(group), groups: Vec::new() };
    match given {
        None if user == 0 => Err(RunError::NoCaller),
        None => Ok(own),
        Some(caller) if user == 0 => Ok(caller),
        Some(caller) if (caller.user, caller.group) == (own.user, own.group) => Ok(own),
        Some(caller) => {
            let asked = (caller.user.0, caller.group.0);
            Err(RunError::OtherCaller { own: (user, group), asked })
        }
    }
}

/// Jails this process and serves until the stream ends.
///
/// # Errors
/// [`RunError`].
pub fn run(arguments: Arguments) -> Result<(), RunError> {
    jail::close_all_but(arguments.descriptors())?;
    let (max_open_nodes, max_handles) = jail::limits()?;
    let caller = caller(arguments.caller)?;
    let to_become = geteuid().is_root().then_some(&caller);
    let folder = jail::folder(arguments.folder, to_become)?;
    options::check_folder(&folder).map_err(ServeError::from)?;
    let jailed = jail::enter(folder, to_become, arguments.read_only)?;
    if !jailed.lacking.is_empty() {
        let lacking = jailed.lacking.join(" and ");
        say(&format!("jailed without {lacking}: this host has none, or forbids it"));
    }
    let options = Options {
        user: caller.user,
        group: caller.group,
        read_only: arguments.read_only,
        max_nodes: options::MAX_NODES,
        max_open_nodes,
        max_handles,
    };
    let ready = || {
        filter::install()?;
        // Nothing may read it.
        let _ = std::io::stdout().write_all(b"ready\n");
        Ok(())
    };
    Ok(serve_after(arguments.stream, jailed.folder, jailed.own, options, ready)?)
}
