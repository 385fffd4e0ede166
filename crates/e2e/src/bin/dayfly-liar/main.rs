//! Replaces the agent of a guest, as root of the guest can, and sends wrong answers (see
//! [`dayfly_e2e::lies`]).
//!
//! The agent may be process 1, which no signal ends, and no other socket can have its vsock port.
//! So the liar freezes the agent in a control group, and copies the listening socket out of the
//! agent (pidfd_getfd(2)). From then on the liar accepts every connection of the host. The liar has
//! to run detached, because the frozen agent no longer serves the client that started the liar.

use anyhow::{Context, Result, bail, ensure};
use dayfly_api::agent::{Failure, FailureCode, FrameKind, HEADER_BYTES, Reply, Request};
use dayfly_api::agent::{decode_header, encode};
use dayfly_e2e::lies::{self, Lie, Then};
use dayfly_hostile::archives;
use rustix::net::{AddressFamily, SocketFlags, accept_with, sockopt};
use rustix::process::{Pid, PidfdFlags, PidfdGetfdFlags, pidfd_getfd, pidfd_open};
use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::os::fd::OwnedFd;
use std::path::Path;

/// The agent's name if it is not process 1.
const AGENT: &str = "dayfly-agent\n";
/// The control group in which the agent is frozen.
const FREEZER: &str = "/sys/fs/cgroup/liar";

fn main() -> Result<()> {
    let agent = agent()?;
    let socket = listener(agent)?;
    freeze(agent)?;
    println!("process {}, the agent, is frozen; its socket is mine", agent.as_raw_nonzero());
    loop {
        let stream = accept_with(&socket, SocketFlags::CLOEXEC).context("accept")?;
        std::thread::spawn(move || match serve(File::from(stream)) {
            Ok(()) => {}
            Err(e) => println!("{e:#}"),
        });
    }
}

/// The agent: the process named [`AGENT`], or else process 1.
fn agent() -> Result<Pid> {
    for entry in fs::read_dir("/proc")? {
        let entry = entry?;
        let pid =
            entry.file_name().to_str().and_then(|name| name.parse().ok()).and_then(Pid::from_raw);
        if let Some(pid) = pid
            && !pid.is_init()
            && fs::read_to_string(entry.path().join("comm")).is_ok_and(|name| name == AGENT)
        {
            return Ok(pid);
        }
    }
    Ok(Pid::INIT)
}

/// A copy of the vsock socket on which the process listens.
fn listener(pid: Pid) -> Result<OwnedFd> {
    let process = pidfd_open(pid, PidfdFlags::empty()).context("pidfd_open")?;
    for entry in fs::read_dir(format!("/proc/{}/fd", pid.as_raw_nonzero()))? {
        let Some(number) = entry?.file_name().to_str().and_then(|name| name.parse().ok()) else {
            continue;
        };
        // The process may have closed the descriptor since the folder was read.
        let Ok(fd) = pidfd_getfd(&process, number, PidfdGetfdFlags::empty()) else { continue };
        if sockopt::socket_domain(&fd) == Ok(AddressFamily::VSOCK)
            && sockopt::socket_acceptconn(&fd) == Ok(true)
        {
            return Ok(fd);
        }
    }
    bail!("process {pid:?}: expected a vsock socket that listens, got none")
}

/// Stops every thread of a process for good, also of process 1.
fn freeze(pid: Pid) -> Result<()> {
    let group = Path::new(FREEZER);
    fs::create_dir(group).with_context(|| FREEZER.to_owned())?;
    fs::write(group.join("cgroup.procs"), pid.as_raw_nonzero().to_string())
        .context("cgroup.procs")?;
    fs::write(group.join("cgroup.freeze"), "1").context("cgroup.freeze")?;
    while !fs::read_to_string(group.join("cgroup.events"))?.contains("frozen 1") {
        std::thread::yield_now();
    }
    Ok(())
}

fn serve(mut stream: File) -> Result<()> {
    let mut header = [0; HEADER_BYTES];
    stream.read_exact(&mut header)?;
    let (kind, length) = decode_header(header)?;
    ensure!(kind == FrameKind::Request, "expected a request, got {kind:?}");
    let mut body = vec![0; length];
    stream.read_exact(&mut body)?;
    let said = match serde_json::from_slice(&body)? {
        Request::ReadArchive { path } => match (number(&path, "archive"), lie(&path)) {
            (Some(n), _) if n < archives::all().len() => {
                lies::send(&mut stream, archives::all().swap_remove(n).archive().bytes)
            }
            (_, Some(lie)) => (lie.say)(&mut stream),
            _ => refuse(&mut stream, &format!("{path}: expected /archive-N/… or /lie-N/…")),
        },
        other => {
            refuse(&mut stream, &format!("the liar answers nothing but archives, got {other:?}"))
        }
    };
    if said? == Then::Hold {
        let _ = io::copy(&mut stream, &mut io::sink());
    }
    Ok(())
}

/// N of a path `/WORD-N/…`.
fn number(path: &str, word: &str) -> Option<usize> {
    path.strip_prefix('/')?.strip_prefix(word)?.strip_prefix('-')?.split('/').next()?.parse().ok()
}

fn lie(path: &str) -> Option<Lie> {
    let (of, n) = match (number(path, "lie"), number(path, "silence")) {
        (Some(n), _) => (lies::all(), n),
        (None, n) => (lies::silent(), n?),
    };
    of.into_iter().nth(n)
}

fn refuse(stream: &mut File, why: &str) -> io::Result<Then> {
    let failure = Failure { code: FailureCode::Invalid, message: why.to_owned() };
    stream.write_all(&encode(FrameKind::Reply, &serde_json::to_vec(&Reply::Err(failure))?))?;
    Ok(Then::Hold)
}
