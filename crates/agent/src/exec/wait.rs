//! A program's signals and its end.

use super::adopted::Minded;
use super::cage::Cage;
use super::detached::Log;
use super::orders::signal_group;
use super::programs::Programs;
use super::spawn::Child;
use crate::wire::timespec;
use dayfly_api::agent::Exit;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::process::{Signal, WaitId, WaitIdOptions, waitid};
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::Instant;

impl Child {
    /// Signals the process group, or only the program if it has moved to another group.
    pub(super) fn signal(&self, signal: Signal) {
        signal_group(self.pid, &self.pidfd, signal);
    }

    /// Reaps the program if it has ended.
    pub(super) fn reap(&self) -> Option<Exit> {
        let options = WaitIdOptions::EXITED | WaitIdOptions::NOHANG;
        match waitid(WaitId::PidFd(self.pidfd.as_fd()), options) {
            Ok(Some(status)) => Some(Exit {
                code: status.exit_status(),
                signal: status.terminating_signal(),
                timed_out: false,
            }),
            Ok(None) | Err(Errno::INTR) => None,
            // The main thread has reaped the program ([`super::adopted`]).
            Err(_) => Some(Exit { code: None, signal: None, timed_out: false }),
        }
    }
}

/// Waits for a program's end; kills it at the deadline.
pub(super) fn outlast(child: &Child, cage: &Cage, mut deadline: Option<Instant>) -> Exit {
    let mut timed_out = false;
    loop {
        let timeout = deadline.map(|d| timespec(d.saturating_duration_since(Instant::now())));
        let mut fds = [PollFd::new(&child.pidfd, PollFlags::IN)];
        let _ = poll(&mut fds, timeout.as_ref());
        if let Some(exit) = child.reap() {
            return Exit { timed_out, ..exit };
        }
        if deadline.is_some_and(|d| Instant::now() >= d) {
            (deadline, timed_out) = (None, true);
            cage.kill(child.pid);
        }
    }
}

/// Waits, in a new thread, for a program without a client.
pub(super) fn mind(
    programs: &Arc<Programs>,
    child: Child,
    cage: Cage,
    deadline: Option<Instant>,
    log: Option<Arc<Log>>,
) {
    let pid = child.pid;
    let programs = Arc::clone(programs);
    let minded = Minded::new(pid);
    let minder = move || {
        let mut exit = outlast(&child, &cage, deadline);
        if (exit.code, exit.signal) == (None, None)
            && let Some(passed_on) = minded.exit()
        {
            exit = Exit { timed_out: exit.timed_out, ..passed_on };
        }
        if let Some(log) = log {
            log.exited(exit);
        }
        programs.cages.give_back(cage);
    };
    let thread = std::thread::Builder::new().name(format!("mind-{pid}")).stack_size(64 << 10);
    if let Err(error) = thread.spawn(minder) {
        crate::say!(
            "exec: no thread to wait for detached process {pid}: {error}: \
             its time limit is not kept"
        );
    }
}
