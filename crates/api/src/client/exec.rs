//! The two directions of a running program.

use super::error::ClientError;
use super::reason::Reason;
use crate::agent::{
    Exit, FrameKind, HEADER_BYTES, MAX_FRAME_BYTES, WindowSize, decode_header, encode,
};
use crate::types::{RunReply, Vm};
use hyper::upgrade::Upgraded;
use hyper_util::rt::TokioIo;
use std::io;
use tokio::io::{AsyncReadExt, AsyncWriteExt, ReadHalf, WriteHalf};

type Io = TokioIo<Upgraded>;

/// A program that runs in a guest. Dropping both halves ends the program unless it is detached, and
/// ends an ephemeral VM.
#[derive(Debug)]
pub struct Exec {
    /// The VM's state at the program's start.
    pub vm: Vm,
    /// The program's process id in the guest.
    pub pid: u32,
    /// The program's id, if it is detached and the guest's agent gives ids.
    pub id: Option<String>,
    /// The half that sends to the program.
    pub input: ExecInput,
    /// The half that receives from the program.
    pub output: ExecOutput,
}

/// Sends input, signals and window sizes to a program.
#[derive(Debug)]
pub struct ExecInput {
    io: WriteHalf<Io>,
}

/// Receives a program's output and exit.
#[derive(Debug)]
pub struct ExecOutput {
    io: ReadHalf<Io>,
    call: String,
    /// Where the reason of an early end is asked for, and the VM.
    reason: Option<(Reason, String)>,
}

/// An event of a running program.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ExecEvent {
    /// Output to standard output or to the terminal.
    Stdout(Vec<u8>),
    /// Output to standard error.
    Stderr(Vec<u8>),
    /// The program's end; the last event.
    Exit(Exit),
}

/// The result of a finished program.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Finished {
    /// Exit code or signal.
    pub exit: Exit,
    /// Its standard output.
    pub stdout: Vec<u8>,
    /// Its standard error.
    pub stderr: Vec<u8>,
}

impl Exec {
    /// Sends `first`, the frames of the request, and waits for the program's start.
    pub(super) async fn start(
        call: String,
        io: Io,
        first: &[u8],
        reason: Reason,
    ) -> Result<Self, ClientError> {
        let (read, write) = tokio::io::split(io);
        let mut input = ExecInput { io: write };
        let mut output = ExecOutput { io: read, call, reason: None };
        input.send_frames(first).await.map_err(|e| output.broken(e))?;
        let foreign = |got: String, call: &str| ClientError::Foreign {
            call: call.to_owned(),
            expected: "a reply frame",
            got,
        };
        match output.frame().await? {
            Some((FrameKind::Reply, body)) => match serde_json::from_slice(&body) {
                Ok(RunReply::Started { vm, pid, id }) => {
                    output.reason = Some((reason, vm.id.to_string()));
                    Ok(Self { vm: *vm, pid, id, input, output })
                }
                Ok(RunReply::Failed(error)) => Err(ClientError::Refused(error)),
                Err(e) => Err(foreign(e.to_string(), &output.call)),
            },
            Some((kind, _)) => Err(foreign(format!("{kind:?}"), &output.call)),
            None => Err(output.broken(io::ErrorKind::UnexpectedEof.into())),
        }
    }

    /// Waits for the program's end and collects its output, up to `cap` bytes.
    ///
    /// # Errors
    /// [`ClientError`] if the connection breaks before the end, or if the program writes more.
    pub async fn finish(mut self, cap: usize) -> Result<Finished, ClientError> {
        let (mut stdout, mut stderr) = (Vec::new(), Vec::new());
        loop {
            match self.output.next().await? {
                ExecEvent::Stdout(bytes) => stdout.extend_from_slice(&bytes),
                ExecEvent::Stderr(bytes) => stderr.extend_from_slice(&bytes),
                ExecEvent::Exit(exit) => return Ok(Finished { exit, stdout, stderr }),
            }
            if stdout.len() + stderr.len() > cap {
                return Err(ClientError::Foreign {
                    call: self.output.call,
                    expected: "a short output",
                    got: format!("more than {cap} bytes"),
                });
            }
        }
    }
}

impl ExecInput {
    async fn send(&mut self, kind: FrameKind, body: &[u8]) -> io::Result<()> {
        self.io.write_all(&encode(kind, body)).await?;
        self.io.flush().await
    }

    async fn send_frames(&mut self, frames: &[u8]) -> io::Result<()> {
        self.io.write_all(frames).await?;
        self.io.flush().await
    }

    /// Sends bytes to the program's standard input.
    ///
    /// # Errors
    /// If the connection has ended.
    pub async fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        for piece in bytes.chunks(MAX_FRAME_BYTES) {
            self.send(FrameKind::Stdin, piece).await?;
        }
        Ok(())
    }

    /// Ends the program's standard input.
    ///
    /// # Errors
    /// If the connection has ended.
    pub async fn end(&mut self) -> io::Result<()> {
        self.send(FrameKind::StdinEnd, &[]).await
    }

    /// Sends a new size of the program's terminal.
    ///
    /// # Errors
    /// If the connection has ended.
    pub async fn resize(&mut self, size: WindowSize) -> io::Result<()> {
        self.send(FrameKind::Resize, &serde_json::to_vec(&size)?).await
    }

    /// Sends a signal, by number, to the program's process group.
    ///
    /// # Errors
    /// If the connection has ended.
    pub async fn signal(&mut self, signal: i32) -> io::Result<()> {
        self.send(FrameKind::Signal, &signal.to_le_bytes()).await
    }
}

impl ExecOutput {
    fn broken(&self, source: io::Error) -> ClientError {
        ClientError::Broken { call: self.call.clone(), source: source.into() }
    }

    fn foreign(&self, got: String) -> ClientError {
        ClientError::Foreign {
            call: self.call.clone(),
            expected: "output or exit of the program",
            got,
        }
    }

    /// The next frame; `None` if the connection ends between two frames.
    async fn frame(&mut self) -> Result<Option<(FrameKind, Vec<u8>)>, ClientError> {
        let mut header = [0; HEADER_BYTES];
        match self.io.read(&mut header).await.map_err(|e| self.broken(e))? {
            0 => return Ok(None),
            got => self.io.read_exact(&mut header[got..]).await.map_err(|e| self.broken(e))?,
        };
        let (kind, length) = decode_header(header).map_err(|e| self.foreign(e.to_string()))?;
        let mut body = vec![0; length];
        self.io.read_exact(&mut body).await.map_err(|e| self.broken(e))?;
        Ok(Some((kind, body)))
    }

    /// Waits for the next event. [`ExecEvent::Exit`] is the last one.
    ///
    /// # Errors
    /// [`ClientError::Refused`] if the VM ends before the program does. [`ClientError::Broken`] if
    /// the connection ends first, which means that the daemon has ended.
    pub async fn next(&mut self) -> Result<ExecEvent, ClientError> {
        match (self.event().await, &self.reason) {
            (Err(error), Some((reason, vm))) => Err(reason.instead_of(error, vm).await),
            (event, _) => event,
        }
    }

    async fn event(&mut self) -> Result<ExecEvent, ClientError> {
        match self.frame().await? {
            None => Err(self.broken(io::Error::new(
                io::ErrorKind::UnexpectedEof,
                "the VM or the daemon ended before the program did",
            ))),
            Some((FrameKind::Stdout, bytes)) => Ok(ExecEvent::Stdout(bytes)),
            Some((FrameKind::Stderr, bytes)) => Ok(ExecEvent::Stderr(bytes)),
            Some((FrameKind::Exit, body)) => serde_json::from_slice(&body)
                .map(ExecEvent::Exit)
                .map_err(|e| self.foreign(e.to_string())),
            // The VM ended before the program did, and the daemon sends the cause.
            Some((FrameKind::Reply, body)) => match serde_json::from_slice(&body) {
                Ok(RunReply::Failed(error)) => Err(ClientError::Refused(error)),
                Ok(RunReply::Started { .. }) => Err(self.foreign("a second start".into())),
                Err(e) => Err(self.foreign(e.to_string())),
            },
            Some((kind, _)) => Err(self.foreign(format!("a frame of kind {kind:?}"))),
        }
    }
}
