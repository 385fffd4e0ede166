//! The pager process: fault threads and the prefetcher ([`crate::threads`]), and the main thread,
//! which talks to daemon and VMMs.

use crate::begin::{Beginning, begin};
use crate::clones::{Clone, Handle};
use crate::error::{ServeError, step};
use crate::jail;
use crate::order::Order;
use crate::pace::Pace;
use crate::source::Source;
use crate::stored::Stored;
use crate::template::{Counters, Template};
use crate::threads::{STOP, Shared};
use crate::wire::{FromPager, Report, Settings, ToPager, receive, receive_bytes, send, send_bytes};
use crate::workers::Workers;
use dayfly_sys::uffd::{Descriptors, Uffd};
use dayfly_units::regions;
use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::fd::{AsFd, OwnedFd};
use std::io;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, OnceLock};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Interval of the checks for clones that wait too long.
const LOOK: Timespec = Timespec { tv_sec: 0, tv_nsec: 500_000_000 };
const LOOK_EVERY: Duration = Duration::from_millis(500);
/// How long a thread may take to end.
const END: Duration = Duration::from_secs(10);
/// The most fault threads.
const MAX_THREADS: u32 = 64;

/// Follows the plan from the daemon at the other end of `socket`. Returns when everything is
/// present and the daemon and all clones know, when no process needs the template any more, or when
/// the daemon closes the connection instead of sending a plan.
///
/// # Errors
/// [`ServeError`]. The daemon gets it, or, after `Begun`, sees this process end.
pub fn run(socket: OwnedFd, descriptors: Descriptors) -> Result<(), ServeError> {
    let usual = Settings::default().fault_threads as usize + 1;
    let workers = Workers::waiting(usual).map_err(step("threads"))?;
    let begun = match begin(&socket) {
        Ok(None) => return Ok(()),
        Ok(Some(beginning)) => prepare(beginning),
        Err(e) => Err(e),
    };
    let answer = match &begun {
        Ok(_) => FromPager::Begun,
        Err(e) => FromPager::Failed { cause: e.to_string() },
    };
    // If the daemon is gone, the next read from it shows that.
    let _ = send(&socket, &answer, &[]);
    let (template, first, settings) = begun?;
    Server::start(template, &first, settings, descriptors, workers)?.talk(socket)
}

fn prepare(beginning: Beginning) -> Result<(Template<Stored>, Vec<u32>, Settings), ServeError> {
    let Beginning { source, memory, first, settings } = beginning;
    let template = Template::new(memory, source).map_err(step("the template"))?;
    jail::limit_memory(template.bytes()).map_err(step("the limit of memory"))?;
    Ok((template, first, settings))
}

/// As [`run`], with the caller's template and source.
///
/// # Errors
/// [`ServeError`].
pub fn fill<S: Source + 'static>(
    template: Template<S>,
    first: &[u32],
    settings: Settings,
    socket: OwnedFd,
) -> Result<(), ServeError> {
    let descriptors = Descriptors::open().map_err(step("/proc/self/fd"))?;
    Server::start(template, first, settings, descriptors, Workers::default())?.talk(socket)
}

/// A clone whose VMM has not sent its regions yet.
struct Coming {
    handle: Handle,
    socket: OwnedFd,
}

/// The state of the main thread.
struct Server<S> {
    shared: Arc<Shared<S>>,
    threads: Vec<JoinHandle<()>>,
    descriptors: Descriptors,
    began: Instant,
    next_id: u64,
    clones: u64,
    /// Whether no fault thread serves, so that this thread notes faults.
    stands_still: bool,
    /// When killed clones were re-armed last.
    looked: Instant,
}

impl<S: Source + 'static> Server<S> {
    fn start(
        template: Template<S>,
        first: &[u32],
        settings: Settings,
        descriptors: Descriptors,
        mut workers: Workers,
    ) -> Result<Self, ServeError> {
        let order = Order::new(template.layout(), first, &settings.policy);
        let event = || eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK);
        let faults = epoll::create(CreateFlags::CLOEXEC).map_err(step("epoll"))?;
        let (news, stopped) =
            (event().map_err(step("eventfd"))?, event().map_err(step("eventfd"))?);
        epoll::add(&faults, &stopped, EventData::new_u64(STOP), EventFlags::IN)
            .map_err(step("epoll"))?;
        let fault_threads = settings.fault_threads.clamp(1, MAX_THREADS);
        let began = Instant::now();
        let template = template.retrying(Duration::from_millis(u64::from(settings.retry_ms)));
        let shared = Arc::new(Shared {
            began,
            busy: (0..fault_threads).map(|_| AtomicU64::new(0)).collect(),
            template,
            order: Mutex::new(order),
            more: Condvar::new(),
            pace: Pace::default(),
            puzzled: OnceLock::new(),
            faults,
            news,
            stop: AtomicBool::new(false),
            stopped,
            settings,
        });
        let mut threads = Vec::new();
        for thread in 0..shared.busy.len() {
            let shared = Arc::clone(&shared);
            let serves = move || shared.serve_faults(thread);
            threads.push(workers.start(c"faults", serves).map_err(step("threads"))?);
        }
        let ahead = Arc::clone(&shared);
        let fetches = move || ahead.fetch_ahead();
        threads.push(workers.start(c"ahead", fetches).map_err(step("threads"))?);
        // A template that is all zero is complete already.
        shared.look();
        Ok(Self {
            shared,
            threads,
            descriptors,
            began,
            next_id: 0,
            clones: 0,
            stands_still: false,
            looked: began,
        })
    }

    /// The main loop, until the template is complete or unused.
    fn talk(mut self, socket: OwnedFd) -> Result<(), ServeError> {
        let deadline = Duration::from_secs(u64::from(self.shared.settings.deadline_s));
        let mut daemon = Some(socket);
        let mut coming: Vec<Coming> = Vec::new();
        let mut first_reported = false;
        while self.shared.template.missing() > 0 {
            let clones = self.shared.template.clones.all();
            let unused = clones.iter().all(|(_, clone)| clone.has_ended());
            if daemon.is_none() && coming.is_empty() && unused {
                self.stop();
                return Ok(());
            }
            self.turn(&mut daemon, &mut coming)?;
            self.shared.template.kill_overdue(deadline);
            self.look(deadline);
            if !first_reported && self.shared.order().lead() == 0 {
                first_reported = true;
                if let Some(daemon) = &daemon {
                    let _ = send(daemon, &FromPager::First, &[]);
                }
            }
        }
        self.stop();
        // First the clones, so that they do not need the pager once the memfd is sealed.
        for (id, clone) in self.shared.template.clones.all() {
            clone.release();
            self.shared.forget(id, &clone);
        }
        self.shared.template.seal().map_err(step("sealing the template"))?;
        // Clones that arrive now have all of their memory, and get that answer. Once the daemon
        // knows that the template is whole, it sends no more clones.
        let report = self.report();
        let Self { shared, descriptors, .. } = self;
        let bytes = shared.template.bytes();
        drop(shared);
        if let Some(daemon) = &daemon {
            let _ = send(daemon, &FromPager::Whole(report), &[]);
        }
        while daemon.is_some() || !coming.is_empty() {
            let (from_daemon, readable) =
                wait(daemon.as_ref(), &coming, &[], None, &mut Vec::new())?;
            for number in readable.into_iter().rev() {
                coming.swap_remove(number).arrive_late(bytes, &descriptors);
            }
            if from_daemon {
                hear(&mut daemon, &mut coming);
            }
        }
        Ok(())
    }

    /// Looks after fault threads that wait for their reads, and after killed clones.
    fn look(&mut self, deadline: Duration) {
        let stands_still = self.is_standing(deadline);
        let stood_still = std::mem::replace(&mut self.stands_still, stands_still);
        if stands_still {
            if !stood_still {
                say!("no page has come for {} s", deadline.as_secs());
            }
            self.shared.note_faults();
        }
        if self.looked.elapsed() >= LOOK_EVERY {
            self.looked = Instant::now();
            self.shared.watch_killed();
        }
    }

    /// Waits for an event, and handles it.
    fn turn(
        &mut self,
        daemon: &mut Option<OwnedFd>,
        coming: &mut Vec<Coming>,
    ) -> Result<(), ServeError> {
        let living = self.shared.template.clones.all();
        let (living, ended): (Vec<_>, Vec<_>) =
            living.into_iter().partition(|(_, clone)| !clone.has_ended());
        let mut others: Vec<&OwnedFd> = vec![&self.shared.news];
        others.extend(self.stands_still.then_some(&self.shared.faults));
        let before_clones = others.len();
        others.extend(living.iter().map(|(_, clone)| clone.process()));
        let mut ready = Vec::new();
        let (from_daemon, readable) =
            wait(daemon.as_ref(), coming, &others, Some(&LOOK), &mut ready)?;
        if ready.first() == Some(&true) {
            let _ = rustix::io::read(&self.shared.news, &mut [0_u8; 8]);
        }
        let just_ended =
            living.iter().zip(ready.iter().skip(before_clones)).filter(|(_, ended)| **ended);
        let just_ended = just_ended.map(|(one, _)| one).inspect(|(_, clone)| clone.end());
        for (id, clone) in
            just_ended.chain(&ended).filter(|(_, clone)| clone.uffd().is_memory_gone())
        {
            self.shared.forget(*id, clone);
        }
        for number in readable.into_iter().rev() {
            let one = coming.swap_remove(number);
            // A clone with invalid regions is not served; its VMM learns that from the closed
            // socket.
            if let Err(e) = self.arrive(one) {
                say!("{e}");
            }
        }
        if from_daemon {
            hear(daemon, coming);
        }
        Ok(())
    }

    fn arrive(&mut self, coming: Coming) -> io::Result<()> {
        let socket = coming.socket.try_clone()?;
        let clone =
            Arc::new(coming.receive_memory(self.shared.template.bytes(), &self.descriptors)?);
        let id = self.next_id;
        self.next_id += 1;
        self.clones += 1;
        self.shared.watch(id, &clone)?;
        send_bytes(&socket, regions::SERVED, &[])
    }

    /// Stops all threads and waits for them. A thread that does not end in time waits for a disk;
    /// it ends with the process, and no page depends on it.
    fn stop(&mut self) {
        {
            // Set under the lock, so that a thread about to wait sees `stop` or gets the
            // notification.
            let _order = self.shared.order();
            self.shared.stop.store(true, Ordering::Release);
        }
        let _ = rustix::io::write(&self.shared.stopped, &1_u64.to_ne_bytes());
        self.shared.more.notify_all();
        let until = Instant::now() + END;
        for thread in self.threads.drain(..) {
            while !thread.is_finished() && Instant::now() < until {
                std::thread::sleep(Duration::from_millis(1));
            }
            if thread.is_finished() {
                let _ = thread.join();
            } else {
                say!("a thread does not end within {} s", END.as_secs());
            }
        }
    }

    /// Whether every fault thread has been busy with one fault for longer than `limit`, so that
    /// other faults are not served.
    fn is_standing(&self, limit: Duration) -> bool {
        let now = self.began.elapsed();
        let since = |busy: &AtomicU64| match busy.load(Ordering::Relaxed) {
            0 => Duration::ZERO,
            ms => now.saturating_sub(Duration::from_millis(ms)),
        };
        self.shared.busy.iter().all(|busy| since(busy) > limit)
    }

    fn report(&self) -> Report {
        let Counters {
            faults,
            zero_faults,
            late_faults,
            asked,
            ahead,
            bytes,
            fault_ns,
            longest_fault_ns,
            turns,
            replaced,
        } = &self.shared.template.counters;
        let of = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        Report {
            faults: of(faults),
            zero_faults: of(zero_faults),
            late_faults: of(late_faults),
            asked: of(asked),
            ahead: of(ahead),
            bytes: of(bytes),
            read_bytes: self.shared.template.read_bytes(),
            clones: self.clones,
            fault_ns: of(fault_ns) / of(faults).max(1),
            longest_fault_ns: of(longest_fault_ns),
            turns: of(turns),
            replaced: of(replaced),
            took_ms: u64::try_from(self.began.elapsed().as_millis()).unwrap_or(u64::MAX),
        }
    }
}

impl Coming {
    /// Receives the regions and the userfaultfd from the VMM.
    fn receive_memory(self, file_bytes: u64, descriptors: &Descriptors) -> io::Result<Clone> {
        let wrong = |what: &str| {
            io::Error::new(io::ErrorKind::InvalidData, format!("VM {}: {what}", self.handle.vm))
        };
        let (packet, fds) = receive_bytes(&self.socket)?
            .ok_or_else(|| wrong("its VMM ended before it sent its memory"))?;
        let regions = regions::decode(&packet, file_bytes)
            .ok_or_else(|| wrong("its VMM sent invalid regions"))?;
        let [uffd] = <[OwnedFd; 1]>::try_from(fds)
            .map_err(|_| wrong("its VMM sent no userfaultfd, or more"))?;
        Ok(Clone::new(self.handle, Uffd::sent(uffd, descriptors)?, regions))
    }

    /// Answers a clone that arrives when everything is present: unregisters its memory first.
    fn arrive_late(self, file_bytes: u64, descriptors: &Descriptors) {
        let Ok(socket) = self.socket.try_clone() else { return };
        // A VMM that sends invalid regions, or has ended, gets no answer.
        if let Ok(clone) = self.receive_memory(file_bytes, descriptors) {
            clone.release();
            let _ = send_bytes(&socket, regions::SERVED, &[]);
        }
    }
}

/// Handles one message from the daemon.
fn hear(daemon: &mut Option<OwnedFd>, coming: &mut Vec<Coming>) {
    let Some(socket) = daemon.as_ref() else { return };
    match receive::<ToPager>(socket) {
        Ok(Some((ToPager::Clone { vm }, fds))) => match <[OwnedFd; 3]>::try_from(fds) {
            Ok([socket, process, exit]) => {
                coming.push(Coming { handle: Handle { vm, process, exit: exit.into() }, socket });
            }
            Err(fds) => {
                say!("clone {vm}: expected 3 descriptors, got {}", fds.len())
            }
        },
        Ok(Some((other, _))) => say!("expected a clone, got {other:?}"),
        Ok(None) => *daemon = None,
        Err(e) => {
            say!("the daemon's words: {e}");
            *daemon = None;
        }
    }
}

type Ready = (bool, Vec<usize>);

/// Waits until the daemon, a coming VMM, or one of `others` is readable. Returns whether the daemon
/// is, and the indexes of readable VMMs in ascending order. `ready` gets a flag for each of
/// `others`.
fn wait(
    daemon: Option<&OwnedFd>,
    coming: &[Coming],
    others: &[&OwnedFd],
    within: Option<&Timespec>,
    ready: &mut Vec<bool>,
) -> Result<Ready, ServeError> {
    let sockets = coming.iter().map(|one| &one.socket);
    let all = daemon.into_iter().chain(sockets).chain(others.iter().copied());
    let mut polled: Vec<PollFd<'_>> =
        all.map(|fd| PollFd::from_borrowed_fd(fd.as_fd(), PollFlags::IN)).collect();
    match poll(&mut polled, within) {
        Ok(_) | Err(rustix::io::Errno::INTR) => {}
        Err(e) => return Err(step("waiting")(e)),
    }
    let mut readable = polled.iter().map(|fd| !fd.revents().is_empty());
    let from_daemon = daemon.is_some() && readable.next().unwrap_or(false);
    let coming = (0..coming.len()).filter(|_| readable.next().unwrap_or(false)).collect();
    ready.extend(readable);
    Ok((from_daemon, coming))
}

#[cfg(test)]
#[path = "serve_tests.rs"]
mod tests;

#[cfg(test)]
#[path = "combinations_tests.rs"]
mod combinations;

#[cfg(test)]
#[path = "hostile_tests.rs"]
mod hostile;
