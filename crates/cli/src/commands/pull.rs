//! `dayfly pull`, `tag`, `rmi`: images of registries, by docker's references.

use crate::progress::Steps;
use crate::references::{ImageArg, Record, References, manifest_of};
use crate::{connect, failure, output, pulling};
use anyhow::{Context, Result, bail};
use dayfly_api::client::Client;
use dayfly_api::types::ErrorCode;
use dayfly_registry::Reference;
use std::sync::Arc;

/// Arguments of `dayfly pull`.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Credentials come from docker's config.json ($DOCKER_CONFIG or ~/.docker), also \
                  through its helpers. Mirrors and insecure registries are named in \
                  ~/.config/dayfly/registries.toml:\n  \
                  [registry.\"registry.lan:5000\"]\n  \
                  insecure = true\n\
                  Of an image for several platforms, the best one for this host's CPUs is taken."
)]
pub struct Pull {
    /// Print only the image's reference
    #[arg(short, long)]
    quiet: bool,
    /// The image, as [REGISTRY/]NAME[:TAG][@DIGEST], such as debian:12
    #[arg(value_name = "IMAGE")]
    image: Reference,
}

/// Arguments of `dayfly tag`.
#[derive(Debug, clap::Args)]
pub struct Tag {
    /// The image, by name or reference (dayfly image ls)
    source: ImageArg,
    /// The further reference, as [REGISTRY/]NAME[:TAG]
    target: Reference,
}

/// Arguments of `dayfly rmi`.
#[derive(Debug, clap::Args)]
pub struct Remove {
    /// Images, by name or reference; the last reference removes the image, unless a snapshot or a
    /// VM uses it
    #[arg(required = true, value_name = "IMAGE")]
    images: Vec<ImageArg>,
}

impl Pull {
    pub async fn run(self) -> Result<()> {
        let client = connect::client().await?;
        let steps = Arc::new(Steps::new());
        let pulled = pulling::pull(&client, &self.image, &steps).await?;
        drop(steps);
        if !self.quiet {
            let status =
                if pulled.is_new { "Downloaded newer image" } else { "Image is up to date" };
            eprintln!("Digest: {}\nStatus: {status} for {}", pulled.digest, self.image.familiar());
        }
        output::line(&self.image)
    }
}

impl Tag {
    pub async fn run(self) -> Result<()> {
        if self.target.digest().is_some() {
            bail!("{}: expected NAME[:TAG], got a digest, which only its content has", self.target);
        }
        let client = connect::client().await?;
        let image = pulling::local(&client, &self.source).await?;
        let image = image.with_context(|| {
            format!("no image named {}; `dayfly image ls` lists them", self.source)
        })?;
        let (manifest, digest) = (manifest_of(&image), None);
        let disk = image.digest;
        References::change(|all| {
            all.set(&self.target, Record { image: image.name, disk, digest, manifest })
        })?;
        Ok(())
    }
}

impl Remove {
    pub async fn run(self) -> Result<u8> {
        let client = connect::client().await?;
        let mut code = 0;
        for arg in &self.images {
            match remove(&client, arg).await {
                Ok(()) => output::line(arg)?,
                Err(error) => code = failure::report(&error),
            }
        }
        Ok(code)
    }
}

/// Removes an image by its name in the store, or a reference and with the last one its image.
async fn remove(client: &Client, arg: &ImageArg) -> Result<()> {
    if let Some(name) = &arg.name {
        let removed = client.remove_image(name).await;
        let absent = removed.as_ref().is_err_and(|e| e.code() == Some(ErrorCode::NotFound));
        let known = match &arg.reference {
            Some(reference) => References::load()?.find(reference).is_some(),
            None => false,
        };
        if !(absent && known) {
            removed?;
            return References::change(|all| all.forget_image(name));
        }
    }
    let known = References::load()?;
    let found = arg.reference.as_ref().and_then(|r| Some((r, known.find(r)?.clone())));
    let Some((reference, record)) = found else {
        bail!("no image named {arg}; `dayfly image ls` lists them");
    };
    let mut others = known;
    if !others.forget(reference) {
        bail!(
            "image {arg}: is there by a tag; remove that (dayfly image ls), or image {}",
            record.image
        );
    }
    if !others.names(&record.image) {
        match client.remove_image(&record.image).await {
            Ok(()) => {}
            Err(e) if e.code() == Some(ErrorCode::NotFound) => {}
            Err(e) => return Err(e.into()),
        }
    }
    References::change(|all| all.forget(reference)).map(drop)
}
