//! Running a program for the host.
//!
//! ```text
//! users, PATH, streams ──▶ spawn ──▶ Started ──▶ session (streams, signals, timeout) ──▶ Exit
//!          │                 │
//!          └──── Err ◀───────┘  nothing runs
//! ```

pub mod cage;
mod session;
pub mod spawn;
pub mod users;

use crate::watch::Watchers;
use crate::wire::{Conn, WireError};
use cage::{Cage, Cages};
use dayfly_api::agent::{ExecSpec, Exit, Failure, FailureCode, Reply, WindowSize};
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use rustix::pipe::{PipeFlags, pipe_with};
use rustix::pty::{OpenptFlags, ioctl_tiocgptpeer, openpt, unlockpt};
use rustix::termios::{Winsize, tcsetwinsize};
use spawn::{Child, Plan, SpawnError, Step};
use std::collections::BTreeMap;
use std::ffi::CString;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::time::Instant;

/// Where programs are looked for when the request names no PATH.
pub const DEFAULT_PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// Why a program was not started.
#[derive(Debug, thiserror::Error)]
pub enum ExecError {
    /// The request does not make sense.
    #[error("exec: {0}")]
    Invalid(String),
    /// No such user or group.
    #[error("exec: {0}")]
    User(#[from] users::UserError),
    /// /etc/passwd or /etc/group cannot be read.
    #[error("exec: {path}: {errno}")]
    Accounts {
        /// Which file.
        path: PathBuf,
        /// Why.
        errno: Errno,
    },
    /// No pipe or terminal.
    #[error("exec: {what}: {errno}")]
    Streams {
        /// What was being made.
        what: &'static str,
        /// Why not.
        errno: Errno,
    },
    /// Stopped between clone and exec.
    #[error("exec: {what}: {errno}")]
    Spawn {
        /// What was being done, to what.
        what: String,
        /// Where it stopped.
        step: Step,
        /// Why.
        errno: Errno,
    },
}

impl From<&ExecError> for Failure {
    fn from(error: &ExecError) -> Self {
        let code = match error {
            ExecError::Invalid(_) | ExecError::User(_) => FailureCode::Invalid,
            ExecError::Accounts { .. } | ExecError::Streams { .. } => FailureCode::Io,
            ExecError::Spawn { step, errno, .. } => spawn_code(*step, *errno),
        };
        Self { code, message: error.to_string() }
    }
}

/// Docker's 127 for what is not there, its 126 for what is there and cannot be run.
fn spawn_code(step: Step, errno: Errno) -> FailureCode {
    match (step, errno) {
        (Step::Exec | Step::Cwd, Errno::NOENT | Errno::NOTDIR) => FailureCode::NotFound,
        (Step::Exec, Errno::TOOBIG) => FailureCode::Invalid,
        (Step::Exec, Errno::IO | Errno::NOMEM | Errno::MFILE | Errno::NFILE) => FailureCode::Io,
        (Step::Exec | Step::Cwd | Step::User, _) => FailureCode::NotPermitted,
        (Step::Clone | Step::Session | Step::Terminal | Step::Streams, _) => FailureCode::Io,
    }
}

/// What execs need and share.
#[derive(Debug)]
pub struct Programs {
    /// Where /etc/passwd and /etc/group are; `/` but in tests.
    pub root: PathBuf,
    /// Control groups.
    pub cages: Cages,
    /// Whether the agent is protected from the out-of-memory killer by a setting that programs would inherit.
    pub mortal: bool,
    /// Whether this machine may be a clone of itself by now.
    pub fork: Fork,
    /// Who wants to know that.
    pub watchers: Watchers,
}

impl Programs {
    /// Programs of the machine at `root`, none of which runs yet.
    #[must_use]
    pub fn new(root: PathBuf, cages: Cages, mortal: bool) -> Self {
        Self { root, cages, mortal, fork: Fork::default(), watchers: Watchers::default() }
    }
}

/// Which machine this is, where it is forked while programs run: in the clone nobody is at the other end of their connections, and they live on.
#[derive(Debug, Default)]
pub struct Fork {
    under_way: AtomicBool,
    /// How often it became another machine by that.
    times: AtomicU64,
    /// Which clone it is, of the last fork.
    number: AtomicU32,
}

impl Fork {
    /// Any moment now there may be two of this machine.
    pub fn begin(&self) {
        self.under_way.store(true, Ordering::SeqCst);
    }

    /// It is known which of them this is: the clone of that number, or the one that was forked.
    pub fn end(&self, clone: Option<u32>) {
        if let Some(number) = clone.filter(|_| self.is_under_way()) {
            self.number.store(number, Ordering::SeqCst);
            self.times.fetch_add(1, Ordering::SeqCst);
        }
        self.under_way.store(false, Ordering::SeqCst);
    }

    /// Whether that is not known.
    #[must_use]
    pub fn is_under_way(&self) -> bool {
        self.under_way.load(Ordering::SeqCst)
    }

    /// How often it became another machine; read after [`Self::is_under_way`], which ends later.
    #[must_use]
    pub fn times(&self) -> u64 {
        self.times.load(Ordering::SeqCst)
    }

    /// Which clone it is, if [`Self::times`] is not 0.
    #[must_use]
    pub fn number(&self) -> u32 {
        self.number.load(Ordering::SeqCst)
    }
}

/// The agent's ends of a program's streams.
#[derive(Debug, Default)]
pub(crate) struct Streams {
    pub(crate) stdin: Option<OwnedFd>,
    pub(crate) stdout: Option<OwnedFd>,
    pub(crate) stderr: Option<OwnedFd>,
    pub(crate) terminal: bool,
}

/// A program that runs.
pub(crate) struct Running {
    pub(crate) child: Child,
    pub(crate) cage: Cage,
    pub(crate) streams: Streams,
}

/// Runs `spec` for the client of `conn`, to the end.
///
/// # Errors
/// [`WireError`] where the client sent something malformed; the program is dead then. A client that is merely gone is
/// no error.
pub fn run(programs: &Arc<Programs>, conn: &mut Conn, spec: &ExecSpec) -> Result<(), WireError> {
    match start(programs, spec) {
        Ok(running) => session::run(programs, conn, spec, running),
        Err(error) => conn.reply(&Reply::Err(Failure::from(&error))),
    }
}

/// Runs `spec`, to which nobody listens, to its end, or kills it when it is time.
///
/// # Errors
/// [`ExecError`]; nothing ran then.
pub fn run_alone(programs: &Programs, spec: &ExecSpec, until: Instant) -> Result<Exit, ExecError> {
    let Running { child, cage, .. } = start(programs, spec)?;
    let exit = session::outlast(&child, &cage, Some(until));
    programs.cages.give_back(cage);
    Ok(exit)
}

/// Reads a small text file; a missing one is empty.
fn read_text(root: &Path, name: &str) -> Result<String, ExecError> {
    let path = root.join(name);
    let failed = |errno| ExecError::Accounts { path: path.clone(), errno };
    let file = match rustix::fs::open(&path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty()) {
        Ok(file) => file,
        Err(Errno::NOENT | Errno::NOTDIR) => return Ok(String::new()),
        Err(errno) => return Err(failed(errno)),
    };
    let mut bytes = Vec::with_capacity(4096);
    loop {
        if bytes.len() as u64 >= users::MAX_FILE_BYTES {
            return Err(failed(Errno::FBIG));
        }
        bytes.reserve(4096);
        match rustix::io::read(&file, rustix::buffer::spare_capacity(&mut bytes)) {
            Ok(0) => return Ok(String::from_utf8_lossy(&bytes).into_owned()),
            Ok(_) | Err(Errno::INTR) => {}
            Err(errno) => return Err(failed(errno)),
        }
    }
}

fn text(what: &str, value: &str) -> Result<CString, ExecError> {
    CString::new(value).map_err(|_| ExecError::Invalid(format!("{what}: expected no zero byte, got one")))
}

/// The candidates for `program`: itself where it names a path, else one for each folder of PATH.
fn candidates(program: &str, path: &str) -> Result<Vec<CString>, ExecError> {
    if program.contains('/') {
        return Ok(vec![text("program", program)?]);
    }
    path.split(':')
        .map(|folder| {
            let folder = if folder.is_empty() { "." } else { folder };
            text("PATH", &format!("{}/{program}", folder.trim_end_matches('/')))
        })
        .collect()
}

fn environment(spec: &ExecSpec, home: &str) -> Result<BTreeMap<String, String>, ExecError> {
    let mut env =
        BTreeMap::from([("PATH".to_owned(), DEFAULT_PATH.to_owned()), ("HOME".to_owned(), home.to_owned())]);
    if spec.pty.is_some() {
        env.insert("TERM".to_owned(), "xterm".to_owned());
    }
    for (name, value) in &spec.env {
        if name.is_empty() || name.contains('=') {
            let shown: String = name.chars().take(64).collect();
            return Err(ExecError::Invalid(format!("env: expected a name without '=', got {shown:?}")));
        }
        env.insert(name.clone(), value.clone());
    }
    Ok(env)
}

/// A window's size for the kernel.
pub(crate) fn window(size: WindowSize) -> Winsize {
    Winsize { ws_row: size.rows, ws_col: size.cols, ws_xpixel: 0, ws_ypixel: 0 }
}

/// The child's ends of its streams.
struct Inner {
    stdin: OwnedFd,
    stdout: Option<OwnedFd>,
    stderr: Option<OwnedFd>,
}

fn open_streams(spec: &ExecSpec) -> Result<(Streams, Inner), ExecError> {
    let failed = |what| move |errno| ExecError::Streams { what, errno };
    if let Some(size) = spec.pty {
        let flags = OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC;
        let master = openpt(flags).map_err(failed("open a pseudo-terminal"))?;
        unlockpt(&master).map_err(failed("unlock a pseudo-terminal"))?;
        tcsetwinsize(&master, window(size)).map_err(failed("set a terminal's size"))?;
        let slave = ioctl_tiocgptpeer(&master, flags).map_err(failed("open a terminal's other end"))?;
        rustix::io::ioctl_fionbio(&master, true).map_err(failed("make a terminal non-blocking"))?;
        let stdin = if spec.stdin {
            Some(rustix::io::fcntl_dupfd_cloexec(&master, 3).map_err(failed("copy a descriptor"))?)
        } else {
            None
        };
        let streams = Streams { stdin, stdout: Some(master), stderr: None, terminal: true };
        return Ok((streams, Inner { stdin: slave, stdout: None, stderr: None }));
    }
    let mut streams = Streams::default();
    let stdin = if spec.stdin {
        let (read, write) = pipe_with(PipeFlags::CLOEXEC).map_err(failed("make a pipe"))?;
        rustix::io::ioctl_fionbio(&write, true).map_err(failed("make a pipe non-blocking"))?;
        streams.stdin = Some(write);
        read
    } else {
        rustix::fs::open(c"/dev/null", OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())
            .map_err(failed("open /dev/null"))?
    };
    if spec.detach {
        return Ok((streams, Inner { stdin, stdout: None, stderr: None }));
    }
    let (out, stdout) = pipe_with(PipeFlags::CLOEXEC).map_err(failed("make a pipe"))?;
    let (err, stderr) = pipe_with(PipeFlags::CLOEXEC).map_err(failed("make a pipe"))?;
    streams.stdout = Some(out);
    streams.stderr = Some(err);
    Ok((streams, Inner { stdin, stdout: Some(stdout), stderr: Some(stderr) }))
}

fn start(programs: &Programs, spec: &ExecSpec) -> Result<Running, ExecError> {
    let Some(program) = spec.argv.first().filter(|p| !p.is_empty()) else {
        return Err(ExecError::Invalid("argv: expected at least a program, got none".into()));
    };
    if spec.detach && (spec.stdin || spec.pty.is_some()) {
        let why = "detach: expected neither stdin nor pty: nobody is there to serve them";
        return Err(ExecError::Invalid(why.into()));
    }
    let passwd = read_text(&programs.root, "etc/passwd")?;
    let group = read_text(&programs.root, "etc/group")?;
    let account = users::resolve(&spec.user, &passwd, &group)?;
    let env = environment(spec, &account.home)?;
    let path = env.get("PATH").map_or(DEFAULT_PATH, String::as_str);
    let candidates = candidates(program, path)?;
    let argv = spec.argv.iter().map(|a| text("argv", a)).collect::<Result<Vec<_>, _>>()?;
    let env = env
        .iter()
        .map(|(name, value)| text("env", &format!("{name}={value}")))
        .collect::<Result<Vec<_>, _>>()?;
    let named = !spec.cwd.is_empty();
    let cwd = text("cwd", if named { &spec.cwd } else { &account.home })?;
    let (streams, inner) = open_streams(spec)?;
    let console = rustix::stdio::stderr();
    let input = inner.stdin.as_fd();
    let otherwise = if streams.terminal { input } else { console };
    let cage = programs.cages.take();
    let mut plan = Plan {
        programs: &candidates,
        argv: &argv,
        env: &env,
        cwd: &cwd,
        cwd_fallback: (!named).then_some(c"/"),
        uid: account.uid,
        gid: account.gid,
        groups: &account.groups,
        streams: [
            input,
            inner.stdout.as_ref().map_or(otherwise, AsFd::as_fd),
            inner.stderr.as_ref().map_or(otherwise, AsFd::as_fd),
        ],
        terminal: streams.terminal,
        cgroup: cage.fd(),
        mortal: programs.mortal,
    };
    let mut result = spawn::spawn(&plan);
    if plan.cgroup.is_some() && matches!(result, Err(SpawnError { step: Step::Clone, .. })) {
        // The group cannot be entered (removed by the image's own init, or made a group of threads).
        plan.cgroup = None;
        result = spawn::spawn(&plan);
    }
    let in_group = plan.cgroup.is_some();
    match result {
        Ok(child) => {
            let cage = if in_group { cage } else { Cage::tree() };
            Ok(Running { child, cage, streams })
        }
        Err(error) => {
            programs.cages.give_back(cage);
            Err(explain(error, spec, program, &candidates))
        }
    }
}

fn explain(error: SpawnError, spec: &ExecSpec, program: &str, candidates: &[CString]) -> ExecError {
    let SpawnError { step, errno } = error;
    let there = || candidates.iter().any(|c| rustix::fs::stat(c.as_c_str()).is_ok());
    let what = match step {
        Step::Clone => "clone".to_owned(),
        Step::Session => "new session".to_owned(),
        Step::Terminal => "controlling terminal".to_owned(),
        Step::Streams => "standard streams".to_owned(),
        Step::User => format!("become user {:?}", spec.user),
        Step::Cwd => format!("working directory {:?}", spec.cwd),
        Step::Exec if errno == Errno::NOENT && program.contains('/') && there() => {
            format!("{program:?} is there, but the interpreter or loader that it names is not")
        }
        Step::Exec => format!("{program:?}"),
    };
    ExecError::Spawn { what, step, errno }
}
