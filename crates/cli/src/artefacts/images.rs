//! Builds root disks on this host and uploads them to the daemon.

use super::upload;
use crate::progress::Steps;
use anyhow::{Context, Result};
use dayfly_api::client::Client;
use dayfly_api::types::{Image, ImageUpload};
use dayfly_image::{BuildOptions, BuiltImage, Debian, Source, build};
use dayfly_units::Name;
use rustix::fs::{FlockOperation, flock};
use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Builds the root disk of `source` and stores it as `name`.
///
/// # Errors
/// If the disk cannot be built or stored. Nothing is left behind then, except in the cache.
pub async fn build_image(
    client: &Client,
    source: Source,
    options: BuildOptions,
    name: &Name,
    steps: &Arc<Steps>,
) -> Result<Image> {
    // The output folder is in the cache, so that the disk can be a hard link. If a build is killed,
    // the next build sweeps its folder.
    let cache = options.cache.clone().unwrap_or_else(dayfly_image::cache::default_folder);
    let out = OutFolder::new(&cache)?;
    let (target, shown) = (out.path().to_owned(), Arc::clone(steps));
    let BuiltImage { root_ext4, manifest, .. } = tokio::task::spawn_blocking(move || {
        let mut label = String::new();
        build(&source, &options, &target, &mut |progress| {
            if label != progress.step {
                progress.step.clone_into(&mut label);
                shown.begin(label.clone());
            }
            if progress.done_bytes > 0 {
                shown.bytes(progress.done_bytes, 0);
            }
        })
    })
    .await??;
    let head = ImageUpload {
        size_bytes: manifest.size_bytes,
        digest: manifest.digest,
        source: manifest.source,
        config: manifest.run,
    };
    steps.begin(format!("storing image {name}"));
    let image = upload::send(vec![root_ext4], steps, async |body| {
        client.upload_image(name, &head, body).await
    })
    .await;
    steps.end();
    image
}

/// Builds a Debian root disk and stores it as `name`. The cache is used if it holds the same build.
///
/// # Errors
/// As for [`build_image`].
pub async fn build_debian(
    client: &Client,
    suite: &str,
    include: &[String],
    name: &Name,
    steps: &Arc<Steps>,
) -> Result<Image> {
    let debian = Debian { suite: suite.into(), include: include.to_vec(), refresh: false };
    build_image(client, Source::Debian(debian), BuildOptions::default(), name, steps).await
}

/// A staging folder under the rules of the crate `image`. The process that locks the folder owns
/// it, and a folder without an owner is swept ([`dayfly_image::sweep`]).
pub(super) struct OutFolder {
    path: PathBuf,
    _lock: File,
}

impl OutFolder {
    pub(super) fn new(cache: &Path) -> Result<Self> {
        let parent = cache.join("staging");
        let context = || parent.display().to_string();
        std::fs::create_dir_all(&parent).with_context(context)?;
        // The lock of the parent folder prevents a sweep between the folder's creation and its
        // locking.
        let gate = File::open(&parent).with_context(context)?;
        flock(&gate, FlockOperation::LockExclusive).with_context(context)?;
        let unique = std::time::UNIX_EPOCH.elapsed().unwrap_or_default().as_nanos();
        let path = parent.join(format!("out-{}-{unique}", std::process::id()));
        std::fs::create_dir(&path).with_context(context)?;
        let lock = File::open(&path).with_context(context)?;
        flock(&lock, FlockOperation::LockExclusive).with_context(context)?;
        Ok(Self { path, _lock: lock })
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for OutFolder {
    fn drop(&mut self) {
        // A folder that cannot be removed now is swept later.
        let _ = std::fs::remove_dir_all(&self.path);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sweep_takes_a_folder_only_from_the_dead() {
        let cache = tempfile::tempdir().expect("a folder");
        let out = OutFolder::new(cache.path()).expect("a folder");
        assert_eq!(dayfly_image::sweep(cache.path()).expect("a sweep"), 0);
        assert!(out.path.is_dir());
        let path = out.path.clone();
        // The state after SIGKILL: the lock is released, the folder stays.
        flock(&out._lock, FlockOperation::Unlock).expect("an unlock");
        assert_eq!(dayfly_image::sweep(cache.path()).expect("a sweep"), 1);
        assert!(!path.exists());
    }
}
