//! `dayfly kernel`: what guests boot.

use super::signals::each;
use crate::output::{self, ListArgs, ago};
use crate::progress::Steps;
use crate::{artefacts, connect};
use anyhow::Result;
use clap::Subcommand;
use dayfly_units::Name;
use std::path::PathBuf;

/// Arguments of `dayfly kernel`.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Fetch a cloud kernel of Debian and give it dayfly's agent; prints its name
    Fetch {
        /// Version, such as 6.12 or 6.1
        version: String,
        /// Its name here [default: the version]
        #[arg(long)]
        name: Option<Name>,
    },
    /// Add a kernel of your own; prints its name
    Add {
        /// An unpacked linux-image package, or a vmlinux or vmlinuz that has everything built in
        #[arg(long, value_name = "PATH")]
        from: PathBuf,
        /// Its name here
        name: Name,
    },
    /// List kernels
    Ls(ListArgs),
    /// Remove kernels that nothing uses
    Rm {
        /// The kernels
        #[arg(required = true)]
        names: Vec<Name>,
    },
}

impl Command {
    pub async fn run(self) -> Result<u8> {
        match self {
            Self::Fetch { version, name } => {
                let name = name.map_or_else(|| version.parse(), Ok)?;
                let (client, steps) = (connect::client().await?, Steps::new());
                let kernel = artefacts::fetch_kernel(&client, &version, &name, &steps).await?;
                drop(steps);
                output::line(kernel.name).map(|()| 0)
            }
            Self::Add { from, name } => {
                let (client, steps) = (connect::client().await?, Steps::new());
                let kernel = artefacts::add_kernel(&client, from, &name, &steps).await?;
                drop(steps);
                output::line(kernel.name).map(|()| 0)
            }
            Self::Ls(list) => ls(list).await.map(|()| 0),
            Self::Rm { names } => each(&names, async |client, name| client.remove_kernel(name).await).await,
        }
    }
}

async fn ls(list: ListArgs) -> Result<()> {
    let kernels = connect::client().await?.kernels().await?;
    let header = ["NAME", "RELEASE", "CREATED"];
    output::list(
        list,
        &kernels,
        header,
        |k| k.name.to_string(),
        |k| [k.name.to_string(), k.release.clone(), ago(k.created_unix_ms)],
    )
}
