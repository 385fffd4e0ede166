//! `dayfly kernel`: manages guest kernels.

use super::signals::each;
use crate::output::{self, ListArgs, ago};
use crate::progress::Steps;
use crate::{artefacts, connect};
use anyhow::Result;
use clap::Subcommand;
use dayfly_units::Name;
use std::path::PathBuf;

/// Subcommands of `dayfly kernel`.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Fetch a cloud kernel of Debian and add dayfly's agent; prints its name
    Fetch {
        /// Version, such as 6.12 or 6.1
        #[arg(value_name = "VERSION")]
        release: String,
        /// Name of the stored kernel [default: the version]
        #[arg(long)]
        name: Option<Name>,
    },
    /// Add another kernel; prints its name
    Add {
        /// An unpacked linux-image package, or a vmlinux or vmlinuz that has everything built in
        #[arg(long, value_name = "PATH")]
        from: PathBuf,
        /// Name of the stored kernel
        name: Name,
    },
    /// List kernels
    Ls(ListArgs),
    /// Remove kernels that nothing uses
    Rm {
        /// Names of the kernels
        #[arg(required = true)]
        names: Vec<Name>,
    },
}

impl Command {
    pub async fn run(self) -> Result<u8> {
        match self {
            Self::Fetch { release, name } => {
                let name = name.map_or_else(|| release.parse(), Ok)?;
                let (client, steps) = (connect::client().await?, Steps::new());
                let kernel = artefacts::fetch_kernel(&client, &release, &name, &steps).await?;
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
            Self::Rm { names } => {
                each(&names, async |client, name| client.remove_kernel(name).await).await
            }
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
