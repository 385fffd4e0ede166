//! `dayfly load`: images of an archive.

use crate::progress::Steps;
use crate::references::{Record, References};
use crate::{artefacts, connect, output, pulling};
use anyhow::{Context, Result, bail};
use dayfly_api::client::Client;
use dayfly_api::types::Image;
use dayfly_image::{BuildOptions, Limits, Listed, Listing};
use dayfly_registry::Reference;
use std::io::IsTerminal;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Arguments of `dayfly load`.
#[derive(Debug, clap::Args)]
#[command(after_help = "The archive is one of docker save, or an OCI layout in a tar; it may be \
                  compressed with gzip, zstd or xz. Each image gets the references that the \
                  archive has for it. Of an image for several platforms, the best one for this \
                  host's CPUs is taken.")]
pub struct Args {
    /// The archive; -: standard input
    #[arg(short, long, value_name = "FILE", default_value = "-")]
    input: PathBuf,
}

impl Args {
    pub async fn run(self) -> Result<()> {
        if self.input == Path::new("-") && std::io::stdin().is_terminal() {
            bail!("standard input is a terminal: name an archive with -i FILE");
        }
        let client = connect::client().await?;
        let steps = Arc::new(Steps::new());
        let (input, shown) = (self.input, Arc::clone(&steps));
        let listing = tokio::task::spawn_blocking(move || {
            Listing::open(&input, None, Limits::default(), &mut |step| {
                shown.begin(step.step);
            })
        });
        let listing = listing.await??;
        let cpu_level = client.info().await?.cpu_level;
        for listed in &listing.images {
            let options = BuildOptions { cpu_level, ..BuildOptions::default() };
            let what = || {
                let name = listed.names.first().unwrap_or(&listed.digest);
                format!("image {:?} of the archive", name.chars().take(100).collect::<String>())
            };
            let lines = load(&client, &listing, listed, options, &steps).await;
            // Printed now, because an error of a later image must not hide what is stored.
            lines.with_context(what)?.iter().try_for_each(output::line)?;
        }
        Ok(())
    }
}

/// Stores an image, unless it is there, and records its references. Returns a line for each
/// reference, or one with its name in the store.
async fn load(
    client: &Client,
    listing: &Listing,
    listed: &Listed,
    options: BuildOptions,
    steps: &Arc<Steps>,
) -> Result<Vec<String>> {
    let references = listed.names.iter().filter_map(|name| reference(name));
    let references: Vec<Reference> = references.collect();
    let stem = references.first().map_or("image", |r| r.path());
    let name = pulling::named_by(stem, &listed.digest, pulling::DIGITS[0])?;
    let image = match pulling::there(client, &name).await? {
        Some(image) => image,
        None => {
            let source = listing.source(listed);
            artefacts::build_image(client, source, options, &name, steps).await?
        }
    };
    steps.end();
    let Image { name, digest: disk, .. } = image;
    let record = Record { image: name.clone(), disk, digest: None, manifest: None };
    References::change(|all| {
        for reference in &references {
            all.set(reference, record.clone());
        }
    })?;
    if references.is_empty() {
        return Ok(vec![format!("Loaded image: {name}")]);
    }
    Ok(references.iter().map(|r| format!("Loaded image: {}", r.familiar())).collect())
}

/// The name as a reference. A bare tag, which an OCI layout may have, is none.
fn reference(name: &str) -> Option<Reference> {
    let reference = name.contains(['/', ':']).then(|| name.parse::<Reference>().ok()).flatten();
    reference.filter(|reference| reference.digest().is_none())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_archives_are_references_unless_they_are_bare_tags() {
        let familiar = |name: &str| reference(name).map(|r| r.familiar());
        assert_eq!(familiar("docker.io/library/app:1").as_deref(), Some("app:1"));
        assert_eq!(familiar("app:1").as_deref(), Some("app:1"));
        for none in ["latest", "1.0", "", "a b:1", "\u{1b}[2J/x:1"] {
            assert_eq!(familiar(none), None, "{none:?}");
        }
    }
}
