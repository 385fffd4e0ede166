//! What programs in the guest may ask for, at the socket `/run/dayfly/agent.sock`, which is root's: a line in, a line out.
//!
//! `fork` or `fork N` makes N clones of this machine. As of fork(2), there are two answers to one question: in the machine that was forked `0` and the ids of its
//! clones, in each clone its number, from 1. By then it has its identity. `error: WHY` where nothing was forked.
//!
//! `watch ...` makes the connection one that is told when the machine is forked ([`crate::watch`]).
//!
//! `/run/dayfly/dayfly-fork [N]` asks that, prints the answer, and ends with 0 or 1. It is a link to the agent's own program, which knows it by that name: an
//! image need not have anything.

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

/// The socket, below the root.
const SOCKET: &str = "run/dayfly/agent.sock";
/// The program, below the root.
const PROGRAM: &str = "run/dayfly/dayfly-fork";
/// The name of that.
pub const NAME: &str = "dayfly-fork";
/// The longest line.
const LINE_BYTES: usize = 64;
/// Programs that are answered at one time.
const MOST: usize = 8;
/// How long a program may take to say what it wants, and to take the answer.
const PATIENCE: Duration = Duration::from_secs(10);
/// How long the host may take.
const HOST_PATIENCE: Duration = Duration::from_secs(120);
/// What JSON of a few thousand ids takes, with room.
const STACK_BYTES: usize = 256 << 10;

/// Connects to the host.
pub type Host = fn() -> Result<OwnedFd, Errno>;

/// Listens below `root`, in a thread of its own.
///
/// # Errors
/// The socket cannot be made.
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
            // Of descriptors, perhaps, which come back.
            std::thread::sleep(Duration::from_millis(100));
            continue;
        };
        if open.fetch_add(1, Ordering::SeqCst) >= MOST {
            open.fetch_sub(1, Ordering::SeqCst);
            tell(&stream, &format!("error: {MOST} programs are answered: expected fewer"));
            continue;
        }
        let (programs, counted) = (Arc::clone(programs), Arc::clone(&open));
        let thread = std::thread::Builder::new().name("local".into()).stack_size(STACK_BYTES);
        let started = thread.spawn(move || {
            match answer(&stream, &programs, host) {
                Ok(Some(answer)) => tell(&stream, &answer),
                Ok(None) => {}
                Err(why) => tell(&stream, &format!("error: {why}")),
            }
            counted.fetch_sub(1, Ordering::SeqCst);
        });
        if started.is_err() {
            open.fetch_sub(1, Ordering::SeqCst);
        }
    }
}

/// One that is gone is told nothing.
fn tell(mut stream: &UnixStream, line: &str) {
    let _ = stream.set_write_timeout(Some(PATIENCE));
    let _ = stream.write_all(format!("{line}\n").as_bytes());
}

/// Reads a line and does what it says; tells what to answer.
fn answer(mut stream: &UnixStream, programs: &Programs, host: Host) -> Result<Option<String>, String> {
    let failed = |e: io::Error| format!("reading a line: {e}");
    stream.set_read_timeout(Some(PATIENCE)).map_err(failed)?;
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
    let count = count.ok_or_else(|| format!("expected `fork`, `fork COUNT` or `watch`, got {line:?}"))?;
    fork(programs, host, count).map(Some)
}

/// Asks the host for clones, and finds out which of them this is.
fn fork(programs: &Programs, host: Host, count: u32) -> Result<String, String> {
    let before = programs.fork.times();
    let fd = host()
        .map_err(|errno| format!("the host did not listen: this machine may not fork itself ({errno})"))?;
    let mut conn = Conn::new(Arc::new(fd), Buffers::default());
    conn.push_json(FrameKind::Request, &HostRequest::Fork { count });
    let asked = conn.flush().and_then(|()| conn.wait_frame(HOST_PATIENCE));
    if let Ok(true) = asked
        && let Ok(Some((FrameKind::Reply, body))) = conn.frame()
    {
        return match serde_json::from_slice(body) {
            Ok(HostReply::Forked { ids }) => {
                let words = std::iter::once("0".to_owned()).chain(ids.iter().map(ToString::to_string));
                Ok(words.collect::<Vec<_>>().join(" "))
            }
            Ok(HostReply::Err { message }) => Err(message.replace('\n', " ")),
            Err(e) => Err(format!("the host's reply: {e}")),
        };
    }
    // It broke: nobody is at its other end in a clone, which is one as soon as it has an identity.
    let until = Instant::now() + HOST_PATIENCE;
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

/// The program: asks with these arguments, and prints the answer.
#[must_use]
pub fn ask(arguments: impl Iterator<Item = OsString>) -> ExitCode {
    let words: Vec<String> = arguments.map(|word| word.to_string_lossy().into_owned()).collect();
    let ask = || -> io::Result<String> {
        let mut stream = UnixStream::connect(Path::new("/").join(SOCKET))?;
        stream.write_all(format!("fork {}\n", words.join(" ")).as_bytes())?;
        let mut answer = String::new();
        // The host's patience ends it.
        stream.read_to_string(&mut answer)?;
        Ok(answer)
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
