//! `dayfly program`: the detached programs of a VM.

use super::logs;
use super::signals::signal;
use crate::output::{self, Format, FormatArgs, ListArgs, ago};
use crate::terminal_text::Stranger;
use crate::{connect, failure};
use anyhow::{Context, Result};
use clap::Subcommand;
use dayfly_api::agent::Program;
use dayfly_api::client::{Client, LogOptions};
use tokio::signal::unix::{SignalKind, signal as receive};

/// The subcommands of `dayfly program`.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// List the detached programs of a VM: the last 32
    Ls {
        /// The VM, by id or name
        vm: String,
        #[command(flatten)]
        list: ListArgs,
    },
    /// Wait until a program has ended; prints its exit code, and ends with it
    Wait {
        #[command(flatten)]
        which: Which,
        #[command(flatten)]
        format: FormatArgs,
    },
    /// Send a signal to a program and the processes of its group
    Kill {
        /// The signal, such as TERM, SIGKILL or 15
        #[arg(short, long, default_value = "TERM", value_parser = signal)]
        signal: i32,
        #[command(flatten)]
        which: Which,
    },
    /// Show what a program writes from now on, pass SIGINT and SIGTERM on to it, and end with its
    /// exit code
    Attach {
        /// Show what it has written so far, too
        #[arg(long)]
        logs: bool,
        /// Pass the output to the terminal unfiltered, control sequences included
        #[arg(long)]
        raw: bool,
        #[command(flatten)]
        which: Which,
    },
    /// Forget a program that has ended, and its output
    Rm {
        #[command(flatten)]
        which: Which,
    },
}

/// A detached program.
#[derive(Debug, clap::Args)]
pub struct Which {
    /// The VM, by id or name
    vm: String,
    /// The program, by id, unique start of its id, or process id
    program: String,
}

impl Command {
    pub async fn run(self) -> Result<u8> {
        let client = connect::client().await?;
        match self {
            Self::Ls { vm, list } => ls(&client, &vm, list).await.map(|()| 0),
            Self::Wait { which, format } => {
                let ended = client.wait_for_program(&which.vm, &which.program).await?;
                match format.format {
                    Format::Json => output::emit(&output::json_line(&ended)?)?,
                    Format::Table => output::line(code(&ended))?,
                }
                Ok(code(&ended))
            }
            Self::Kill { signal, which } => {
                client.kill_program(&which.vm, &which.program, signal).await?;
                output::line(which.program).map(|()| 0)
            }
            Self::Attach { logs, raw, which } => attach(&client, &which, logs, raw).await,
            Self::Rm { which } => {
                client.remove_program(&which.vm, &which.program).await?;
                output::line(which.program).map(|()| 0)
            }
        }
    }
}

/// The exit code of a program that has ended.
fn code(program: &Program) -> u8 {
    program.exit.map_or(failure::DAYFLY, failure::code_of)
}

async fn ls(client: &Client, vm: &str, list: ListArgs) -> Result<()> {
    let programs = client.programs(vm).await?;
    output::list(
        list,
        &programs,
        ["ID", "PID", "USER", "STATE", "STARTED", "COMMAND"],
        |program| program.id.clone(),
        |program| {
            let user = if program.user.is_empty() { "root" } else { &program.user };
            [
                program.id.clone(),
                program.pid.to_string(),
                user.to_owned(),
                state(program),
                ago(program.started_unix_ms),
                program.command.join(" "),
            ]
        },
    )
}

/// The state of a program, with how it ended.
fn state(program: &Program) -> String {
    match program.exit {
        None => "running".to_owned(),
        Some(exit) if exit.timed_out => "exited (time limit)".to_owned(),
        Some(exit) => match (exit.code, exit.signal) {
            (Some(code), _) => format!("exited ({code})"),
            (None, Some(signal)) => format!("exited (signal {signal})"),
            (None, None) => "exited".to_owned(),
        },
    }
}

async fn attach(client: &Client, which: &Which, logs: bool, raw: bool) -> Result<u8> {
    let Which { vm, program } = which;
    let tail = (!logs).then_some(0);
    let options = LogOptions { follow: true, tail, ..LogOptions::default() };
    let log = client.program_log(vm, program, options).await?;
    let mut out = Stranger::new(std::io::stdout(), raw);
    let (mut interrupt, mut terminate) =
        (receive(SignalKind::interrupt())?, receive(SignalKind::terminate())?);
    let result = {
        let whole = async {
            // Processes that the program has left behind may write on: its end counts.
            tokio::select! {
                copied = logs::copy(log, &mut out) => copied?,
                ended = client.wait_for_program(vm, program) => return Ok(code(&ended?)),
            }
            Ok(code(&client.wait_for_program(vm, program).await?))
        };
        let mut whole = std::pin::pin!(whole);
        loop {
            let signal = tokio::select! {
                result = &mut whole => break result,
                Some(()) = interrupt.recv() => SignalKind::interrupt(),
                Some(()) = terminate.recv() => SignalKind::terminate(),
            };
            if let Err(e) = client.kill_program(vm, program, signal.as_raw_value()).await {
                let _shown = failure::report(&e.into());
            }
        }
    };
    out.end().context("standard output")?;
    result
}

#[cfg(test)]
mod tests {
    use super::*;
    use dayfly_api::agent::Exit;

    #[test]
    fn a_state_has_how_a_program_ended() {
        let program = |exit| Program {
            id: "0123456789ab".into(),
            pid: 7,
            command: vec!["true".into()],
            user: String::new(),
            started_unix_ms: 0,
            exit,
            ended_unix_ms: None,
        };
        let exit = |code, signal, timed_out| Some(Exit { code, signal, timed_out });
        for (exit, shown, number) in [
            (None, "running", 125),
            (exit(Some(3), None, false), "exited (3)", 3),
            (exit(None, Some(15), false), "exited (signal 15)", 143),
            (exit(None, Some(9), true), "exited (time limit)", 137),
        ] {
            let program = program(exit);
            assert_eq!((state(&program).as_str(), code(&program)), (shown, number));
        }
    }
}
