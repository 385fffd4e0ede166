//! The host's side of the exec channel.

use crate::machine::Machine;
use dayfly_machine_init::{
    ExecSpec, Exit, GuestStatus, Kind, MAX_FRAME_BYTES, Request, WindowSize, read_frame,
    write_frame,
};
use rustix::event::{PollFd, PollFlags, poll};
use std::io::{self, Read, Write};
use std::net::Shutdown;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};

/// Why a program could not be run in the machine, or why its exit is unknown.
#[derive(Debug, thiserror::Error)]
pub enum ExecError {
    /// The machine's socket does not accept connections.
    #[error("{path}: {source}; is the machine running?")]
    Connect {
        /// Path of the socket.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// The connection broke.
    #[error("exec channel: {0}")]
    Channel(#[from] io::Error),
    /// The machine refused the request.
    #[error("the machine: {0}")]
    Refused(String),
    /// The machine closed the connection without an answer.
    #[error("exec channel: the machine closed the connection before it reported the program's end")]
    Cut,
    /// The machine sent an unexpected frame.
    #[error("exec channel: expected {expected}, got {got}")]
    Unexpected {
        /// The expected frame.
        expected: &'static str,
        /// The received frame.
        got: String,
    },
}

/// The result of a finished program.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Output {
    /// Exit code or signal.
    pub exit: Exit,
    /// All of standard output.
    pub stdout: Vec<u8>,
    /// All of standard error.
    pub stderr: Vec<u8>,
}

/// The source of standard input.
pub enum Input<'a> {
    /// These bytes, then end of input.
    Bytes(&'a [u8]),
    /// A descriptor, read until its end or the program's end.
    Descriptor(BorrowedFd<'a>),
    /// A terminal; changes of its window size are sent to the program's terminal.
    Terminal(BorrowedFd<'a>),
}

impl Machine {
    fn request(&self, request: &Request) -> Result<UnixStream, ExecError> {
        let path = self.exec_socket();
        let mut stream =
            UnixStream::connect(&path).map_err(|source| ExecError::Connect { path, source })?;
        let body = serde_json::to_vec(request).map_err(io::Error::from)?;
        write_frame(&mut stream, Kind::Request, &body)?;
        Ok(stream)
    }

    /// Asks the machine for its status, with a deadline of 10 s.
    ///
    /// # Errors
    /// [`ExecError`]
    pub fn ask_status(&self) -> Result<GuestStatus, ExecError> {
        let mut stream = self.request(&Request::Status)?;
        stream.set_read_timeout(Some(std::time::Duration::from_secs(10)))?;
        match read_frame(&mut stream)? {
            Some((Kind::Status, body)) => {
                Ok(serde_json::from_slice(&body).map_err(io::Error::from)?)
            }
            Some((Kind::Failed, body)) => {
                Err(ExecError::Refused(String::from_utf8_lossy(&body).into_owned()))
            }
            Some((kind, _)) => {
                Err(ExecError::Unexpected { expected: "a status", got: format!("{kind:?}") })
            }
            None => Err(ExecError::Cut),
        }
    }

    /// Runs a program to its end and keeps its output.
    ///
    /// # Errors
    /// [`ExecError`]
    pub fn exec_output(&self, spec: &ExecSpec, input: &[u8]) -> Result<Output, ExecError> {
        let (mut stdout, mut stderr) = (Vec::new(), Vec::new());
        let exit = self.exec(spec, Input::Bytes(input), &mut stdout, &mut stderr)?;
        Ok(Output { exit, stdout, stderr })
    }

    /// Runs a program to its end. The program is killed if the caller disconnects.
    ///
    /// # Errors
    /// [`ExecError`]
    pub fn exec(
        &self,
        spec: &ExecSpec,
        input: Input<'_>,
        stdout: &mut dyn Write,
        stderr: &mut dyn Write,
    ) -> Result<Exit, ExecError> {
        let stream = self.request(&Request::Exec(spec.clone()))?;
        let (cancel, cancelled) = UnixStream::pair()?;
        let out = Mutex::new(&stream);
        let send = |kind, body: &[u8]| {
            write_frame(&mut *out.lock().unwrap_or_else(PoisonError::into_inner), kind, body)
        };
        std::thread::scope(|scope| {
            scope.spawn(|| {
                // An error means that the program has ended or that the channel is broken; the
                // reading side reports which.
                drop(feed(input, &cancelled, &send));
            });
            let exit = drain(&stream, stdout, stderr);
            drop(cancel);
            drop(stream.shutdown(Shutdown::Both));
            exit
        })
    }
}

fn drain(
    mut stream: &UnixStream,
    stdout: &mut dyn Write,
    stderr: &mut dyn Write,
) -> Result<Exit, ExecError> {
    loop {
        let (kind, body) = read_frame(&mut stream)?.ok_or(ExecError::Cut)?;
        match kind {
            Kind::Stdout => stdout.write_all(&body).and_then(|()| stdout.flush())?,
            Kind::Stderr => stderr.write_all(&body).and_then(|()| stderr.flush())?,
            Kind::Exit => return Ok(serde_json::from_slice(&body).map_err(io::Error::from)?),
            Kind::Failed => {
                return Err(ExecError::Refused(String::from_utf8_lossy(&body).into_owned()));
            }
            other => {
                return Err(ExecError::Unexpected {
                    expected: "output or an exit",
                    got: format!("{other:?}"),
                });
            }
        }
    }
}

/// The size of a terminal; `None` if the descriptor is no terminal.
#[must_use]
pub fn window_size(terminal: impl AsFd) -> Option<WindowSize> {
    let size = rustix::termios::tcgetwinsize(terminal).ok()?;
    Some(WindowSize { rows: size.ws_row, columns: size.ws_col })
}

/// Sends input until its end, or until the peer of `cancelled` is closed.
fn feed(
    input: Input<'_>,
    cancelled: &UnixStream,
    send: &(dyn Fn(Kind, &[u8]) -> io::Result<()> + Sync),
) -> io::Result<()> {
    let (from, terminal) = match input {
        Input::Bytes(bytes) => {
            for piece in bytes.chunks(MAX_FRAME_BYTES) {
                send(Kind::Stdin, piece)?;
            }
            return send(Kind::StdinEnd, &[]);
        }
        Input::Descriptor(fd) => (fd, false),
        Input::Terminal(fd) => (fd, true),
    };
    let mut size = window_size(from).filter(|_| terminal);
    // A terminal is checked every 250 ms, because its window size may have changed.
    let tick = terminal.then_some(rustix::event::Timespec { tv_sec: 0, tv_nsec: 250_000_000 });
    let mut buffer = vec![0; 64 << 10];
    loop {
        let mut wait = [PollFd::new(&from, PollFlags::IN), PollFd::new(cancelled, PollFlags::IN)];
        match poll(&mut wait, tick.as_ref()) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(e) => return Err(e.into()),
        }
        if !wait[1].revents().is_empty() {
            return Ok(());
        }
        if terminal && window_size(from) != size {
            size = window_size(from);
            if let Some(size) = size {
                send(Kind::Resize, &serde_json::to_vec(&size)?)?;
            }
        }
        if wait[0].revents().is_empty() {
            continue;
        }
        let count = match rustix::io::read(from, &mut buffer[..]) {
            Ok(count) => count,
            Err(rustix::io::Errno::INTR | rustix::io::Errno::AGAIN) => continue,
            Err(e) => return Err(e.into()),
        };
        if count == 0 {
            return send(Kind::StdinEnd, &[]);
        }
        send(Kind::Stdin, buffer.get(..count).unwrap_or_default())?;
    }
}

/// A terminal in raw mode; dropping the value restores the mode.
pub struct RawTerminal<'a> {
    terminal: BorrowedFd<'a>,
    before: rustix::termios::Termios,
}

impl<'a> RawTerminal<'a> {
    /// Switches `terminal` to raw mode; `None` if the descriptor is no terminal.
    #[must_use]
    pub fn new(terminal: BorrowedFd<'a>) -> Option<Self> {
        let before = rustix::termios::tcgetattr(terminal).ok()?;
        let mut raw = before.clone();
        raw.make_raw();
        rustix::termios::tcsetattr(terminal, rustix::termios::OptionalActions::Now, &raw).ok()?;
        Some(Self { terminal, before })
    }
}

impl Drop for RawTerminal<'_> {
    fn drop(&mut self) {
        let _ = rustix::termios::tcsetattr(
            self.terminal,
            rustix::termios::OptionalActions::Now,
            &self.before,
        );
    }
}

/// Copies all bytes of `source` to the file `target` in the machine, with permissions `mode`.
///
/// # Errors
/// [`ExecError`], also for a read error of `source`.
pub fn copy_in(
    machine: &Machine,
    source: &mut impl Read,
    target: &str,
    mode: u32,
) -> Result<(), ExecError> {
    let mut body = Vec::new();
    source.read_to_end(&mut body)?;
    let script = "mkdir -p \"$(dirname \"$1\")\" && cat > \"$1.new\" && \
        chmod \"$2\" \"$1.new\" && mv \"$1.new\" \"$1\"";
    let argv = ["sh", "-c", script, "sh", target, &format!("{mode:o}")].map(str::to_owned).to_vec();
    let out = machine.exec_output(&ExecSpec { argv, ..ExecSpec::default() }, &body)?;
    match out.exit {
        Exit::Code(0) => Ok(()),
        _ => Err(ExecError::Refused(String::from_utf8_lossy(&out.stderr).trim().to_owned())),
    }
}
