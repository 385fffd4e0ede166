//! Names of images in registries, by docker's grammar (github.com/distribution/reference,
//! `ParseNormalizedNamed`).
//!
//! ```text
//! reference = [domain "/"] path [":" tag] ["@" digest]
//! ```
//!
//! The first component is a domain if it has a `.`, a `:` or a capital, or is `localhost`.
//! Otherwise the domain is `docker.io`, where a path of one component is below `library/`.

use crate::digest::BlobDigest;
use std::fmt;
use std::str::FromStr;

/// Docker's registry.
pub(crate) const DOCKER: &str = "docker.io";
const LIBRARY: &str = "library/";
/// The tag of a reference that has neither tag nor digest.
const LATEST: &str = "latest";
/// Upper limit for the bytes of domain and path.
const MAX_NAME_BYTES: usize = 255;
const MAX_TAG_BYTES: usize = 128;

/// The name of an image in a registry.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Reference {
    domain: String,
    path: String,
    tag: Option<String>,
    digest: Option<BlobDigest>,
}

/// Why a text is not a [`Reference`].
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("image {text:?}: {part}: expected {expected}")]
pub struct ReferenceError {
    text: String,
    part: &'static str,
    expected: &'static str,
}

impl Reference {
    /// The registry, such as `docker.io` or `localhost:5000`.
    #[must_use]
    pub fn domain(&self) -> &str {
        &self.domain
    }

    /// The repository in the registry, such as `library/debian`.
    #[must_use]
    pub fn path(&self) -> &str {
        &self.path
    }

    /// The tag. A reference without a tag has a digest.
    #[must_use]
    pub fn tag(&self) -> Option<&str> {
        self.tag.as_deref()
    }

    /// The digest of the manifest or index. It decides if there is a tag too.
    #[must_use]
    pub fn digest(&self) -> Option<&BlobDigest> {
        self.digest.as_ref()
    }

    /// What selects the manifest in the repository: the digest, or else the tag.
    #[must_use]
    pub fn selector(&self) -> String {
        match (&self.digest, &self.tag) {
            (Some(digest), _) => digest.to_string(),
            (None, Some(tag)) => tag.clone(),
            (None, None) => LATEST.to_owned(),
        }
    }

    /// This reference with `digest` in addition to its tag.
    #[must_use]
    pub fn pinned(&self, digest: BlobDigest) -> Self {
        Self { digest: Some(digest), ..self.clone() }
    }

    /// The short form, as docker shows it: `debian:12` for `docker.io/library/debian:12`.
    #[must_use]
    pub fn familiar(&self) -> String {
        let whole = self.to_string();
        let docker = whole.strip_prefix("docker.io/");
        docker.map_or_else(
            || whole.clone(),
            |path| path.strip_prefix(LIBRARY).unwrap_or(path).to_owned(),
        )
    }
}

/// The canonical form, with the domain: `docker.io/library/debian:12`.
impl fmt::Display for Reference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.domain, self.path)?;
        if let Some(tag) = &self.tag {
            write!(f, ":{tag}")?;
        }
        if let Some(digest) = &self.digest {
            write!(f, "@{digest}")?;
        }
        Ok(())
    }
}

impl FromStr for Reference {
    type Err = ReferenceError;

    fn from_str(text: &str) -> Result<Self, ReferenceError> {
        let bad = |part, expected| {
            Err(ReferenceError { text: text.chars().take(300).collect(), part, expected })
        };
        let (rest, digest) = match text.split_once('@') {
            None => (text, None),
            Some((rest, digest)) => match digest.parse() {
                Ok(digest) => (rest, Some(digest)),
                Err(_) => return bad("digest", "sha256: and 64 lower-case hexadecimal digits"),
            },
        };
        let last = rest.rfind('/').map_or(0, |slash| slash + 1);
        let (name, tag) = match rest[last..].find(':') {
            None => (rest, None),
            Some(colon) => (&rest[..last + colon], Some(&rest[last + colon + 1..])),
        };
        if tag.is_some_and(|tag| !is_tag(tag)) {
            return bad("tag", "1 to 128 letters, digits, '_', '.', '-', not starting with . or -");
        }
        let (domain, path) = match name.split_once('/') {
            Some((first, path)) if looks_like_domain(first) => (first, path.to_owned()),
            _ => (DOCKER, name.to_owned()),
        };
        let domain = if domain == "index.docker.io" { DOCKER } else { domain };
        if name.len() == 64 && name.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f')) {
            return bad("name", "a name, not 64 hexadecimal digits");
        }
        let path =
            if domain == DOCKER && !path.contains('/') { LIBRARY.to_owned() + &path } else { path };
        if !is_domain(domain) {
            return bad("registry", "a host's name or address, and perhaps a port");
        }
        if !path.split('/').all(is_component) {
            return bad("name", "lower-case letters and digits, with '.', '_', '__', '-' between");
        }
        if domain.len() + path.len() > MAX_NAME_BYTES {
            return bad("name", "at most 255 bytes");
        }
        let tag = tag.map(str::to_owned);
        let tag = if digest.is_none() { tag.or(Some(LATEST.to_owned())) } else { tag };
        Ok(Self { domain: domain.to_owned(), path, tag, digest })
    }
}

fn looks_like_domain(first: &str) -> bool {
    first == "localhost"
        || first.contains(['.', ':'])
        || first.bytes().any(|b| b.is_ascii_uppercase())
}

/// A host's name, an IPv4 address or an IPv6 address in brackets, and perhaps a port.
pub(crate) fn is_domain(text: &str) -> bool {
    let (host, port) = match text.strip_prefix('[').map(|rest| rest.split_once(']')) {
        Some(Some((host, rest))) => {
            if host.parse::<std::net::Ipv6Addr>().is_err() {
                return false;
            }
            ("a", if rest.is_empty() { None } else { Some(rest.strip_prefix(':').unwrap_or("")) })
        }
        Some(None) => return false,
        None => match text.split_once(':') {
            Some((host, port)) => (host, Some(port)),
            None => (text, None),
        },
    };
    let label = |part: &str| {
        let bytes = part.as_bytes();
        let edge = |b: Option<&u8>| b.is_some_and(u8::is_ascii_alphanumeric);
        bytes.iter().all(|b| b.is_ascii_alphanumeric() || *b == b'-')
            && edge(bytes.first())
            && edge(bytes.last())
    };
    let digits = |port: &str| port.bytes().all(|b| b.is_ascii_digit());
    let port_fits =
        port.is_none_or(|port| digits(port) && port.parse::<u16>().is_ok_and(|port| port != 0));
    port_fits && host.split('.').all(label)
}

/// `[a-z0-9]+((\.|_|__|-+)[a-z0-9]+)*`
fn is_component(text: &str) -> bool {
    let word = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit();
    let mut separator = String::new();
    let mut any = false;
    for c in text.chars() {
        if u8::try_from(c).is_ok_and(word) {
            let fits = separator.is_empty()
                || (any && matches!(separator.as_str(), "." | "_" | "__"))
                || (any && separator.bytes().all(|b| b == b'-'));
            if !fits {
                return false;
            }
            separator.clear();
            any = true;
        } else if matches!(c, '.' | '_' | '-') {
            separator.push(c);
        } else {
            return false;
        }
    }
    any && separator.is_empty()
}

fn is_tag(text: &str) -> bool {
    let word = |b: u8| b.is_ascii_alphanumeric() || b == b'_';
    text.len() <= MAX_TAG_BYTES
        && text.bytes().next().is_some_and(word)
        && text.bytes().all(|b| word(b) || matches!(b, b'.' | b'-'))
}

#[cfg(test)]
#[path = "reference_tests.rs"]
mod tests;
