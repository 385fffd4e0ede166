//! The process that passes the bytes of one VM's published ports: `dayfly-relay`, in the VM's
//! control group.
//!
//! ```text
//!  start ──▶ spawn ──▶ runs ──ended──▶ the VMM lives? ──yes──▶ pause ──▶ spawn …
//!              ▲                            └──no──▶ (done)
//!  adopt ──────┴─▶ runs
//! ```
//! The listeners are bound by the daemon, so that a request gets their errors. The daemon keeps
//! them, so that a relay that ends loses no client that waits, but never waits for them itself: no
//! event of a published port reaches the daemon. A relay ends with its VMM, whose pidfd it watches,
//! and outlives the daemon. The next daemon finds it by the name of its process, and lets it be.

use crate::base::config::{RELAY_NAME, VmDir};
use crate::base::groups::GroupLease;
use crate::base::pidfd::{self, kill};
use crate::net::bound::{Bound, Kind, bind_again};
use crate::net::bounds::{Bounds, FlowShare};
use dayfly_api::types::Publish;
use dayfly_host::cpu_time;
use dayfly_host::process::{Ended, Process, ProcessId, VmProcess, scan_below, uid_of};
use dayfly_host::spawn::{FIRST_FD, Program, Spawn, Stdio};
use dayfly_units::VmId;
use dayfly_units::error::chain;
use dayfly_units::sync::lock;
use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io;
use std::net::Ipv4Addr;
use std::os::fd::AsFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;

/// What the log calls it.
const RELAY: &str = "the relay";
/// The pause before another relay is started, at first and at most.
const PAUSES: (Duration, Duration) = (Duration::from_millis(20), Duration::from_secs(5));
/// A relay that has run as long as this ends for another reason than the one before it.
const LASTED: Duration = Duration::from_secs(60);
/// Time limit for relays that were killed.
const ENDING_WITHIN: Duration = Duration::from_secs(5);

/// Where a relay runs, and for which VM.
#[derive(Debug, Clone)]
pub struct Place {
    /// The program `dayfly-relay`.
    pub program: PathBuf,
    /// The VM's folder, which names the VM in the relay's `argv[0]`.
    pub dir: VmDir,
    /// The VM's user.
    pub uid: u32,
    /// The VM's control group.
    pub group: Option<Arc<GroupLease>>,
    /// The VMM, with which the relay ends.
    pub vmm: Arc<Process>,
    /// What the VM may take of the host's memory beside its RAM.
    pub memory_max_bytes: Option<u64>,
    /// What the VM's relays have taken.
    pub spent: Arc<Spent>,
}

/// CPU time of the relays of a VM, of ports and of streams, for its bill. It never goes down.
#[derive(Debug, Default)]
pub struct Spent(Mutex<Relays>);

#[derive(Debug, Default)]
struct Relays {
    /// Microseconds of those that have ended.
    ended_us: u64,
    /// Those that run, and the most that was read of their clocks.
    run: Vec<(ProcessId, u64)>,
}

/// Reads the clock of a process. What was read before stays, if it has ended and is not a child:
/// its pid may be another process's by now.
fn look((id, most_us): &mut (ProcessId, u64)) -> u64 {
    if let Some(time) = cpu_time::of_process(id.pid)
        && ProcessId::of(id.pid).is_ok_and(|now| now == Some(*id))
    {
        *most_us = u64::try_from(time.as_micros()).unwrap_or(u64::MAX).max(*most_us);
    }
    *most_us
}

impl Spent {
    /// That of the relays before, in microseconds, if this daemon was not there.
    #[must_use]
    pub fn before(ended_us: u64) -> Self {
        Self(Mutex::new(Relays { ended_us, run: Vec::new() }))
    }

    /// Microseconds of the relays that have ended.
    #[must_use]
    pub fn ended_us(&self) -> u64 {
        lock(&self.0).ended_us
    }

    /// Microseconds of all of them. Up to three system calls for each that runs.
    #[must_use]
    pub fn us(&self) -> u64 {
        let mut relays = lock(&self.0);
        let ended_us = relays.ended_us;
        relays.run.iter_mut().map(look).fold(ended_us, u64::saturating_add)
    }

    /// A relay runs.
    pub(super) fn begins(&self, relay: ProcessId) {
        lock(&self.0).run.push((relay, 0));
    }

    /// The relay has ended, and is not reaped yet. Of one that was not a child, only what was read
    /// before is known.
    pub(super) fn ends(&self, relay: ProcessId) {
        let relays = &mut *lock(&self.0);
        if let Some(at) = relays.run.iter().position(|(id, _)| *id == relay) {
            let took_us = look(&mut relays.run.swap_remove(at));
            relays.ended_us = relays.ended_us.saturating_add(took_us);
        }
    }
}

/// What a relay serves.
#[derive(Debug)]
pub(super) struct Ports {
    pub guest: Ipv4Addr,
    /// Each port, and its socket. `None`: the relay of an earlier daemon has it.
    pub published: Vec<(Publish, Option<Bound>)>,
}

/// A relay that was stopped and is not gone yet: its ports may be in use still.
#[derive(Debug)]
struct Stopped {
    process: Option<ProcessId>,
    /// Ports of the host.
    ports: BTreeSet<u16>,
}

#[derive(Debug)]
struct Ending {
    relays: Mutex<BTreeMap<u64, Stopped>>,
    changed: Notify,
    next: AtomicU64,
}

static ENDING: Ending = Ending {
    relays: Mutex::new(BTreeMap::new()),
    changed: Notify::const_new(),
    next: AtomicU64::new(0),
};

/// Whether a relay was killed and is not gone yet.
#[must_use]
pub fn is_ending(relay: ProcessId) -> bool {
    lock(&ENDING.relays).values().any(|stopped| stopped.process == Some(relay))
}

/// Waits until no relay that was stopped may have one of these ports of the host. Returns whether
/// one had.
pub(super) async fn ended(ports: &BTreeSet<u16>) -> bool {
    let is_free = || lock(&ENDING.relays).values().all(|stopped| stopped.ports.is_disjoint(ports));
    let waiting = async {
        loop {
            let changed = ENDING.changed.notified();
            tokio::pin!(changed);
            changed.as_mut().enable();
            if is_free() {
                return;
            }
            changed.await;
        }
    };
    if is_free() {
        return false;
    }
    if tokio::time::timeout(ENDING_WITHIN, waiting).await.is_err() {
        tracing::error!(?ports, "a relay of these ports does not end");
    }
    true
}

#[derive(Debug)]
enum State {
    /// There is none yet, or none any more.
    Starting,
    Runs(Arc<Process>),
    Stopped,
    /// No relay will run any more.
    Gone,
}

/// The relay of a VM. Dropping this lets the relay be, but no other one follows it.
#[derive(Debug)]
pub(super) struct Relay {
    number: u64,
    ports: BTreeSet<u16>,
    state: Arc<Mutex<State>>,
    released: CancellationToken,
}

impl Drop for Relay {
    fn drop(&mut self) {
        self.released.cancel();
    }
}

/// Notes that no relay runs any more, and that no port is bound, when dropped.
struct Guard(u64, Arc<Mutex<State>>);

impl Drop for Guard {
    fn drop(&mut self) {
        // With the state's lock, as `Relay::stop`.
        let mut state = lock(&self.1);
        *state = State::Gone;
        lock(&ENDING.relays).remove(&self.0);
        drop(state);
        ENDING.changed.notify_waiters();
    }
}

impl Relay {
    /// Keeps a relay running until the VM has ended, beginning with `adopted` if there is one. Call
    /// it within a tokio runtime.
    pub(super) fn keep(place: Place, ports: Ports, adopted: Option<Process>) -> Self {
        let state = Arc::new(Mutex::new(State::Starting));
        let released = CancellationToken::new();
        let number = ENDING.next.fetch_add(1, Ordering::Relaxed);
        let guard = Guard(number, state.clone());
        let of_host = ports.published.iter().map(|(port, _)| port.host_port).collect();
        tokio::spawn(keep(place, ports, adopted, guard, released.clone()));
        Self { number, ports: of_host, state, released }
    }

    /// Kills the relay. Does not wait for its end ([`ended`]).
    pub(super) fn stop(mut self) {
        let mut state = lock(&self.state);
        let process = match &*state {
            State::Gone | State::Stopped => return,
            State::Starting => None,
            State::Runs(process) => Some(process.clone()),
        };
        *state = State::Stopped;
        let (id, ports) = (process.as_ref().map(|process| process.id()), &mut self.ports);
        let stopped = Stopped { process: id, ports: std::mem::take(ports) };
        lock(&ENDING.relays).insert(self.number, stopped);
        if let Some(process) = process {
            kill(&process, RELAY);
        }
    }
}

async fn keep(
    place: Place,
    ports: Ports,
    mut adopted: Option<Process>,
    guard: Guard,
    released: CancellationToken,
) {
    let framed = |(_, bound): &(_, Option<Bound>)| matches!(bound, Some((Kind::Framed, ..)));
    let framed = ports.published.iter().any(framed);
    let has_flows = ports.published.iter().any(|(port, _)| !port.protocol.is_tcp());
    let flows = FlowShare::take(has_flows);
    let bounds = Bounds::of(place.memory_max_bytes, framed, flows.count());
    // After `guard`, so that it is dropped before.
    let work = Arc::new((place, Mutex::new(ports), bounds));
    let (mut pause, longest) = PAUSES;
    let mut failed = String::new();
    loop {
        let began = tokio::time::Instant::now();
        let same = work.clone();
        let process = match adopted.take() {
            Some(process) => Ok(process),
            None => tokio::task::spawn_blocking(move || {
                let (place, ports, bounds) = &*same;
                spawn(place, &mut lock(ports), bounds)
            })
            .await
            .unwrap_or_else(|e| Err(io::Error::other(e))),
        };
        let vm = work.0.dir.path().display();
        match process {
            Ok(process) => {
                let process = Arc::new(process);
                match &mut *lock(&guard.1) {
                    starting @ State::Starting => *starting = State::Runs(process.clone()),
                    // It was stopped meanwhile.
                    _ => kill(&process, RELAY),
                }
                work.0.spent.begins(process.id());
                wait(&process, &released, &work.1).await;
                work.0.spent.ends(process.id());
                if let runs @ State::Runs(_) = &mut *lock(&guard.1) {
                    *runs = State::Starting;
                }
                let (how, _) = gone(&process);
                if !goes_on(&work.0.vmm, &guard.1, &released) {
                    return;
                }
                let pid = process.id().pid;
                tracing::warn!(%vm, pid, "its relay has ended ({how}); starting another one");
            }
            Err(e) => {
                if !goes_on(&work.0.vmm, &guard.1, &released) {
                    return;
                }
                let why = chain(&e);
                if failed != why {
                    tracing::error!(%vm, "relaying its ports: {why}; trying again");
                    failed = why;
                }
            }
        }
        if began.elapsed() >= LASTED {
            pause = PAUSES.0;
        }
        tokio::select! {
            () = tokio::time::sleep(pause) => {}
            () = released.cancelled() => return,
        }
        pause = (pause * 2).min(longest);
    }
}

/// Waits for the end of a relay. Closes its listeners when no other relay will follow it.
async fn wait(process: &Arc<Process>, released: &CancellationToken, ports: &Mutex<Ports>) {
    let ended = pidfd::ended(process, RELAY);
    tokio::pin!(ended);
    tokio::select! {
        () = &mut ended => return,
        () = released.cancelled() => {}
    }
    lock(ports).published.clear();
    ended.await;
}

/// Whether another relay is to be started.
fn goes_on(vmm: &Process, state: &Mutex<State>, released: &CancellationToken) -> bool {
    let stopped = matches!(*lock(state), State::Stopped) || released.is_cancelled();
    !stopped && vmm.is_alive().unwrap_or(false)
}

/// How a process has ended, in words, and whether that is as it should be. Reaps it if it is a
/// child.
pub(super) fn gone(process: &Process) -> (String, bool) {
    let ended = process.wait(Some(Duration::ZERO));
    let clean = matches!(ended, Ok(Some(Ended::Code(0))));
    let how = match ended {
        Ok(Some(Ended::Code(code))) => format!("exit code {code}"),
        Ok(Some(Ended::Signal(libc::SIGSYS))) => "a forbidden system call (SIGSYS)".to_owned(),
        Ok(Some(Ended::Signal(signal))) => format!("signal {signal}"),
        Ok(Some(Ended::Unknown) | None) => "how is not known".to_owned(),
        Err(e) => e.to_string(),
    };
    (how, clean)
}

/// Starts a relay. Blocks for about a millisecond.
fn spawn(place: &Place, ports: &mut Ports, bounds: &Bounds) -> io::Result<Process> {
    let failed =
        |what: &'static str| move |e: io::Error| io::Error::new(e.kind(), format!("{what}: {e}"));
    // The relay of an earlier daemon had these.
    bind_again(&mut ports.published)?;
    let log = File::options().create(true).append(true).mode(0o600).open(place.dir.relay_log());
    let mut spawn = Spawn::new(Program::Path(place.program.clone()), place.dir.relay());
    let vmm = place.vmm.as_fd().try_clone_to_owned().map_err(failed("the VMM's pidfd"))?;
    spawn.fds.push((vmm, FIRST_FD));
    let mut words = vec!["--guest".to_owned(), ports.guest.to_string()];
    words.extend(["--vmm".to_owned(), FIRST_FD.to_string()]);
    words.extend(["--user".to_owned(), place.uid.to_string()]);
    words.extend(bounds.arguments());
    let bound = ports.published.iter().filter_map(|(_, bound)| bound.as_ref());
    for ((kind, socket, guest_port), number) in bound.zip(FIRST_FD + 1..) {
        let socket = socket.try_clone().map_err(failed("a listener"))?;
        spawn.fds.push((socket, number));
        words.push(format!("{}:{number}:{guest_port}", kind.word()));
    }
    spawn.argv.extend(words.into_iter().map(Into::into));
    spawn.group = place.group.as_ref().map(|group| group.entry()).transpose()?;
    spawn.stderr = Stdio::Fd(log.map_err(failed("its log"))?.into());
    // Before it runs, so that none is left without a pidfd if no descriptor is free.
    let kept = File::open("/dev/null").map_err(failed("a descriptor that is free"))?;
    let child = spawn.run().map_err(io::Error::other)?;
    drop(kept);
    Process::from_child(child)
}

/// The relays that a daemon before has left, of the VMs in the folder `vms`. Blocks.
#[derive(Debug, Default)]
pub struct Left(Vec<(VmId, Process)>);

impl Left {
    /// Looks for them.
    #[must_use]
    pub fn find(vms: &Path) -> Self {
        let found = scan_below(vms, RELAY_NAME).unwrap_or_else(|e| {
            tracing::error!("looking for relays of an earlier daemon: {e}");
            Vec::new()
        });
        let open = |relay: VmProcess| Some((relay.vm, Process::open(relay.process).ok()??));
        Self(found.into_iter().filter_map(open).collect())
    }

    /// The relay of a VM with this user. Any process may give itself such a name, so its user
    /// counts too: root, until it is in its jail.
    pub fn take(&mut self, vm: VmId, uid: u32) -> Option<Process> {
        let is_its =
            |process: &Process| uid_of(process.id().pid).is_ok_and(|user| user == uid || user == 0);
        let at = self.0.iter().position(|(of, process)| *of == vm && is_its(process))?;
        Some(self.0.swap_remove(at).1)
    }
}

#[cfg(test)]
#[path = "relay_tests.rs"]
mod tests;
