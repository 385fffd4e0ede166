//! `dayfly image`: manages root disks.

use super::pull;
use crate::output::{self, Format, ListArgs, ago};
use crate::progress::Steps;
use crate::references::{ImageArg, References, manifest_of};
use crate::{artefacts, connect, pulling};
use anyhow::{Context, Result, bail};
use clap::Subcommand;
use dayfly_api::types::Image;
use dayfly_image::{BuildError, BuildOptions, Debian, Pull, Size, Source};
use dayfly_registry::{Reference, Registry};
use dayfly_units::{Bytes, MODULES_SOURCE, Name};
use serde::Serialize;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// What a source of a registry begins with, as in skopeo.
const DOCKER: &str = "docker://";
/// Characters of a digest in a table: `sha256:` and 12 digits, as in docker.
const SHORT_DIGEST: usize = 19;

/// Subcommands of `dayfly image`.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Build a root disk; prints its name
    Build(Build),
    /// List images
    Ls(ListArgs),
    /// Pull an image from a registry (as dayfly pull)
    Pull(pull::Pull),
    /// Give an image a further reference (as dayfly tag)
    Tag(pull::Tag),
    /// Show an image as JSON
    Inspect {
        /// The image, by name or reference
        image: ImageArg,
    },
    /// Remove images that nothing uses (as dayfly rmi)
    Rm(pull::Remove),
}

/// Arguments of `dayfly image build`.
#[derive(Debug, clap::Args)]
#[command(group(clap::ArgGroup::new("origin").required(true).args(["from", "debian"])))]
pub struct Build {
    /// A folder, an archive of `docker save`, or an OCI layout; `-`: an archive from standard
    /// input; docker://IMAGE: an image of a registry
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
            Self::Pull(args) => args.run().await.map(|()| 0),
            Self::Tag(args) => args.run().await.map(|()| 0),
            Self::Inspect { image } => inspect(&image).await.map(|()| 0),
            Self::Rm(args) => args.run().await,
        }
    }
}

impl Build {
    async fn run(self) -> Result<()> {
        let reference = self.from.as_ref().and_then(|from| from.to_str()?.strip_prefix(DOCKER));
        let reference = reference.map(str::parse).transpose()?;
        if reference.is_some() && self.image.is_some() {
            bail!("--image chooses from an archive; write {DOCKER}NAME@DIGEST");
        }
        let source = match (self.from, self.debian) {
            (Some(_), _) if reference.is_some() => None,
            (Some(path), _) => Some(detected(&path, self.image)?),
            (None, Some(suite)) => {
                Some(Source::Debian(Debian { suite, include: self.include, refresh: self.refresh }))
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
        let image = match (source, &reference) {
            (Some(source), _) => {
                artefacts::build_image(&client, source, options, &self.name, &steps).await?
            }
            (None, Some(reference)) => {
                let registry = Registry::of_the_user()?;
                let pull = Pull::begin(&registry, reference, cpu_level, None).await?;
                pulling::built(&client, &pull, options, &self.name, &steps).await?
            }
            (None, None) => bail!("expected --from or --debian"),
        };
        drop(steps);
        output::line(image.name)
    }
}

/// The source at `path`. If there is nothing, the user may have meant an image of a registry.
fn detected(path: &Path, image: Option<String>) -> Result<Source> {
    let found = Source::detect(path, image);
    let is_absent = matches!(&found, Err(BuildError::Io { source, .. })
        if source.kind() == std::io::ErrorKind::NotFound);
    let reference = path.to_str().and_then(|text| text.parse::<Reference>().ok());
    match reference.filter(|_| is_absent) {
        Some(reference) => found.with_context(|| {
            format!("for an image of a registry, use --from {DOCKER}{}", reference.familiar())
        }),
        None => Ok(found?),
    }
}

async fn inspect(arg: &ImageArg) -> Result<()> {
    let client = connect::client().await?;
    let image = pulling::local(&client, arg).await?;
    let image =
        image.with_context(|| format!("no image named {arg}; `dayfly image ls` lists them"))?;
    output::json(&Known::new(image, &References::load()?))
}

/// An image with its references.
#[derive(Debug, Serialize)]
pub struct Known {
    #[serde(flatten)]
    image: Image,
    /// In the canonical form.
    references: Vec<String>,
    /// What registries have for the references.
    digests: Vec<String>,
}

impl Known {
    /// Adds what the user's references say about `image`.
    pub fn new(image: Image, all: &References) -> Self {
        let (mut references, mut digests) = (Vec::new(), Vec::new());
        for (reference, record) in all.of(&image) {
            references.push(reference.to_string());
            digests.extend(record.digest.clone());
        }
        digests.dedup();
        Self { image, references, digests }
    }
}

/// Lists images: in a table one line for each reference, as docker does.
pub async fn ls(list: ListArgs) -> Result<()> {
    let mut images = connect::client().await?.images().await?;
    // The modules of a kernel are no root disk. They are removed when their kernel is.
    images.retain(|image| !image.source.starts_with(MODULES_SOURCE));
    let all = References::load()?;
    if list.quiet || list.format == Format::Json {
        let images: Vec<Known> = images.into_iter().map(|i| Known::new(i, &all)).collect();
        return output::list(list, &images, [], |known| known.image.name.to_string(), |_| []);
    }
    let header = ["NAME", "DIGEST", "SIZE", "STORED", "SOURCE", "CREATED"];
    let rows = images.iter().flat_map(|image| {
        let mut names: Vec<(String, Option<String>)> =
            all.of(image).map(|(r, record)| (r.familiar(), record.digest.clone())).collect();
        if names.is_empty() {
            names.push((image.name.to_string(), manifest_of(image)));
        }
        names.into_iter().map(move |(name, digest)| row(image, name, digest))
    });
    output::emit(&output::table(header, rows))
}

fn row(image: &Image, name: String, digest: Option<String>) -> [String; 6] {
    let pulled = manifest_of(image).is_some();
    [
        // A digest has its own column.
        name.split('@').next().unwrap_or_default().to_owned(),
        digest.map_or_else(|| "-".to_owned(), |digest| digest.chars().take(SHORT_DIGEST).collect()),
        Bytes(image.size_bytes).to_string(),
        Bytes(image.stored_bytes).to_string(),
        if pulled { "registry".to_owned() } else { image.source.clone() },
        ago(image.created_unix_ms),
    ]
}
