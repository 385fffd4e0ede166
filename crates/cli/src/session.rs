//! Connects the user's terminal or pipe with a program in a guest.
//!
//! ```text
//! stdin thread ──▶ ┐
//! signals ───────▶ ├─ writer task ──▶ connection ──▶ program
//! window size ───▶ ┘
//! stdout, stderr ◀── this task ◀───── connection ◀── program
//! ```
//!
//! The two directions are independent: a program that writes much and reads nothing blocks neither.

mod terminal;

pub use terminal::{RawTerminal, window_size};

use crate::failure;
use crate::terminal_text::Stranger;
use anyhow::{Context, Result};
use dayfly_api::client::{Exec, ExecEvent, ExecInput, ExecOutput};
use std::io::Read;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::mpsc;

/// Signals that are forwarded to the program.
const FORWARDED: [SignalKind; 6] = [
    SignalKind::hangup(),
    SignalKind::interrupt(),
    SignalKind::quit(),
    SignalKind::terminate(),
    SignalKind::user_defined1(),
    SignalKind::user_defined2(),
];
/// Number of SIGINT and SIGTERM signals after which dayfly ends without the program.
const FORCED_END_SIGNALS: u32 = 3;
const STDIN_PIECE_BYTES: usize = 64 << 10;

/// How the user is attached to the program.
#[derive(Debug, Clone, Copy)]
pub struct Attach {
    /// Whether the program gets this process's standard input.
    pub stdin: bool,
    /// Whether the program has a pseudo-terminal; the user's terminal is then in raw mode.
    pub terminal: bool,
    /// Whether a terminal gets the program's output unfiltered. Otherwise [`Stranger`] filters it.
    /// A pipe or file always gets the bytes unchanged.
    pub raw: bool,
}

enum Control {
    Signal(i32),
    Resize,
}

/// Connects the user with the program until the program ends. Returns the exit code. The terminal
/// is restored afterwards.
///
/// # Errors
/// If the connection breaks, or if standard output is closed.
pub async fn attach(exec: Exec, how: Attach) -> Result<u8> {
    let (control_in, control) = mpsc::channel(16);
    let forced = forward_signals(control_in, how.terminal)?;
    let raw = if how.terminal && how.stdin {
        RawTerminal::enter().context("the terminal")?
    } else {
        None
    };
    let stdin = how.stdin.then(read_stdin).transpose().context("standard input")?;
    let writer = tokio::spawn(write_input(exec.input, stdin, control, how.terminal));
    let result = tokio::select! {
        result = copy_output(exec.output, how.raw) => result,
        Ok(code) = forced => Ok(code),
    };
    writer.abort();
    drop(raw);
    result
}

/// Forwards signals to the program. After [`FORCED_END_SIGNALS`] signals that ask for an end, the
/// receiver gets dayfly's exit code.
fn forward_signals(
    control: mpsc::Sender<Control>,
    terminal: bool,
) -> Result<tokio::sync::oneshot::Receiver<u8>> {
    let (forced_in, forced) = tokio::sync::oneshot::channel();
    let ignored = terminal::ignored_signals();
    let mut signals: Vec<(i32, Signal)> = Vec::new();
    for kind in FORWARDED {
        let number = kind.as_raw_value();
        // Signals that the parent process made this process ignore (nohup, a
        // background job) stay ignored.
        if ignored & (1 << (number - 1)) == 0 {
            signals.push((number, signal(kind).context("signals")?));
        }
    }
    let mut resized = signal(SignalKind::window_change()).context("signals")?;
    tokio::spawn(async move {
        let mut asked = 0;
        loop {
            let next = futures::future::select_all(signals.iter_mut().map(|(number, s)| {
                let number = *number;
                Box::pin(async move { s.recv().await.map(|()| number) })
            }));
            let message = tokio::select! {
                (got, ..) = next => match got {
                    Some(number) => Control::Signal(number),
                    None => return,
                },
                Some(()) = resized.recv(), if terminal => Control::Resize,
            };
            if let Control::Signal(number) = message {
                if [SignalKind::interrupt(), SignalKind::terminate()]
                    .iter()
                    .any(|k| k.as_raw_value() == number)
                {
                    asked += 1;
                }
                if asked >= FORCED_END_SIGNALS {
                    let code = u8::try_from(number).unwrap_or_default();
                    let _ = forced_in.send(failure::SIGNAL + code);
                    return;
                }
            }
            // The channel is full only if the connection is stalled, and then the signal cannot be
            // delivered.
            let _ = control.try_send(message);
        }
    });
    Ok(forced)
}

/// Reads standard input on a separate thread, which is never joined, because a read of a terminal
/// cannot be cancelled.
pub(crate) fn read_stdin() -> std::io::Result<mpsc::Receiver<Vec<u8>>> {
    let (pieces, receiver) = mpsc::channel(4);
    std::thread::Builder::new().name("stdin".into()).spawn(move || {
        let mut stdin = std::io::stdin().lock();
        let mut buffer = vec![0; STDIN_PIECE_BYTES];
        loop {
            match stdin.read(&mut buffer) {
                Err(e) if e.kind() == std::io::ErrorKind::Interrupted => {}
                // A read of a terminal that is gone fails; for the program, that is the end of its
                // input.
                Ok(0) | Err(_) => return,
                Ok(got) => {
                    if pieces.blocking_send(buffer[..got].to_vec()).is_err() {
                        return;
                    }
                }
            }
        }
    })?;
    Ok(receiver)
}

/// Writes input and control messages until the connection ends. The error needs no report, because
/// the reading side reports the cause.
async fn write_input(
    mut input: ExecInput,
    mut stdin: Option<mpsc::Receiver<Vec<u8>>>,
    mut control: mpsc::Receiver<Control>,
    terminal: bool,
) -> std::io::Result<()> {
    if terminal && let Some(size) = window_size() {
        // The size may have changed while the VM started.
        input.resize(size).await?;
    }
    loop {
        let piece = async {
            match &mut stdin {
                Some(pieces) => pieces.recv().await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            biased;
            message = control.recv() => match message {
                Some(Control::Signal(number)) => input.signal(number).await?,
                Some(Control::Resize) => if let Some(size) = window_size() {
                    input.resize(size).await?;
                },
                None => return Ok(()),
            },
            piece = piece => match piece {
                Some(bytes) => input.write(&bytes).await?,
                None => {
                    input.end().await?;
                    stdin = None;
                }
            },
        }
    }
}

/// Writes the program's output to standard output and standard error. Returns the exit code.
async fn copy_output(output: ExecOutput, raw: bool) -> Result<u8> {
    let mut streams =
        Some((Stranger::new(std::io::stdout(), raw), Stranger::new(std::io::stderr(), raw)));
    let result = copy_pieces(output, &mut streams).await;
    if let Some((out, err)) = &mut streams {
        // A colour that is still on must be reset, whatever the end was.
        let _ = out.end().and(err.end());
    }
    result
}

type Streams = (Stranger<std::io::Stdout>, Stranger<std::io::Stderr>);

async fn copy_pieces(mut output: ExecOutput, streams: &mut Option<Streams>) -> Result<u8> {
    loop {
        let (bytes, error) = match output.next().await? {
            ExecEvent::Stdout(bytes) => (bytes, false),
            ExecEvent::Stderr(bytes) => (bytes, true),
            ExecEvent::Exit(exit) => {
                if exit.timed_out {
                    eprintln!(
                        "dayfly: the program ran longer than --timeout allows and was killed"
                    );
                }
                return Ok(failure::code_of(exit));
            }
        };
        let Some((mut out, mut err)) = streams.take() else { return Ok(failure::DAYFLY) };
        // The write is in a blocking task, so that a slow reader of standard output does not stop
        // the forwarding of signals.
        let written = tokio::task::spawn_blocking(move || {
            let done = if error { err.write(&bytes) } else { out.write(&bytes) };
            (out, err, done)
        });
        let (out, err, done) = written.await.context("writing the program's output")?;
        *streams = Some((out, err));
        done.context("standard output")?;
    }
}
