//! `dayfly logs`: shows the console, or the output of a detached program.

use super::options::past;
use crate::connect;
use crate::terminal_text::Stranger;
use anyhow::{Context, Result};
use dayfly_api::client::{ByteStream, LogOptions};

/// Exit code of a program that SIGINT ends: 128 plus its number.
const INTERRUPTED: i32 = 128 + 2;

/// Arguments of `dayfly logs`.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "The newest output is kept: 2 to 4 MiB of a console, and 256 KiB of each of 32 \
                  detached programs of a VM.\n\
                  A terminal gets text and colours; other control characters are shown, not \
                  obeyed. A pipe or a file gets the bytes as they are."
)]
pub struct Args {
    /// Follow the output until the VM ends, or until no process can write to it any more
    #[arg(short, long)]
    follow: bool,
    /// Show only the last N lines of the output so far
    #[arg(short = 'n', long, value_name = "N")]
    tail: Option<u64>,
    /// Show only output since this time: a time ago such as 90s or 10m, or seconds since 1970; of a
    /// detached program
    #[arg(long, value_name = "TIME", value_parser = past)]
    since: Option<u64>,
    /// Pass the output to the terminal unfiltered, control sequences included
    #[arg(long)]
    raw: bool,
    /// The VM, by id or name
    vm: String,
    /// A detached program, by the id that dayfly exec -d printed [default: the program of
    /// dayfly run -d, or else the console]
    program: Option<String>,
    /// Show the console of a VM of dayfly run -d
    #[arg(long, conflicts_with = "program")]
    console: bool,
}

impl Args {
    pub async fn run(self) -> Result<()> {
        let client = connect::client().await?;
        let options =
            LogOptions { follow: self.follow, tail: self.tail, since_unix_ms: self.since };
        let log = match &self.program {
            None => client.logs(&self.vm, self.console, options).await?,
            Some(program) => client.program_log(&self.vm, program, options).await?,
        };
        let mut out = Stranger::new(std::io::stdout(), self.raw);
        // While standard output takes nothing, `copy` blocks and the first signal is not noticed.
        tokio::spawn(async {
            for _ in 0..2 {
                if tokio::signal::ctrl_c().await.is_err() {
                    return;
                }
            }
            std::process::exit(INTERRUPTED);
        });
        let ended = tokio::select! {
            copied = copy(log, &mut out) => Ok(copied),
            Ok(()) = tokio::signal::ctrl_c() => Err(()),
        };
        // A colour that is still on must be reset, whatever the end was.
        out.end().context("standard output")?;
        match ended {
            Ok(copied) => copied,
            Err(()) => std::process::exit(INTERRUPTED),
        }
    }
}

pub(super) async fn copy(mut log: ByteStream, out: &mut Stranger<std::io::Stdout>) -> Result<()> {
    while let Some(bytes) = log.next().await? {
        out.write(&bytes).context("standard output")?;
    }
    Ok(())
}
