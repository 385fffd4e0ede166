//! `dayfly run`: clones a snapshot or an image, runs a program, and removes the clone.

use super::create::warn_of_cpus;
use super::limits_arg::LimitArgs;
use super::network::NetworkArgs;
use super::options::{ExecArgs, LifetimeArgs, duration, label};
use super::volumes_arg::VolumeArgs;
use crate::image_source::{first_choice, snapshot_for};
use crate::progress::Steps;
use crate::pulling::When;
use crate::references::ImageArg;
use crate::{connect, output, session};
use anyhow::Result;
use dayfly_api::types::{CreateRequest, RunRequest, Source};
use dayfly_units::VmName;
use std::sync::Arc;
use std::time::Duration;

/// Arguments of `dayfly run`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Name and hostname of the VM [default: its id]
    #[arg(long)]
    name: Option<VmName>,
    /// Keep the VM after the program ends; without this, the daemon removes the VM as soon as this
    /// command ends, however it ends
    #[arg(long)]
    keep: bool,
    /// Leave the program running and print the VM's id; dayfly logs VM shows its output. The VM
    /// stays until it is removed, or for --ttl; with --rm, until the program has ended
    #[arg(short, long, conflicts_with_all = ["keep", "interactive", "tty"])]
    detach: bool,
    /// Add the label NAME=VALUE; may be repeated
    #[arg(short, long, value_parser = label)]
    label: Vec<(String, String)>,
    /// End the VM, and the program with it, after this time, such as 90s, 10m, 8h or 7d
    #[arg(long, value_name = "TIME", value_parser = duration)]
    ttl: Option<Duration>,
    /// Remove the VM when the program has ended, which is the default
    #[arg(long, conflicts_with = "keep")]
    rm: bool,
    #[command(flatten)]
    network: NetworkArgs,
    #[command(flatten)]
    volumes: VolumeArgs,
    #[command(flatten)]
    limits: LimitArgs,
    /// Number of vCPUs, from those of the snapshot to 16 [default: those of the snapshot]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u8).range(1..=16))]
    cpus: Option<u8>,
    #[command(flatten)]
    exec: ExecArgs,
    /// When to pull an image of a registry
    #[arg(long, value_enum, default_value_t)]
    pull: When,
    /// Snapshot to clone (dayfly snapshots); or an image (dayfly image ls, or of a registry), of
    /// which the first use makes a snapshot
    snapshot: ImageArg,
    /// Run this instead of the image's entrypoint, and ignore the image's command; "" runs only
    /// what follows the snapshot
    #[arg(long, value_name = "PROGRAM")]
    entrypoint: Option<String>,
    /// The program and its arguments, or arguments for the image's entrypoint [default: the image's
    /// command]
    #[arg(trailing_var_arg = true, allow_hyphen_values = true, value_name = "PROGRAM")]
    argv: Vec<String>,
}

impl Args {
    pub async fn run(self) -> Result<u8> {
        let exec = self.exec.spec(self.argv, self.detach)?;
        let client = connect::client().await?;
        let steps = Arc::new(Steps::new());
        let name = first_choice(&client, &self.snapshot, self.pull, &steps).await?;
        steps.end();
        let source = Source::Snapshot(name);
        let create = CreateRequest {
            source,
            name: self.name,
            labels: self.label.into_iter().collect(),
            forks: 0,
            network: self.network.request(),
            lifetime: LifetimeArgs { ttl: self.ttl, rm: self.detach && self.rm }.request(),
            volumes: self.volumes.request().await?,
            limits: self.limits.request(),
            vcpus: self.cpus,
        };
        let entrypoint = self.entrypoint.map(|program| match program.as_str() {
            "" => Vec::new(),
            _ => vec![program],
        });
        let keep = self.keep || self.detach;
        let mut request = RunRequest { create, exec, entrypoint, keep };
        let running = match client.run(&request).await {
            Ok(running) => running,
            Err(refused) => {
                let found = snapshot_for(&client, &self.snapshot, &refused, self.pull, &steps);
                let found = found.await?;
                steps.end();
                request.create.source = Source::Snapshot(found.ok_or(refused)?);
                client.run(&request).await?
            }
        };
        warn_of_cpus(&running.vm);
        if self.detach {
            return output::line(running.vm.id).map(|()| 0);
        }
        if self.keep {
            eprintln!(
                "dayfly: VM {} ({}) stays; `dayfly rm -f {0}` removes it",
                running.vm.name, running.vm.id
            );
        }
        session::attach(running, self.exec.attach()).await
    }
}
