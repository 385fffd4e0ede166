//! The server: one thread for a connection, one request for a connection.
//!
//! Threads wait in `accept(2)` themselves, so that the first request after a restore wakes the thread which serves it,
//! on a stack that is already there. A thread that takes the last place to wait in starts another one; at the bound
//! ([`MAX_WORKERS`]) the last one serves only what is over at once and refuses programs and archives, so the agent
//! answers always.
//!
//! A snapshot holds the connections that were open when it was taken. In a clone nobody is at their other end, and not
//! every transport says so: when an identity makes this another machine, all that were accepted before the seal are
//! shut down, which ends whatever serves them. A machine that is forked is not sealed; programs of such connections live on there.

use crate::archive;
use crate::exec::{self, Programs};
use crate::gate::{Gate, Refusal, Wish};
use crate::hooks;
use crate::identity;
use crate::kernel::Kernel;
use crate::priority;
use crate::stat;
use crate::watch::Is;
use crate::wire::{Buffers, Conn, PATIENCE, WireError};
use dayfly_api::agent::{Failure, FailureCode, FrameKind, Identity, Ready, Reply, Request};
use rustix::time::{ClockId, clock_gettime};
use std::collections::HashMap;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixListener;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Threads, and so connections, at most.
pub const MAX_WORKERS: usize = 128;
/// Threads that wait for a connection at the start.
const FIRST_WORKERS: usize = 2;
/// What a worker's deepest call (a tree of 512 folders, JSON of 256 KiB) needs, with room.
const STACK_BYTES: usize = 1 << 20;

/// Where connections come from.
pub trait Listener: Send + Sync {
    /// Waits for the next connection: a stream socket.
    ///
    /// # Errors
    /// What the kernel says. Lack of descriptors or memory is waited out, anything else ends the server.
    fn accept(&self) -> io::Result<OwnedFd>;
}

impl Listener for UnixListener {
    fn accept(&self) -> io::Result<OwnedFd> {
        Self::accept(self).map(|(stream, _)| stream.into())
    }
}

/// The agent: everything that requests share.
pub struct Agent {
    /// `/` but in tests.
    root: PathBuf,
    kernel: Box<dyn Kernel>,
    programs: Arc<Programs>,
    state: Mutex<Shared>,
}

struct Shared {
    gate: Gate,
    next: u64,
    open: HashMap<u64, Open>,
    workers: usize,
    waiting: usize,
}

struct Open {
    fd: Arc<OwnedFd>,
    /// Accepted while nothing was sealed: a clone made since then has nobody at the other end.
    before_seal: bool,
}

impl Agent {
    /// An agent for the machine at `root`.
    #[must_use]
    pub fn new(root: PathBuf, kernel: Box<dyn Kernel>, programs: Programs) -> Arc<Self> {
        let state = Shared { gate: Gate::open(), next: 0, open: HashMap::new(), workers: 0, waiting: 0 };
        Arc::new(Self { root, kernel, programs: Arc::new(programs), state: Mutex::new(state) })
    }

    /// What it runs.
    #[must_use]
    pub fn programs(&self) -> &Arc<Programs> {
        &self.programs
    }

    fn state(&self) -> MutexGuard<'_, Shared> {
        // A panic while it was held left counters and a map, each of which is valid at every point.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What the agent says of itself.
    #[must_use]
    pub fn ready(&self) -> Ready {
        let up = clock_gettime(ClockId::Boottime);
        let micros = up.tv_sec.saturating_mul(1_000_000).saturating_add(up.tv_nsec / 1000);
        Ready {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            kernel: rustix::system::uname().release().to_string_lossy().into_owned(),
            uptime_us: u64::try_from(micros).unwrap_or(0),
            sealed: self.state().gate.sealed(),
        }
    }

    /// Starts the first threads that wait on `listener`.
    ///
    /// # Errors
    /// Where no thread can be started.
    pub fn serve(self: &Arc<Self>, listener: &Arc<dyn Listener>) -> io::Result<()> {
        for _ in 0..FIRST_WORKERS {
            self.add_worker(listener)?;
        }
        Ok(())
    }

    fn add_worker(self: &Arc<Self>, listener: &Arc<dyn Listener>) -> io::Result<()> {
        {
            let mut state = self.state();
            if state.workers >= MAX_WORKERS {
                return Err(io::Error::other("as many threads as there may be"));
            }
            state.workers += 1;
            state.waiting += 1;
        }
        let (agent, door) = (Arc::clone(self), Arc::clone(listener));
        let thread = std::thread::Builder::new().name("agent".into()).stack_size(STACK_BYTES);
        let started = thread.spawn(move || agent.work(&door)).map(drop);
        if started.is_err() {
            let mut state = self.state();
            state.workers -= 1;
            state.waiting -= 1;
        }
        started
    }

    fn work(self: &Arc<Self>, listener: &Arc<dyn Listener>) {
        priority::after_programs();
        let mut buffers = Buffers::default();
        loop {
            let fd = match listener.accept() {
                Ok(fd) => Arc::new(fd),
                Err(error) if patient(&error) => {
                    std::thread::sleep(Duration::from_millis(100));
                    continue;
                }
                Err(error) => {
                    crate::say!("accept: {error}: this thread ends");
                    let mut state = self.state();
                    state.workers -= 1;
                    state.waiting -= 1;
                    return;
                }
            };
            let last = {
                let mut state = self.state();
                state.waiting -= 1;
                state.waiting == 0
            };
            let crowded = last && self.add_worker(listener).is_err();
            let id = self.register(&fd);
            let conn = Conn::new(fd, std::mem::take(&mut buffers));
            let served = catch_unwind(AssertUnwindSafe(|| self.connection(conn, id, crowded)));
            // A bug that ends one connection must not end process 1; the panic's own message is on the console.
            buffers = served.unwrap_or_default();
            self.forget(id);
            if self.leave_pool() {
                return;
            }
        }
    }

    /// Goes back to wait, unless enough others do.
    fn leave_pool(&self) -> bool {
        let mut state = self.state();
        let leave = state.waiting >= FIRST_WORKERS;
        if leave {
            state.workers -= 1;
        } else {
            state.waiting += 1;
        }
        leave
    }

    fn register(&self, fd: &Arc<OwnedFd>) -> u64 {
        let mut state = self.state();
        let id = state.next;
        state.next += 1;
        let before_seal = !state.gate.sealed();
        state.open.insert(id, Open { fd: Arc::clone(fd), before_seal });
        id
    }

    fn forget(&self, id: u64) {
        self.state().open.remove(&id);
    }

    fn connection(&self, mut conn: Conn, id: u64, crowded: bool) -> Buffers {
        let patience = if crowded { Duration::from_secs(1) } else { PATIENCE };
        let mut served = Ok(true);
        while let Ok(true) = served {
            served = self.request(&mut conn, id, patience, crowded);
        }
        if let Err(error) = served
            && let Some(failure) = error.failure()
            && conn.reply(&Reply::Err(failure)).is_ok()
        {
            conn.linger();
        }
        conn.into_buffers()
    }

    /// Serves one request; says whether another may follow it. After an identity one may: whoever makes a clone has something for it to
    /// do, and another connection costs a guest as much as the identity itself.
    fn request(
        &self,
        conn: &mut Conn,
        id: u64,
        patience: Duration,
        crowded: bool,
    ) -> Result<bool, WireError> {
        if !conn.wait_frame(patience)? {
            return Ok(false);
        }
        let request = match conn.frame()? {
            Some((FrameKind::Request, body)) => serde_json::from_slice::<Request>(body)
                .map_err(|source| WireError::Json { what: "request", source })?,
            Some((got, _)) => return Err(WireError::Unexpected { expected: "a request", got }),
            None => return Ok(false),
        };
        conn.consume();
        let wish = Wish::from(&request);
        let asked = self.state().gate.ask(wish);
        if let Err(refusal) = asked {
            return self.refuse(conn, refusal).map(|()| false);
        }
        if crowded && takes_long(&request) {
            let message = format!("{MAX_WORKERS} connections are open: expected fewer");
            return conn.reply(&Reply::Err(Failure { code: FailureCode::Io, message })).map(|()| false);
        }
        let mut goes_on = false;
        let served = match request {
            Request::Ping => conn.reply(&Reply::Ready(self.ready())),
            Request::Seal => {
                let reply = self.hold();
                if reply == Reply::Ok {
                    rustix::fs::sync();
                } else {
                    self.state().gate.unseal();
                }
                conn.reply(&reply)
            }
            Request::Fork => {
                let reply = self.hold();
                if reply == Reply::Ok {
                    self.programs.fork.begin();
                }
                conn.reply(&reply)
            }
            Request::Forked => {
                self.programs.fork.end(None);
                self.programs.watchers.release(Is::Parent);
                conn.reply(&Reply::Ok)
            }
            Request::Identity(identity) => {
                let reply = self.become_machine(&identity, id);
                goes_on = matches!(reply, Reply::Ok);
                conn.reply(&reply)
            }
            Request::Exec(spec) => exec::run(&self.programs, conn, &spec),
            Request::ReadArchive { path } => archive::send(conn, &path),
            Request::WriteArchive { path } => archive::receive(conn, &path),
            Request::Stat => {
                let reply = stat::stat(&self.root).map_or_else(
                    |e| Reply::Err(Failure { code: FailureCode::Io, message: e.to_string() }),
                    Reply::Stat,
                );
                conn.reply(&reply)
            }
            Request::Shutdown { reboot } => {
                let told = conn.reply(&Reply::Ok);
                self.kernel.end(reboot);
                told
            }
        };
        served.map(|()| goes_on)
    }

    /// Makes ready for this machine's being copied; programs hold their writes from here on.
    fn hold(&self) -> Reply {
        match self.programs.watchers.hold() {
            Ok(()) => {
                identity::prepare(&self.root);
                Reply::Ok
            }
            Err(why) => Reply::Err(Failure { code: FailureCode::Io, message: why }),
        }
    }

    fn refuse(&self, conn: &mut Conn, refusal: Refusal) -> Result<(), WireError> {
        conn.reply(&Reply::Err(refusal.into()))?;
        conn.linger();
        Ok(())
    }

    /// The gate has let an identity in: takes it on, and lets the gate know how that went, come what may.
    fn become_machine(&self, identity: &Identity, own: u64) -> Reply {
        let hooks = || hooks::run(&self.programs, identity);
        let become_machine = || identity::take_on(self.kernel.as_ref(), &self.root, identity, hooks);
        let result = catch_unwind(AssertUnwindSafe(become_machine));
        let reply = match &result {
            Ok(Ok(_)) => Reply::Ok,
            Ok(Err(error)) => Reply::Err(Failure::from(error)),
            Err(_) => {
                let message = "identity: a bug in the agent: see the console".to_owned();
                Reply::Err(Failure { code: FailureCode::Io, message })
            }
        };
        let mut state = self.state();
        state.gate.became(matches!(result, Ok(Ok(_))));
        let another_machine = matches!(result, Ok(Ok(true)));
        if matches!(result, Ok(Ok(_))) {
            self.programs.fork.end(another_machine.then_some(identity.number));
        }
        match &result {
            Ok(Ok(true)) => {
                let Identity { number, machine_id, .. } = identity;
                self.programs.watchers.release(Is::Clone { number: *number, id: machine_id });
            }
            Ok(Ok(false)) => self.programs.watchers.release(Is::Parent),
            _ => {}
        }
        if another_machine {
            for (_, open) in state.open.iter().filter(|(id, open)| **id != own && open.before_seal) {
                let _ = rustix::net::shutdown(&open.fd, rustix::net::Shutdown::Both);
            }
        }
        reply
    }
}

/// Whether `accept` can be tried again.
fn patient(error: &io::Error) -> bool {
    let short = [libc::EMFILE, libc::ENFILE, libc::ENOMEM, libc::ENOBUFS, libc::EINTR, libc::ECONNABORTED];
    error.raw_os_error().is_some_and(|e| short.contains(&e))
}

/// Whether a request keeps its thread for as long as the client likes.
const fn takes_long(request: &Request) -> bool {
    matches!(request, Request::Exec(_) | Request::ReadArchive { .. } | Request::WriteArchive { .. })
}
