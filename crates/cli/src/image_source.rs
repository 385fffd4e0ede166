//! A snapshot for a command that names an image: made at its first use, cloned from then on. The
//! image may be in a registry.
//!
//! Its name is the image's with the first digits of the image's digest. So an image that was built
//! again gets another snapshot, and no name that a user chose is taken.

use crate::artefacts;
use crate::progress::Steps;
use crate::pulling::{self, When};
use crate::references::ImageArg;
use anyhow::{Context, Result};
use dayfly_api::client::{Client, ClientError};
use dayfly_api::types::{BakeRequest, ErrorCode, Image};
use dayfly_units::{CpuModel, Name};
use std::sync::Arc;

/// RAM in bytes of such a snapshot, and so of its clones.
const MEMORY_BYTES: u64 = 256 << 20;
/// Digits of the digest in a name.
const DIGITS: usize = 12;

/// The snapshot to ask for first: the one that `arg` names, which costs no further request if it is
/// there. A text that can be no snapshot's name names an image, which is baked if it was not yet.
///
/// # Errors
/// The image cannot be pulled or baked.
pub async fn first_choice(
    client: &Client,
    arg: &ImageArg,
    when: When,
    steps: &Arc<Steps>,
) -> Result<Name> {
    match &arg.name {
        Some(name) if when != When::Always => Ok(name.clone()),
        _ => baked(client, pulling::image(client, arg, when, steps).await?, steps).await,
    }
}

/// The snapshot to clone in place of `arg`, after the daemon refused a request with `refused`.
/// `None` if it was not refused because there is no snapshot of that name.
///
/// # Errors
/// The image cannot be pulled or baked.
pub async fn snapshot_for(
    client: &Client,
    arg: &ImageArg,
    refused: &ClientError,
    when: When,
    steps: &Arc<Steps>,
) -> Result<Option<Name>> {
    let Some(name) = arg.name.as_ref().filter(|_| when != When::Always) else { return Ok(None) };
    if refused.code() != Some(ErrorCode::NotFound) {
        return Ok(None);
    }
    // The refusal may be of something else, such as a network.
    let absent = client.snapshot(name).await.err();
    if absent.and_then(|error| error.code()) != Some(ErrorCode::NotFound) {
        return Ok(None);
    }
    let image = match pulling::local(client, arg).await? {
        Some(image) => image,
        None if when == When::Never => return Ok(None),
        None => pulling::image(client, arg, when, steps)
            .await
            .with_context(|| format!("{arg}: there is no snapshot of this name"))?,
    };
    baked(client, image, steps).await.map(Some)
}

/// The snapshot of `image`, which is made if it is not there.
async fn baked(client: &Client, image: Image, steps: &Steps) -> Result<Name> {
    let snapshot = snapshot_name(&image)?;
    if client.snapshot(&snapshot).await.is_ok() {
        return Ok(snapshot);
    }
    let request = BakeRequest {
        image: image.name.clone(),
        name: snapshot.clone(),
        kernel: artefacts::ensure_kernel(client, None, steps).await?,
        memory_bytes: MEMORY_BYTES,
        vcpus: 1,
        cpu_model: CpuModel::Host,
        warmup: None,
        recording: None,
        init: None,
        egress: None,
    };
    let baked = async { artefacts::watch(client.bake(&request).await?, steps).await };
    match baked.await {
        Ok(_) => {}
        // Another command has baked it meanwhile.
        Err(_) if client.snapshot(&snapshot).await.is_ok() => {}
        Err(error) => return Err(error.context(format!("baking image {}", image.name))),
    }
    steps.say(&format!("dayfly: baked image {} as snapshot {snapshot}", image.name));
    Ok(snapshot)
}

/// The name of the snapshot of an image, cut to the length of a name.
fn snapshot_name(image: &Image) -> Result<Name> {
    let digits: String = image.digest.chars().take(DIGITS).collect();
    let room = 63 - 1 - digits.len();
    let stem: String = image.name.as_str().chars().take(room).collect();
    format!("{stem}-{digits}").parse().context("a name for the image's snapshot")
}

#[cfg(test)]
mod tests {
    use super::*;
    use dayfly_units::ImageConfig;

    #[test]
    fn another_build_of_an_image_has_another_snapshot() {
        let image = |name: &str, digest: &str| Image {
            name: name.parse().expect("a name"),
            digest: digest.into(),
            size_bytes: 0,
            stored_bytes: 0,
            created_unix_ms: 0,
            source: String::new(),
            config: ImageConfig::default(),
        };
        let name = |image: &Image| snapshot_name(image).expect("a name").to_string();
        assert_eq!(name(&image("debian", "0123456789abcdef")), "debian-0123456789ab");
        let long = "x".repeat(63);
        let (first, second) = (image(&long, "00000000000000"), image(&long, "11111111111111"));
        assert_eq!(name(&first).len(), 63);
        assert_ne!(name(&first), name(&second));
    }
}
