//! Pagers: processes that fill a snapshot's RAM while clones of it run ([`dayfly_pager`]).
//!
//! The daemon starts one for each snapshot that it opens and whose RAM is not in memory yet. A
//! pager outlives the daemon, and ends when all pages are there. If a pager dies before, clones
//! would wait for ever for missing pages. Therefore this module ends their VMs, with the pager's
//! exit as the cause.
//!
//! One pager is started ahead ([`Prepared`]): a new process, its namespaces and its jail take
//! longer than all else that opens a snapshot.

use crate::base::config::Config;
use crate::base::error::{ApiError, Outcome};
use crate::base::groups::{GroupLease, GroupStock};
use crate::templates::shared::Shared;
use dayfly_api::types::ErrorCode;
use dayfly_host::process::{Ended, Process, ProcessId, lives};
use dayfly_host::spawn::{FIRST_FD, Namespaces, Program, Spawn, SpawnError, Stdio};
use dayfly_pager::client::Client;
use dayfly_pager::wire::{FromPager, Report, Settings, pair};
use dayfly_store::{OpenSnapshot, Plan};
use dayfly_sys::group::Entry;
use dayfly_units::{Name, VmId, error::chain, sync::lock};
use dayfly_vmm::control::{ExitReason, ExitRecord};
use dayfly_vmm::memory::{lazy, working_set};
use dayfly_vmm::meter::{self, METER_BYTES};
use rustix::fd::{AsFd, OwnedFd};
use rustix::net::sockopt::Timeout;
use std::ffi::OsString;
use std::fs::File;
use std::io::{self, Read as _, Write as _};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio::sync::watch;

/// The last component of a pager's `argv[0]`.
pub const PAGER_NAME: &str = "dayfly-pager";

/// Time limit for a pager to begin; requests wait for it.
const BEGIN: Duration = Duration::from_secs(60);
/// Time limit for sending a message to a pager, such as a new clone; requests wait for it.
const SEND: Duration = Duration::from_secs(5);

/// Why no pager was started.
#[derive(Debug, thiserror::Error)]
pub enum PagerError {
    /// A socket, a descriptor or a thread.
    #[error("starting a pager: {0}")]
    Io(#[from] io::Error),
    /// The process could not be started.
    #[error(transparent)]
    Spawn(#[from] SpawnError),
}

/// The state of a pager.
#[derive(Debug, Clone, PartialEq, Eq)]
enum State {
    /// Pages are missing. `first`: whether the working set is there.
    Filling { first: bool },
    /// All pages are there.
    Whole,
    /// The pager ended while pages were missing.
    Gone,
}

/// A clone that the pager serves: its id, its VMM, its exit record.
type Served = (VmId, Arc<Process>, PathBuf);

/// A pager that was started.
#[derive(Debug)]
pub struct Pager {
    snapshot: Name,
    state: watch::Sender<State>,
    /// The connection to the pager; `None` once no message is left to send.
    client: Mutex<Option<Arc<Client>>>,
    served: Mutex<Vec<Served>>,
    process: Process,
    /// The template's memory file. If it is sealed it is complete, whatever the pager has reported.
    memory: File,
    /// Its control group, to which the kernel charges the template's pages.
    _group: Option<GroupLease>,
}

/// The pager of an open template. When the template is closed and no clone runs, the pager ends,
/// even if pages are missing.
#[derive(Debug)]
pub struct Wanted(Arc<Pager>);

impl Wanted {
    /// The pager itself.
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

/// A pager without a plan. It ends when its connection is closed, so that none is left of a daemon
/// that was killed.
#[derive(Debug)]
struct Prepared {
    socket: OwnedFd,
    process: Process,
    group: Option<GroupLease>,
}

impl Prepared {
    /// Ends it.
    fn end(self) {
        drop(self.socket);
        match self.process.wait(Some(SEND)) {
            Ok(Some(_)) => {}
            other => tracing::warn!("a pager without a snapshot does not end: {other:?}"),
        }
    }
}

/// Starts pagers.
#[derive(Debug, Clone)]
pub struct Pagers {
    program: PathBuf,
    name: PathBuf,
    /// Started ahead for the next snapshot that is opened.
    prepared: Arc<Mutex<Option<Prepared>>>,
    groups: GroupStock,
    /// Options of the pagers.
    pub settings: Settings,
}

impl Pagers {
    /// Pagers of a daemon with this configuration.
    #[must_use]
    pub fn new(config: &Config) -> Self {
        let deadline_s = u32::try_from(config.deadlines.page.as_secs()).unwrap_or(u32::MAX);
        Self {
            program: config.vmm.with_file_name(PAGER_NAME),
            name: config.run.join(PAGER_NAME),
            prepared: Arc::default(),
            groups: GroupStock::default(),
            settings: Settings { deadline_s, ..Settings::default() },
        }
    }

    /// With a control group for each pager.
    #[must_use]
    pub fn in_groups(self, groups: GroupStock) -> Self {
        Self { groups, ..self }
    }

    /// Starts a pager that fills the RAM of `open` according to `plan`, except the pages that
    /// clones map from other templates.
    ///
    /// # Errors
    /// [`PagerError`]; no process fills the RAM then.
    pub fn start(
        &self,
        open: &OpenSnapshot,
        plan: &Plan,
        shared: Option<&Shared>,
    ) -> Result<Wanted, PagerError> {
        let Prepared { socket: ours, process, group } = self.take()?;
        let begun = || -> io::Result<_> {
            rustix::net::sockopt::set_socket_timeout(&ours, Timeout::Recv, Some(BEGIN))?;
            rustix::net::sockopt::set_socket_timeout(&ours, Timeout::Send, Some(SEND))?;
            let receiving = ours.try_clone()?;
            let elsewhere = shared.map(Shared::frames).unwrap_or_default();
            let client =
                Client::begin(ours, plan, &touched_first(open), &elsewhere, self.settings)?;
            // From here on the pager sends reports at any time.
            rustix::net::sockopt::set_socket_timeout(&receiving, Timeout::Recv, None)?;
            Ok((Arc::new(client), open.memory.try_clone()?))
        };
        let (client, memory) = begun().inspect_err(|_| {
            let _ = process.kill().and_then(|()| process.wait(Some(SEND)));
        })?;
        let pager = Arc::new(Pager {
            memory,
            snapshot: open.manifest.name.clone(),
            state: watch::Sender::new(State::Filling { first: false }),
            client: Mutex::new(Some(client.clone())),
            served: Mutex::default(),
            process,
            _group: group,
        });
        let (watched, pagers) = (pager.clone(), self.clone());
        std::thread::Builder::new().name("pager".to_owned()).spawn(move || {
            watched.watch(client, &pagers);
            pagers.warm();
        })?;
        Ok(Wanted(pager))
    }

    /// Starts a pager for the next snapshot, if none waits. If that fails, the next snapshot starts
    /// its own.
    pub fn warm(&self) {
        let mut prepared = lock(&self.prepared);
        if prepared.is_none() {
            let spawned = self.spawn();
            *prepared = spawned
                .inspect_err(|e| tracing::warn!("no pager is started ahead: {}", chain(e)))
                .ok();
        }
    }

    /// Ends the pager that waits for a snapshot.
    pub fn end(&self) {
        if let Some(prepared) = lock(&self.prepared).take() {
            prepared.end();
        }
    }

    /// The pager that waits, if it lives, or else a new one.
    fn take(&self) -> Result<Prepared, PagerError> {
        match lock(&self.prepared).take() {
            Some(prepared) if prepared.process.is_alive().unwrap_or(false) => return Ok(prepared),
            // So that no zombie stays.
            Some(prepared) => prepared.end(),
            None => {}
        }
        self.spawn()
    }

    fn spawn(&self) -> Result<Prepared, PagerError> {
        // All of its work and all pages of the template are charged to its group (Closer, IV-B).
        match self.groups.template() {
            None => self.spawn_in(None),
            Some(group) => self.spawn_in(Some(group)).or_else(|e| {
                tracing::warn!("a pager without a control group: {}", chain(&e));
                self.spawn_in(None)
            }),
        }
    }

    fn spawn_in(&self, group: Option<(GroupLease, Entry)>) -> Result<Prepared, PagerError> {
        let (ours, theirs) = pair()?;
        let mut spawn = Spawn::new(Program::Path(self.program.clone()), &self.name);
        spawn.argv.push(OsString::from(FIRST_FD.to_string()));
        // No PID namespace: a pager ends VMMs, which are outside of any namespace that it could
        // have. The program changes its user, root folder and capabilities itself, and installs its
        // seccomp filter (`dayfly_pager::jail`).
        spawn.namespaces =
            Namespaces::MOUNT.and(Namespaces::NET).and(Namespaces::IPC).and(Namespaces::UTS);
        spawn.fds = vec![(theirs, FIRST_FD)];
        spawn.stderr = Stdio::Inherit;
        let (group, entry) = group.unzip();
        spawn.group = entry;
        Ok(Prepared { socket: ours, process: Process::from_child(spawn.run()?)?, group })
    }
}

/// The frames that clones touch first, in the recorded order.
fn touched_first(open: &OpenSnapshot) -> Vec<u32> {
    let record =
        open.working_set.as_ref().map(|file| working_set::read(file, open.manifest.memory_bytes));
    // A damaged record is reported when a VMM loads it.
    record.and_then(Result::ok).unwrap_or_default().in_order()
}

impl Pager {
    /// Whether a new clone must be announced to the pager.
    pub fn is_filling(&self) -> bool {
        matches!(*self.state.borrow(), State::Filling { .. })
    }

    /// Whether the working set is there.
    pub fn has_first(&self) -> bool {
        matches!(*self.state.borrow(), State::Filling { first: true } | State::Whole)
    }

    /// The pager's process.
    pub const fn process(&self) -> &Process {
        &self.process
    }

    /// Whether it ended while pages were missing, which then stay missing.
    pub fn is_gone(&self) -> bool {
        *self.state.borrow() == State::Gone
    }

    /// Announces a new clone to the pager. Returns the socket for the clone's VMM, or `None` if all
    /// pages are there.
    ///
    /// # Errors
    /// The pager ended, or the exit record cannot be opened.
    pub fn clone_comes(
        &self,
        vm: VmId,
        vmm: &Arc<Process>,
        exit: &Path,
    ) -> Outcome<Option<OwnedFd>> {
        let failed = |e: io::Error| {
            ApiError::internal(format_args!(
                "telling the pager of snapshot {} of a clone: {e}",
                self.snapshot
            ))
        };
        let Some(client) = lock(&self.client).clone() else {
            // Without a connection only a complete template may be cloned: missing pages would read
            // as zeroes.
            let whole = *self.state.borrow() == State::Whole;
            return if whole { Ok(None) } else { Err(failed(io::ErrorKind::BrokenPipe.into())) };
        };
        let record = File::options().append(true).open(exit).map_err(failed)?;
        {
            let mut served = lock(&self.served);
            served.retain(|(_, vmm, _)| vmm.is_alive().unwrap_or(false));
            served.push((vm, vmm.clone(), exit.to_owned()));
        }
        client.clone_comes(&vm.to_string(), vmm.as_fd(), record.as_fd()).map(Some).map_err(failed)
    }

    /// Waits until all pages are there.
    ///
    /// # Errors
    /// The pager ended before, or `within` has passed.
    pub async fn whole(&self, within: Duration) -> Outcome<()> {
        let mut state = self.state.subscribe();
        let settled = state.wait_for(|state| !matches!(state, State::Filling { .. }));
        match tokio::time::timeout(within, settled).await {
            Ok(Ok(state)) if *state == State::Whole => Ok(()),
            Ok(_) => Err(ApiError::new(
                ErrorCode::Guest,
                format_args!(
                    "the pager of snapshot {} died while memory was missing",
                    self.snapshot
                ),
            )),
            Err(_) => Err(ApiError::new(
                ErrorCode::Timeout,
                format_args!(
                    "the memory of snapshot {}: not all there within {} s",
                    self.snapshot,
                    within.as_secs()
                ),
            )),
        }
    }

    /// Reads the pager's reports until it ends. Runs on a thread for each pager. The next pager is
    /// started when this one has fetched what its clones touch first; before, that would delay
    /// their creations.
    fn watch(&self, client: Arc<Client>, pagers: &Pagers) {
        loop {
            match client.next() {
                Ok(Some(FromPager::First)) => {
                    self.state.send_replace(State::Filling { first: true });
                    pagers.warm();
                }
                Ok(Some(FromPager::Whole(report))) => return self.end_whole(client, &report),
                Ok(Some(report)) => {
                    tracing::warn!(snapshot = %self.snapshot, "a pager reported {report:?}")
                }
                Ok(None) => return self.end_gone("it ended", &pagers.groups),
                Err(e) => return self.end_gone(&e.to_string(), &pagers.groups),
            }
        }
    }

    fn end_whole(&self, client: Arc<Client>, report: &Report) {
        tracing::info!(snapshot = %self.snapshot, "all of its memory is there: {report:?}");
        self.state.send_replace(State::Whole);
        lock(&self.served).clear();
        // The last reference: dropping it closes the connection, and the pager ends.
        lock(&self.client).take();
        drop(client);
        if let Err(e) = self.process.wait(None) {
            tracing::warn!("a pager: {e}");
        }
    }

    fn end_gone(&self, why: &str, groups: &GroupStock) {
        // A pager whose template was closed goes on for clones that still run.
        let left = lock(&self.client).take().is_none();
        if !left {
            let _ = self.process.kill();
        }
        let ended = self.process.wait(None);
        if lazy::is_whole(&self.memory) {
            // It released all clones before it sealed the memory file.
            self.state.send_replace(State::Whole);
            lock(&self.served).clear();
            return;
        }
        self.state.send_replace(State::Gone);
        if left && matches!(ended, Ok(Some(Ended::Code(0)))) {
            // It ended by itself, because all of its clones had ended.
            lock(&self.served).clear();
            tracing::info!(snapshot = %self.snapshot, "its pager ended with its last clone");
        } else {
            let snapshot = &self.snapshot;
            tracing::error!(%snapshot, ?ended, "its pager died while memory was missing: {why}");
        }
        for (vm, vmm, exit) in lock(&self.served).drain(..) {
            let cause = format!(
                "the pager of its memory died while pages were missing (snapshot {})",
                self.snapshot
            );
            if let Err(e) = end_with(&vmm, &exit, &cause, groups) {
                tracing::error!(vm = %vm, "ending a VM without a pager: {e}");
            }
        }
    }
}

/// Kills a VMM, and writes `cause` to its exit file if that has no record. Takes the limit of CPU
/// time of its group among `groups` away before, so that it ends quickly.
///
/// # Errors
/// The process cannot be signalled.
pub fn end_with(vmm: &Process, exit: &Path, cause: &str, groups: &GroupStock) -> io::Result<()> {
    let record = || -> io::Result<()> {
        // Never truncated, because the VMM has its first page mapped.
        let mut begin = Vec::new();
        File::open(exit)?.take(METER_BYTES as u64 + 1).read_to_end(&mut begin)?;
        if !meter::split(&begin).1.is_empty() {
            return Ok(()); // the VMM has ended by itself
        }
        let exit_record = ExitRecord { reason: ExitReason::Failed, message: cause.to_owned() };
        File::options().append(true).open(exit)?.write_all(&serde_json::to_vec(&exit_record)?)
    };
    if let Err(e) = record() {
        tracing::warn!("{}: {e}", exit.display());
    }
    groups.lift_cap_of(vmm.id().pid);
    vmm.kill()
}

/// Whether the pager of a VM's memory lives. The record of a VM of an earlier version does not name
/// it; for such a VM any process with the `argv[0]` of this daemon's pagers counts.
///
/// # Errors
/// `/proc` cannot be read.
pub fn pager_lives(pager: Option<ProcessId>, name: &Path) -> io::Result<bool> {
    let Some(pager) = pager else { return lives(name) };
    Process::open(pager)?.map_or(Ok(false), |process| process.is_alive())
}

#[cfg(test)]
#[path = "pagers_tests.rs"]
mod tests;
