//! Manifests of registries, and what all their requests share: endpoints and authentication.

use crate::auth::Authorization;
use crate::config::{Config, Endpoint};
use crate::credentials::DockerConfig;
use crate::digest::BlobDigest;
use crate::error::RegistryError;
use crate::reference::Reference;
use crate::requests::{Requests, message, unexpected};
use crate::retry::Policy;
use crate::text::shown;
use crate::transport::{Answer, Request, Timeouts, Transport};
use dayfly_units::sync::lock;
use http::header::{ACCEPT, CONTENT_TYPE};
use http::{HeaderMap, HeaderValue, Method, StatusCode};
use std::collections::HashMap;
use std::sync::Mutex;

/// Upper limit for a manifest or an index, in bytes; the distribution specification's.
pub(crate) const MAX_MANIFEST_BYTES: usize = 4 << 20;
/// What this client reads (image-spec, media-types.md, and docker's schema 2).
const TYPES: &str = "application/vnd.oci.image.index.v1+json, \
    application/vnd.oci.image.manifest.v1+json, \
    application/vnd.docker.distribution.manifest.list.v2+json, \
    application/vnd.docker.distribution.manifest.v2+json";

/// What a [`Registry`] is made of.
#[derive(Debug)]
pub struct Settings {
    /// Mirrors and insecure registries.
    pub config: Config,
    /// Credentials.
    pub docker: DockerConfig,
    /// How long a registry may take.
    pub timeouts: Timeouts,
    /// How often requests are made again.
    pub policy: Policy,
}

/// A client of all registries.
#[derive(Debug)]
pub struct Registry {
    pub(crate) base: Requests,
    /// By the origin and the repository that they are for.
    authorizations: Mutex<HashMap<(String, String), Authorization>>,
    /// Whether the endpoint of this name has TLS, if it is insecure.
    schemes: Mutex<HashMap<String, bool>>,
}

/// A manifest or an index.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Manifest {
    /// The digest of `bytes`.
    pub digest: BlobDigest,
    /// The media type that the registry states, without parameters; may be empty.
    pub media_type: String,
    /// The document.
    pub bytes: Vec<u8>,
}

/// Which manifest of a repository is asked for.
pub(crate) struct Wanted<'a> {
    pub method: Method,
    /// `manifests/TAG` or `blobs/DIGEST`.
    pub what: &'a str,
    /// What it is called in errors.
    pub name: String,
    pub headers: HeaderMap,
}

impl<'a> Wanted<'a> {
    fn manifest(method: Method, what: &'a str, image: &Reference) -> Self {
        let headers = HeaderMap::from_iter([(ACCEPT, HeaderValue::from_static(TYPES))]);
        Self { method, what, name: image.familiar(), headers }
    }
}

impl Registry {
    /// A client with `settings`, without connections.
    #[must_use]
    pub fn new(settings: Settings) -> Self {
        let Settings { config, docker, timeouts, policy } = settings;
        let transport = Transport { timeouts, ..Transport::default() };
        let base = Requests { config, docker, transport, policy };
        Self { base, authorizations: Mutex::default(), schemes: Mutex::default() }
    }

    /// A client with the user's configuration.
    ///
    /// # Errors
    /// [`crate::ConfigError`] if `registries.toml` cannot be read.
    pub fn of_the_user() -> Result<Self, crate::ConfigError> {
        let config = Config::path().map_or_else(|| Ok(Config::default()), |p| Config::load(&p))?;
        Ok(Self::new(Settings {
            config,
            docker: DockerConfig::of_the_user(),
            timeouts: Timeouts::default(),
            policy: Policy::default(),
        }))
    }

    /// The configuration.
    #[must_use]
    pub const fn config(&self) -> &Config {
        &self.base.config
    }

    /// The digest that `image` names now, if the registry says it without sending the manifest.
    ///
    /// # Errors
    /// [`RegistryError`].
    pub async fn digest(&self, image: &Reference) -> Result<Option<BlobDigest>, RegistryError> {
        if let Some(digest) = image.digest() {
            return Ok(Some(digest.clone()));
        }
        let what = format!("manifests/{}", image.selector());
        let wanted = Wanted::manifest(Method::HEAD, &what, image);
        let stated = self.fetch(image, &wanted, async |answer| Ok(stated_digest(&answer.headers)));
        match stated.await {
            // Some registries know GET only.
            Err(RegistryError::Status { .. }) => Ok(None),
            other => other,
        }
    }

    /// The manifest or index that `image` names. By a digest, it is verified.
    ///
    /// # Errors
    /// [`RegistryError`].
    pub async fn manifest(&self, image: &Reference) -> Result<Manifest, RegistryError> {
        let what = format!("manifests/{}", image.selector());
        let wanted = Wanted::manifest(Method::GET, &what, image);
        self.fetch(image, &wanted, async |answer| {
            let (url, stated) = (answer.url.to_string(), stated_digest(&answer.headers));
            let media_type = answer.headers.get(CONTENT_TYPE).and_then(|v| v.to_str().ok());
            let media_type = media_type.unwrap_or_default().split(';').next().unwrap_or_default();
            let media_type = media_type.trim().to_ascii_lowercase();
            let bytes = answer.body.whole(MAX_MANIFEST_BYTES).await?;
            let digest = BlobDigest::of(&bytes);
            let expected = image.digest().or(stated.as_ref());
            if let Some(expected) = expected.filter(|expected| **expected != digest) {
                return Err(RegistryError::Digest {
                    what: format!("{url}: manifest of {}", image.familiar()),
                    expected: expected.to_string(),
                    got: digest.to_string(),
                    bytes: bytes.len() as u64,
                });
            }
            Ok(Manifest { digest, media_type, bytes })
        })
        .await
    }

    /// What `read` makes of the answer 200 of the first endpoint that has what is wanted; of the
    /// last one the error.
    async fn fetch<T>(
        &self,
        image: &Reference,
        wanted: &Wanted<'_>,
        read: impl AsyncFn(Answer) -> Result<T, RegistryError>,
    ) -> Result<T, RegistryError> {
        let mut endpoints = self.base.config.endpoints(image.domain()).into_iter().peekable();
        while let Some(endpoint) = endpoints.next() {
            let attempt = || async { read(self.ask(&endpoint, image, wanted).await?).await };
            match self.base.patiently(attempt).await {
                Err(error) if endpoints.peek().is_some() && error.is_of_the_endpoint() => {
                    tracing::warn!(mirror = %endpoint.name, %error, "the next endpoint is asked");
                }
                other => return other,
            }
        }
        unreachable!("each registry has itself as an endpoint")
    }

    /// One request to one endpoint, with authentication if it asks for it.
    pub(crate) async fn ask(
        &self,
        endpoint: &Endpoint,
        image: &Reference,
        wanted: &Wanted<'_>,
    ) -> Result<Answer, RegistryError> {
        let https = self.has_tls(endpoint).await?;
        let target = format!("/v2/{}/{}", image.path(), wanted.what);
        let url = endpoint.url(https, &target).map_err(|expected| RegistryError::Document {
            url: endpoint.host.clone(),
            place: "name of the registry",
            expected: expected.to_owned(),
            got: shown(&target),
        })?;
        let mut request = Request::new(wanted.method.clone());
        request.headers = wanted.headers.clone();
        let key = (url.origin(), image.path().to_owned());
        let known = lock(&self.authorizations).get(&key).cloned();
        request.authorization = known.as_ref().map(|known| known.header.clone());
        let mut answer = self.base.transport.follow(&url, &endpoint.trust, &request).await?;
        let mut who = known.map_or("requests without credentials".to_owned(), |known| known.who);
        // A redirect's target that answers 401 is not the registry.
        if answer.status == StatusCode::UNAUTHORIZED && answer.url.same_origin(&url) {
            let headers = std::mem::take(&mut answer.headers);
            drop(answer);
            let fresh = self.base.authorize(endpoint, https, image, &headers).await?;
            request.authorization = Some(fresh.header.clone());
            who.clone_from(&fresh.who);
            lock(&self.authorizations).insert(key, fresh);
            answer = self.base.transport.follow(&url, &endpoint.trust, &request).await?;
        }
        match answer.status.as_u16() {
            200 | 206 => Ok(answer),
            401 | 403 => {
                let message = message(answer.body).await;
                Err(self.base.denied(endpoint, image, &who, &message))
            }
            404 => Err(RegistryError::NotFound {
                image: wanted.name.clone(),
                registry: endpoint.name.clone(),
                message: message(answer.body).await,
            }),
            _ => Err(unexpected("200", answer).await),
        }
    }

    /// Whether the endpoint has TLS. One that is insecure by name is asked over http first: if it
    /// answers otherwise than HTTP, or that it wants TLS, it has TLS.
    async fn has_tls(&self, endpoint: &Endpoint) -> Result<bool, RegistryError> {
        if !endpoint.insecure {
            return Ok(true);
        }
        if let Some(known) = lock(&self.schemes).get(&endpoint.host) {
            return Ok(*known);
        }
        let url = endpoint.url(false, "/v2/").map_err(|expected| RegistryError::Document {
            url: endpoint.host.clone(),
            place: "name of the registry",
            expected: expected.to_owned(),
            got: shown(&endpoint.host),
        })?;
        let request = Request::new(Method::GET);
        let tls = match self.base.transport.send(&url, &endpoint.trust, &request, None).await {
            // Go's servers with TLS answer so, and nginx.
            Ok(answer) => matches!(answer.status.as_u16(), 400 | 497),
            Err(RegistryError::Broken { .. }) => true,
            Err(error) => return Err(error),
        };
        lock(&self.schemes).insert(endpoint.host.clone(), tls);
        Ok(tls)
    }
}

fn stated_digest(headers: &HeaderMap) -> Option<BlobDigest> {
    headers.get("docker-content-digest")?.to_str().ok()?.parse().ok()
}
