//! `dayfly machine`: manages the Linux host under QEMU.

use crate::home::home;
use crate::machine_start::{cpus_warning, machine_options, restart_machine, use_machine};
use crate::output;
use crate::progress::Steps;
use anyhow::{Context, Result};
use clap::Subcommand;
use dayfly_machine::{
    ExecSpec, Exit, Input, Machine, RawTerminal, Root, Share, State, Stopped, accelerator,
    supervisor_main, window_size,
};
use dayfly_units::Bytes;
use ipnet::Ipv4Net;
use std::io::{IsTerminal, stderr, stdin, stdout};
use std::os::fd::AsFd;
use std::path::Path;
use std::process::ExitCode;
use std::time::Duration;

/// Time for the machine to unmount its disk before it is killed.
const STOP: Duration = Duration::from_secs(20);

/// Subcommands of `dayfly machine`.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Make the machine, or change its options; its disk stays
    Init {
        /// Number of virtual CPUs: as many as this host has, at most 8, if KVM runs the machine;
        /// one if it is emulated, because emulation of several is not reliable
        #[arg(long)]
        cpus: Option<u32>,
        /// Memory; this host only provides what the machine touches
        #[arg(short, long, default_value = "4G")]
        memory: Bytes,
        /// Length of the sparse disk, fixed when the disk is made
        #[arg(long, default_value = "64G")]
        disk: Bytes,
        /// Show the folder PATH of this host at /shares/NAME in the machine; may be repeated.
        /// Read-only unless :rw is added. Without this option the machine sees no file of this host
        #[arg(long = "share", value_name = "NAME=PATH[:ro|:rw]")]
        shares: Vec<Share>,
        /// Do not connect the machine with the network of this host: its VMs reach nothing outside
        #[arg(long)]
        no_network: bool,
        /// A private range that its VMs may reach unless they are closed, such as 10.1.0.0/16; may
        /// be repeated. This host's own addresses stay out of reach
        #[arg(long, value_name = "RANGE", conflicts_with = "no_network")]
        reach: Vec<Ipv4Net>,
    },
    /// Start the machine; one that runs older programs is restarted if no VM lives in it
    Start,
    /// Start the machine anew with this installation's programs; ends all VMs in it
    Restart {
        /// Do not ask, even if VMs live in it
        #[arg(short, long, short_alias = 'y', visible_alias = "yes")]
        force: bool,
    },
    /// Stop the machine, and every VM in it
    Stop,
    /// Show the machine's status, as JSON; exit code 3 if it does not run
    Status,
    /// Remove the machine with its disk, and so all images, kernels and snapshots
    Rm,
    /// Run a program in the machine
    Exec {
        /// Use the shared folders at their paths on this host (machine init --share), instead of
        /// the machine's files
        #[arg(long)]
        host: bool,
        /// The program and its arguments
        #[arg(
            trailing_var_arg = true,
            allow_hyphen_values = true,
            required = true,
            value_name = "PROGRAM"
        )]
        argv: Vec<String>,
    },
    /// Run a shell in the machine
    Shell {
        /// Use the shared folders at their paths on this host (machine init --share), instead of
        /// the machine's files
        #[arg(long)]
        host: bool,
    },
}

/// Arguments of the hidden command by which the machine starts its supervisor.
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
        // The library blocks, so it runs in a blocking task.
        tokio::task::spawn_blocking(move || self.run_blocking()).await?
    }

    fn run_blocking(self) -> Result<u8> {
        let home = home()?;
        let steps = Steps::new();
        let progress = &mut |text: &str| steps.begin(text);
        match self {
            Self::Init { cpus, memory, disk, shares, no_network, reach } => {
                let mut options = machine_options(&steps)?;
                options.cpus = cpus.unwrap_or(options.cpus);
                if let Some(warning) = cpus_warning(options.cpus, accelerator()) {
                    steps.say(&format!("dayfly: warning: {warning}"));
                }
                options.memory_mib = memory.0 >> 20;
                options.disk_bytes = disk.0;
                options.shares = shares;
                options.network = !no_network;
                options.daemon_arguments = daemon_arguments(&reach);
                let machine = Machine::init(&home, &options, progress)?;
                steps.end();
                output::line(machine.folder().display())?;
            }
            Self::Start => {
                let machine = use_machine(&home, &steps)?;
                output::line(machine.api_socket().display())?;
            }
            Self::Restart { force } => {
                let machine = restart_machine(&home, &steps, force)?;
                output::line(machine.api_socket().display())?;
            }
            Self::Stop => match Machine::open(&home)?.stop(STOP, progress)? {
                Stopped::WasStopped => steps.say("dayfly: the machine did not run"),
                Stopped::Clean => {}
                Stopped::Killed => {
                    steps.say("dayfly: the machine did not end in time and was killed")
                }
            },
            Self::Status => {
                let status = Machine::open(&home)?.status()?;
                output::json(&status)?;
                // As in systemctl, exit code 3 means that it does not run.
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

/// The arguments of the machine's `dayflyd`.
fn daemon_arguments(reach: &[Ipv4Net]) -> Vec<String> {
    reach.iter().flat_map(|range| ["--reach".to_owned(), range.to_string()]).collect()
}

/// The machine, started if it does not run. A running machine is not restarted even if its programs
/// have changed, because its VMs would end with it.
fn running(home: &Path, steps: &Steps) -> Result<Machine> {
    if let Ok(machine) = Machine::open(home)
        && machine.status().is_ok_and(|status| status.state == State::Running)
    {
        return Ok(machine);
    }
    use_machine(home, steps)
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_are_given_to_the_machines_daemon() {
        let reach = ["10.1.0.0/16", "192.168.7.0/24"].map(|range| range.parse().unwrap());
        let arguments = daemon_arguments(&reach);
        assert_eq!(arguments, ["--reach", "10.1.0.0/16", "--reach", "192.168.7.0/24"]);
        assert!(daemon_arguments(&[]).is_empty());
    }
}
