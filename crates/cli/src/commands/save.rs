//! `dayfly save`: images as an archive for docker.

use crate::progress::Steps;
use crate::references::{ImageArg, References};
use crate::{artefacts, connect, output, pulling};
use anyhow::{Context, Result, bail};
use dayfly_api::client::Client;
use dayfly_api::types::Image;
use dayfly_image::save::{self, SavedImage};
use dayfly_units::MODULES_SOURCE;
use std::fs::{File, Permissions};
use std::io::{self, BufWriter, IsTerminal, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Bytes of a write.
const BUFFER_BYTES: usize = 1 << 20;

/// Arguments of `dayfly save`.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "skopeo and dayfly load read the archive, which has the form of docker save. \
                  An image is saved with one layer, because a root disk has none. An image that \
                  is given by a reference has that name in the archive; one given by its name in \
                  the store, or by a digest, has all its references that have tags."
)]
pub struct Args {
    /// Write to this file instead of standard output
    #[arg(short, long, value_name = "FILE")]
    output: Option<PathBuf>,
    /// The images
    #[arg(required = true)]
    images: Vec<ImageArg>,
}

impl Args {
    pub async fn run(self) -> Result<()> {
        if self.output.is_none() && io::stdout().is_terminal() {
            bail!("standard output is a terminal: name a file with -o FILE, or redirect it");
        }
        let client = connect::client().await?;
        let steps = Arc::new(Steps::new());
        let mut images = Vec::new();
        for (image, names) in wanted(&client, &self.images).await? {
            steps.begin(format!("fetching image {}", image.name));
            images.push(SavedImage {
                disk: artefacts::download_disk(&client, &image, &steps).await?,
                names,
                created: output::rfc3339(image.created_unix_ms),
                comment: image.source,
                config: image.config,
            });
        }
        let (shown, to) = (Arc::clone(&steps), self.output);
        let writing = tokio::task::spawn_blocking(move || write(&images, to.as_deref(), &shown));
        let written = writing.await?;
        steps.end();
        written
    }
}

/// The images of the arguments, each once, with the names that the archive gives them.
async fn wanted(client: &Client, arguments: &[ImageArg]) -> Result<Vec<(Image, Vec<String>)>> {
    let known = References::load()?;
    let mut all: Vec<(Image, Vec<String>)> = Vec::new();
    for argument in arguments {
        let image = pulling::local(client, argument).await?;
        let image = image
            .with_context(|| format!("no image named {argument}; `dayfly image ls` lists them"))?;
        if image.source.starts_with(MODULES_SOURCE) {
            bail!("{argument} has the modules of a kernel; expected a root disk");
        }
        let by_name = argument.name.as_ref() == Some(&image.name);
        let mut names: Vec<String> = match &argument.reference {
            Some(reference) if !by_name && reference.digest().is_none() => {
                vec![reference.to_string()]
            }
            _ => known.of(&image).map(|(reference, _)| reference.to_string()).collect(),
        };
        // docker's archives have no names with digests.
        names.retain(|name| !name.contains('@'));
        match all.iter_mut().find(|(other, _)| other.name == image.name) {
            Some((_, there)) => {
                names.retain(|name| !there.contains(name));
                there.extend(names);
            }
            None => all.push((image, names)),
        }
    }
    Ok(all)
}

/// Writes the archive to standard output, or to a file that appears when it is whole.
fn write(images: &[SavedImage], to: Option<&Path>, steps: &Steps) -> Result<()> {
    let mut step = |text| steps.begin(text);
    let Some(path) = to else {
        return to_end(images, io::stdout().lock(), &mut step).context("standard output");
    };
    let context = || path.display().to_string();
    // A device or a pipe is written in place.
    if std::fs::metadata(path).is_ok_and(|there| !there.is_file()) {
        let file = File::options().write(true).open(path).with_context(context)?;
        return to_end(images, file, &mut step).with_context(context);
    }
    let folder = path.parent().filter(|parent| !parent.as_os_str().is_empty());
    let mut new = tempfile::Builder::new();
    // As of any new file; the user's mask applies.
    let new = new.permissions(Permissions::from_mode(0o666)).prefix(".dayfly-save-");
    let mut file = new.tempfile_in(folder.unwrap_or(Path::new("."))).with_context(context)?;
    to_end(images, &mut file, &mut step).with_context(context)?;
    file.persist(path).with_context(context)?;
    Ok(())
}

fn to_end(
    images: &[SavedImage],
    out: impl Write,
    step: &mut dyn FnMut(String),
) -> Result<(), save::SaveError> {
    let mut out = BufWriter::with_capacity(BUFFER_BYTES, out);
    save::write(images, &mut out, step)?;
    Ok(out.flush()?)
}
