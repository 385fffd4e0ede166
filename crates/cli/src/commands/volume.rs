//! `dayfly volume`: manages named volumes.

use super::signals::each;
use crate::connect;
use crate::output::{self, ListArgs, ago};
use anyhow::Result;
use clap::Subcommand;
use dayfly_units::Name;

/// Subcommands of `dayfly volume`.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Make a volume, unless it is there; prints its name
    Create {
        /// Name of the volume
        name: Name,
    },
    /// List your volumes
    Ls(List),
    /// Show a volume as JSON
    Inspect {
        /// Name of the volume
        name: Name,
    },
    /// Remove volumes with their files; refused while a VM has them, also one that has ended
    Rm {
        /// Names of the volumes
        #[arg(required = true)]
        names: Vec<Name>,
    },
}

/// Arguments of `dayfly volume ls`.
#[derive(Debug, clap::Args)]
pub struct List {
    #[command(flatten)]
    list: ListArgs,
    /// Only volumes whose name has this part: name=PART; may be repeated
    #[arg(short, long, value_name = "KEY=VALUE", value_parser = filter)]
    filter: Vec<String>,
}

/// The value of a filter by name.
fn filter(text: &str) -> Result<String, String> {
    match text.split_once('=') {
        Some(("name", part)) if !part.is_empty() => Ok(part.to_owned()),
        _ => Err(format!("expected name=PART, got {text:?}")),
    }
}

impl Command {
    pub async fn run(self) -> Result<u8> {
        match self {
            Self::Create { name } => {
                let volume = connect::client().await?.create_volume(&name).await?;
                output::line(volume.name).map(|()| 0)
            }
            Self::Ls(list) => ls(list).await.map(|()| 0),
            Self::Inspect { name } => {
                let volume = connect::client().await?.volume(&name).await?;
                output::json(&volume).map(|()| 0)
            }
            Self::Rm { names } => {
                each(&names, async |client, name| client.remove_volume(name).await).await
            }
        }
    }
}

async fn ls(List { list, filter }: List) -> Result<()> {
    let volumes = connect::client().await?.volumes(&filter).await?;
    let header = ["NAME", "VMS", "CREATED"];
    output::list(
        list,
        &volumes,
        header,
        |v| v.name.to_string(),
        |v| [v.name.to_string(), v.vms.len().to_string(), ago(v.created_unix_ms)],
    )
}
