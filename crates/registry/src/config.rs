//! `registries.toml`: mirrors, insecure registries and roots of certificates, by name.
//!
//! ```toml
//! cache = "8G"                       # most bytes of blobs to keep for later pulls
//!
//! [registry."docker.io"]
//! mirrors = ["mirror.lan:5000"]      # asked first, in this order
//!
//! [registry."mirror.lan:5000"]
//! insecure = true                    # http, or TLS with any certificate
//!
//! [registry."registry.example.com"]
//! ca = "/etc/ssl/example.pem"        # trusted in addition to the roots of the host
//! ```

use crate::reference::{DOCKER, is_domain};
use crate::tls::Trust;
use crate::url::Url;
use dayfly_units::Bytes;
use serde::Deserialize;
use std::collections::BTreeMap;
use std::io::{self, Read};
use std::net::IpAddr;
use std::path::{Path, PathBuf};

/// The host that serves docker's registry.
const DOCKER_HOST: &str = "registry-1.docker.io";
/// Bytes of blobs that are kept if the file does not say.
const CACHE: Bytes = Bytes(8 << 30);
const MAX_FILE_BYTES: u64 = 1 << 20;
/// Upper limit for the mirrors of a registry.
const MAX_MIRRORS: usize = 16;

/// What `registries.toml` says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Config {
    /// Most bytes of blobs to keep for later pulls.
    pub cache: Bytes,
    registries: BTreeMap<String, Entry>,
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
struct Entry {
    mirrors: Vec<String>,
    insecure: bool,
    ca: Option<PathBuf>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Written {
    cache: Option<String>,
    registry: BTreeMap<String, Entry>,
}

/// Why `registries.toml` was not read.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The file cannot be read.
    #[error("{path}: {source}", path = path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// The file is no TOML, or a value has another type.
    #[error("{path}: {why}", path = path.display())]
    Toml {
        /// The file.
        path: PathBuf,
        /// The place and the cause.
        why: String,
    },
    /// A key or a value is not known.
    #[error("{path}: {place}: expected {expected}, got {got:?}", path = path.display())]
    Field {
        /// The file.
        path: PathBuf,
        /// The path of the key.
        place: String,
        /// What is accepted.
        expected: &'static str,
        /// What was found.
        got: String,
    },
}

impl Default for Config {
    fn default() -> Self {
        Self { cache: CACHE, registries: BTreeMap::new() }
    }
}

impl Config {
    /// The path of the file: `dayfly/registries.toml` below `$XDG_CONFIG_HOME` or `~/.config`.
    #[must_use]
    pub fn path() -> Option<PathBuf> {
        let set = |name: &str| std::env::var_os(name).filter(|v| !v.is_empty()).map(PathBuf::from);
        let folder = set("XDG_CONFIG_HOME").or_else(|| Some(set("HOME")?.join(".config")))?;
        Some(folder.join("dayfly/registries.toml"))
    }

    /// Reads the file at `path`. A file that is absent says nothing.
    ///
    /// # Errors
    /// [`ConfigError`].
    pub fn load(path: &Path) -> Result<Self, ConfigError> {
        let failed = |source| ConfigError::Io { path: path.to_owned(), source };
        let file = match std::fs::File::open(path) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(Self::default()),
            other => other.map_err(failed)?,
        };
        let mut text = String::new();
        file.take(MAX_FILE_BYTES + 1).read_to_string(&mut text).map_err(failed)?;
        Self::parse(&text, path)
    }

    /// Reads `text`; `path` is for errors.
    ///
    /// # Errors
    /// [`ConfigError`].
    pub fn parse(text: &str, path: &Path) -> Result<Self, ConfigError> {
        let toml =
            |e: toml::de::Error| ConfigError::Toml { path: path.to_owned(), why: e.to_string() };
        let field = |place: String, expected, got: &str| ConfigError::Field {
            path: path.to_owned(),
            place,
            expected,
            got: got.chars().take(200).collect(),
        };
        if text.len() as u64 > MAX_FILE_BYTES {
            return Err(field("(all)".to_owned(), "at most 1 MiB", "more"));
        }
        let mut unknown = None;
        let written: Written =
            serde_ignored::deserialize(toml::Deserializer::parse(text).map_err(toml)?, |key| {
                unknown.get_or_insert_with(|| key.to_string());
            })
            .map_err(toml)?;
        if let Some(key) = unknown {
            let last = key.rsplit('.').next().unwrap_or_default().to_owned();
            let expected = "cache, registry.NAME.mirrors, .insecure or .ca";
            return Err(field(key, expected, &last));
        }
        let cache = match &written.cache {
            None => CACHE,
            Some(text) => {
                let expected = "a number of bytes, such as 8G";
                text.parse().map_err(|_| field("cache".to_owned(), expected, text))?
            }
        };
        for (name, entry) in &written.registry {
            let expected = "a registry, such as docker.io or registry.lan:5000";
            let here = |key: &str| format!("registry.{name:?}{key}");
            if !is_domain(name) {
                return Err(field(here(""), expected, name));
            }
            if let Some(mirror) = entry.mirrors.iter().find(|mirror| !is_domain(mirror)) {
                return Err(field(here(".mirrors"), expected, mirror));
            }
            if entry.mirrors.len() > MAX_MIRRORS {
                return Err(field(here(".mirrors"), "at most 16 mirrors", "more"));
            }
        }
        Ok(Self { cache, registries: written.registry })
    }

    /// The places to ask for images of `domain`: its mirrors, then itself.
    pub(crate) fn endpoints(&self, domain: &str) -> Vec<Endpoint> {
        let mirrors = self.registries.get(domain).map_or(&[][..], |entry| &entry.mirrors);
        let mirrors = mirrors.iter().map(|mirror| self.endpoint(mirror, Some(domain)));
        mirrors.chain([self.endpoint(domain, None)]).collect()
    }

    fn endpoint(&self, domain: &str, mirror_of: Option<&str>) -> Endpoint {
        let insecure = self.is_insecure(domain);
        let ca = self.registries.get(domain).and_then(|entry| entry.ca.clone());
        Endpoint {
            name: domain.to_owned(),
            host: if domain == DOCKER { DOCKER_HOST } else { domain }.to_owned(),
            insecure,
            trust: match ca {
                _ if insecure => Trust::Anyone,
                Some(path) => Trust::File(path),
                None => Trust::Host,
            },
            namespace: mirror_of.map(str::to_owned),
        }
    }

    /// Whether the registry `domain` may be used without TLS or with any certificate: by this
    /// configuration, or because it is on this host.
    pub(crate) fn is_insecure(&self, domain: &str) -> bool {
        self.registries.get(domain).is_some_and(|entry| entry.insecure) || is_loopback(domain)
    }
}

/// A place that serves images.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Endpoint {
    /// The name that credentials are for.
    pub name: String,
    /// Host, and port if one is given.
    pub host: String,
    pub insecure: bool,
    pub trust: Trust,
    /// The registry that this one mirrors.
    pub namespace: Option<String>,
}

impl Endpoint {
    /// The URL of `target`, which starts with `/`.
    pub fn url(&self, https: bool, target: &str) -> Result<Url, &'static str> {
        let scheme = if https { "https" } else { "http" };
        let mut url = Url::parse(&format!("{scheme}://{}{target}", self.host))?;
        if let Some(namespace) = &self.namespace {
            // As containerd does, so that one mirror can serve several registries.
            url.target.push_str(&format!("?ns={}", crate::url::encoded(namespace)));
        }
        Ok(url)
    }
}

/// `localhost`, 127.0.0.0/8 or `::1`, with or without a port.
fn is_loopback(domain: &str) -> bool {
    let Ok(Url { host, .. }) = Url::parse(&format!("http://{domain}")) else { return false };
    host == "localhost" || host.parse::<IpAddr>().is_ok_and(|address| address.is_loopback())
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = r#"
        cache = "1G"
        [registry."docker.io"]
        mirrors = ["mirror.lan:5000", "b.lan"]
        [registry."mirror.lan:5000"]
        insecure = true
        [registry."b.lan"]
        ca = "/b.pem"
    "#;

    fn parsed(text: &str) -> Result<Config, ConfigError> {
        Config::parse(text, Path::new("/r.toml"))
    }

    #[test]
    fn mirrors_come_first_and_each_has_its_own_trust() {
        let config = parsed(TEXT).unwrap();
        assert_eq!(config.cache, Bytes(1 << 30));
        let all = config.endpoints("docker.io");
        let hosts: Vec<&str> = all.iter().map(|e| e.host.as_str()).collect();
        assert_eq!(hosts, ["mirror.lan:5000", "b.lan", "registry-1.docker.io"]);
        let trust: Vec<&Trust> = all.iter().map(|e| &e.trust).collect();
        assert_eq!(trust, [&Trust::Anyone, &Trust::File("/b.pem".into()), &Trust::Host]);
        assert!(all[0].insecure && !all[1].insecure && !all[2].insecure);
        let url = all[0].url(false, "/v2/").unwrap();
        assert_eq!((url.target.as_str(), url.port), ("/v2/?ns=docker.io", 5000));
        assert_eq!(all[2].url(true, "/v2/").unwrap().target, "/v2/");
        assert_eq!(parsed("").unwrap(), Config::default());
    }

    #[test]
    fn only_this_host_is_insecure_by_itself() {
        let config = Config::default();
        for name in ["localhost", "localhost:5000", "127.9.9.9:1", "[::1]:5000", "LOCALHOST"] {
            assert!(config.is_insecure(name), "{name}");
        }
        for name in ["docker.io", "localhost.example.com", "128.0.0.1", "[::2]", "10.0.0.1:5000"] {
            assert!(!config.is_insecure(name), "{name}");
        }
    }

    #[test]
    fn what_is_not_known_is_refused_by_its_path() {
        for (text, parts) in [
            ("[registry.\"a.b\"]\ninsecur = true", ["registry.a.b.insecur", "insecure"]),
            ("mirror = 1", ["mirror", "expected cache"]),
            ("[registry.\"http://a\"]", ["http://a", "a registry"]),
            ("[registry.a]\nmirrors = [\"x/y\"]", ["registry.\"a\".mirrors", "x/y"]),
            ("cache = \"much\"", ["cache", "such as 8G"]),
            ("cache = 1", ["line 1", "string"]),
            ("[registry", ["line 1", "/r.toml"]),
        ] {
            let error = parsed(text).unwrap_err().to_string();
            assert!(parts.iter().all(|part| error.contains(part)), "{error}");
            assert!(error.starts_with("/r.toml: "), "{error}");
        }
        let absent = Config::load(Path::new("/nonexistent/r.toml")).unwrap();
        assert_eq!(absent, Config::default());
    }
}
