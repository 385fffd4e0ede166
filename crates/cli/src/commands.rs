//! The commands, one file each, with docker's command-line grammar.

mod bake;
mod colours;
mod connect;
mod cp;
mod create;
mod doctor;
mod events;
mod exec;
mod fork;
mod image;
mod inspect;
mod kernel;
mod limits_arg;
mod load;
mod logs;
mod machine;
mod network;
mod options;
mod port;
mod program;
mod ps;
mod ps_cells;
mod ps_filter;
mod ps_format;
mod pull;
mod record;
mod rm;
mod run;
mod save;
mod signals;
mod snapshot;
mod snapshots;
mod stats;
mod store;
mod version;
mod volume;
mod volumes_arg;

use anyhow::Result;
use clap::{CommandFactory, Parser, Subcommand};
use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;

/// Bake a virtual machine once; start copies of it in milliseconds
#[derive(Debug, Parser)]
#[command(
    name = "dayfly",
    version,
    propagate_version = true,
    after_help = "The daemon is found by itself: DAYFLY_HOST=unix:///path if it is set; else this \
                  host's own, where KVM can run Linux; else one in the machine (dayfly machine). \
                  It is started when it does not run.\n\
                  Exit codes: the program's own; 125: dayfly failed; 126: the program cannot be \
                  run; 127: it is not there; 128+n: signal n ended it."
)]
pub struct Args {
    /// The command to run.
    #[command(subcommand)]
    pub command: Command,
}

/// The commands of `dayfly`.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Build, pull, list, show and remove images
    #[command(subcommand)]
    Image(image::Command),
    /// Pull an image from a registry
    Pull(pull::Pull),
    /// Load the images of an archive that docker, podman, buildah or skopeo saved
    Load(load::Args),
    /// Save images as an archive in docker's form, which skopeo reads too
    Save(save::Args),
    /// List images (as dayfly image ls)
    Images(crate::output::ListArgs),
    /// Give an image a further reference
    Tag(pull::Tag),
    /// Remove images
    Rmi(pull::Remove),
    /// Make, list, show and remove named volumes
    #[command(subcommand)]
    Volume(volume::Command),
    /// Fetch, list and remove guest kernels
    #[command(subcommand)]
    Kernel(kernel::Command),
    /// Boot an image, warm it up, and make a snapshot of it
    Bake(bake::Args),
    /// Clone a snapshot or an image, run a program in it, and remove it
    Run(run::Args),
    /// Start a VM and leave it running; prints its id
    Create(create::Args),
    /// Clone a running VM, with its memory and disk as they are now; prints the clones' ids
    Fork(fork::Args),
    /// Run a program in a running VM
    Exec(exec::Args),
    /// List, wait for, signal, attach to and forget the detached programs of a VM
    #[command(subcommand)]
    Program(program::Command),
    /// Connect to a vsock port of a running VM
    Connect(connect::Args),
    /// List VMs
    Ps(ps::Args),
    /// Show what happens to VMs
    Events(events::Args),
    /// List the published ports of a VM
    Port(port::Args),
    /// Show the memory and CPU use of VMs; for one VM, its memory by colour
    Stats(stats::Args),
    /// Show a VM's console, or the output of a detached program in the VM
    Logs(logs::Args),
    /// Copy files and folders between this host and a VM
    Cp(cp::Args),
    /// Stop the vCPUs of VMs
    Pause(signals::Pause),
    /// Resume the vCPUs of VMs
    Unpause(signals::Unpause),
    /// Power VMs off by their guests, and kill those that do not in time
    Stop(signals::Stop),
    /// Boot VMs that have ended from their own disks
    Start(signals::Start),
    /// Stop VMs, and start them again
    Restart(signals::Restart),
    /// Kill VMs without a shutdown of the guest
    Kill(signals::Kill),
    /// Change the time to live of VMs
    Update(signals::Update),
    /// Wait until VMs have ended; prints how
    Wait(signals::Wait),
    /// Remove VMs
    Rm(rm::Args),
    /// Make a snapshot of a running VM
    Snapshot(snapshot::Args),
    /// List and remove snapshots
    Snapshots(snapshots::Args),
    /// Show what a snapshot's memory is used for, and draw a picture of it
    Colours(colours::Args),
    /// Record which memory a run of a clone touches, and compare it with the working set
    Record(record::Args),
    /// Show what the store holds, verify it, and remove unused data
    #[command(subcommand)]
    Store(store::Command),
    /// Show everything about a VM, a snapshot or an image, as JSON
    Inspect(inspect::Args),
    /// Check what this host can do, what is missing, and what crashes left behind
    Doctor(doctor::Args),
    /// Manage the Linux host under QEMU, for hosts whose KVM cannot run Linux
    #[command(subcommand)]
    Machine(machine::Command),
    /// Print the completion script of a shell
    Completions {
        /// Name of the shell
        shell: clap_complete::Shell,
    },
    /// Write the manual pages of all commands into a folder; `make install` runs this
    #[command(hide = true)]
    Man {
        /// The folder, which exists
        folder: PathBuf,
    },
    /// Show the versions of dayfly and of the daemon
    Version(version::Args),
    /// Started by `dayfly machine start`: supervises the machine's processes
    #[command(hide = true)]
    MachineSupervise(machine::Supervise),
    /// Started by `dayfly run` and `create`: offers folders of this host to the machine
    #[command(hide = true)]
    VolumeKeep,
}

impl Command {
    /// Runs the commands that must not have the runtime's threads. Returns `None` for every other
    /// command.
    #[must_use]
    pub fn before_runtime(&self) -> Option<ExitCode> {
        match self {
            Self::MachineSupervise(args) => Some(args.run()),
            Self::VolumeKeep => Some(crate::offers::keep()),
            Self::Completions { shell } => {
                // Not to standard output, because the generator panics if that is closed.
                let mut script = Vec::new();
                clap_complete::generate(*shell, &mut Args::command(), "dayfly", &mut script);
                // A reader that closed the pipe, such as head(1), has what it wanted.
                let _ = std::io::stdout().write_all(&script);
                Some(ExitCode::SUCCESS)
            }
            Self::Man { folder } => {
                let written = clap_mangen::generate_to(Args::command(), folder);
                Some(written.map_or_else(
                    |e| {
                        eprintln!("dayfly: writing manual pages to {}: {e}", folder.display());
                        ExitCode::from(125)
                    },
                    |()| ExitCode::SUCCESS,
                ))
            }
            _ => None,
        }
    }

    /// Runs the command and returns the exit code.
    ///
    /// # Errors
    /// Any error, for [`crate::failure::report`].
    pub async fn run(self) -> Result<u8> {
        match self {
            Self::Image(command) => command.run().await,
            Self::Pull(args) => args.run().await.map(|()| 0),
            Self::Load(args) => args.run().await.map(|()| 0),
            Self::Save(args) => args.run().await.map(|()| 0),
            Self::Images(list) => image::ls(list).await.map(|()| 0),
            Self::Tag(args) => args.run().await.map(|()| 0),
            Self::Rmi(args) => args.run().await,
            Self::Kernel(command) => command.run().await,
            Self::Volume(command) => command.run().await,
            Self::Bake(args) => args.run().await.map(|()| 0),
            Self::Run(args) => args.run().await,
            Self::Create(args) => args.run().await.map(|()| 0),
            Self::Fork(args) => args.run().await.map(|()| 0),
            Self::Exec(args) => args.run().await,
            Self::Program(command) => command.run().await,
            Self::Connect(args) => args.run().await.map(|()| 0),
            Self::Ps(args) => args.run().await.map(|()| 0),
            Self::Events(args) => args.run().await.map(|()| 0),
            Self::Port(args) => args.run().await,
            Self::Stats(args) => args.run().await.map(|()| 0),
            Self::Logs(args) => args.run().await.map(|()| 0),
            Self::Cp(args) => args.run().await.map(|()| 0),
            Self::Pause(args) => args.run().await,
            Self::Unpause(args) => args.run().await,
            Self::Kill(args) => args.run().await,
            Self::Stop(args) => args.run().await,
            Self::Start(args) => args.run().await,
            Self::Restart(args) => args.run().await,
            Self::Wait(args) => args.run().await,
            Self::Update(args) => args.run().await,
            Self::Rm(args) => args.run().await,
            Self::Snapshot(args) => args.run().await.map(|()| 0),
            Self::Snapshots(args) => args.run().await,
            Self::Colours(args) => args.run().await.map(|()| 0),
            Self::Record(args) => args.run().await.map(|()| 0),
            Self::Store(command) => command.run().await,
            Self::Inspect(args) => args.run().await.map(|()| 0),
            Self::Doctor(args) => args.run().await,
            Self::Machine(command) => command.run().await,
            Self::Version(args) => args.run().await.map(|()| 0),
            Self::Completions { .. }
            | Self::Man { .. }
            | Self::MachineSupervise(_)
            | Self::VolumeKeep => {
                unreachable!("run by before_runtime")
            }
        }
    }
}

#[cfg(test)]
mod tests;
