//! Authentication: Basic, and tokens of a token server
//! (distribution.github.io/distribution/spec/auth/token).

use crate::challenge;
use crate::config::Endpoint;
use crate::credentials::Credentials;
use crate::error::RegistryError;
use crate::reference::Reference;
use crate::requests::{Requests, message, unexpected};
use crate::secret::Secret;
use crate::text::shown;
use crate::tls::Trust;
use crate::transport::{Answer, Request};
use crate::url::{Url, encoded};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use http::header::{CONTENT_TYPE, WWW_AUTHENTICATE};
use http::{HeaderMap, HeaderValue, Method};
use serde::Deserialize;

/// Upper limit for the answer of a token server, in bytes.
const MAX_TOKEN_BYTES: usize = 1 << 20;
/// Upper limit for a token, in bytes: it must fit into the head of a request.
const MAX_HEADER_BYTES: usize = 32 << 10;

/// What is sent to a registry, and as whom.
#[derive(Debug, Clone)]
pub(crate) struct Authorization {
    pub header: HeaderValue,
    pub who: String,
}

/// The answer of a token server.
#[derive(Deserialize)]
struct Granted {
    #[serde(default)]
    token: Option<String>,
    #[serde(default)]
    access_token: Option<String>,
}

impl Requests {
    /// What to send to `endpoint`, whose answer 401 has `headers`.
    pub(crate) async fn authorize(
        &self,
        endpoint: &Endpoint,
        https: bool,
        image: &Reference,
        headers: &HeaderMap,
    ) -> Result<Authorization, RegistryError> {
        let all = headers.get_all(WWW_AUTHENTICATE).iter().filter_map(|value| value.to_str().ok());
        let all: Vec<_> = all.flat_map(challenge::parse).collect();
        let credentials = self.docker.find(&endpoint.name).await?;
        if let Credentials::Token(token) = &credentials {
            return sent("Bearer", token.reveal(), &endpoint.name, "the token of config.json");
        }
        if let Some(bearer) = all.iter().find(|challenge| challenge.scheme == "bearer") {
            let parameter = |name: &str| bearer.parameters.get(name).cloned().unwrap_or_default();
            let (realm, service) = (parameter("realm"), parameter("service"));
            let realm = self.realm(endpoint, https, &realm)?;
            return self.token(endpoint, &realm, &service, image, &credentials).await;
        }
        if all.iter().any(|challenge| challenge.scheme == "basic") {
            return match &credentials {
                Credentials::Basic(user, password) => {
                    let pair = basic(user, password);
                    sent("Basic", &pair, &endpoint.name, &format!("user {}", shown(user)))
                }
                _ => Err(self.denied(endpoint, image, "requests without credentials", "")),
            };
        }
        let schemes: Vec<&str> = all.iter().map(|challenge| challenge.scheme.as_str()).collect();
        Err(RegistryError::Challenge {
            registry: endpoint.name.clone(),
            expected: "Bearer or Basic",
            got: match schemes.join(", ").as_str() {
                "" => "401 without a challenge".to_owned(),
                schemes => shown(schemes),
            },
        })
    }

    /// The URL of the token server. The registry chooses its host, as the protocol has it; it gets
    /// credentials over TLS, or if it is insecure by name.
    fn realm(&self, endpoint: &Endpoint, https: bool, realm: &str) -> Result<Url, RegistryError> {
        let refused = |expected| RegistryError::Challenge {
            registry: endpoint.name.clone(),
            expected,
            got: format!("the realm {:?}", shown(realm)),
        };
        let url = Url::parse(realm).map_err(refused)?;
        if !url.https && (https || !self.config.is_insecure(&url.authority())) {
            return Err(refused(
                "a token server with TLS, or one that is insecure by name (registries.toml)",
            ));
        }
        Ok(url)
    }

    async fn token(
        &self,
        endpoint: &Endpoint,
        realm: &Url,
        service: &str,
        image: &Reference,
        credentials: &Credentials,
    ) -> Result<Authorization, RegistryError> {
        let scope = format!("repository:{}:pull", image.path());
        let mut form = format!("service={}&scope={}", encoded(service), encoded(&scope));
        let mut request = Request::new(Method::GET);
        let mut url = realm.clone();
        let mut who = "requests without credentials".to_owned();
        if let Credentials::Identity(token) = credentials {
            // OAuth2, RFC 6749, section 6.
            form = format!(
                "grant_type=refresh_token&client_id=dayfly&refresh_token={}&{form}",
                encoded(token.reveal())
            );
            request.method = Method::POST;
            request.body = Bytes::from(form);
            let kind = HeaderValue::from_static("application/x-www-form-urlencoded");
            request.headers.insert(CONTENT_TYPE, kind);
            who = "the identity token of config.json".to_owned();
        } else {
            if let Credentials::Basic(user, password) = credentials {
                let pair = basic(user, password);
                who = format!("user {}", shown(user));
                let authorization = sent("Basic", &pair, &endpoint.name, &who)?;
                request.authorization = Some(authorization.header);
            }
            let mark = if url.target.contains('?') { '&' } else { '?' };
            url.target.push(mark);
            url.target.push_str(&form);
        }
        let insecure = self.config.is_insecure(&realm.authority());
        let trust = if insecure { Trust::Anyone } else { Trust::Host };
        let answer = self.granted(&url, &trust, &request).await?;
        if matches!(answer.status.as_u16(), 400 | 401 | 403 | 404) {
            let message = message(answer.body).await;
            return Err(self.denied(endpoint, image, &who, &message));
        }
        let shown_url = url.to_string();
        let bad = |expected: &str, got: &str| RegistryError::Document {
            url: shown_url.clone(),
            place: "answer of the token server",
            expected: expected.to_owned(),
            got: got.to_owned(),
        };
        let bytes = answer.body.whole(MAX_TOKEN_BYTES).await?;
        // The decoder's own text may quote the token.
        let granted: Granted = serde_json::from_slice(&bytes)
            .map_err(|_| bad("JSON with token or access_token", "something else"))?;
        let token = granted.token.filter(|token| !token.is_empty()).or(granted.access_token);
        let token = token.filter(|token| !token.is_empty());
        let token = token.ok_or_else(|| bad("a token", "none"))?;
        sent("Bearer", &token, &endpoint.name, &who)
    }

    /// The token server's answer. Redirects of a request with an identity token are not followed,
    /// because its body is a credential.
    async fn granted(
        &self,
        url: &Url,
        trust: &Trust,
        request: &Request,
    ) -> Result<Answer, RegistryError> {
        self.patiently(|| async {
            let answer = if request.method == Method::POST {
                self.transport.send(url, trust, request, None).await?
            } else {
                self.transport.follow(url, trust, request).await?
            };
            match answer.status.as_u16() {
                200 | 400 | 401 | 403 | 404 => Ok(answer),
                _ => Err(unexpected("200", answer).await),
            }
        })
        .await
    }

    pub(crate) fn denied(
        &self,
        endpoint: &Endpoint,
        image: &Reference,
        who: &str,
        message: &str,
    ) -> RegistryError {
        RegistryError::Denied {
            image: image.familiar(),
            registry: endpoint.name.clone(),
            who: who.to_owned(),
            message: message.to_owned(),
            config: self.docker.shown(),
        }
    }
}

fn basic(user: &str, password: &Secret) -> String {
    STANDARD.encode(format!("{user}:{}", password.reveal()))
}

/// A header that `Debug` does not show.
fn sent(
    scheme: &str,
    secret: &str,
    registry: &str,
    who: &str,
) -> Result<Authorization, RegistryError> {
    let bad = |got: &str| RegistryError::Challenge {
        registry: registry.to_owned(),
        expected: "a token or password of at most 32 KiB that fits into a header",
        got: got.to_owned(),
    };
    if secret.len() > MAX_HEADER_BYTES {
        return Err(bad("a longer one"));
    }
    let mut header = HeaderValue::try_from(format!("{scheme} {secret}"))
        .map_err(|_| bad("one with other characters"))?;
    header.set_sensitive(true);
    Ok(Authorization { header, who: who.to_owned() })
}
