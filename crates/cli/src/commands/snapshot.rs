//! `dayfly snapshot`: makes a snapshot of a VM.

use crate::progress::Steps;
use crate::{artefacts, connect, output};
use anyhow::Result;
use dayfly_api::types::SnapshotRequest;
use dayfly_units::Name;

/// Arguments of `dayfly snapshot`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The VM, by id or name; it keeps running afterwards
    vm: String,
    /// Name of the new snapshot
    #[arg(short = 't', long = "tag", value_name = "NAME")]
    name: Name,
}

impl Args {
    pub async fn run(self) -> Result<()> {
        let client = connect::client().await?;
        let steps = Steps::new();
        let stream = client.snapshot_vm(&self.vm, &SnapshotRequest { name: self.name }).await?;
        let snapshot = artefacts::watch(stream, &steps).await?;
        drop(steps);
        output::line(snapshot.name)
    }
}
