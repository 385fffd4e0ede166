//! Pagers: processes that fill a snapshot's RAM while clones of it run ([`dayfly_pager`]).
//!
//! One is started for each snapshot that is opened and whose RAM is not in memory yet. It outlives this daemon; when all is there it ends by
//! itself. One that dies before leaves clones that wait for ever for what they touch: their VMs are ended here, with that as the cause.

use crate::config::Config;
use crate::daemon::Daemon;
use crate::depot::sharing::Shared;
use crate::error::{Fault, Outcome, blocking};
use crate::vm::Vm;
use crate::vm::control_link;
use crate::vm::registry::lock;
use dayfly_api::types::ErrorCode;
use dayfly_host::process::{Ended, Process};
use dayfly_host::spawn::{FIRST_FD, Namespaces, Program, Spawn, SpawnError, Stdio};
use dayfly_pager::client::Client;
use dayfly_pager::wire::{FromPager, Report, Settings, pair};
use dayfly_store::{OpenSnapshot, Plan};
use dayfly_units::{Name, VmId};
use dayfly_vmm::control::{Answer, Command, ExitReason, ExitRecord};
use dayfly_vmm::memory::{lazy, working_set};
use rustix::fd::{AsFd, OwnedFd};
use rustix::net::sockopt::Timeout;
use std::ffi::OsString;
use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use tokio::sync::watch;

/// The last component of a pager's `argv[0]`.
pub const PAGER_NAME: &str = "dayfly-pager";

/// How long a pager may take to begin, and to hear of a clone: births wait for both.
const BEGIN: Duration = Duration::from_secs(60);
/// See [`BEGIN`].
const TELL: Duration = Duration::from_secs(5);
/// How often it is looked whether a VM of a daemon before has all of its memory.
const LOOK: Duration = Duration::from_secs(1);

/// Why there is no pager.
#[derive(Debug, thiserror::Error)]
pub enum PagerError {
    /// A socket or a descriptor.
    #[error("starting a pager: {0}")]
    Io(#[from] io::Error),
    /// The process.
    #[error(transparent)]
    Spawn(#[from] SpawnError),
}

/// How far a pager is.
#[derive(Debug, Clone, PartialEq, Eq)]
enum State {
    /// Pages are missing; whether those are there that clones touch first.
    Filling { first: bool },
    /// All is there.
    Whole,
    /// It died before.
    Gone,
}

/// A clone that it serves: its VM, its VMM, its exit record.
type Served = (VmId, Arc<Process>, PathBuf);

/// A pager that was started.
#[derive(Debug)]
pub struct Pager {
    snapshot: Name,
    state: watch::Sender<State>,
    /// `None` when nothing is left to say.
    client: Mutex<Option<Arc<Client>>>,
    served: Mutex<Vec<Served>>,
    process: Process,
    /// The template's memory: sealed, it is whole, whatever its pager has told.
    memory: File,
}

/// A pager whose template is open. When nobody has that open any more, and no clone runs, it ends before all is there.
#[derive(Debug)]
pub struct Wanted(Arc<Pager>);

impl Wanted {
    /// The pager.
    pub const fn pager(&self) -> &Arc<Pager> {
        &self.0
    }
}

impl Drop for Wanted {
    fn drop(&mut self) {
        if let Some(client) = lock(&self.0.client).take() {
            client.leave();
        }
    }
}

/// What pagers are started with.
#[derive(Debug, Clone)]
pub struct Pagers {
    program: PathBuf,
    name: PathBuf,
    /// How they work.
    pub settings: Settings,
}

impl Pagers {
    /// Those of a daemon.
    #[must_use]
    pub fn new(config: &Config) -> Self {
        let deadline_s = u32::try_from(config.deadlines.page.as_secs()).unwrap_or(u32::MAX);
        Self {
            program: config.vmm.with_file_name(PAGER_NAME),
            name: config.run.join(PAGER_NAME),
            settings: Settings { deadline_s, ..Settings::default() },
        }
    }

    /// Starts one that fills the RAM of `open` by `plan`, but for what clones have from other templates.
    ///
    /// # Errors
    /// [`PagerError`]; nobody fills it then.
    pub fn start(
        &self,
        open: &OpenSnapshot,
        plan: &Plan,
        shared: Option<&Shared>,
    ) -> Result<Wanted, PagerError> {
        let (ours, theirs) = pair()?;
        let mut spawn = Spawn::new(Program::Path(self.program.clone()), &self.name);
        spawn.argv.push(OsString::from(FIRST_FD.to_string()));
        // Not the namespace of processes: it ends VMMs, which are outside of any of its own.
        spawn.namespaces = Namespaces::MOUNT.and(Namespaces::NET).and(Namespaces::IPC).and(Namespaces::UTS);
        spawn.fds = vec![(theirs, FIRST_FD)];
        spawn.stderr = Stdio::Inherit;
        let process = Process::from_child(spawn.run()?)?;
        let begun = || -> io::Result<_> {
            rustix::net::sockopt::set_socket_timeout(&ours, Timeout::Recv, Some(BEGIN))?;
            rustix::net::sockopt::set_socket_timeout(&ours, Timeout::Send, Some(TELL))?;
            let told = ours.try_clone()?;
            let elsewhere = shared.map(Shared::frames).unwrap_or_default();
            let client = Client::begin(ours, plan, &touched_first(open), &elsewhere, self.settings)?;
            // From here on it tells what it likes, when it likes.
            rustix::net::sockopt::set_socket_timeout(&told, Timeout::Recv, None)?;
            Ok((Arc::new(client), open.memory.try_clone()?))
        };
        let (client, memory) = begun().inspect_err(|_| {
            let _ = process.kill().and_then(|()| process.wait(Some(TELL)));
        })?;
        let pager = Arc::new(Pager {
            memory,
            snapshot: open.manifest.name.clone(),
            state: watch::Sender::new(State::Filling { first: false }),
            client: Mutex::new(Some(client.clone())),
            served: Mutex::default(),
            process,
        });
        let watched = pager.clone();
        std::thread::Builder::new().name("pager".to_owned()).spawn(move || watched.watch(client))?;
        Ok(Wanted(pager))
    }
}

/// The frames that clones touch first, in that order, as recorded.
fn touched_first(open: &OpenSnapshot) -> Vec<u32> {
    let record = open.working_set.as_ref().map(|file| working_set::read(file, open.manifest.memory_bytes));
    // A damaged record is refused where clones are told to use it.
    record.and_then(Result::ok).unwrap_or_default().in_order()
}

impl Pager {
    /// Whether a clone that comes now has to be told to it.
    pub fn is_filling(&self) -> bool {
        matches!(*self.state.borrow(), State::Filling { .. })
    }

    /// Whether the pages are there that clones touch first.
    pub fn has_first(&self) -> bool {
        matches!(*self.state.borrow(), State::Filling { first: true } | State::Whole)
    }

    /// Its process.
    pub const fn process(&self) -> &Process {
        &self.process
    }

    /// Whether it died: what it has not filled is missing for ever.
    pub fn is_gone(&self) -> bool {
        *self.state.borrow() == State::Gone
    }

    /// Tells of a clone that comes; gives the socket for its VMM, or nothing where all is there.
    ///
    /// # Errors
    /// It died, or the exit record cannot be opened.
    pub fn clone_comes(&self, vm: VmId, vmm: &Arc<Process>, exit: &Path) -> Outcome<Option<OwnedFd>> {
        let failed = |e: io::Error| {
            Fault::internal(format_args!("telling the pager of snapshot {} of a clone: {e}", self.snapshot))
        };
        let Some(client) = lock(&self.client).clone() else {
            // Without anybody to tell, only a template that is whole may be cloned: what is missing would read as zeroes.
            let whole = *self.state.borrow() == State::Whole;
            return if whole { Ok(None) } else { Err(failed(io::ErrorKind::BrokenPipe.into())) };
        };
        let record = File::options().write(true).open(exit).map_err(failed)?;
        {
            let mut served = lock(&self.served);
            served.retain(|(_, vmm, _)| vmm.is_alive().unwrap_or(false));
            served.push((vm, vmm.clone(), exit.to_owned()));
        }
        client.clone_comes(&vm.to_string(), vmm.as_fd(), record.as_fd()).map(Some).map_err(failed)
    }

    /// Waits until all is there.
    ///
    /// # Errors
    /// It died, or it takes longer than `within`.
    pub async fn whole(&self, within: Duration) -> Outcome<()> {
        let mut state = self.state.subscribe();
        let settled = state.wait_for(|state| !matches!(state, State::Filling { .. }));
        match tokio::time::timeout(within, settled).await {
            Ok(Ok(state)) if *state == State::Whole => Ok(()),
            Ok(_) => Err(Fault::new(
                ErrorCode::Guest,
                format_args!("the pager of snapshot {} died while memory was missing", self.snapshot),
            )),
            Err(_) => Err(Fault::new(
                ErrorCode::Timeout,
                format_args!(
                    "the memory of snapshot {}: not all there within {} s",
                    self.snapshot,
                    within.as_secs()
                ),
            )),
        }
    }

    /// Hears what it tells, to its end.
    fn watch(&self, client: Arc<Client>) {
        loop {
            match client.next() {
                Ok(Some(FromPager::First)) => {
                    self.state.send_replace(State::Filling { first: true });
                }
                Ok(Some(FromPager::Whole(report))) => return self.end_whole(client, &report),
                Ok(Some(told)) => tracing::warn!(snapshot = %self.snapshot, "a pager told {told:?}"),
                Ok(None) => return self.end_gone("it ended"),
                Err(e) => return self.end_gone(&e.to_string()),
            }
        }
    }

    fn end_whole(&self, client: Arc<Client>, report: &Report) {
        tracing::info!(snapshot = %self.snapshot, "all of its memory is there: {report:?}");
        self.state.send_replace(State::Whole);
        lock(&self.served).clear();
        // The last one of them: the pager hears nobody any more, and ends.
        lock(&self.client).take();
        drop(client);
        if let Err(e) = self.process.wait(None) {
            tracing::warn!("a pager: {e}");
        }
    }

    fn end_gone(&self, why: &str) {
        // One that was left goes on by itself for clones that still run.
        let left = lock(&self.client).take().is_none();
        if !left {
            let _ = self.process.kill();
        }
        let ended = self.process.wait(None);
        if lazy::is_whole(&self.memory) {
            // It let go of all clones before it sealed that.
            self.state.send_replace(State::Whole);
            lock(&self.served).clear();
            return;
        }
        self.state.send_replace(State::Gone);
        if left && matches!(ended, Ok(Some(Ended::Code(0)))) {
            // All of its clones had ended.
            lock(&self.served).clear();
            tracing::info!(snapshot = %self.snapshot, "its pager ended with the last who wanted it");
        } else {
            tracing::error!(snapshot = %self.snapshot, ?ended, "its pager died while memory was missing: {why}");
        }
        for (vm, vmm, exit) in lock(&self.served).drain(..) {
            let cause =
                format!("the pager of its memory died while pages were missing (snapshot {})", self.snapshot);
            if let Err(e) = end_with(&vmm, &exit, &cause) {
                tracing::error!(vm = %vm, "ending a VM without a pager: {e}");
            }
        }
    }
}

/// A VM that a daemon before left with memory still to come: a pager of that daemon's fills it. When no such pager lives any more and pages
/// are missing all the same, the VM is ended.
pub async fn watch_left(daemon: Arc<Daemon>, vm: Arc<Vm>, vmm: Arc<Process>) {
    let control = vm.dir.control();
    let mut answered = Instant::now();
    while !daemon.stop.is_cancelled() && !vm.is_gone() {
        let name = daemon.config.run.join(PAGER_NAME);
        let lives = blocking(move || {
            dayfly_host::process::lives(&name)
                .map_err(|e| Fault::internal(format_args!("looking for pagers: {e}")))
        });
        // Asked after it is known whether somebody still fills it.
        let lives = lives.await.unwrap_or(true);
        let deadlines = daemon.config.deadlines;
        let status = control_link::command(&control, Command::Status, deadlines.control).await;
        let (whole, silent) = match status {
            Ok(Answer::Status(status)) => {
                answered = Instant::now();
                (status.whole, false)
            }
            // Busy, or waiting for memory itself.
            _ => (false, true),
        };
        match () {
            () if whole => return,
            () if !lives && (!silent || answered.elapsed() > deadlines.save) => {
                let cause = "the pager of its memory died while pages were missing, and no daemon was there";
                if let Err(e) = end_with(&vmm, &vm.dir.exit(), cause) {
                    tracing::error!(vm = %vm.id, "ending a VM without a pager: {e}");
                }
                return;
            }
            _ => tokio::time::sleep(LOOK).await,
        }
    }
}

/// Ends a VMM that cannot say why by itself.
///
/// # Errors
/// It may not be signalled.
pub fn end_with(vmm: &Process, exit: &Path, cause: &str) -> io::Result<()> {
    let told = || -> io::Result<()> {
        if std::fs::metadata(exit)?.len() > 0 {
            return Ok(()); // it ended by itself
        }
        let record = ExitRecord { reason: ExitReason::Failed, message: cause.to_owned() };
        std::fs::write(exit, serde_json::to_vec(&record)?)
    };
    if let Err(e) = told() {
        tracing::warn!("{}: {e}", exit.display());
    }
    vmm.kill()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixture;

    #[test]
    fn a_patient_daemons_clones_wait_longer_for_a_page() {
        let folder = tempfile::tempdir().unwrap();
        let mut config = fixture::config(folder.path());
        let usual = Pagers::new(&config).settings;
        assert_eq!(usual, Settings::default());
        config.deadlines = config.deadlines.times(4);
        assert_eq!(Pagers::new(&config).settings, Settings { deadline_s: usual.deadline_s * 4, ..usual });
    }
}
