//! Relays frames between QEMU and a program, and keeps a program running.

use super::filter::allows;
use super::frames::{body, framed, read_frame};
use super::host::{Changes, Host};
use super::program::{Kind, Program};
use super::state::{Facts, Uplink};
use crate::confine;
use crate::progress::{SupervisorError, system};
use dayfly_machine_init::{UPLINK_ADDRESS, UPLINK_GATEWAY, UPLINK_MAC};
use std::io::{self, BufReader, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};
use std::time::Duration;

/// Bytes that are read from a socket at a time.
const BUFFER_BYTES: usize = 256 << 10;
/// How long a program may take to answer its first frame.
const ANSWER: Duration = Duration::from_secs(60);
/// The pause before a program is started again: at first, and at most.
const PAUSE: Duration = Duration::from_millis(200);
const MAX_PAUSE: Duration = Duration::from_secs(30);

/// What the threads of an uplink share.
struct Shared {
    /// The host's network; `None` if it cannot be read, and then nothing leaves.
    host: RwLock<Option<Host>>,
    /// The program's socket, once the program has answered.
    program: Mutex<Option<Arc<UnixStream>>>,
    facts: Mutex<Facts>,
    report: Box<dyn Fn(Uplink) + Send + Sync>,
    /// Whether QEMU has closed its end, or a thread of the uplink has failed.
    gone: AtomicBool,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Shared {
    fn is_gone(&self) -> bool {
        self.gone.load(Ordering::Acquire)
    }

    /// Changes the facts and reports the state. The lock is held meanwhile, so that reports arrive
    /// in the order of the changes.
    fn change(&self, change: impl FnOnce(&mut Facts)) {
        let mut facts = lock(&self.facts);
        let before = facts.state();
        change(&mut facts);
        let now = facts.state();
        if now != before {
            (self.report)(now);
        }
    }

    /// Notes the host's network.
    fn host(&self, read: io::Result<Host>) {
        let (host, unknown) = match read {
            Ok(host) => (Some(host), None),
            Err(e) => (None, Some(format!("this host's addresses cannot be read: {e}"))),
        };
        let routes = host.as_ref().is_some_and(|host| host.routes);
        let resolvers = host.as_ref().is_some_and(|host| !host.resolvers.is_empty());
        let of = |host: &Option<Host>| host.as_ref().map(|host| host.resolvers.clone());
        let mut known = self.host.write().unwrap_or_else(PoisonError::into_inner);
        let others = of(&known).is_some_and(|had| Some(had) != of(&host));
        *known = host;
        drop(known);
        if others {
            // A program reads the list of resolvers only when it starts.
            self.end_program();
        }
        self.change(|facts| {
            (facts.unknown, facts.routes, facts.resolvers) = (unknown, routes, resolvers);
        });
    }

    fn allows(&self, frame: &[u8]) -> bool {
        let host = self.host.read().unwrap_or_else(PoisonError::into_inner);
        host.as_ref().is_some_and(|host| allows(frame, &host.own, !host.resolvers.is_empty()))
    }

    /// Ends the connection with the program, which then ends.
    fn end_program(&self) {
        if let Some(program) = &*lock(&self.program) {
            drop(program.shutdown(Shutdown::Both));
        }
    }
}

/// Ends the uplink if one of its threads ends before QEMU does, which only a panic causes. Without
/// this the state would stay `up`.
struct EndsWithThread<'a>(&'a Shared);

impl Drop for EndsWithThread<'_> {
    fn drop(&mut self) {
        if !self.0.gone.swap(true, Ordering::AcqRel) {
            self.0.end_program();
            self.0.change(|facts| facts.failed = true);
        }
    }
}

/// Starts the uplink in the calling thread's network namespace, which is the host's. `machine` is
/// the other end of QEMU's socket. `kinds` are the programs to try, in this order. `report` gets
/// each new state.
///
/// # Errors
/// A thread or a socket cannot be made.
pub(crate) fn start(
    folder: &Path,
    kinds: &'static [Kind],
    machine: UnixStream,
    report: impl Fn(Uplink) + Send + Sync + 'static,
) -> Result<(), SupervisorError> {
    let facts = Facts { why: "it is being started".to_owned(), ..Facts::default() };
    let shared = Arc::new(Shared {
        host: RwLock::default(),
        program: Mutex::default(),
        facts: Mutex::new(facts),
        report: Box::new(report),
        gone: AtomicBool::new(false),
    });
    let fail = |e| system("the uplink")(e);
    let changes = Changes::new().map_err(fail)?;
    shared.host(Host::read());
    (shared.report)(lock(&shared.facts).state());
    let user = confine::user_for(folder);
    let other_end = machine.try_clone().map_err(fail)?;
    let spawn = |name: &str, run: Box<dyn FnOnce(&Shared) + Send>| {
        let shared = Arc::clone(&shared);
        let thread = std::thread::Builder::new().name(name.to_owned()).stack_size(256 << 10);
        let run = move || {
            let ends = EndsWithThread(&shared);
            run(ends.0);
        };
        thread.spawn(run).map(drop).map_err(fail)
    };
    spawn("uplink-host", Box::new(move |shared| watch(shared, &changes)))?;
    spawn("uplink-out", Box::new(move |shared| out(shared, &machine)))?;
    spawn("uplink-in", Box::new(move |shared| keep(shared, kinds, user, &other_end)))
}

/// Follows the host's network.
fn watch(shared: &Shared, changes: &Changes) {
    while !shared.is_gone() {
        let changed = changes.wait();
        let known = shared.host.read().unwrap_or_else(PoisonError::into_inner).clone();
        shared.host(match known {
            Some(host) if !changed => Ok(host.later()),
            _ => Host::read(),
        });
    }
}

/// Passes on the machine's frames until QEMU has ended.
fn out(shared: &Shared, machine: &UnixStream) {
    let mut from = BufReader::with_capacity(BUFFER_BYTES, machine);
    let mut frame = Vec::new();
    loop {
        match read_frame(&mut from, &mut frame) {
            Ok(true) => {}
            Ok(false) => break,
            Err(e) => {
                eprintln!("uplink: a frame of QEMU: {e}; the uplink ends");
                break;
            }
        }
        if !shared.allows(body(&frame)) {
            continue;
        }
        let program = lock(&shared.program).clone();
        if let Some(program) = program {
            // The other thread notices the end of the program.
            drop((&*program).write_all(&frame));
        }
    }
    shared.gone.store(true, Ordering::Release);
    drop(machine.shutdown(Shutdown::Both));
    shared.end_program();
}

/// Keeps a program running until QEMU has ended.
fn keep(shared: &Shared, kinds: &[Kind], user: Option<u32>, machine: &UnixStream) {
    let mut pause = PAUSE;
    while !shared.is_gone() {
        let mut failures = Vec::new();
        for kind in kinds {
            let end = serve(shared, *kind, user, machine);
            let answered = end.is_ok();
            failures.push(format!("{}: {}", kind.name(), end.unwrap_or_else(|e| e.to_string())));
            if answered {
                pause = PAUSE;
                break;
            }
        }
        shared.change(|facts| (facts.program, facts.why) = (None, failures.join("; ")));
        if !shared.is_gone() {
            std::thread::sleep(pause);
            pause = (pause * 2).min(MAX_PAUSE);
        }
    }
}

/// Runs one program until it ends, and returns how it ended.
///
/// # Errors
/// It could not be started, or never answered.
fn serve(
    shared: &Shared,
    kind: Kind,
    user: Option<u32>,
    machine: &UnixStream,
) -> io::Result<String> {
    let program = Program::start(kind, user)?;
    let said = |e: io::Error, said: String| {
        if said.is_empty() { e } else { io::Error::other(said) }
    };
    let frames = match program.frames.try_clone() {
        Ok(frames) => Arc::new(frames),
        Err(e) => return Err(said(e, program.end())),
    };
    let mut from = BufReader::with_capacity(BUFFER_BYTES, &*frames);
    if let Err(e) = first_answer(&frames, &mut from) {
        return Err(said(e, program.end()));
    }
    *lock(&shared.program) = Some(Arc::clone(&frames));
    // QEMU may have ended before the program was there to be ended.
    if shared.is_gone() {
        shared.end_program();
    }
    shared.change(|facts| facts.program = Some(kind.name()));
    let mut frame = Vec::new();
    let mut to = machine;
    let cause = loop {
        match read_frame(&mut from, &mut frame) {
            Ok(true) if to.write_all(&frame).is_ok() => {}
            Ok(true) => break "QEMU has ended".to_owned(),
            Ok(false) => break "ended".to_owned(),
            Err(e) => break e.to_string(),
        }
    };
    *lock(&shared.program) = None;
    let said = program.end();
    Ok(if said.is_empty() { cause } else { format!("{cause}: {said}") })
}

/// Asks the program for the gateway's MAC, and waits for the answer.
fn first_answer(mut to: &UnixStream, from: &mut BufReader<&UnixStream>) -> io::Result<()> {
    to.set_read_timeout(Some(ANSWER))?;
    to.write_all(&framed(&question()))?;
    let mut frame = Vec::new();
    loop {
        match read_frame(from, &mut frame) {
            Ok(true) if is_answer(body(&frame)) => return to.set_read_timeout(None),
            Ok(true) => {}
            Ok(false) => return Err(io::Error::other("ended at once")),
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => {
                return Err(io::Error::other(format!("no answer in {} s", ANSWER.as_secs())));
            }
            Err(e) => return Err(e),
        }
    }
}

/// The ARP request (RFC 826) of the machine for its gateway.
fn question() -> Vec<u8> {
    let head = [0xff, 0xff, 0xff, 0xff, 0xff, 0xff];
    let kind = [8, 6, 0, 1, 8, 0, 6, 4, 0, 1];
    let (from, to) = (UPLINK_ADDRESS.octets(), UPLINK_GATEWAY.octets());
    [&head[..], &UPLINK_MAC, &kind, &UPLINK_MAC, &from, &[0; 6], &to].concat()
}

/// Whether the frame answers [`question`].
fn is_answer(frame: &[u8]) -> bool {
    frame.get(12..14) == Some(&[8, 6])
        && frame.get(20..22) == Some(&[0, 2])
        && frame.get(28..32) == Some(&UPLINK_GATEWAY.octets())
}
