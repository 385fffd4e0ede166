//! A person or a pipe on one side, a program in a guest on the other.
//!
//! ```text
//! stdin thread ──▶ ┐
//! signals ───────▶ ├─ writer task ──▶ connection ──▶ program
//! window size ───▶ ┘
//! stdout, stderr ◀── this task ◀───── connection ◀── program
//! ```
//!
//! Both directions go on by themselves: a program that reads nothing while it writes much stops neither.

mod terminal;

pub use terminal::{RawTerminal, window_size};

use crate::failure;
use anyhow::{Context, Result};
use dayfly_api::client::{Exec, ExecEvent, ExecInput, ExecOutput};
use std::io::{Read, Write};
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::mpsc;

/// Signals that the program gets in our place.
const FORWARDED: [SignalKind; 6] = [
    SignalKind::hangup(),
    SignalKind::interrupt(),
    SignalKind::quit(),
    SignalKind::terminate(),
    SignalKind::user_defined1(),
    SignalKind::user_defined2(),
];
/// So many signals that ask for an end, and we end without the program.
const PATIENCE: u32 = 3;
const STDIN_PIECE_BYTES: usize = 64 << 10;

/// What the user is to the program.
#[derive(Debug, Clone, Copy)]
pub struct Attach {
    /// Our standard input goes to it.
    pub stdin: bool,
    /// It has a pseudo-terminal, and our terminal is raw.
    pub terminal: bool,
}

enum Control {
    Signal(i32),
    Resize,
}

/// Connects the user with the program until it ends; gives the exit code for it. The terminal is as before afterwards.
///
/// # Errors
/// When the connection breaks, or our standard output is closed.
pub async fn attach(exec: Exec, how: Attach) -> Result<u8> {
    let (control_in, control) = mpsc::channel(16);
    let forced = forward_signals(control_in, how.terminal)?;
    let raw = if how.terminal && how.stdin { RawTerminal::enter().context("the terminal")? } else { None };
    let stdin = how.stdin.then(read_stdin).transpose().context("standard input")?;
    let writer = tokio::spawn(write_input(exec.input, stdin, control, how.terminal));
    let result = tokio::select! {
        result = copy_output(exec.output) => result,
        Ok(code) = forced => Ok(code),
    };
    writer.abort();
    drop(raw);
    result
}

/// Hands signals on; after [`PATIENCE`] that asked for an end, the receiver gets our exit code.
fn forward_signals(
    control: mpsc::Sender<Control>,
    terminal: bool,
) -> Result<tokio::sync::oneshot::Receiver<u8>> {
    let (forced_in, forced) = tokio::sync::oneshot::channel();
    let ignored = terminal::ignored_signals();
    let mut signals: Vec<(i32, Signal)> = Vec::new();
    for kind in FORWARDED {
        let number = kind.as_raw_value();
        // What our parent made us ignore (nohup, a shell's background job) stays ignored.
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
                if asked >= PATIENCE {
                    let code = u8::try_from(number).unwrap_or_default();
                    let _ = forced_in.send(failure::SIGNAL + code);
                    return;
                }
            }
            // Full only when the connection stands still, and then the signal has nowhere to go.
            let _ = control.try_send(message);
        }
    });
    Ok(forced)
}

/// Reads standard input on a thread of its own, which nobody waits for: a read of a terminal cannot be called off.
pub(crate) fn read_stdin() -> std::io::Result<mpsc::Receiver<Vec<u8>>> {
    let (pieces, receiver) = mpsc::channel(4);
    std::thread::Builder::new().name("stdin".into()).spawn(move || {
        let mut stdin = std::io::stdin().lock();
        let mut buffer = vec![0; STDIN_PIECE_BYTES];
        loop {
            match stdin.read(&mut buffer) {
                Err(e) if e.kind() == std::io::ErrorKind::Interrupted => {}
                // A terminal that is gone reads as an error: for the program, that is the end of its input.
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

/// Ends when the connection does: its reading side tells why.
async fn write_input(
    mut input: ExecInput,
    mut stdin: Option<mpsc::Receiver<Vec<u8>>>,
    mut control: mpsc::Receiver<Control>,
    terminal: bool,
) -> std::io::Result<()> {
    if terminal && let Some(size) = window_size() {
        // It may have changed while the VM started.
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

async fn copy_output(mut output: ExecOutput) -> Result<u8> {
    loop {
        let (bytes, error) = match output.next().await? {
            ExecEvent::Stdout(bytes) => (bytes, false),
            ExecEvent::Stderr(bytes) => (bytes, true),
            ExecEvent::Exit(exit) => {
                if exit.timed_out {
                    eprintln!("dayfly: the program ran longer than --timeout allows and was killed");
                }
                return Ok(failure::code_of(exit));
            }
        };
        // A slow reader of ours must not stop signals from being handed on.
        tokio::task::spawn_blocking(move || {
            if error {
                std::io::stderr().lock().write_all(&bytes)
            } else {
                let mut out = std::io::stdout().lock();
                out.write_all(&bytes).and_then(|()| out.flush())
            }
        })
        .await
        .context("writing the program's output")?
        .context("standard output")?;
    }
}
