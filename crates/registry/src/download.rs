//! Fetches a blob: verified while it streams, resumed after a cut.

use crate::blobs::{BlobCache, Claim, Partial};
use crate::client::{Registry, Wanted};
use crate::config::Endpoint;
use crate::digest::Blob;
use crate::error::RegistryError;
use crate::reference::Reference;
use crate::text::shown;
use http::header::{CONTENT_LENGTH, CONTENT_RANGE, RANGE};
use http::{HeaderMap, HeaderValue, Method, StatusCode};
use std::io;
use std::sync::atomic::{AtomicU64, Ordering};

/// Bytes that make an attempt one with progress. Fewer do not start the count of attempts again, so
/// that a registry that sends a byte at a time comes to an end.
const PROGRESS_BYTES: u64 = 64 << 10;

/// How often the bytes that are there may be dropped, to fetch the blob from its beginning.
const MAX_RESETS: u32 = 3;

/// A download in progress.
struct Download<'a> {
    image: &'a Reference,
    blob: &'a Blob,
    partial: Partial,
    done: &'a AtomicU64,
    /// Whether bytes of several connections or processes are in the file.
    mixed: bool,
    resets: u32,
}

impl Registry {
    /// Fetches a blob of the repository of `image` into `cache`, unless it is there. `done` grows
    /// by the bytes that are there, and falls if they have to be fetched again.
    ///
    /// # Errors
    /// [`RegistryError`]. The bytes that have arrived stay for the next call, unless they are
    /// wrong.
    pub async fn blob(
        &self,
        image: &Reference,
        blob: &Blob,
        cache: &BlobCache,
        done: &AtomicU64,
    ) -> Result<(), RegistryError> {
        let (claimed, wanted) = (cache.clone(), blob.clone());
        let claim = tokio::task::spawn_blocking(move || claimed.claim(&wanted)).await;
        let partial = match joined(claim)? {
            Claim::There => {
                done.fetch_add(blob.size, Ordering::Relaxed);
                return Ok(());
            }
            Claim::Mine(partial) => partial,
        };
        done.fetch_add(partial.have, Ordering::Relaxed);
        let mixed = partial.have > 0;
        let mut download = Download { image, blob, partial, done, mixed, resets: 0 };
        let mut endpoints = self.base.config.endpoints(image.domain()).into_iter().peekable();
        while let Some(endpoint) = endpoints.next() {
            match self.from_endpoint(&endpoint, &mut download).await {
                Ok(()) => {
                    let partial = download.partial;
                    return joined(tokio::task::spawn_blocking(|| partial.finish()).await);
                }
                Err(error) if endpoints.peek().is_some() && error.is_of_the_endpoint() => {
                    tracing::warn!(mirror = %endpoint.name, %error, "the next endpoint is asked");
                    if matches!(error, RegistryError::Digest { .. }) {
                        download.reset(&error.to_string())?;
                    }
                }
                Err(error) => {
                    if matches!(error, RegistryError::Digest { .. }) {
                        download.partial.discard();
                    }
                    return Err(error);
                }
            }
        }
        unreachable!("each registry has itself as an endpoint")
    }

    /// Fetches what is missing, and verifies the whole.
    async fn from_endpoint(
        &self,
        endpoint: &Endpoint,
        download: &mut Download<'_>,
    ) -> Result<(), RegistryError> {
        let mut attempt = 1;
        loop {
            let before = download.partial.have;
            let error = match self.rest(endpoint, download).await {
                Ok(()) => match download.verify(endpoint) {
                    Ok(()) => return Ok(()),
                    // Bytes of a killed process, or of two servers, may not fit together.
                    Err(error) if download.mixed && download.resets < MAX_RESETS => {
                        download.reset(&error.to_string())?;
                        continue;
                    }
                    Err(error) => return Err(error),
                },
                Err(error) => error,
            };
            let out_of_range = matches!(&error, RegistryError::Status { status, .. }
                if status.starts_with("416"));
            if out_of_range && download.mixed {
                download.reset(&error.to_string())?;
                continue;
            }
            if download.partial.have.saturating_sub(before) >= PROGRESS_BYTES {
                attempt = 1;
            }
            let Some(pause) = self.base.policy.after(attempt, &error) else { return Err(error) };
            tracing::debug!(%error, attempt, blob = %download.blob.digest, "again after a pause");
            tokio::time::sleep(pause).await;
            attempt += 1;
            download.mixed = download.partial.have > 0;
        }
    }

    /// One request for the bytes after those that are there.
    async fn rest(
        &self,
        endpoint: &Endpoint,
        download: &mut Download<'_>,
    ) -> Result<(), RegistryError> {
        let Blob { digest, size } = download.blob;
        if download.partial.have == *size && *size > 0 {
            return Ok(());
        }
        let mut headers = HeaderMap::new();
        let from = download.partial.have;
        if from > 0 {
            let range = HeaderValue::try_from(format!("bytes={from}-"));
            headers.extend(range.ok().map(|range| (RANGE, range)));
        }
        let what = format!("blobs/{digest}");
        let name = format!("{}: blob {digest}", download.image.familiar());
        let wanted = Wanted { method: Method::GET, what: &what, name, headers };
        let mut answer = self.ask(endpoint, download.image, &wanted).await?;
        let url = answer.url.to_string();
        if answer.status == StatusCode::PARTIAL_CONTENT {
            let range = answer.headers.get(CONTENT_RANGE).and_then(|value| value.to_str().ok());
            let begin = range.and_then(|range| range.strip_prefix("bytes ")?.split_once('-'));
            if begin.and_then(|(begin, _)| begin.parse().ok()) != Some(from) {
                return Err(RegistryError::Document {
                    url,
                    place: "Content-Range",
                    expected: format!("bytes {from}-"),
                    got: shown(range.unwrap_or("none")),
                });
            }
        } else if from > 0 {
            download.reset("the registry sends the whole blob instead of its rest")?;
        }
        let missing = size - download.partial.have;
        let length = answer.headers.get(CONTENT_LENGTH).and_then(|value| value.to_str().ok());
        let length = length.and_then(|text| text.parse::<u64>().ok());
        if let Some(length) = length.filter(|length| *length != missing) {
            return Err(RegistryError::Document {
                url,
                place: "Content-Length",
                expected: format!("{missing}, as the descriptor of {digest} says"),
                got: length.to_string(),
            });
        }
        while let Some(piece) = answer.body.next().await? {
            if piece.len() as u64 > size - download.partial.have {
                let what = format!("{url}: blob {digest}");
                return Err(RegistryError::TooLarge { what, max: *size });
            }
            download.partial.write(&piece)?;
            download.done.fetch_add(piece.len() as u64, Ordering::Relaxed);
        }
        if download.partial.have < *size {
            let got = download.partial.have;
            let why = format!("expected {size} bytes, got an end after {got}");
            return Err(RegistryError::Broken { url, why });
        }
        Ok(())
    }
}

impl Download<'_> {
    fn verify(&self, endpoint: &Endpoint) -> Result<(), RegistryError> {
        let got = self.partial.digest();
        if got == self.blob.digest {
            return Ok(());
        }
        Err(RegistryError::Digest {
            what: format!(
                "registry {}: blob {} of {}",
                endpoint.name,
                self.blob.digest,
                self.image.familiar()
            ),
            expected: self.blob.digest.to_string(),
            got: got.to_string(),
            bytes: self.partial.have,
        })
    }

    /// Drops what is there, because of `why`.
    fn reset(&mut self, why: &str) -> Result<(), RegistryError> {
        if self.resets >= MAX_RESETS {
            return Err(RegistryError::Document {
                url: format!("blob {} of {}", self.blob.digest, self.image.familiar()),
                place: "its bytes",
                expected: format!("at most {MAX_RESETS} beginnings"),
                got: why.to_owned(),
            });
        }
        self.resets += 1;
        self.done.fetch_sub(self.partial.have, Ordering::Relaxed);
        self.mixed = false;
        self.partial.reset()
    }
}

/// The result of a blocking task, which does not panic.
fn joined<T>(
    result: Result<Result<T, RegistryError>, tokio::task::JoinError>,
) -> Result<T, RegistryError> {
    result.unwrap_or_else(|error| {
        Err(RegistryError::Io {
            what: "run a task for",
            path: "the cache of blobs".into(),
            source: io::Error::other(error),
        })
    })
}
