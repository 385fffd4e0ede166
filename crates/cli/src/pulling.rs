//! Pulls images into the daemon's store, and finds images by name or reference.
//!
//! ```text
//! digest known and image there? ──yes──▶ up to date
//!     │ no
//! documents ─▶ image of this manifest there? ──yes──▶ record the reference
//!                   │ no
//!              layers ─▶ disk ─▶ upload as STEM-DIGITS ─▶ record the reference
//! ```

use crate::artefacts;
use crate::progress::Steps;
use crate::references::{ImageArg, Record, References, is_of};
use anyhow::{Context, Result, bail};
use clap::ValueEnum;
use dayfly_api::client::{Client, ClientError};
use dayfly_api::types::{ErrorCode, Image};
use dayfly_image::{BuildError, BuildOptions, Pull, Source};
use dayfly_registry::{Reference, Registry};
use dayfly_units::Name;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Digits of the manifest's digest in an image's name; more if another image has the name.
pub const DIGITS: [usize; 2] = [12, 40];

/// When an image is pulled.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, ValueEnum)]
pub enum When {
    /// Even if there is one
    Always,
    /// If there is none
    #[default]
    Missing,
    /// Never
    Never,
}

/// What a pull has done.
pub struct Pulled {
    /// The image in the store.
    pub image: Image,
    /// The digest of what the registry has for the reference.
    pub digest: String,
    /// Whether anything was fetched.
    pub is_new: bool,
}

/// The image of the store that `arg` means: by its name, else by its reference.
///
/// # Errors
/// The daemon or the file of references fails.
pub async fn local(client: &Client, arg: &ImageArg) -> Result<Option<Image>> {
    if let Some(name) = &arg.name
        && let Some(image) = there(client, name).await?
    {
        return Ok(Some(image));
    }
    let Some(reference) = &arg.reference else { return Ok(None) };
    recorded(client, reference).await.map(|found| found.map(|(image, _)| image))
}

/// The image that is recorded for `reference`.
pub async fn recorded(client: &Client, reference: &Reference) -> Result<Option<(Image, Record)>> {
    let Some(record) = References::load()?.find(reference).cloned() else { return Ok(None) };
    let image = there(client, &record.image).await?;
    Ok(image.filter(|image| record.means(image)).map(|image| (image, record)))
}

/// The image `name` of the store.
///
/// # Errors
/// The daemon fails.
pub async fn there(client: &Client, name: &Name) -> Result<Option<Image>, ClientError> {
    match client.image(name).await {
        Ok(image) => Ok(Some(image)),
        Err(e) if e.code() == Some(ErrorCode::NotFound) => Ok(None),
        Err(e) => Err(e),
    }
}

/// The image that `arg` means. Pulls it if there is none here, as `when` says.
///
/// # Errors
/// There is none, or it cannot be pulled.
pub async fn image(
    client: &Client,
    arg: &ImageArg,
    when: When,
    steps: &Arc<Steps>,
) -> Result<Image> {
    if when != When::Always
        && let Some(image) = local(client, arg).await?
    {
        return Ok(image);
    }
    match &arg.reference {
        Some(reference) if when != When::Never => {
            let pulled = pull(client, reference, steps).await;
            Ok(pulled.with_context(|| format!("{arg}: there is no image of this name here"))?.image)
        }
        _ => bail!("no image named {arg}; `dayfly image ls` lists them"),
    }
}

/// Pulls `reference` into the store, and records it.
///
/// # Errors
/// The registry, the build or the daemon fails. Layers that have arrived stay in the cache.
pub async fn pull(client: &Client, reference: &Reference, steps: &Arc<Steps>) -> Result<Pulled> {
    let registry = Registry::of_the_user()?;
    let shown = reference.familiar();
    steps.begin(format!("looking up {shown}"));
    if let Some((image, record)) = recorded(client, reference).await?
        && let Some(digest) = record.digest
        && registry.digest(reference).await?.is_some_and(|now| now.to_string() == digest)
    {
        steps.end();
        return Ok(Pulled { image, digest, is_new: false });
    }
    let cpu_level = client.info().await?.cpu_level;
    let pull = Pull::begin(&registry, reference, cpu_level, None).await?;
    let manifest = pull.manifest_digest().to_string();
    let (name, found) = name_of(client, reference, &manifest).await?;
    let is_new = found.is_none();
    let image = match found {
        Some(image) => image,
        None => store(client, &pull, &name, cpu_level, &manifest, steps).await?,
    };
    steps.end();
    let digest = pull.image().digest().map_or_else(|| manifest.clone(), ToString::to_string);
    let record = Record {
        image: image.name.clone(),
        disk: image.digest.clone(),
        digest: Some(digest.clone()),
        manifest: Some(manifest),
    };
    let (before, named) = References::change(|all| {
        let before = all.set(reference, record);
        let named = before.as_ref().is_some_and(|before| all.names(&before.image));
        (before, named)
    })?;
    // The tag has moved, and no reference means the earlier image. The daemon keeps an image that a
    // snapshot or a VM uses.
    if let Some(before) = before.filter(|before| !named && is_stored_by_pull(reference, before))
        && let Ok(Some(earlier)) = there(client, &before.image).await
        && before.means(&earlier)
        && client.remove_image(&before.image).await.is_ok()
    {
        steps.say(&format!("dayfly: removed image {}, which was {shown}", before.image));
    }
    Ok(Pulled { image, digest, is_new })
}

/// The name for the image of this manifest, and the image if it is there.
async fn name_of(
    client: &Client,
    reference: &Reference,
    manifest: &str,
) -> Result<(Name, Option<Image>)> {
    for digits in DIGITS {
        let name = stored_name(reference, manifest, digits)?;
        match there(client, &name).await? {
            None => return Ok((name, None)),
            Some(image) if is_of(&image, manifest) => return Ok((name, Some(image))),
            Some(_) => {}
        }
    }
    bail!("{}: other images have the names for it (dayfly image ls)", reference.familiar())
}

/// The last component of the repository, and the first `digits` of the manifest's digest.
fn stored_name(reference: &Reference, manifest: &str, digits: usize) -> Result<Name> {
    named_by(reference.path(), manifest, digits)
}

/// The last component of the repository `path`, and the first `digits` of `digest`.
///
/// # Errors
/// The digest is none.
pub fn named_by(path: &str, digest: &str, digits: usize) -> Result<Name> {
    let stem = path.rsplit('/').next().unwrap_or_default();
    let hex = digest.trim_start_matches("sha256:");
    let name = format!("{:.*}-{:.digits$}", 63 - 1 - digits, stem, hex);
    name.parse().with_context(|| format!("a name for {path}"))
}

/// Whether [`pull`] made and named the image of `record` for `reference`. The user named any other
/// image: one that `dayfly tag` gave this reference, or one of `dayfly image build`.
fn is_stored_by_pull(reference: &Reference, record: &Record) -> bool {
    let (Some(_), Some(manifest)) = (&record.digest, &record.manifest) else { return false };
    let is_named =
        |digits| stored_name(reference, manifest, digits).is_ok_and(|name| name == record.image);
    DIGITS.into_iter().any(is_named)
}

async fn store(
    client: &Client,
    pull: &Pull<'_>,
    name: &Name,
    cpu_level: u8,
    manifest: &str,
    steps: &Arc<Steps>,
) -> Result<Image> {
    let options = BuildOptions { cpu_level, ..BuildOptions::default() };
    match built(client, pull, options, name, steps).await {
        Err(error) => match there(client, name).await? {
            // Another process has pulled it meanwhile.
            Some(image) if is_of(&image, manifest) => Ok(image),
            _ => Err(error),
        },
        built => built,
    }
}

/// Fetches the layers, builds the disk and stores it as `name`.
///
/// # Errors
/// As for [`pull`].
pub async fn built(
    client: &Client,
    pull: &Pull<'_>,
    options: BuildOptions,
    name: &Name,
    steps: &Arc<Steps>,
) -> Result<Image> {
    let source = fetched(pull, steps).await?;
    let built = artefacts::build_image(client, source, options, name, steps).await;
    if let Err(error) = &built
        && let Some(BuildError::Digest { .. }) = error.downcast_ref()
    {
        // The next attempt fetches the layers again.
        pull.forget();
    }
    built
}

/// Fetches the layers, with progress.
async fn fetched(pull: &Pull<'_>, steps: &Steps) -> Result<Source> {
    let (done, total) = (AtomicU64::new(0), pull.layer_bytes());
    steps.begin(format!("pulling {}", short(pull.image())));
    let fetching = pull.fetch(&done);
    tokio::pin!(fetching);
    loop {
        tokio::select! {
            fetched = &mut fetching => {
                fetched?;
                return Ok(pull.source());
            }
            () = tokio::time::sleep(Duration::from_millis(100)) => {
                steps.bytes(done.load(Ordering::Relaxed), total);
            }
        }
    }
}

/// The reference without its digest, if it has a tag.
fn short(image: &Reference) -> String {
    let whole = image.familiar();
    match image.tag() {
        Some(_) => whole.split('@').next().unwrap_or_default().to_owned(),
        None => whole,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_images_name_is_its_repositorys_last_part_and_its_digest() {
        let hex = "0123456789abcdef".repeat(4);
        let name = |text: &str, digits| {
            let reference: Reference = text.parse().expect("a reference");
            stored_name(&reference, &format!("sha256:{hex}"), digits).expect("a name").to_string()
        };
        assert_eq!(name("localhost:5000/a/web_app:1", 12), "web_app-0123456789ab");
        let long = "x".repeat(100);
        for digits in DIGITS {
            let name = name(&long, digits);
            assert!(name.len() == 63 && name.ends_with(&format!("x-{}", &hex[..digits])), "{name}");
        }
    }

    #[test]
    fn a_moved_tag_removes_only_an_image_that_pull_named() {
        let reference: Reference = "localhost:5000/a/web:1".parse().expect("a reference");
        let manifest = format!("sha256:{}", "0123456789abcdef".repeat(4));
        let record = |image: &str, digest: Option<&str>| Record {
            image: image.parse().expect("a name"),
            disk: "disk".to_owned(),
            digest: digest.map(str::to_owned),
            manifest: Some(manifest.clone()),
        };
        let removes = |record: &Record| is_stored_by_pull(&reference, record);
        let pulled = record("web-0123456789ab", Some("sha256:index"));
        assert!(removes(&pulled));
        let long = format!("web-{}", &manifest["sha256:".len()..][..40]);
        assert!(removes(&record(&long, Some("sha256:index"))));
        // `dayfly tag` copies the manifest, and knows no digest.
        assert!(!removes(&record("web-0123456789ab", None)));
        assert!(!removes(&record("production", Some("sha256:index"))));
        assert!(!removes(&record("app-0123456789ab", Some("sha256:index"))));
        assert!(!removes(&Record { manifest: None, ..pulled }));
    }
}
