//! HTTP/1.1 with bounds: a connection for each request, redirects followed with care.
//!
//! A pull makes few requests, so connections are not kept.

use crate::error::RegistryError;
use crate::text::shown;
use crate::tls::{Tls, Trust};
use crate::url::Url;
use bytes::Bytes;
use http::header::{AUTHORIZATION, HOST, LOCATION, USER_AGENT};
use http::{HeaderMap, HeaderValue, Method, StatusCode};
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use rustls::pki_types::ServerName;
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio::task::JoinHandle;
use tokio::time::timeout;
use tokio_rustls::TlsConnector;

/// Redirects that are followed for one request.
const MAX_REDIRECTS: usize = 5;
/// Upper limit for the bytes of an answer's head.
const MAX_HEAD_BYTES: usize = 64 << 10;
/// Upper limit for the headers of an answer.
const MAX_HEADERS: usize = 100;
const AGENT: &str = concat!("dayfly/", env!("CARGO_PKG_VERSION"));

/// How long a registry may take.
#[derive(Debug, Clone, Copy)]
pub struct Timeouts {
    /// For the name's resolution, the connection and the TLS handshake together; and for the
    /// answer that shows whether an insecure registry has TLS.
    pub connect: Duration,
    /// For the head of an answer, and between two pieces of a body. A slow body has no limit.
    pub silence: Duration,
}

impl Default for Timeouts {
    fn default() -> Self {
        Self { connect: Duration::from_secs(20), silence: Duration::from_secs(60) }
    }
}

/// Makes requests.
#[derive(Debug, Default)]
pub(crate) struct Transport {
    pub timeouts: Timeouts,
    pub tls: Tls,
}

/// A request, without the headers that the transport adds.
#[derive(Debug, Clone)]
pub(crate) struct Request {
    pub method: Method,
    pub headers: HeaderMap,
    /// The value of `Authorization`, for the origin of the first URL only.
    pub authorization: Option<HeaderValue>,
    pub body: Bytes,
}

impl Request {
    pub fn new(method: Method) -> Self {
        Self { method, headers: HeaderMap::new(), authorization: None, body: Bytes::new() }
    }
}

/// The head of an answer, and its body to read.
#[derive(Debug)]
pub(crate) struct Answer {
    pub url: Url,
    pub status: StatusCode,
    pub headers: HeaderMap,
    pub body: Body,
}

/// The body of an answer. Dropping it closes the connection.
#[derive(Debug)]
pub(crate) struct Body {
    url: String,
    incoming: Incoming,
    silence: Duration,
    connection: JoinHandle<()>,
}

impl Drop for Body {
    fn drop(&mut self) {
        self.connection.abort();
    }
}

impl Body {
    /// The next bytes; `None` at the end.
    pub async fn next(&mut self) -> Result<Option<Bytes>, RegistryError> {
        loop {
            let frame = timeout(self.silence, self.incoming.frame()).await;
            match frame.map_err(|_| silent(&self.url, self.silence))? {
                None => return Ok(None),
                Some(Err(e)) => return Err(broken(&self.url, &e)),
                // Trailers are not used.
                Some(Ok(frame)) => match frame.into_data() {
                    Ok(bytes) if !bytes.is_empty() => return Ok(Some(bytes)),
                    _ => {}
                },
            }
        }
    }

    /// All of the body, if it has at most `max` bytes.
    pub async fn whole(mut self, max: usize) -> Result<Vec<u8>, RegistryError> {
        let mut all = Vec::new();
        while let Some(piece) = self.next().await? {
            if piece.len() > max - all.len() {
                return Err(RegistryError::TooLarge { what: self.url.clone(), max: max as u64 });
            }
            all.extend_from_slice(&piece);
        }
        Ok(all)
    }
}

impl Transport {
    /// Makes the request and follows redirects, of which only the first URL's origin gets
    /// [`Request::authorization`], and none leads from https to http. `trust` holds for the first
    /// URL's host only.
    pub async fn follow(
        &self,
        first: &Url,
        trust: &Trust,
        request: &Request,
    ) -> Result<Answer, RegistryError> {
        let mut url = first.clone();
        for _ in 0..=MAX_REDIRECTS {
            let own = url.same_origin(first);
            let authorization = request.authorization.as_ref().filter(|_| own);
            let trust = if own { trust } else { &Trust::Host };
            let answer = self.send(&url, trust, request, authorization).await?;
            let is_redirect = matches!(answer.status.as_u16(), 301 | 302 | 303 | 307 | 308);
            let location = answer.headers.get(LOCATION).filter(|_| is_redirect);
            let Some(location) = location else { return Ok(answer) };
            let text = String::from_utf8_lossy(location.as_bytes()).into_owned();
            let refused = |expected: &str| RegistryError::Redirect {
                url: url.to_string(),
                expected: expected.to_owned(),
                got: shown(text.split('?').next().unwrap_or_default()),
            };
            url = url.redirect(&text).map_err(refused)?;
        }
        Err(RegistryError::Redirect {
            url: first.to_string(),
            expected: format!("at most {MAX_REDIRECTS} redirects"),
            got: "more".to_owned(),
        })
    }

    /// Makes one request.
    pub async fn send(
        &self,
        url: &Url,
        trust: &Trust,
        request: &Request,
        authorization: Option<&HeaderValue>,
    ) -> Result<Answer, RegistryError> {
        self.send_within(self.timeouts.silence, url, trust, request, authorization).await
    }

    /// Makes one request. `silence` bounds each wait for a part of its answer.
    pub async fn send_within(
        &self,
        silence: Duration,
        url: &Url,
        trust: &Trust,
        request: &Request,
        authorization: Option<&HeaderValue>,
    ) -> Result<Answer, RegistryError> {
        let shown = url.to_string();
        let connected = timeout(self.timeouts.connect, self.connect(url, trust)).await;
        let stream = connected.map_err(|_| RegistryError::Connect {
            host: url.authority(),
            why: format!("no answer for {} s", self.timeouts.connect.as_secs()),
        })??;
        let mut builder = http1::Builder::new();
        builder.max_buf_size(MAX_HEAD_BYTES).max_headers(MAX_HEADERS);
        let handshake = builder.handshake::<_, Full<Bytes>>(TokioIo::new(stream)).await;
        let (mut sender, connection) = handshake.map_err(|e| broken(&shown, &e))?;
        let connection = tokio::spawn(async move {
            // The request or the body reports the error.
            let _ = connection.await;
        });
        let mut message = http::Request::new(Full::new(request.body.clone()));
        *message.method_mut() = request.method.clone();
        let target = url.target.parse::<http::Uri>();
        *message.uri_mut() = target.map_err(|e| broken(&shown, &e))?;
        *message.headers_mut() = request.headers.clone();
        let headers = message.headers_mut();
        let host = HeaderValue::try_from(url.authority()).map_err(|e| broken(&shown, &e))?;
        headers.insert(HOST, host);
        headers.insert(USER_AGENT, HeaderValue::from_static(AGENT));
        if let Some(authorization) = authorization {
            headers.insert(AUTHORIZATION, authorization.clone());
        }
        let answered = timeout(silence, sender.send_request(message)).await;
        let (head, incoming) = match answered {
            Ok(Ok(answer)) => answer.into_parts(),
            Ok(Err(e)) => {
                connection.abort();
                return Err(broken(&shown, &e));
            }
            Err(_) => {
                connection.abort();
                return Err(silent(&shown, silence));
            }
        };
        let body = Body { url: shown, incoming, silence, connection };
        Ok(Answer { url: url.clone(), status: head.status, headers: head.headers, body })
    }

    async fn connect(&self, url: &Url, trust: &Trust) -> Result<Box<dyn Stream>, RegistryError> {
        let host = url.authority();
        let tcp = TcpStream::connect((url.host.as_str(), url.port)).await;
        let tcp = tcp.map_err(|e| RegistryError::Connect {
            host: host.clone(),
            why: shown(&e.to_string()),
        })?;
        // Requests are short, and each waits for its answer.
        let _ = tcp.set_nodelay(true);
        if !url.https {
            return Ok(Box::new(tcp));
        }
        let config = self.tls.config(trust, &host)?;
        let failed = |why: String| RegistryError::Tls {
            why: shown(&why),
            next: format!(
                "if {host} has no TLS, or a certificate that this host does not know, add it to \
                 registries.toml as insecure or with its ca"
            ),
            host: host.clone(),
        };
        let name = ServerName::try_from(url.host.clone()).map_err(|e| failed(e.to_string()))?;
        let stream = TlsConnector::from(config).connect(name, tcp).await;
        Ok(Box::new(stream.map_err(|e| failed(e.to_string()))?))
    }
}

/// A connection, with or without TLS.
pub(crate) trait Stream: AsyncRead + AsyncWrite + Send + Unpin {}

impl<T: AsyncRead + AsyncWrite + Send + Unpin> Stream for T {}

fn silent(url: &str, silence: Duration) -> RegistryError {
    RegistryError::Silent { url: url.to_owned(), seconds: silence.as_secs() }
}

fn broken(url: &str, error: &dyn std::error::Error) -> RegistryError {
    let mut why = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        why = format!("{why}: {cause}");
        source = cause.source();
    }
    RegistryError::Broken { url: url.to_owned(), why: shown(&why) }
}
