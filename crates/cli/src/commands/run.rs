//! `dayfly run`: clones a snapshot, runs a program, and removes the clone.

use super::network::NetworkArgs;
use super::options::ExecArgs;
use crate::{connect, session};
use anyhow::Result;
use dayfly_api::types::{CreateRequest, RunRequest, Source};
use dayfly_units::{Name, VmName};
use std::collections::BTreeMap;

/// Arguments of `dayfly run`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Name and hostname of the VM [default: its id]
    #[arg(long)]
    name: Option<VmName>,
    /// Keep the VM after the program ends
    #[arg(long)]
    keep: bool,
    #[command(flatten)]
    network: NetworkArgs,
    #[command(flatten)]
    exec: ExecArgs,
    /// Snapshot to clone (dayfly snapshots)
    snapshot: Name,
    /// The program and its arguments
    #[arg(
        trailing_var_arg = true,
        allow_hyphen_values = true,
        required = true,
        value_name = "PROGRAM"
    )]
    argv: Vec<String>,
}

impl Args {
    pub async fn run(self) -> Result<u8> {
        let exec = self.exec.spec(self.argv, false)?;
        let source = Source::Snapshot(self.snapshot);
        let create = CreateRequest {
            source,
            name: self.name,
            labels: BTreeMap::new(),
            forks: 0,
            network: self.network.request(),
        };
        let client = connect::client().await?;
        let running = client.run(&RunRequest { create, exec, keep: self.keep }).await?;
        if self.keep {
            eprintln!(
                "dayfly: VM {} ({}) stays; `dayfly rm -f {0}` removes it",
                running.vm.name, running.vm.id
            );
        }
        session::attach(running, self.exec.attach()).await
    }
}
