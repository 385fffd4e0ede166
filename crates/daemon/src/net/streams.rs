//! The process to which streams of one VM are handed over: `dayfly-relay --streams`, in the VM's
//! control group ([`dayfly_relay::streams`]).
//!
//! ```text
//!  first hand-over ──▶ spawn ──▶ runs ──no stream for a while──▶ control closed ──▶ ends
//!                                  ├── ended by itself ──▶ the next hand-over spawns another one
//!                                  └── the VM has ended ──▶ killed, if clients read too slowly
//! ```
//! A stream is either the daemon's or the process's ([`message`](dayfly_relay::streams::message)):
//! the process passes on no byte before the daemon has answered that it may. So a process that ends
//! or stands still before costs no stream. If a hand-over fails, the VM's streams stay with the
//! daemon for a minute, because the next one would fail too.
//!
//! The user of the process is that of the VM, and the VM's slot gives this user to the next VM. So
//! the slot is free only when no process is left ([`Streams::end`]).

use crate::base::config::STREAMS_NAME;
use crate::base::pidfd::{ended, kill, readable};
use crate::net::bounds;
use crate::net::line::{Line, Open, SEND, Shared, pair};
use crate::net::relay::{Place, Spent, gone};
use dayfly_host::process::{Process, ProcessId, scan_below, uid_of};
use dayfly_host::spawn::{FIRST_FD, Program, Spawn, Stdio};
use dayfly_relay::streams::message::{Event, Handed, Order};
use dayfly_units::VmId;
use dayfly_units::error::chain;
use dayfly_units::sync::lock;
use rustix::io::{Errno, IoSlice};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, Shutdown, sendmsg, shutdown};
use std::collections::BTreeSet;
use std::fs::File;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::sync::Notify;
use tokio::time::{Instant, sleep, timeout, timeout_at};

/// What the log calls it.
const STREAMS: &str = "the process of streams";
/// How long a process without streams waits for the next one.
const IDLE: Duration = Duration::from_secs(5);
/// Time in which a process that has closed its sockets ends, if it does.
const ENDING: Duration = Duration::from_millis(200);
/// How long a VM's streams stay with the daemon after a hand-over that has failed.
const REST: Duration = Duration::from_secs(60);

/// The processes whose end this daemon waits for.
static RUNNING: Mutex<BTreeSet<ProcessId>> = Mutex::new(BTreeSet::new());

/// Whether this daemon waits for the end of the process.
#[must_use]
pub fn is_running(process: ProcessId) -> bool {
    lock(&RUNNING).contains(&process)
}

/// The streams of a VM.
#[derive(Debug, Clone, Default)]
pub struct Streams(Arc<OfVm>);

#[derive(Debug, Default)]
struct OfVm {
    /// The process that gets the next stream.
    running: tokio::sync::Mutex<Option<Running>>,
    processes: Mutex<Processes>,
    /// Notified when one of them has ended.
    ended: Notify,
    times: Times,
}

/// How long processes and hand-overs rest.
#[derive(Debug, Clone, Copy)]
struct Times {
    idle: Duration,
    rest: Duration,
}

impl Default for Times {
    fn default() -> Self {
        Self { idle: IDLE, rest: REST }
    }
}

/// All processes of a VM: also those that get no more streams, and those of an earlier daemon.
#[derive(Debug, Default)]
struct Processes {
    all: Vec<Arc<Process>>,
    /// Those that are being started.
    starting: usize,
    /// Whether the VM has ended, so that no other one is started.
    is_closed: bool,
    /// No hand-over is tried before.
    rests_until: Option<Instant>,
}

impl Processes {
    fn is_empty(&self) -> bool {
        self.starting == 0 && self.all.is_empty()
    }
}

/// A process that runs.
#[derive(Debug)]
struct Running {
    /// Closing it makes the process end after its last stream.
    control: AsyncFd<OwnedFd>,
    shared: Arc<Shared>,
}

/// Why a stream stays with the daemon.
#[derive(Debug, thiserror::Error)]
pub enum NotHanded {
    /// The process cannot be started.
    #[error("starting it: {}", chain(.0))]
    Start(io::Error),
    /// The kernel does not take the message.
    #[error("handing over: {0}")]
    Send(io::Error),
    /// The process has as many streams as it may.
    #[error("it has {0} streams, which is the most")]
    Full(usize),
    /// The process has refused the stream, or has ended.
    #[error("it did not take the stream")]
    Refused,
    /// The process did not answer.
    #[error("it did not take the stream within {} s", .0.as_secs_f64())]
    Silent(Duration),
    /// A hand-over has failed not long ago.
    #[error("an earlier hand-over has failed")]
    Rests,
}

impl NotHanded {
    /// Whether the next hand-over would fail too.
    #[must_use]
    pub const fn lasts(&self) -> bool {
        !matches!(self, Self::Full(_) | Self::Rests)
    }
}

impl Streams {
    /// Hands over a stream, with its connections to the client and to the agent. Starts a process
    /// in `place` if there is none. Returns within that time, and that of a start.
    ///
    /// # Errors
    /// [`NotHanded`]: the process has not touched the connections, and will not.
    pub async fn hand_over(
        &self,
        place: &Place,
        handed: &Handed,
        fds: [BorrowedFd<'_>; 2],
        within: Duration,
    ) -> Result<Line, NotHanded> {
        if lock(&self.0.processes).rests_until.is_some_and(|until| until > Instant::now()) {
            return Err(NotHanded::Rests);
        }
        let line = self.offer(place, &handed.encode(), fds, within).await;
        if line.as_ref().is_err_and(NotHanded::lasts) {
            lock(&self.0.processes).rests_until = Some(Instant::now() + self.0.times.rest);
        }
        line
    }

    async fn offer(
        &self,
        place: &Place,
        message: &[u8],
        [client, agent]: [BorrowedFd<'_>; 2],
        within: Duration,
    ) -> Result<Line, NotHanded> {
        let mut until = Instant::now() + within;
        let late = |_| NotHanded::Silent(within);
        // A process that has run may have ended meanwhile.
        let mut is_last = false;
        loop {
            let (line, of_process) = pair().map_err(NotHanded::Send)?;
            let line = {
                let locked = timeout_at(until, self.0.running.lock()).await;
                let mut running = locked.map_err(late)?;
                if running.is_none() {
                    is_last = true;
                    *running = Some(self.start(place).await.map_err(NotHanded::Start)?);
                    until = Instant::now() + within;
                }
                let Some(Running { control, shared }) = &*running else {
                    return Err(NotHanded::Refused);
                };
                let open = Open::new(shared).ok_or(NotHanded::Full(shared.most))?;
                let line = Line::new(line, open).map_err(NotHanded::Send)?;
                let fds = [client, agent, of_process.as_fd()];
                // It is writable when the process takes what was handed over before.
                let sent = control.async_io(Interest::WRITABLE, |to| hand(to, message, &fds));
                match timeout_at(until, sent).await.map_err(late)? {
                    Ok(()) => line,
                    Err(e) if is_closed(&e) && !is_last => {
                        *running = None;
                        continue;
                    }
                    Err(e) => return Err(NotHanded::Send(e)),
                }
            };
            drop(of_process);
            let why = match timeout_at(until, line.next()).await {
                Ok(Some(Event::Taken)) => match line.order(&Order::Go) {
                    Ok(()) => return Ok(line),
                    Err(e) => NotHanded::Send(e),
                },
                Ok(_) => NotHanded::Refused,
                Err(_) => NotHanded::Silent(within),
            };
            let has_ended = self.take_back(line).await;
            if !has_ended || std::mem::replace(&mut is_last, true) {
                return Err(why);
            }
        }
    }

    /// Takes back a stream on which its process has not begun. Returns whether the process has
    /// ended.
    async fn take_back(&self, line: Line) -> bool {
        let shared = line.shared().clone();
        match line.order(&Order::No) {
            Ok(()) => {}
            // The process has closed the line, and with it its descriptors of the stream.
            Err(e) if is_closed(&e) => {}
            Err(e) => {
                // When the line is closed, it would go on with the stream.
                tracing::error!("a process of streams cannot be stopped: {e}; ending it");
                kill(&shared.process, STREAMS);
                ended(&shared.process, STREAMS).await;
            }
        }
        drop(line);
        // A process that is killed closes its sockets a moment before its end.
        let has_ended = timeout(ENDING, readable(&shared.process)).await;
        let has_ended = matches!(has_ended, Ok(Ok(())));
        if has_ended {
            self.forget(&shared, false).await;
        }
        has_ended
    }

    /// Starts a process, and a task that waits for its end.
    async fn start(&self, place: &Place) -> io::Result<Running> {
        // A task, so that no process is forgotten if the caller is cancelled.
        tokio::spawn(started(self.clone(), place.clone())).await.map_err(io::Error::other)?
    }

    /// Has the end of a process of an earlier daemon waited for, and its CPU time counted. `keeps`
    /// is dropped then. Call it within a tokio runtime.
    pub fn adopt<T: Send + 'static>(&self, process: Process, spent: Arc<Spent>, keeps: T) {
        let process = Arc::new(process);
        self.add(&process);
        spent.begins(process.id());
        let streams = self.clone();
        tokio::spawn(async move {
            ended(&process, STREAMS).await;
            spent.ends(process.id());
            drop(keeps);
            streams.remove(&process);
        });
    }

    fn add(&self, process: &Arc<Process>) {
        lock(&RUNNING).insert(process.id());
        let mut processes = lock(&self.0.processes);
        processes.all.push(process.clone());
        if processes.is_closed {
            kill(process, STREAMS);
        }
    }

    fn remove(&self, process: &Arc<Process>) {
        lock(&self.0.processes).all.retain(|other| !Arc::ptr_eq(other, process));
        lock(&RUNNING).remove(&process.id());
        self.0.ended.notify_waiters();
    }

    /// Has no other process started: the VM has ended. Returns whether none is left.
    pub fn close(&self) -> bool {
        let mut processes = lock(&self.0.processes);
        processes.is_closed = true;
        processes.is_empty()
    }

    /// As [`Self::close`], and returns when none is left. Clients have `grace` for their last
    /// bytes.
    pub async fn end(&self, grace: Duration) {
        if self.close() || timeout(grace, self.none_left()).await.is_ok() {
            return;
        }
        let left = lock(&self.0.processes).all.clone();
        left.iter().for_each(|process| kill(process, STREAMS));
        self.none_left().await;
    }

    async fn none_left(&self) {
        loop {
            let ended = self.0.ended.notified();
            tokio::pin!(ended);
            ended.as_mut().enable();
            if lock(&self.0.processes).is_empty() {
                return;
            }
            ended.await;
        }
    }

    /// Has the next hand-over start another process, if it would go to this one and `if_idle` is
    /// not set, or it has no streams.
    async fn forget(&self, shared: &Arc<Shared>, if_idle: bool) -> bool {
        let mut running = self.0.running.lock().await;
        // Hand-overs are counted with this lock.
        let forgotten = running.take_if(|running| {
            Arc::ptr_eq(&running.shared, shared) && !(if_idle && shared.has_streams())
        });
        forgotten.is_some()
    }
}

/// A process that is being started, until this is dropped.
struct Starting(Streams);

impl Starting {
    fn of(streams: &Streams) -> io::Result<Self> {
        let mut processes = lock(&streams.0.processes);
        if processes.is_closed {
            return Err(io::Error::new(io::ErrorKind::NotFound, "its VM has ended"));
        }
        processes.starting += 1;
        Ok(Self(streams.clone()))
    }
}

impl Drop for Starting {
    fn drop(&mut self) {
        lock(&self.0.0.processes).starting -= 1;
        self.0.0.ended.notify_waiters();
    }
}

async fn started(streams: Streams, place: Place) -> io::Result<Running> {
    let starting = Starting::of(&streams)?;
    let vm = place.dir.path().display().to_string();
    let (most, spent) = (bounds::streams(place.memory_max_bytes), place.spent.clone());
    let spawned = tokio::task::spawn_blocking(move || spawn(&place, most)).await;
    let (process, control) = spawned.map_err(io::Error::other)??;
    let shared = Arc::new(Shared::new(process, most));
    streams.add(&shared.process);
    drop(starting);
    spent.begins(shared.process.id());
    tokio::spawn(keep(streams, shared.clone(), spent, vm));
    // SAFETY: `OwnedFd` gives the same open descriptor as long as it lives, and the `AsyncFd` owns
    // it.
    let control = unsafe { AsyncFd::register_with_interest(control, Interest::WRITABLE) }?;
    Ok(Running { control, shared })
}

/// Waits for the end of a process, and ends it when it has been idle.
async fn keep(streams: Streams, shared: Arc<Shared>, spent: Arc<Spent>, vm: String) {
    let process = &shared.process;
    let idle_time = streams.0.times.idle;
    let end = ended(process, STREAMS);
    tokio::pin!(end);
    loop {
        let idle = async {
            if shared.has_streams() {
                return std::future::pending().await;
            }
            sleep(idle_time).await;
        };
        tokio::select! {
            () = &mut end => break,
            () = shared.changed.notified() => {}
            () = idle => {
                let is_forgotten = streams.forget(&shared, true).await;
                // It ends now, or has got a stream.
                if timeout(idle_time, &mut end).await.is_ok() {
                    break;
                }
                // It gets no stream any more. Its guest may have taken it over.
                if is_forgotten {
                    kill(process, STREAMS);
                }
            }
        }
    }
    spent.ends(process.id());
    let (pid, own) = (process.id().pid, streams.forget(&shared, false).await);
    let (how, is_clean) = gone(process);
    if own && !is_clean {
        tracing::warn!(%vm, pid, "the process of its streams has ended ({how})");
    }
    streams.remove(process);
}

fn is_closed(e: &io::Error) -> bool {
    matches!(e.kind(), io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset)
}

fn hand(control: &OwnedFd, message: &[u8], fds: &[BorrowedFd<'_>]) -> io::Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(3))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    if !ancillary.push(SendAncillaryMessage::ScmRights(fds)) {
        return Err(Errno::NOBUFS.into());
    }
    sendmsg(control, &[IoSlice::new(message)], &mut ancillary, SEND)?;
    Ok(())
}

/// Starts a process for at most this many streams. Returns it with the daemon's end of its control
/// socket. Blocks for about a millisecond.
fn spawn(place: &Place, most: usize) -> io::Result<(Process, OwnedFd)> {
    let failed =
        |what: &'static str| move |e: io::Error| io::Error::new(e.kind(), format!("{what}: {e}"));
    let log = File::options().create(true).append(true).mode(0o600).open(place.dir.streams_log());
    let mut spawn = Spawn::new(Program::Path(place.program.clone()), place.dir.streams());
    let vmm = place.vmm.as_fd().try_clone_to_owned().map_err(failed("the VMM's pidfd"))?;
    let (control, of_process) = pair().map_err(failed("its control socket"))?;
    // The process sends nothing on it. It can fill nothing, either.
    shutdown(&control, Shutdown::Read)?;
    spawn.fds.extend([(vmm, FIRST_FD), (of_process, FIRST_FD + 1)]);
    let (vmm, control_fd) = (FIRST_FD.to_string(), (FIRST_FD + 1).to_string());
    let (user, most) = (place.uid.to_string(), most.to_string());
    let words = ["--streams", &control_fd, "--vmm", &vmm, "--most", &most, "--user", &user];
    spawn.argv.extend(words.into_iter().map(Into::into));
    spawn.group = place.group.as_ref().map(|group| group.entry()).transpose()?;
    spawn.stderr = Stdio::Fd(log.map_err(failed("its log"))?.into());
    // Before it runs, so that none is left without a pidfd if no descriptor is free.
    let kept = File::open("/dev/null").map_err(failed("a descriptor that is free"))?;
    let child = spawn.run().map_err(io::Error::other)?;
    drop(kept);
    Ok((Process::from_child(child)?, control))
}

/// The processes that a daemon before has left, of the VMs in the folder `vms`. Any process may
/// give itself such a name, so its user counts too: [`is_of`]. Blocks.
#[must_use]
pub fn left(vms: &Path) -> Vec<(VmId, Process)> {
    let found = scan_below(vms, STREAMS_NAME).unwrap_or_else(|e| {
        tracing::error!("looking for processes of streams of an earlier daemon: {e}");
        Vec::new()
    });
    found
        .into_iter()
        .filter_map(|left| Some((left.vm, Process::open(left.process).ok()??)))
        .collect()
}

/// Whether a process has the VM's user, or root, which it has until it is in its jail.
#[must_use]
pub fn is_of(process: &Process, uid: u32) -> bool {
    uid_of(process.id().pid).is_ok_and(|user| user == uid || user == 0)
}

#[cfg(test)]
#[path = "streams_tests.rs"]
mod tests;
