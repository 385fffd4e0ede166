//! `dayfly image`: manages root disks.

use super::signals::each;
use crate::output::{self, ListArgs, ago};
use crate::progress::Steps;
use crate::{artefacts, connect};
use anyhow::{Result, bail};
use clap::Subcommand;
use dayfly_image::{BuildOptions, Debian, Size, Source};
use dayfly_units::{Bytes, Name};
use std::path::PathBuf;
use std::sync::Arc;

/// Subcommands of `dayfly image`.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Build a root disk; prints its name
    Build(Build),
    /// List images
    Ls(ListArgs),
    /// Show an image as JSON
    Inspect {
        /// Name of the image
        name: Name,
    },
    /// Remove images that nothing uses
    Rm {
        /// Names of the images
        #[arg(required = true)]
        names: Vec<Name>,
    },
}

/// Arguments of `dayfly image build`.
#[derive(Debug, clap::Args)]
#[command(group(clap::ArgGroup::new("origin").required(true).args(["from", "debian"])))]
pub struct Build {
    /// A folder, an archive of `docker save`, or an OCI layout; `-`: an archive from standard input
    #[arg(long, value_name = "PATH")]
    from: Option<PathBuf>,
    /// Bootstrap this Debian release, such as bookworm (with mmdebstrap)
    #[arg(long, value_name = "SUITE")]
    debian: Option<String>,
    /// Debian packages in addition to the essential ones
    #[arg(long, value_delimiter = ',', conflicts_with = "from", value_name = "PACKAGE,…")]
    include: Vec<String>,
    /// Image to take from an archive or layout that holds several
    #[arg(long, conflicts_with = "debian", value_name = "TAG")]
    image: Option<String>,
    /// Bootstrap again although the cache has the result
    #[arg(long, conflicts_with = "from")]
    refresh: bool,
    /// Size of the sparse disk [default: twice the content, at least 2G]
    #[arg(long, conflicts_with = "free")]
    size: Option<Bytes>,
    /// Free space of the disk in addition to the content
    #[arg(long)]
    free: Option<Bytes>,
    /// Name of the new image
    name: Name,
}

impl Command {
    pub async fn run(self) -> Result<u8> {
        match self {
            Self::Build(args) => args.run().await.map(|()| 0),
            Self::Ls(list) => ls(list).await.map(|()| 0),
            Self::Inspect { name } => {
                output::json(&connect::client().await?.image(&name).await?).map(|()| 0)
            }
            Self::Rm { names } => {
                each(&names, async |client, name| client.remove_image(name).await).await
            }
        }
    }
}

impl Build {
    async fn run(self) -> Result<()> {
        let source = match (self.from, self.debian) {
            (Some(path), _) => Source::detect(&path, self.image)?,
            (None, Some(suite)) => {
                Source::Debian(Debian { suite, include: self.include, refresh: self.refresh })
            }
            (None, None) => bail!("expected --from or --debian"),
        };
        let size = match (self.size, self.free) {
            (Some(total), _) => Size::Total(total),
            (None, Some(free)) => Size::Free(free),
            (None, None) => Size::Auto,
        };
        let client = connect::client().await?;
        // The name is checked before the build, because a build takes long.
        if client.image(&self.name).await.is_ok() {
            bail!(
                "image {}: there is one of this name; `dayfly image rm {0}` removes it",
                self.name
            );
        }
        let steps = Arc::new(Steps::new());
        let cpu_level = client.info().await?.cpu_level;
        let options = BuildOptions { size, cpu_level, ..BuildOptions::default() };
        let image = artefacts::build_image(&client, source, options, &self.name, &steps).await?;
        drop(steps);
        output::line(image.name)
    }
}

async fn ls(list: ListArgs) -> Result<()> {
    let images = connect::client().await?.images().await?;
    let header = ["NAME", "SIZE", "STORED", "SOURCE", "CREATED"];
    output::list(
        list,
        &images,
        header,
        |i| i.name.to_string(),
        |i| {
            [
                i.name.to_string(),
                Bytes(i.size_bytes).to_string(),
                Bytes(i.stored_bytes).to_string(),
                i.source.clone(),
                ago(i.created_unix_ms),
            ]
        },
    )
}
