//! The server: one thread per connection, and usually one request per connection.
//!
//! Worker threads wait in `accept(2)` themselves. So the first request after a restore wakes the
//! thread that serves it, on a stack that is already mapped. A thread that takes the last waiting
//! place starts another thread. At the limit ([`MAX_WORKERS`]) the last thread serves only short
//! requests and refuses programs and archives, so the agent always answers.
//!
//! A snapshot contains the connections that were open when it was taken. In a clone they have no
//! peer, and not every transport reports that. So when an identity makes this another machine, the
//! server shuts down all connections that were accepted before the seal, which ends their requests.
//! A fork does not seal the machine, so programs of such connections live on in the clones.

use crate::archive;
use crate::cpus;
use crate::exec::detached::Excerpt;
use crate::exec::{self, Programs};
use crate::gate::{Gate, Refusal, Wish};
use crate::hooks;
use crate::identity;
use crate::kernel::Kernel;
use crate::priority;
use crate::stat;
use crate::volumes::Volumes;
use crate::watch::Is;
use crate::wire::{Buffers, Conn, TIMEOUT, WireError};
use dayfly_api::agent::{
    Failure, FailureCode, FrameKind, Identity, PROTOCOL, Ready, Reply, Request,
};
use dayfly_units::sync::lock;
use rustix::time::{ClockId, clock_gettime};
use std::collections::HashMap;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixListener;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

/// Maximum number of worker threads, and so of connections.
pub const MAX_WORKERS: usize = 128;
/// Number of threads that wait for a connection at the start.
const FIRST_WORKERS: usize = 2;
/// Bytes of stack for a worker's deepest call (a tree of 512 folders, JSON of 256 KiB), with
/// reserve.
const STACK_BYTES: usize = 1 << 20;

/// A source of connections.
pub trait Listener: Send + Sync {
    /// Waits for the next connection, a stream socket.
    ///
    /// # Errors
    /// The kernel's error. After a lack of descriptors or memory the server tries again; any other
    /// error ends it.
    fn accept(&self) -> io::Result<OwnedFd>;
}

impl Listener for UnixListener {
    fn accept(&self) -> io::Result<OwnedFd> {
        Self::accept(self).map(|(stream, _)| stream.into())
    }
}

/// The state that all requests share.
pub struct Agent {
    /// `/` except in tests.
    root: PathBuf,
    kernel: Box<dyn Kernel>,
    programs: Arc<Programs>,
    volumes: Volumes,
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
    /// Accepted while nothing was sealed: in a clone made since then the connection has no peer.
    before_seal: bool,
}

impl Agent {
    /// An agent for the machine at `root`.
    #[must_use]
    pub fn new(root: PathBuf, kernel: Box<dyn Kernel>, programs: Programs) -> Arc<Self> {
        let state =
            Shared { gate: Gate::open(), next: 0, open: HashMap::new(), workers: 0, waiting: 0 };
        let (programs, volumes) = (Arc::new(programs), Volumes::default());
        Arc::new(Self { root, kernel, programs, volumes, state: Mutex::new(state) })
    }

    /// The programs that the agent runs.
    #[must_use]
    pub fn programs(&self) -> &Arc<Programs> {
        &self.programs
    }

    fn state(&self) -> MutexGuard<'_, Shared> {
        // A panic leaves counters and a map that are valid at every point.
        lock(&self.state)
    }

    /// The agent's description of itself.
    #[must_use]
    pub fn ready(&self) -> Ready {
        let up = clock_gettime(ClockId::Boottime);
        let micros = up.tv_sec.saturating_mul(1_000_000).saturating_add(up.tv_nsec / 1000);
        Ready {
            version: format!("{}+{PROTOCOL}", env!("CARGO_PKG_VERSION")),
            kernel: rustix::system::uname().release().to_string_lossy().into_owned(),
            uptime_us: u64::try_from(micros).unwrap_or(0),
            sealed: self.state().gate.sealed(),
        }
    }

    /// Starts the first worker threads for `listener`.
    ///
    /// # Errors
    /// No thread can be started.
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
        let (agent, shared) = (Arc::clone(self), Arc::clone(listener));
        let thread = std::thread::Builder::new().name("agent".into()).stack_size(STACK_BYTES);
        let started = thread.spawn(move || agent.work(&shared)).map(drop);
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
            // A bug in one connection must not end PID 1; the panic's message is on the console.
            buffers = served.unwrap_or_default();
            self.forget(id);
            if self.leave_pool() {
                return;
            }
        }
    }

    /// Whether this thread must end because enough threads wait. Otherwise counts it as waiting
    /// again.
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
        let time_limit = if crowded { Duration::from_secs(1) } else { TIMEOUT };
        let mut served = Ok(true);
        while let Ok(true) = served {
            served = self.request(&mut conn, id, time_limit, crowded);
        }
        if let Err(error) = served
            && let Some(failure) = error.failure()
            && conn.reply(&Reply::Err(failure)).is_ok()
        {
            conn.linger();
        }
        conn.into_buffers()
    }

    /// Serves one request and returns whether another may follow. After an identity one may: a new
    /// clone usually gets work at once, and another connection costs a guest as much as the
    /// identity itself.
    fn request(
        &self,
        conn: &mut Conn,
        id: u64,
        time_limit: Duration,
        crowded: bool,
    ) -> Result<bool, WireError> {
        if !conn.wait_frame(time_limit)? {
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
            return conn
                .reply(&Reply::Err(Failure { code: FailureCode::Io, message }))
                .map(|()| false);
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
                goes_on = matches!(reply, Reply::Ok | Reply::Cpus { .. });
                conn.reply(&reply)
            }
            Request::Exec(spec) => exec::run(&self.programs, conn, *spec),
            Request::ReadArchive { path } => archive::send(conn, &path),
            Request::WriteArchive { path } => archive::receive(conn, &path),
            Request::Log { .. }
            | Request::Programs
            | Request::SignalProgram { .. }
            | Request::WaitForProgram { .. }
            | Request::ForgetProgram { .. } => self.of_programs(conn, request),
            Request::Mount { path, name, read_only } => {
                self.volumes.serve(conn, &path, &name, read_only)
            }
            Request::Stat => conn.reply(&self.stat()),
            Request::Shutdown { reboot } => {
                let sent = conn.reply(&Reply::Ok);
                self.kernel.end(reboot);
                sent
            }
        };
        served.map(|()| goes_on)
    }

    /// The use of memory and root disk.
    fn stat(&self) -> Reply {
        let failed = |e: stat::StatError| Failure { code: FailureCode::Io, message: e.to_string() };
        stat::stat(&self.root).map_or_else(|e| Reply::Err(failed(e)), Reply::Stat)
    }

    /// Serves the requests about detached programs.
    fn of_programs(&self, conn: &mut Conn, request: Request) -> Result<(), WireError> {
        let logs = &self.programs.logs;
        match request {
            Request::Log { pid, follow, program, tail, since_unix_ms } => {
                let program = program.unwrap_or_else(|| pid.to_string());
                logs.send(conn, &program, Excerpt { follow, tail, since_unix_ms })
            }
            Request::SignalProgram { program, signal } => {
                conn.reply(&logs.signal(&program, signal))
            }
            Request::WaitForProgram { program } => logs.outlast(conn, &program),
            Request::ForgetProgram { program } => conn.reply(&logs.forget(&program)),
            _ => conn.reply(&logs.list()),
        }
    }

    /// Prepares for a snapshot of this machine: waits until the watching programs hold their
    /// writes.
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

    /// Takes on an identity that the gate has admitted, and reports the result to the gate, even
    /// after a panic.
    fn become_machine(&self, identity: &Identity, own: u64) -> Reply {
        self.programs.watchers.wait_for(identity);
        let hooks = || hooks::run(&self.programs, identity);
        let become_machine =
            || identity::take_on(self.kernel.as_ref(), &self.root, identity, hooks);
        let result = catch_unwind(AssertUnwindSafe(become_machine));
        let reply = match &result {
            Ok(Ok(_)) => match identity.cpus {
                None => Reply::Ok,
                Some(wanted) => cpus::start(&self.root, wanted),
            },
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
            for (_, open) in state.open.iter().filter(|(id, open)| **id != own && open.before_seal)
            {
                let _ = rustix::net::shutdown(&open.fd, rustix::net::Shutdown::Both);
            }
            drop(state);
            // Those of the machine before: their connections are among those that have ended.
            self.volumes.unmount();
        }
        reply
    }
}

/// Whether `accept` may be tried again after this error.
fn patient(error: &io::Error) -> bool {
    let short =
        [libc::EMFILE, libc::ENFILE, libc::ENOMEM, libc::ENOBUFS, libc::EINTR, libc::ECONNABORTED];
    error.raw_os_error().is_some_and(|e| short.contains(&e))
}

/// Whether a request occupies its thread as long as the client likes.
const fn takes_long(request: &Request) -> bool {
    matches!(
        request,
        Request::Exec(_)
            | Request::ReadArchive { .. }
            | Request::WriteArchive { .. }
            | Request::Log { .. }
            | Request::WaitForProgram { .. }
            | Request::Mount { .. }
    )
}
