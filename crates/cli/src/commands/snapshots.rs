//! `dayfly snapshots`: lists snapshots. The subcommands `ls`, `inspect` and `rm` work as for
//! images.

use super::signals::each;
use crate::connect;
use crate::output::{self, ListArgs, ago};
use anyhow::Result;
use clap::Subcommand;
use dayfly_api::client::Client;
use dayfly_api::types::{Snapshot, SnapshotUse};
use dayfly_units::{Bytes, Name};
use serde::Serialize;

/// Arguments of `dayfly snapshots`.
#[derive(Debug, clap::Args)]
#[command(args_conflicts_with_subcommands = true)]
pub struct Args {
    #[command(flatten)]
    list: ListArgs,
    #[command(subcommand)]
    command: Option<Command>,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// List snapshots
    Ls(ListArgs),
    /// Show a snapshot as JSON
    Inspect {
        /// Name of the snapshot
        name: Name,
    },
    /// Remove snapshots that nothing uses
    Rm {
        /// Names of the snapshots
        #[arg(required = true)]
        names: Vec<Name>,
    },
}

impl Args {
    pub async fn run(self) -> Result<u8> {
        match self.command.unwrap_or(Command::Ls(self.list)) {
            Command::Ls(list) => ls(list).await.map(|()| 0),
            Command::Inspect { name } => {
                let client = connect::client().await?;
                show(&client, client.snapshot(&name).await?).await.map(|()| 0)
            }
            Command::Rm { names } => {
                each(&names, async |client, name| client.remove_snapshot(name).await).await
            }
        }
    }
}

/// A snapshot with its use of the store.
#[derive(Debug, Serialize)]
struct Shown {
    #[serde(flatten)]
    snapshot: Snapshot,
    store: Option<SnapshotUse>,
}

/// Prints a snapshot as JSON.
pub(super) async fn show(client: &Client, snapshot: Snapshot) -> Result<()> {
    let usage = client.store_usage().await?;
    let store = usage.snapshots.into_iter().find(|used| used.name == snapshot.name);
    output::json(&Shown { snapshot, store })
}

async fn ls(list: ListArgs) -> Result<()> {
    let snapshots = connect::client().await?.snapshots().await?;
    let header = [
        "NAME", "IMAGE", "KERNEL", "PARENT", "CPUS", "MEMORY", "STORED", "LAYERS", "RESIDENT",
        "SHARED", "CREATED",
    ];
    output::list(
        list,
        &snapshots,
        header,
        |s| s.name.to_string(),
        |s| {
            [
                s.name.to_string(),
                s.image.to_string(),
                s.kernel.to_string(),
                s.parent.as_ref().map_or("-".into(), Name::to_string),
                s.vcpus.to_string(),
                Bytes(s.memory_bytes).to_string(),
                if s.pending {
                    "soon".to_owned()
                } else {
                    Bytes(s.memory_stored_bytes.saturating_add(s.layers_stored_bytes)).to_string()
                },
                s.layers.len().to_string(),
                s.resident.as_ref().map_or("-".into(), |r| Bytes(r.own_bytes).to_string()),
                s.resident.as_ref().map_or("-".into(), |r| Bytes(r.shared_bytes).to_string()),
                ago(s.created_unix_ms),
            ]
        },
    )
}
