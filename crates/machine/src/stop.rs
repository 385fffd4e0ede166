//! Stops a machine, and removes it.

use crate::errors::StopError;
use crate::files::{self, FileError};
use crate::lock;
use crate::machine::Machine;
use crate::run_state::{Ended, Running};
use dayfly_machine_init::timespec;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use std::fs;
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

/// The result of [`Machine::stop`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stopped {
    /// The machine was not running.
    WasStopped,
    /// The machine synced its disk and powered off.
    Clean,
    /// The machine was killed, because it did not end in time.
    Killed,
}

impl Machine {
    /// Stops the machine: its processes get SIGTERM, its disk is unmounted, and it powers off.
    /// After `time_limit` the machine is killed.
    ///
    /// # Errors
    /// [`StopError`]
    pub fn stop(
        &self,
        time_limit: Duration,
        progress: &mut dyn FnMut(&str),
    ) -> Result<Stopped, StopError> {
        let _lock = self.command(progress)?;
        if self.alive() {
            progress("stopping the machine");
        }
        self.stop_locked(time_limit)
    }

    /// [`Self::stop`] for a caller that holds the command lock.
    pub(crate) fn stop_locked(&self, time_limit: Duration) -> Result<Stopped, StopError> {
        let life = self.layout.life_lock();
        let mut outcome = Stopped::WasStopped;
        if let Some((pid, handle)) = self.supervisor() {
            let signal = |signal| match pidfd_send_signal(&handle, signal) {
                Ok(()) | Err(rustix::io::Errno::SRCH) => Ok(()),
                Err(e) => Err(StopError::Signal { pid, source: e.into() }),
            };
            outcome = Stopped::Clean;
            if !time_limit.is_zero() {
                signal(Signal::TERM)?;
            }
            if time_limit.is_zero() || !ended_within(&handle, time_limit) {
                signal(Signal::KILL)?;
                ended_within(&handle, Duration::from_secs(10));
                outcome = Stopped::Killed;
            }
        }
        let deadline = Instant::now() + Duration::from_secs(10);
        while lock::held(&life) {
            if Instant::now() > deadline {
                return Err(StopError::Stuck(life));
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        if outcome == Stopped::Clean {
            let ended: Option<Ended> = files::read_json(&self.layout.ended())?;
            if !ended.is_some_and(|e| e.clean) {
                outcome = Stopped::Killed;
            }
        }
        if outcome == Stopped::Killed && !self.layout.ended().exists() {
            let running: Option<Running> = files::read_json(&self.layout.running())?;
            let vms = running.and_then(|running| running.vms);
            let end = Ended { vms, ..Ended::now(false, "killed by a command".to_owned()) };
            files::write_json(&self.layout.ended(), &end)?;
        }
        // A command asked for this end, so it is no crash.
        files::remove(&self.layout.running())?;
        Ok(outcome)
    }

    /// Whether the supervisor is alive. Two states hold the life lock without a supervisor: its
    /// children are still ending, or a new supervisor has not marked the lock yet. Both end soon,
    /// so this waits.
    pub(crate) fn alive(&self) -> bool {
        let life = self.layout.life_lock();
        let deadline = Instant::now() + Duration::from_secs(10);
        loop {
            if lock::signer(&life).is_some() {
                return true;
            }
            if !lock::held(&life) || Instant::now() > deadline {
                return false;
            }
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    /// The supervisor's process id, with a pidfd that cannot come to mean another process.
    fn supervisor(&self) -> Option<(i32, OwnedFd)> {
        let pid = lock::signer(&self.layout.life_lock())?;
        let handle = pidfd_open(Pid::from_raw(pid)?, PidfdFlags::empty()).ok()?;
        (lock::signer(&self.layout.life_lock()) == Some(pid)).then_some((pid, handle))
    }

    /// Stops the machine and removes it with its disk.
    ///
    /// # Errors
    /// [`StopError`]
    pub fn rm(self, progress: &mut dyn FnMut(&str)) -> Result<(), StopError> {
        let _lock = self.command(progress)?;
        self.stop_locked(Duration::from_secs(5))?;
        fs::remove_dir_all(&self.layout.folder)
            .map_err(|e| FileError::new("removing", &self.layout.folder, e).into())
    }
}

/// Whether the process ended within `time_limit`.
fn ended_within(handle: &OwnedFd, time_limit: Duration) -> bool {
    let deadline = Instant::now() + time_limit;
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        match poll(&mut [PollFd::new(handle, PollFlags::IN)], Some(&timespec(left))) {
            Ok(0) => return false,
            Ok(_) => return true,
            Err(rustix::io::Errno::INTR) => {}
            Err(_) => return false,
        }
    }
}
