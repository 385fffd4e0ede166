//! The status of a machine.

use crate::config::InitOptions;
use crate::files::{self, FileError};
use crate::lock;
use crate::machine::Machine;
use crate::report::end_of;
use crate::run_state::{Ended, PauseNote, Running, unix_ms};
use crate::uplink::Uplink;
use dayfly_machine_init::GuestStatus;
use serde::{Deserialize, Serialize};
use std::fs;
use std::os::unix::fs::MetadataExt;

/// The run state of a machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum State {
    /// The machine is being started.
    Starting,
    /// The machine is ready.
    Running,
    /// The machine ended although no command asked for it.
    Crashed,
    /// The machine is not running.
    Stopped,
}

/// The result of [`Machine::status`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Status {
    /// The run state.
    pub state: State,
    /// Process id of the supervisor; QEMU and virtiofsd are its children.
    pub supervisor_pid: Option<i32>,
    /// The supervisor's children (QEMU, virtiofsd, the uplink's program), with their names.
    pub processes: Vec<(i32, String)>,
    /// Milliseconds since the supervisor started.
    pub uptime_ms: Option<u64>,
    /// Cause of the machine's last end.
    pub last_end: Option<String>,
    /// Time of the last end in milliseconds since 1970; `None` if it is not known.
    pub last_end_unix_ms: Option<u64>,
    /// Number of VMs that ended with the machine; `None` if they were not counted.
    pub last_end_vms: Option<u64>,
    /// How often the machine's kernel crashed before it booted.
    pub boot_crashes: u32,
    /// Number of VMs at the last count, ended ones that were not removed included.
    pub vms: Option<u64>,
    /// Whether machine and VMs reach what the user's host reaches; `None` if no machine runs.
    pub uplink: Option<Uplink>,
    /// Why QEMU has paused the machine, if it has.
    pub paused: Option<String>,
    /// Resident host memory of QEMU in bytes.
    pub host_memory_bytes: Option<u64>,
    /// Bytes that the sparse disk takes on the host.
    pub disk_bytes: u64,
    /// The machine's own status, if the machine answers.
    pub machine: Option<GuestStatus>,
    /// The machine's options.
    pub options: InitOptions,
}

impl Machine {
    /// Reads the machine's status.
    ///
    /// # Errors
    /// [`FileError`] if the machine's files cannot be read.
    pub fn status(&self) -> Result<Status, FileError> {
        self.sweep()?;
        let running: Option<Running> = files::read_json(&self.layout.running())?;
        let ended: Option<Ended> = files::read_json(&self.layout.ended())?;
        let alive = self.alive();
        let state = match (&running, alive) {
            (Some(r), true) if r.ready => State::Running,
            (_, true) => State::Starting,
            (Some(_), false) => State::Crashed,
            (None, false) => State::Stopped,
        };
        let supervisor_pid = alive.then(|| lock::signer(&self.layout.life_lock())).flatten();
        let processes = supervisor_pid.map(crate::leaks::children).unwrap_or_default();
        let qemu = processes
            .iter()
            .find(|(_, name)| name.contains("qemu") || name.contains("dayfly-machine"));
        let last_end = match state {
            State::Crashed => end_of(running.as_ref(), ended),
            _ => ended,
        };
        Ok(Status {
            state,
            supervisor_pid,
            uptime_ms: running
                .as_ref()
                .filter(|_| alive)
                .map(|r| unix_ms().saturating_sub(r.since_unix_ms)),
            last_end_unix_ms: last_end.as_ref().map(|end| end.at_unix_ms).filter(|at| *at > 0),
            last_end_vms: last_end.as_ref().and_then(|end| end.vms),
            last_end: last_end.map(|end| end.cause),
            boot_crashes: running.as_ref().filter(|_| alive).map_or(0, |r| r.boot_crashes),
            vms: running.as_ref().filter(|_| alive).and_then(|r| r.vms),
            uplink: running.as_ref().filter(|_| alive).and_then(|r| r.uplink.clone()),
            paused: alive.then(|| PauseNote::read(&self.layout)).flatten(),
            host_memory_bytes: qemu.and_then(|(pid, _)| crate::leaks::resident_bytes(*pid)),
            processes,
            disk_bytes: fs::metadata(self.layout.disk()).map_or(0, |m| m.blocks() * 512),
            machine: (state == State::Running).then(|| self.ask_status().ok()).flatten(),
            options: self.options.clone(),
        })
    }
}
