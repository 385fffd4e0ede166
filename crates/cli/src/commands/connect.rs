//! `dayfly connect`: connects standard input and output to a vsock port of a VM.

use crate::terminal_text::Stranger;
use crate::{connect, session};
use anyhow::{Context, Result};
use tokio::io::{AsyncReadExt, AsyncWriteExt, ReadHalf};

const PIECE_BYTES: usize = 64 << 10;

/// Arguments of `dayfly connect`.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Standard input goes to the program, what it says to standard output, filtered \
                  where that is a terminal. The end of standard input is passed on; \
                  dayfly ends when the program has closed the connection, or its VM has ended, \
                  with exit code 0.\n\
                  The program listens with AF_VSOCK and any context id. Ports 1024 and 1025 are \
                  the guest's agent's."
)]
pub struct Args {
    /// The VM, by id or name
    vm: String,
    /// The vsock port that the program listens on
    #[arg(value_parser = clap::value_parser!(u32).range(1..))]
    port: u32,
}

impl Args {
    pub async fn run(self) -> Result<()> {
        let connection = connect::client().await?.connect(&self.vm, self.port).await?;
        let (output, mut input) = tokio::io::split(connection);
        let mut stdin = session::read_stdin().context("standard input")?;
        let writer = tokio::spawn(async move {
            while let Some(piece) = stdin.recv().await {
                // A program that reads no more may still write.
                if input.write_all(&piece).await.is_err() {
                    return;
                }
            }
            let _ = input.shutdown().await;
        });
        let result = copy_output(output).await;
        writer.abort();
        result
    }
}

async fn copy_output<C: tokio::io::AsyncRead>(mut output: ReadHalf<C>) -> Result<()> {
    let mut buffer = vec![0; PIECE_BYTES];
    let mut out = Stranger::new(std::io::stdout(), false);
    loop {
        let count = output.read(&mut buffer).await.context("the connection to the daemon broke")?;
        if count == 0 {
            return out.end().context("standard output");
        }
        // The write is in a blocking task, so that a slow reader of standard output does not stop
        // the other direction.
        let written = tokio::task::spawn_blocking(move || {
            let done = out.write(&buffer[..count]);
            (out, done, buffer)
        });
        let done;
        (out, done, buffer) = written.await.context("writing what the program says")?;
        done.context("standard output")?;
    }
}
