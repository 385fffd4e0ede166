//! Running a program for the host.
//!
//! ```text
//! users, PATH, streams ──▶ spawn ──▶ Started ──▶ session (streams, signals, timeout) ──▶ Exit
//!          │                 │ detached: streams ──▶ detached (a log)
//!          └──── Err ◀───────┘  nothing runs
//! ```

pub(crate) mod adopted;
pub mod cage;
pub mod detached;
mod error;
mod fork;
pub mod leftovers;
mod orders;
mod programs;
mod session;
pub mod spawn;
mod streams;
pub mod strings;
pub mod users;
mod wait;

pub use error::ExecError;
pub use fork::Fork;
pub use programs::Programs;

use crate::small_file;
use crate::wire::{Conn, WireError};
use cage::Cage;
use dayfly_api::agent::{ExecSpec, Exit, Failure, Reply};
use programs::Running;
use spawn::{Plan, SpawnError, Step};
use std::collections::BTreeMap;
use std::ffi::CString;
use std::fs::DirBuilder;
use std::os::fd::AsFd;
use std::os::unix::fs::DirBuilderExt;
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;
use streams::Unheard;

/// The search path for programs if the request has no PATH.
pub const DEFAULT_PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// Runs `spec` to its end for the client of `conn`.
///
/// # Errors
/// [`WireError`] if the client sent a malformed frame; the program is killed then. A client that
/// merely disconnects is no error.
pub fn run(programs: &Arc<Programs>, conn: &mut Conn, mut spec: ExecSpec) -> Result<(), WireError> {
    let place = strings::receive(&programs.places, conn, &mut spec)?;
    let output = if spec.detach { Unheard::Kept } else { Unheard::Console };
    let started = start(programs, &spec, output);
    // They may be 2 MiB, and the kernel has them.
    (spec.argv, spec.env) = (Vec::new(), BTreeMap::new());
    drop(place);
    match started {
        Ok(running) => session::run(programs, conn, &spec, running),
        Err(error) => conn.reply(&Reply::Err(Failure::from(&error))),
    }
}

/// Runs `spec` to its end without a client, or kills it at `until`. Its output goes to the console.
///
/// # Errors
/// [`ExecError`]; nothing ran.
pub fn run_alone(programs: &Programs, spec: &ExecSpec, until: Instant) -> Result<Exit, ExecError> {
    let Running { child, cage, .. } = start(programs, spec, Unheard::Console)?;
    let exit = wait::outlast(&child, &cage, Some(until));
    programs.cages.give_back(cage);
    Ok(exit)
}

/// Reads an accounts file; a missing file counts as empty.
fn read_text(root: &Path, name: &str) -> Result<String, ExecError> {
    let bytes = small_file::read(&root.join(name), users::MAX_FILE_BYTES)?;
    Ok(String::from_utf8_lossy(&bytes.unwrap_or_default()).into_owned())
}

fn text(what: &str, value: &str) -> Result<CString, ExecError> {
    CString::new(value)
        .map_err(|_| ExecError::Invalid(format!("{what}: expected no zero byte, got one")))
}

/// The paths to try for `program`: only itself if it contains a slash, else one for each folder of
/// PATH.
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
    let mut env = BTreeMap::from([
        ("PATH".to_owned(), DEFAULT_PATH.to_owned()),
        ("HOME".to_owned(), home.to_owned()),
    ]);
    if spec.pty.is_some() {
        env.insert("TERM".to_owned(), "xterm".to_owned());
    }
    for (name, value) in &spec.env {
        if name.is_empty() || name.contains('=') {
            let shown: String = name.chars().take(64).collect();
            return Err(ExecError::Invalid(format!(
                "env: expected a name without '=', got {shown:?}"
            )));
        }
        env.insert(name.clone(), value.clone());
    }
    Ok(env)
}

fn start(programs: &Programs, spec: &ExecSpec, output: Unheard) -> Result<Running, ExecError> {
    let Some(program) = spec.argv.first().filter(|p| !p.is_empty()) else {
        return Err(ExecError::Invalid("argv: expected at least a program, got none".into()));
    };
    if spec.detach && (spec.stdin || spec.pty.is_some()) {
        let why = "detach: expected neither stdin nor pty: no client is there to serve them";
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
    if named && spec.make_cwd {
        // If this fails, the program's start names the folder.
        let _ = DirBuilder::new().recursive(true).mode(0o755).create(&spec.cwd);
    }
    let cwd = text("cwd", if named { &spec.cwd } else { &account.home })?;
    let (streams, mut inner) = streams::open(spec, output)?;
    if account.uid != 0 {
        inner.give_to(spec, account.uid);
    }
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
        // The cgroup cannot be entered: the image's init removed it, or made it a threaded group.
        plan.cgroup = None;
        result = spawn::spawn(&plan);
    }
    let in_group = plan.cgroup.is_some();
    match result {
        Ok(child) => {
            let cage = if in_group { cage } else { Cage::tree() };
            let reader = inner.reader.take();
            let log = reader.map(|reader| programs.logs.add(&child, spec, reader));
            Ok(Running { child, cage, streams, log })
        }
        Err(error) => {
            programs.cages.give_back(cage);
            Err(error::explain(error, spec, program, &candidates))
        }
    }
}
