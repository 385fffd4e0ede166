//! The streams of a program: pipes, a pseudo-terminal, or the log of a detached program.

use super::detached;
use super::error::ExecError;
use dayfly_api::agent::{ExecSpec, WindowSize};
use rustix::fs::{Mode, OFlags};
use rustix::pipe::{PipeFlags, pipe_with};
use rustix::pty::{OpenptFlags, ioctl_tiocgptpeer, openpt, unlockpt};
use rustix::termios::{Winsize, tcsetwinsize};
use std::os::fd::OwnedFd;

/// The agent's ends of a program's streams.
#[derive(Debug, Default)]
pub(crate) struct Streams {
    pub(crate) stdin: Option<OwnedFd>,
    pub(crate) stdout: Option<OwnedFd>,
    pub(crate) stderr: Option<OwnedFd>,
    pub(crate) terminal: bool,
}

/// A window size in the kernel's form.
pub(crate) fn window(size: WindowSize) -> Winsize {
    Winsize { ws_row: size.rows, ws_col: size.cols, ws_xpixel: 0, ws_ypixel: 0 }
}

/// The child's ends of its streams.
pub(super) struct Inner {
    pub(super) stdin: OwnedFd,
    pub(super) stdout: Option<OwnedFd>,
    pub(super) stderr: Option<OwnedFd>,
    /// Reads the output of a detached program.
    pub(super) reader: Option<detached::Reader>,
}

/// The destination of the output of a program without a listening client.
#[derive(Debug, Clone, Copy)]
pub(super) enum Unheard {
    /// The console.
    Console,
    /// Memory, from which [`super::detached`] serves it.
    Kept,
}

impl Inner {
    /// Gives the pipes and the terminal to `uid`, so that the program can open `/dev/stdout` and
    /// its terminal by path, as in containers. The console and `/dev/null` stay root's.
    pub(super) fn give_to(&self, spec: &ExecSpec, uid: u32) {
        let stdin = (spec.stdin || spec.pty.is_some()).then_some(&self.stdin);
        for stream in stdin.into_iter().chain(&self.stdout).chain(&self.stderr) {
            // If it fails, the program still has the open stream.
            let _ = rustix::fs::fchown(stream, Some(rustix::fs::Uid::from_raw(uid)), None);
        }
    }
}

/// Opens both ends of the streams that `spec` asks for.
pub(super) fn open(spec: &ExecSpec, output: Unheard) -> Result<(Streams, Inner), ExecError> {
    let failed = |what| move |errno| ExecError::Streams { what, errno };
    if let Some(size) = spec.pty {
        let flags = OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC;
        let master = openpt(flags).map_err(failed("open a pseudo-terminal"))?;
        unlockpt(&master).map_err(failed("unlock a pseudo-terminal"))?;
        tcsetwinsize(&master, window(size)).map_err(failed("set a terminal's size"))?;
        let slave =
            ioctl_tiocgptpeer(&master, flags).map_err(failed("open a terminal's other end"))?;
        rustix::io::ioctl_fionbio(&master, true).map_err(failed("make a terminal non-blocking"))?;
        let stdin = if spec.stdin {
            Some(rustix::io::fcntl_dupfd_cloexec(&master, 3).map_err(failed("copy a descriptor"))?)
        } else {
            None
        };
        let streams = Streams { stdin, stdout: Some(master), stderr: None, terminal: true };
        return Ok((streams, Inner { stdin: slave, stdout: None, stderr: None, reader: None }));
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
        let inner = match output {
            Unheard::Console => Inner { stdin, stdout: None, stderr: None, reader: None },
            Unheard::Kept => {
                let (stdout, reader) = detached::pipe().map_err(failed("keep what it writes"))?;
                let stderr = rustix::io::fcntl_dupfd_cloexec(&stdout, 3)
                    .map_err(failed("copy a descriptor"))?;
                Inner { stdin, stdout: Some(stdout), stderr: Some(stderr), reader: Some(reader) }
            }
        };
        return Ok((streams, inner));
    }
    let (out, stdout) = pipe_with(PipeFlags::CLOEXEC).map_err(failed("make a pipe"))?;
    let (err, stderr) = pipe_with(PipeFlags::CLOEXEC).map_err(failed("make a pipe"))?;
    streams.stdout = Some(out);
    streams.stderr = Some(err);
    Ok((streams, Inner { stdin, stdout: Some(stdout), stderr: Some(stderr), reader: None }))
}
