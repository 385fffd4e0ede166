//! Downloads root disks from the daemon.

use crate::bridge;
use crate::progress::Steps;
use anyhow::{Context, Result, bail};
use dayfly_api::client::Client;
use dayfly_api::types::Image;
use dayfly_units::sparse;
use std::fs::File;
use std::io::Read;
use std::sync::Arc;

/// The disk of an image, as a file without a name in the cache folder. Pages of zeroes are holes.
///
/// # Errors
/// The daemon fails, the cache's disk is full, or the disk is not what the image says.
pub async fn download_disk(client: &Client, image: &Image, steps: &Arc<Steps>) -> Result<File> {
    let reader = bridge::pump(client.download_image(&image.name).await?);
    let (image, shown) = (image.clone(), Arc::clone(steps));
    let fetching = tokio::task::spawn_blocking(move || {
        let cache = dayfly_image::cache::default_folder();
        let context = || format!("a disk in {}", cache.display());
        std::fs::create_dir_all(&cache).with_context(context)?;
        let file = tempfile::tempfile_in(&cache).with_context(context)?;
        let frame = zstd::Decoder::new(reader).context("the image's disk")?;
        let digest = unpack(frame, &file, image.size_bytes, &shown)
            .with_context(|| format!("fetching the disk of image {}", image.name))?;
        if digest != image.digest {
            bail!(
                "the disk of image {}: expected the digest {}, got {digest}; `dayfly store verify` \
                 checks the store",
                image.name,
                image.digest
            );
        }
        Ok(file)
    });
    fetching.await?
}

/// Writes `bytes` bytes of `from`, and returns their sparse digest.
fn unpack(mut from: impl Read, file: &File, bytes: u64, steps: &Steps) -> Result<String> {
    let mut step = |at: u64, piece: &[u8]| {
        steps.bytes(at + piece.len() as u64, bytes);
        Ok(())
    };
    let digest = sparse::copy_with(&mut from, file, bytes, &mut step)?.digest;
    // So that the end of the frame is checked, and nothing comes behind it.
    if from.read(&mut [0])? > 0 {
        bail!("expected {bytes} bytes, got more");
    }
    Ok(digest.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;
    use dayfly_units::sparse::digest;
    use std::os::unix::fs::{FileExt, MetadataExt};

    #[test]
    fn a_disk_has_holes_and_its_digest_and_no_other_length() {
        let mut disk = vec![0; (2 << 20) + 8192];
        disk[5000] = 7;
        let last = disk.len() - 1;
        disk[last] = 9;
        let (file, steps) = (tempfile::tempfile().unwrap(), Steps::new());
        let length = disk.len() as u64;
        let got = unpack(disk.as_slice(), &file, length, &steps).unwrap();
        assert_eq!(got, digest(&file).unwrap().digest.to_string());
        let mut read = vec![0; disk.len()];
        file.read_exact_at(&mut read, 0).unwrap();
        assert_eq!(read, disk);
        assert!(file.metadata().unwrap().blocks() * 512 < 1 << 20);
        unpack(disk.as_slice(), &file, length - 4096, &steps).unwrap_err();
        unpack(disk.as_slice(), &file, length + 4096, &steps).unwrap_err();
    }
}
