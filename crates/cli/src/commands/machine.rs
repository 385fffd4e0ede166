//! `dayfly machine`: the host under QEMU.

use crate::connect::{machine_options, start_machine};
use crate::home::home;
use crate::output;
use crate::progress::Steps;
use anyhow::{Context, Result};
use clap::Subcommand;
use dayfly_machine::{
    ExecSpec, Exit, Input, Machine, RawTerminal, Root, State, Stopped, supervisor_main, window_size,
};
use dayfly_units::Bytes;
use std::io::{IsTerminal, stderr, stdin, stdout};
use std::os::fd::AsFd;
use std::path::Path;
use std::process::ExitCode;
use std::time::Duration;

/// How long the machine may take to unmount its disk.
const STOP: Duration = Duration::from_secs(20);

/// Arguments of `dayfly machine`.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Make the machine, or change what it is made of; its disk stays
    Init {
        /// Virtual CPUs
        #[arg(long)]
        cpus: Option<u32>,
        /// Memory; this host gives only what the machine touches
        #[arg(short, long, default_value = "4G")]
        memory: Bytes,
        /// Length of the sparse disk, fixed when it is first made
        #[arg(long, default_value = "64G")]
        disk: Bytes,
    },
    /// Start the machine; restarts it when dayfly's programs have changed
    Start,
    /// Stop the machine, and every VM in it
    Stop,
    /// Show whether it runs, as JSON
    Status,
    /// Remove the machine with its disk: images, kernels and snapshots
    Rm,
    /// Run a program in the machine
    Exec {
        /// With this host's files instead of the machine's
        #[arg(long)]
        host: bool,
        /// The program and its arguments
        #[arg(trailing_var_arg = true, allow_hyphen_values = true, required = true, value_name = "PROGRAM")]
        argv: Vec<String>,
    },
    /// A shell in the machine
    Shell {
        /// With this host's files instead of the machine's
        #[arg(long)]
        host: bool,
    },
}

/// Arguments of the hidden command that the machine starts itself with.
#[derive(Debug, clap::Args)]
pub struct Supervise {
    orders: String,
}

impl Supervise {
    pub fn run(&self) -> ExitCode {
        supervisor_main(&self.orders)
    }
}

impl Command {
    pub async fn run(self) -> Result<u8> {
        // The library blocks; nothing else is to be done meanwhile.
        tokio::task::spawn_blocking(move || self.run_blocking()).await?
    }

    fn run_blocking(self) -> Result<u8> {
        let home = home()?;
        let steps = Steps::new();
        let progress = &mut |text: &str| steps.begin(text);
        match self {
            Self::Init { cpus, memory, disk } => {
                let mut options = machine_options(&steps)?;
                options.cpus = cpus.unwrap_or(options.cpus);
                options.memory_mib = memory.0 >> 20;
                options.disk_bytes = disk.0;
                let machine = Machine::init(&home, &options, progress)?;
                steps.end();
                output::line(machine.folder().display())?;
            }
            Self::Start => {
                let machine = start_machine(&home, &steps)?;
                output::line(machine.api_socket().display())?;
            }
            Self::Stop => match Machine::open(&home)?.stop(STOP, progress)? {
                Stopped::WasStopped => steps.say("dayfly: the machine did not run"),
                Stopped::Clean => {}
                Stopped::Killed => steps.say("dayfly: the machine did not end in time and was killed"),
            },
            Self::Status => {
                let status = Machine::open(&home)?.status()?;
                output::json(&status)?;
                // As systemctl does: 3, it does not run.
                return Ok(if status.state == State::Running { 0 } else { 3 });
            }
            Self::Rm => Machine::open(&home)?.rm(progress)?,
            Self::Exec { host, argv } => {
                let machine = running(&home, &steps)?;
                drop(steps);
                return exec(&machine, host, argv, false);
            }
            Self::Shell { host } => {
                let machine = running(&home, &steps)?;
                drop(steps);
                return exec(&machine, host, vec![if host { "bash" } else { "sh" }.into()], true);
            }
        }
        Ok(0)
    }
}

/// The machine, started if it does not run. One that runs is taken as it is, whatever it carries: its VMs would end with it.
fn running(home: &Path, steps: &Steps) -> Result<Machine> {
    if let Ok(machine) = Machine::open(home)
        && machine.status().is_ok_and(|status| status.state == State::Running)
    {
        return Ok(machine);
    }
    start_machine(home, steps)
}

fn exec(machine: &Machine, host: bool, argv: Vec<String>, terminal: bool) -> Result<u8> {
    let mut spec = ExecSpec { argv, ..ExecSpec::default() };
    if host {
        spec.root = Root::Host;
    }
    let input = stdin();
    let exit = if terminal && input.is_terminal() {
        spec.tty = window_size(&input);
        spec.env.extend(std::env::var("TERM").ok().map(|term| ("TERM".to_owned(), term)));
        let _raw = RawTerminal::new(input.as_fd());
        machine.exec(&spec, Input::Terminal(input.as_fd()), &mut stdout(), &mut stderr())
    } else {
        machine.exec(&spec, Input::Descriptor(input.as_fd()), &mut stdout(), &mut stderr())
    };
    let exit: Exit = exit.with_context(|| format!("{} in the machine", spec.argv.join(" ")))?;
    Ok(u8::try_from(exit.shell_code()).unwrap_or(u8::MAX))
}
