//! The process: threads that bring pages ([`crate::threads`]), and this one, which talks.

use crate::clones::{Clone, Handle};
use crate::order::Order;
use crate::pace::Pace;
use crate::source::Source;
use crate::stored::{Expected, Stored};
use crate::template::{Counters, Template};
use crate::threads::{STOP, Shared};
use crate::uffd::{Descriptors, Uffd};
use crate::wire::{FromPager, Report, Settings, ToPager, receive, receive_bytes, send, send_bytes};
use dayfly_store::{PageReader, PagesError};
use dayfly_units::regions;
use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::fd::{AsFd, OwnedFd};
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, OnceLock, RwLock};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// How often it is looked whether a clone waits too long.
const LOOK: Timespec = Timespec { tv_sec: 0, tv_nsec: 500_000_000 };
/// How long a thread may take to end.
const END: Duration = Duration::from_secs(10);
/// The most bytes of a sheet: the largest table's, and twice that for places and order.
const MAX_SHEET_BYTES: u64 = 12 << 30;
/// The most threads for faults.
const MAX_THREADS: u32 = 64;

/// Why a pager ended before its work was done.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// A system call failed.
    #[error("{0}: {1}")]
    Step(&'static str, #[source] io::Error),
    /// What the daemon sent does not fit together.
    #[error("{place}: expected {expected}, got {got}")]
    Invalid {
        /// What.
        place: &'static str,
        /// What it may be.
        expected: String,
        /// What it is.
        got: String,
    },
    /// The plan.
    #[error(transparent)]
    Plan(#[from] PagesError),
}

fn step<E: Into<io::Error>>(what: &'static str) -> impl FnOnce(E) -> ServeError {
    move |error| ServeError::Step(what, error.into())
}

fn invalid(place: &'static str, expected: impl ToString, got: impl ToString) -> ServeError {
    ServeError::Invalid { place, expected: expected.to_string(), got: got.to_string() }
}

/// What the daemon's first message and its files come to.
struct Beginning {
    source: Stored,
    memory: File,
    first: Vec<u32>,
    settings: Settings,
}

/// Follows the plan that the daemon at the other end of `socket` tells, to the end: all is there and everybody knows, or nobody needs it any more.
///
/// # Errors
/// [`ServeError`]; the daemon has been told.
pub fn run(socket: OwnedFd, descriptors: Descriptors) -> Result<(), ServeError> {
    let begun = begin(&socket).and_then(|Beginning { source, memory, first, settings }| {
        let template = Template::new(memory, source).map_err(step("the template"))?;
        Server::start(template, &first, settings, descriptors)
    });
    let told = match &begun {
        Ok(_) => FromPager::Begun,
        Err(e) => FromPager::Failed { cause: e.to_string() },
    };
    // A daemon that is gone is noticed where it is read from.
    let _ = send(&socket, &told, &[]);
    begun?.talk(socket)
}

/// As [`run`], with a template and a source of the caller's.
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
    Server::start(template, first, settings, descriptors)?.talk(socket)
}

fn begin(socket: &OwnedFd) -> Result<Beginning, ServeError> {
    let next = || receive::<ToPager>(socket).map_err(step("the daemon's words"));
    let ended = || step("the daemon's words")(io::Error::from(io::ErrorKind::UnexpectedEof));
    let (first, fds) = next()?.ok_or_else(ended)?;
    let ToPager::Begin { table_bytes, places_bytes, order_bytes, elsewhere_bytes, packs, disks, settings } =
        first
    else {
        return Err(invalid("first message", "Begin", format!("{first:?}")));
    };
    let [memory, sheet] = <[OwnedFd; 2]>::try_from(fds)
        .map_err(|fds| invalid("descriptors of Begin", "RAM and the sheet", fds.len()))?;
    let sheet = File::from(sheet);
    let length = sheet.metadata().map_err(step("the sheet"))?.len();
    let parts = [table_bytes, places_bytes, order_bytes, elsewhere_bytes];
    let told = parts.into_iter().fold(0, u64::saturating_add);
    if told != length || length > MAX_SHEET_BYTES {
        return Err(invalid("bytes of the sheet", format!("{told}, at most {MAX_SHEET_BYTES}"), length));
    }
    let part = |at: u64, bytes: u64| {
        let mut part = vec![0; usize::try_from(bytes).unwrap_or(0)];
        sheet.read_exact_at(&mut part, at).map(|()| part).map_err(step("the sheet"))
    };
    let (table, places) = (part(0, table_bytes)?, part(table_bytes, places_bytes)?);
    let order = part(table_bytes + places_bytes, order_bytes)?;
    let first: Vec<u32> = order.as_chunks().0.iter().map(|frame| u32::from_le_bytes(*frame)).collect();
    let elsewhere = part(table_bytes + places_bytes + order_bytes, elsewhere_bytes)?;
    let elsewhere = rows(&elsewhere)?;
    let wanted = disks.iter().fold(u64::from(packs), |sum, files| sum + u64::from(*files));
    let mut files: Vec<File> = Vec::new();
    while (files.len() as u64) < wanted {
        match next()?.ok_or_else(ended)? {
            (ToPager::Files, fds) if !fds.is_empty() => files.extend(fds.into_iter().map(File::from)),
            (other, fds) => {
                return Err(invalid("message", "Files", format!("{other:?}, {} descriptors", fds.len())));
            }
        }
    }
    if files.len() as u64 != wanted {
        return Err(invalid("packs and files of disks", wanted, files.len()));
    }
    let mut files = files.into_iter();
    let packs = files.by_ref().take(packs as usize).collect();
    let disks = disks.iter().map(|n| files.by_ref().take(*n as usize).collect()).collect();
    let reader = PageReader::open(&table, &places, packs, disks)?;
    let expected = Expected { first: first.clone(), elsewhere, ..Expected::default() };
    let source = Stored::new(reader, &expected, &settings.policy);
    Ok(Beginning { source, memory: memory.into(), first, settings })
}

/// The rows in `bytes`, of each the first and the one behind the last, u32 little-endian.
fn rows(bytes: &[u8]) -> Result<Vec<Range<u32>>, ServeError> {
    let number = |bytes: &[u8]| u32::from_le_bytes(std::array::from_fn(|n| bytes[n]));
    let (chunks, rest) = bytes.as_chunks::<8>();
    let rows: Vec<Range<u32>> = chunks.iter().map(|c| number(&c[..4])..number(&c[4..])).collect();
    let apart =
        rows.iter().all(|row| row.start < row.end) && rows.windows(2).all(|two| two[0].end <= two[1].start);
    if rest.is_empty() && apart {
        return Ok(rows);
    }
    Err(invalid("frames elsewhere", "rows that ascend and do not overlap", format!("{} bytes", bytes.len())))
}

/// A clone whose VMM has not told its regions yet.
struct Coming {
    handle: Handle,
    socket: OwnedFd,
}

/// The thread that talks.
struct Server<S> {
    shared: Arc<Shared<S>>,
    threads: Vec<JoinHandle<()>>,
    descriptors: Descriptors,
    began: Instant,
    next_id: u64,
    clones: u64,
}

impl<S: Source + 'static> Server<S> {
    fn start(
        template: Template<S>,
        first: &[u32],
        settings: Settings,
        descriptors: Descriptors,
    ) -> Result<Self, ServeError> {
        let order = Order::new(template.layout(), first, &settings.policy);
        let event = || eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK);
        let faults = epoll::create(CreateFlags::CLOEXEC).map_err(step("epoll"))?;
        let (news, stopped) = (event().map_err(step("eventfd"))?, event().map_err(step("eventfd"))?);
        epoll::add(&faults, &stopped, EventData::new_u64(STOP), EventFlags::IN).map_err(step("epoll"))?;
        let fault_threads = settings.fault_threads.clamp(1, MAX_THREADS);
        let began = Instant::now();
        let template = template.retrying(Duration::from_millis(u64::from(settings.retry_ms)));
        let shared = Arc::new(Shared {
            began,
            busy: (0..fault_threads).map(|_| AtomicU64::new(0)).collect(),
            template,
            order: Mutex::new(order),
            more: Condvar::new(),
            clones: RwLock::default(),
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
            let builder = std::thread::Builder::new().name("faults".to_owned());
            threads.push(builder.spawn(move || shared.serve_faults(thread)).map_err(step("threads"))?);
        }
        let ahead = Arc::clone(&shared);
        let builder = std::thread::Builder::new().name("ahead".to_owned());
        threads.push(builder.spawn(move || ahead.fetch_ahead()).map_err(step("threads"))?);
        // A template of nothing but zeroes is whole.
        shared.look();
        Ok(Self { shared, threads, descriptors, began, next_id: 0, clones: 0 })
    }

    /// Talks until nothing is left to do.
    fn talk(mut self, socket: OwnedFd) -> Result<(), ServeError> {
        let deadline = Duration::from_secs(u64::from(self.shared.settings.deadline_s));
        let mut daemon = Some(socket);
        let mut coming: Vec<Coming> = Vec::new();
        let mut first_told = false;
        while self.shared.template.missing() > 0 {
            let living = self.shared.clones().values().filter(|clone| !clone.has_ended()).count();
            if daemon.is_none() && coming.is_empty() && living == 0 {
                self.stop();
                return Ok(());
            }
            self.turn(&mut daemon, &mut coming)?;
            self.shared.template.end_who_waits(deadline);
            if self.stands_still(deadline) {
                eprintln!("dayfly-pager: no page has come for {} s", deadline.as_secs());
                std::process::exit(1);
            }
            if !first_told && self.shared.order().lead() == 0 {
                first_told = true;
                if let Some(daemon) = &daemon {
                    let _ = send(daemon, &FromPager::First, &[]);
                }
            }
        }
        self.stop();
        for clone in std::mem::take(&mut *self.shared.clones_mut()).values() {
            clone.release();
        }
        let report = self.report();
        // Clones that come now have all of their memory; they are told so, and nobody else comes once the daemon knows.
        let Self { shared, descriptors, .. } = self;
        let bytes = shared.template.bytes();
        let template = Arc::into_inner(shared).map(|shared| shared.template);
        template.map_or(Ok(()), Template::seal).map_err(step("sealing the template"))?;
        if let Some(daemon) = &daemon {
            let _ = send(daemon, &FromPager::Whole(report), &[]);
        }
        while daemon.is_some() || !coming.is_empty() {
            let (from_daemon, told) = wait(daemon.as_ref(), &coming, &[], None, &mut Vec::new())?;
            for number in told.into_iter().rev() {
                coming.swap_remove(number).arrive_late(bytes, &descriptors);
            }
            if from_daemon {
                hear(&mut daemon, &mut coming);
            }
        }
        Ok(())
    }

    /// Waits for something to happen, and does what follows from it.
    fn turn(&mut self, daemon: &mut Option<OwnedFd>, coming: &mut Vec<Coming>) -> Result<(), ServeError> {
        let living: Vec<(u64, Arc<Clone>)> = {
            let clones = self.shared.clones();
            clones.iter().map(|(id, clone)| (*id, Arc::clone(clone))).collect()
        };
        let (living, ended): (Vec<_>, Vec<_>) = living.into_iter().partition(|(_, clone)| !clone.has_ended());
        let mut others: Vec<&OwnedFd> = vec![&self.shared.news];
        others.extend(living.iter().map(|(_, clone)| clone.process()));
        let mut ready = Vec::new();
        let (from_daemon, told) = wait(daemon.as_ref(), coming, &others, Some(&LOOK), &mut ready)?;
        if ready.first() == Some(&true) {
            let _ = rustix::io::read(&self.shared.news, &mut [0_u8; 8]);
        }
        let just_ended = living.iter().zip(ready.iter().skip(1)).filter(|(_, ended)| **ended);
        let just_ended = just_ended.map(|(one, _)| one).inspect(|(_, clone)| clone.end());
        for (id, clone) in just_ended.chain(&ended).filter(|(_, clone)| clone.uffd().is_of_nobody()) {
            self.shared.forget(*id, clone);
        }
        for number in told.into_iter().rev() {
            let one = coming.swap_remove(number);
            // One that tells nonsense is not served, and its VMM learns that by its socket.
            if let Err(e) = self.arrive(one) {
                eprintln!("dayfly-pager: {e}");
            }
        }
        if from_daemon {
            hear(daemon, coming);
        }
        Ok(())
    }

    fn arrive(&mut self, coming: Coming) -> io::Result<()> {
        let socket = coming.socket.try_clone()?;
        let clone = Arc::new(coming.told_its_memory(self.shared.template.bytes(), &self.descriptors)?);
        let id = self.next_id;
        self.next_id += 1;
        self.clones += 1;
        self.shared.watch(id, &clone)?;
        send_bytes(&socket, regions::SERVED, &[])
    }

    /// Ends all threads and waits for them.
    fn stop(&mut self) {
        {
            // Who is about to wait has seen it, or hears of it.
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
            if !thread.is_finished() {
                // It waits in a read that a VMM or a disk does not let end. The daemon ends those who are served.
                eprintln!("dayfly-pager: a thread does not end within {} s", END.as_secs());
                std::process::exit(1);
            }
            let _ = thread.join();
        }
    }

    /// Whether every thread for faults has been at one fault for longer than `limit`: nobody reads what other clones wait for.
    fn stands_still(&self, limit: Duration) -> bool {
        let now = self.began.elapsed();
        let since = |busy: &AtomicU64| match busy.load(Ordering::Relaxed) {
            0 => Duration::ZERO,
            ms => now.saturating_sub(Duration::from_millis(ms)),
        };
        self.shared.busy.iter().all(|busy| since(busy) > limit)
    }

    fn report(&self) -> Report {
        let Counters { faults, zero_faults, late_faults, asked, ahead, bytes, fault_ns, longest_fault_ns } =
            &self.shared.template.counters;
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
            took_ms: u64::try_from(self.began.elapsed().as_millis()).unwrap_or(u64::MAX),
        }
    }
}

impl Coming {
    /// Reads what its VMM tells.
    fn told_its_memory(self, file_bytes: u64, descriptors: &Descriptors) -> io::Result<Clone> {
        let wrong =
            |what: &str| io::Error::new(io::ErrorKind::InvalidData, format!("VM {}: {what}", self.handle.vm));
        let (packet, fds) =
            receive_bytes(&self.socket)?.ok_or_else(|| wrong("its VMM ended before it told its memory"))?;
        let regions = regions::decode(&packet, file_bytes)
            .ok_or_else(|| wrong("its VMM told regions that cannot be"))?;
        let [uffd] =
            <[OwnedFd; 1]>::try_from(fds).map_err(|_| wrong("its VMM sent no userfaultfd, or more"))?;
        Ok(Clone::new(self.handle, Uffd::sent(uffd, descriptors)?, regions))
    }

    /// When all is there: lets it go, and only then answers.
    fn arrive_late(self, file_bytes: u64, descriptors: &Descriptors) {
        let Ok(socket) = self.socket.try_clone() else { return };
        // One that tells nonsense, or has ended, is not answered.
        if let Ok(clone) = self.told_its_memory(file_bytes, descriptors) {
            clone.release();
            let _ = send_bytes(&socket, regions::SERVED, &[]);
        }
    }
}

/// Hears one message of the daemon's.
fn hear(daemon: &mut Option<OwnedFd>, coming: &mut Vec<Coming>) {
    let Some(socket) = daemon.as_ref() else { return };
    match receive::<ToPager>(socket) {
        Ok(Some((ToPager::Clone { vm }, fds))) => match <[OwnedFd; 3]>::try_from(fds) {
            Ok([socket, process, exit]) => {
                coming.push(Coming { handle: Handle { vm, process, exit: exit.into() }, socket });
            }
            Err(fds) => eprintln!("dayfly-pager: clone {vm}: expected 3 descriptors, got {}", fds.len()),
        },
        Ok(Some((other, _))) => eprintln!("dayfly-pager: expected a clone, got {other:?}"),
        Ok(None) => *daemon = None,
        Err(e) => {
            eprintln!("dayfly-pager: the daemon's words: {e}");
            *daemon = None;
        }
    }
}

type Ready = (bool, Vec<usize>);

/// Waits until the daemon, a VMM that comes, or one of `others` has something; says whether the daemon has, which VMMs have, in rising
/// order, and in `ready` which others.
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
    let mut told = polled.iter().map(|fd| !fd.revents().is_empty());
    let from_daemon = daemon.is_some() && told.next().unwrap_or(false);
    let coming = (0..coming.len()).filter(|_| told.next().unwrap_or(false)).collect();
    ready.extend(told);
    Ok((from_daemon, coming))
}

#[cfg(test)]
#[path = "serve_tests.rs"]
mod tests;

#[cfg(test)]
#[path = "combinations_tests.rs"]
mod combinations;
