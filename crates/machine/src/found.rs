//! Finds out in which state a machine is, for [`crate::decide`].

use crate::decide::Found;
use crate::files::{self, FileError};
use crate::machine::Machine;
use crate::run_state::{PauseNote, Running};
use std::time::{Duration, Instant};

/// How long a machine may take to become ready.
pub(crate) const START_TIMEOUT: Duration = Duration::from_secs(120);
/// How long a running machine may take to answer, and to start its daemon again.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(30);
/// Interval of the questions.
const ASK_AGAIN: Duration = Duration::from_millis(50);

/// A machine that was found, with the details that an error shows.
#[derive(Debug)]
pub(crate) struct Seen {
    pub(crate) found: Found,
    pub(crate) details: String,
}

impl Seen {
    fn new(found: Found, details: impl Into<String>) -> Self {
        Self { found, details: details.into() }
    }
}

impl Machine {
    /// Waits until a machine with a live supervisor is ready. The supervisor may have been killed a
    /// moment ago. The machine may also boot by itself, if the command that started it was killed.
    pub(crate) fn look(&self, count_vms: &dyn Fn() -> Option<u64>) -> Result<Seen, FileError> {
        let boot = Instant::now() + START_TIMEOUT;
        let mut answer = None;
        while self.alive() {
            let running: Option<Running> = files::read_json(&self.layout.running())?;
            if let Some(why) = PauseNote::read(&self.layout) {
                return Ok(Seen::new(Found::Paused, why));
            }
            if running.as_ref().is_some_and(|r| r.ready) {
                let deadline = *answer.get_or_insert_with(|| Instant::now() + ANSWER_TIMEOUT);
                if let Some(seen) = self.ask(deadline, count_vms) {
                    return Ok(seen);
                }
            } else if Instant::now() > boot {
                // A daemon that answers has VMs, whatever became of the machine's report.
                return Ok(match self.options.daemon.as_ref().and_then(|_| count_vms()) {
                    Some(vms) => Seen::new(Found::Ready { vms: Some(vms) }, ""),
                    None => Seen::new(Found::NeverReady, ""),
                });
            }
            std::thread::sleep(ASK_AGAIN);
        }
        Ok(Seen::new(Found::Down, ""))
    }

    /// Asks a machine that was ready once; `None` to ask again.
    fn ask(&self, deadline: Instant, count_vms: &dyn Fn() -> Option<u64>) -> Option<Seen> {
        let late = Instant::now() > deadline;
        let status = match self.ask_status() {
            // Without a daemon there are no VMs.
            Ok(_) if self.options.daemon.is_none() => {
                return Some(Seen::new(Found::Ready { vms: Some(0) }, ""));
            }
            Ok(status) => status.daemon.unwrap_or_default(),
            Err(e) => return late.then(|| Seen::new(Found::Silent, e.to_string())),
        };
        if status.answering {
            return Some(Seen::new(Found::Ready { vms: count_vms() }, ""));
        }
        late.then(|| {
            let last = status.last_end.unwrap_or_else(|| "it has not ended yet".to_owned());
            let details = format!("started again {} times; {last}", status.restarts);
            Seen::new(Found::DaemonSilent, details)
        })
    }

    /// The number of VMs at the last count before the machine became silent, for an error.
    pub(crate) fn last_count(&self) -> Option<u64> {
        files::read_json::<Running>(&self.layout.running()).ok().flatten()?.vms
    }
}
