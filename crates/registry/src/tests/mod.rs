//! A registry that does harm, and what becomes of a pull from it.

mod auth;
mod blobs;
mod manifests;
mod server;

use crate::*;
use dayfly_units::Bytes;
use server::Server;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// A client without pauses, and without credentials.
fn client() -> Registry {
    client_with(Config::default(), DockerConfig::none())
}

fn client_with(config: Config, docker: DockerConfig) -> Registry {
    let policy = Policy {
        attempts: 3,
        pause: Duration::from_millis(1),
        longest_pause: Duration::from_millis(2),
    };
    Registry::new(Settings { config, docker, timeouts: Timeouts::default(), policy })
}

/// A client that takes 50 ms of silence for too long.
fn hasty() -> Registry {
    let timeouts = Timeouts { silence: Duration::from_millis(50), ..Timeouts::default() };
    let policy = Policy { attempts: 1, ..Policy::default() };
    let (config, docker) = (Config::default(), DockerConfig::none());
    Registry::new(Settings { config, docker, timeouts, policy })
}

fn config(text: &str) -> Config {
    Config::parse(text, Path::new("registries.toml")).unwrap()
}

/// A cache in a folder of the test.
fn cache() -> (tempfile::TempDir, BlobCache) {
    let folder = tempfile::tempdir().unwrap();
    let cache = BlobCache::new(folder.path().to_owned(), Bytes(1 << 30));
    (folder, cache)
}

fn blob(bytes: &[u8]) -> Blob {
    Blob { digest: BlobDigest::of(bytes), size: bytes.len() as u64 }
}

/// Bytes that differ from place to place.
fn content(length: usize) -> Vec<u8> {
    (0..length).map(|n| (n.wrapping_mul(2_654_435_761) >> 13).to_le_bytes()[0]).collect()
}

/// Fetches a blob from `server`; returns the bytes in the cache, and those that were counted.
async fn fetched(
    registry: &Registry,
    server: &Server,
    blob: &Blob,
) -> Result<(Vec<u8>, u64), RegistryError> {
    let (folder, cache) = cache();
    let done = AtomicU64::new(0);
    registry.blob(&server.image("a/b:1"), blob, &cache, &done).await?;
    let bytes = std::fs::read(folder.path().join("blobs").join(blob.digest.hex())).unwrap();
    Ok((bytes, done.load(Ordering::Relaxed)))
}
