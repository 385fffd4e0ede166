//! Requests from programs in the guest, at the socket `/run/dayfly/agent.sock`: one line in, one
//! line out. Only root may connect: the socket's mode is 0600, and the agent also checks each
//! peer's user (`SO_PEERCRED`), because an image may change modes.
//!
//! `fork` or `fork N` makes N clones of this machine. As with fork(2), one request has two answers.
//! The original machine gets `0` and the ids of its clones. Each clone gets its number, from 1,
//! once it has its identity. The answer is `error: WHY` if no fork took place.
//!
//! `watch ...` registers the connection for news of forks ([`crate::watch`]).
//!
//! `/run/dayfly/dayfly-fork [N]` sends a fork request, prints the answer, and exits with 0 or 1. It
//! is a link to the agent's executable, which checks the name under which it runs, so an image
//! needs no program for this.

use crate::exec::Programs;
use crate::wire::{Buffers, Conn};
use dayfly_api::agent::{FrameKind, HostReply, HostRequest};
use rustix::io::Errno;
use std::ffi::OsString;
use std::fs::Permissions;
use std::io::{self, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// The socket's path relative to the root.
const SOCKET: &str = "run/dayfly/agent.sock";
/// The path of the `dayfly-fork` link relative to the root.
const PROGRAM: &str = "run/dayfly/dayfly-fork";
/// The file name of that link.
pub const NAME: &str = "dayfly-fork";
/// Maximum bytes of a request line.
const LINE_BYTES: usize = 64;
/// Maximum number of concurrent connections.
const MOST: usize = 8;
/// Time limit for a program to send its line, and to take the answer.
const TIMEOUT: Duration = Duration::from_secs(10);
/// Time limit for the host's reply.
const HOST_TIMEOUT: Duration = Duration::from_secs(120);
/// Stack of a connection's thread: enough for JSON with a few thousand ids.
const STACK_BYTES: usize = 256 << 10;

/// Connects to the host.
pub type Host = fn() -> Result<OwnedFd, Errno>;

/// Listens on the socket below `root`, in a new thread.
///
/// # Errors
/// The socket cannot be created.
pub fn serve(root: &Path, programs: Arc<Programs>, host: Host) -> io::Result<()> {
    let (socket, program) = (root.join(SOCKET), root.join(PROGRAM));
    if let Some(folder) = socket.parent() {
        std::fs::create_dir_all(folder)?;
    }
    for old in [&socket, &program] {
        match std::fs::remove_file(old) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(e),
            _ => {}
        }
    }
    let listener = UnixListener::bind(&socket)?;
    std::fs::set_permissions(&socket, Permissions::from_mode(0o600))?;
    std::os::unix::fs::symlink(format!("/proc/{}/exe", std::process::id()), &program)?;
    let thread = std::thread::Builder::new().name("local".into()).stack_size(64 << 10);
    thread.spawn(move || accept(&listener, &programs, host)).map(drop)
}

fn accept(listener: &UnixListener, programs: &Arc<Programs>, host: Host) {
    let open = Arc::new(AtomicUsize::new(0));
    loop {
        let Ok((stream, _)) = listener.accept() else {
            // Perhaps no descriptor is free; some become free later.
            std::thread::sleep(Duration::from_millis(100));
            continue;
        };
        if let Err(why) = is_ours(&stream) {
            write_line(&stream, &format!("error: {why}"));
            continue;
        }
        if open.fetch_add(1, Ordering::SeqCst) >= MOST {
            open.fetch_sub(1, Ordering::SeqCst);
            write_line(&stream, &format!("error: {MOST} programs are answered: expected fewer"));
            continue;
        }
        let (programs, counted) = (Arc::clone(programs), Arc::clone(&open));
        let thread = std::thread::Builder::new().name("local".into()).stack_size(STACK_BYTES);
        let started = thread.spawn(move || {
            match answer(&stream, &programs, host) {
                Ok(Some(answer)) => write_line(&stream, &answer),
                Ok(None) => {}
                Err(why) => write_line(&stream, &format!("error: {why}")),
            }
            counted.fetch_sub(1, Ordering::SeqCst);
        });
        if started.is_err() {
            open.fetch_sub(1, Ordering::SeqCst);
        }
    }
}

/// Whether the peer had this process's user (root) when it connected.
fn is_ours(stream: &UnixStream) -> Result<(), String> {
    let own = rustix::process::geteuid();
    match rustix::net::sockopt::socket_peercred(stream) {
        Ok(peer) if peer.uid == own => Ok(()),
        Ok(peer) => Err(format!(
            "expected a program of user {}, got one of {}",
            own.as_raw(),
            peer.uid.as_raw()
        )),
        Err(errno) => Err(format!("which user asks: {errno}")),
    }
}

/// Writes a line; errors are ignored, because the peer may be gone.
fn write_line(mut stream: &UnixStream, line: &str) {
    let _ = stream.set_write_timeout(Some(TIMEOUT));
    let _ = stream.write_all(format!("{line}\n").as_bytes());
}

/// Reads and executes a request line. Returns the answer, if one is due.
pub(crate) fn answer(
    mut stream: &UnixStream,
    programs: &Programs,
    host: Host,
) -> Result<Option<String>, String> {
    let failed = |e: io::Error| format!("reading a line: {e}");
    stream.set_read_timeout(Some(TIMEOUT)).map_err(failed)?;
    let (mut line, mut byte) = (Vec::new(), [0]);
    while stream.read(&mut byte).map_err(failed)? == 1 && byte != *b"\n" {
        line.extend(byte);
        if line.len() > LINE_BYTES {
            return Err(format!("expected a line of at most {LINE_BYTES} bytes"));
        }
    }
    let line = String::from_utf8_lossy(&line);
    let mut words = line.split_ascii_whitespace();
    let count = match (words.next(), words.next(), words.next()) {
        (Some("watch"), first, second) => {
            let stream = stream.try_clone().map_err(failed)?;
            let words = first.into_iter().chain(second).chain(words);
            return programs.watchers.add(stream, words).map(|()| None);
        }
        (Some("fork"), None, None) => Some(1),
        (Some("fork"), Some(count), None) => count.parse().ok().filter(|count| *count > 0),
        _ => None,
    };
    let count =
        count.ok_or_else(|| format!("expected `fork`, `fork COUNT` or `watch`, got {line:?}"))?;
    fork(programs, host, count).map(Some)
}

/// Requests clones from the host, and finds out whether this machine is the original or one of
/// them.
fn fork(programs: &Programs, host: Host, count: u32) -> Result<String, String> {
    let before = programs.fork.times();
    let fd = host().map_err(|errno| {
        format!("the host did not listen: this machine may not fork itself ({errno})")
    })?;
    let mut conn = Conn::new(Arc::new(fd), Buffers::default());
    conn.push_json(FrameKind::Request, &HostRequest::Fork { count });
    let asked = conn.flush().and_then(|()| conn.wait_frame(HOST_TIMEOUT));
    if let Ok(true) = asked
        && let Ok(Some((FrameKind::Reply, body))) = conn.frame()
    {
        return match serde_json::from_slice(body) {
            Ok(HostReply::Forked { ids }) => {
                let words =
                    std::iter::once("0".to_owned()).chain(ids.iter().map(ToString::to_string));
                Ok(words.collect::<Vec<_>>().join(" "))
            }
            Ok(HostReply::Err { message }) => Err(message.replace('\n', " ")),
            Err(e) => Err(format!("the host's reply: {e}")),
        };
    }
    // The connection broke. In a clone the host's end does not exist; the clone is known as such
    // once it has its identity.
    #[cfg(test)]
    tests::BROKEN.fetch_add(1, Ordering::SeqCst);
    let until = Instant::now() + HOST_TIMEOUT;
    while programs.fork.is_under_way() && Instant::now() < until {
        std::thread::sleep(Duration::from_millis(1));
    }
    if programs.fork.times() != before {
        return Ok(programs.fork.number().to_string());
    }
    Err(format!(
        "the host did not answer: {}",
        asked.map_or_else(|e| e.to_string(), |_| "no reply".to_owned())
    ))
}

/// The program `dayfly-fork`: sends the request and prints the answer.
#[must_use]
pub fn ask(arguments: impl Iterator<Item = OsString>) -> ExitCode {
    let words: Vec<String> = arguments.map(|word| word.to_string_lossy().into_owned()).collect();
    let ask = || -> io::Result<String> {
        let mut stream = UnixStream::connect(Path::new("/").join(SOCKET))?;
        // The agent refuses other users before it reads, so a write error may come with an answer.
        let asked = stream.write_all(format!("fork {}\n", words.join(" ")).as_bytes());
        let mut answer = String::new();
        // No time limit here: the agent's limit for the host ends the wait.
        let read = stream.read_to_string(&mut answer);
        if answer.is_empty() { asked.and(read).map(|_| answer) } else { Ok(answer) }
    };
    match ask() {
        Ok(answer) if !answer.is_empty() && !answer.starts_with("error") => {
            let mut out = io::stdout();
            match out.write_all(answer.as_bytes()).and_then(|()| out.flush()) {
                Ok(()) => ExitCode::SUCCESS,
                Err(_) => ExitCode::FAILURE,
            }
        }
        Ok(answer) => {
            let _ = writeln!(io::stderr(), "{NAME}: {}", answer.trim_end());
            ExitCode::FAILURE
        }
        Err(e) => {
            let _ = writeln!(io::stderr(), "{NAME}: the agent of this machine: {e}");
            ExitCode::FAILURE
        }
    }
}

#[cfg(test)]
#[path = "local_tests.rs"]
mod tests;
