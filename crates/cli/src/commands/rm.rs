//! `dayfly rm`: removes VMs.

use super::signals::each;
use anyhow::Result;

/// Arguments of `dayfly rm`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Remove VMs that have not exited, too
    #[arg(short, long)]
    force: bool,
    /// VMs, by id or name
    #[arg(required = true)]
    vms: Vec<String>,
}

impl Args {
    pub async fn run(self) -> Result<u8> {
        each(&self.vms, async |client, vm| client.remove_vm(vm, self.force).await).await
    }
}
