//! `dayfly-machine-init`: the machine's first process, and the server for the host.
//!
//! PID 1 does three things only. It mounts the file systems of a Linux userland, starts itself
//! again as the *server*, and reaps orphans. The server (`serve`) loads modules, mounts the disk,
//! keeps the daemon running, and answers the host. If the server ends, the machine ends, because a
//! machine that no host can reach must not look alive.

mod boot;
mod control;
mod daemon;
mod exec;
mod serve;
mod status;
mod steady;
mod uplink;

use std::process::{Command, ExitCode};

fn main() -> ExitCode {
    if std::process::id() == 1 {
        let text = match first_process() {
            Ok(()) => "the server ended".to_owned(),
            Err(e) => format!("{e}"),
        };
        boot::say(&format!("{text}; the machine ends"));
        boot::end(libc::RB_AUTOBOOT);
        return ExitCode::FAILURE;
    }
    match serve::run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            boot::say(&e.to_string());
            serve::send_to_host(&format!("failed {e}"));
            ExitCode::FAILURE
        }
    }
}

/// Runs as PID 1; returns when the server has ended.
fn first_process() -> Result<(), boot::BootError> {
    boot::file_systems()?;
    boot::limits()?;
    let server = Command::new("/proc/self/exe")
        .arg0("dayfly-machine-serve")
        .env_clear()
        .env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin")
        .env("HOME", "/root")
        .spawn()
        .map_err(|source| boot::BootError::new("starting the server", source))?;
    loop {
        let mut status = 0;
        // SAFETY: `status` outlives the call, and no other code of this process waits for children.
        let pid = unsafe { libc::waitpid(-1, &raw mut status, 0) };
        if u32::try_from(pid).is_ok_and(|pid| pid == server.id()) {
            return Ok(());
        }
        if pid < 0 && std::io::Error::last_os_error().raw_os_error() == Some(libc::ECHILD) {
            return Ok(());
        }
    }
}

use std::os::unix::process::CommandExt as _;
