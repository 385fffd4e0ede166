//! URLs of registries, token servers and redirects.

use std::fmt;

/// Longest URL, in bytes. Redirects of object stores carry signatures of some kilobytes.
const MAX_URL_BYTES: usize = 16 << 10;

/// An absolute URL with the scheme `http` or `https`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Url {
    pub https: bool,
    /// Host name or address, without brackets, in lower case.
    pub host: String,
    pub port: u16,
    /// Path and query; starts with `/`.
    pub target: String,
}

impl Url {
    /// Reads an absolute URL. A user in it is refused, because it would be a credential.
    pub fn parse(text: &str) -> Result<Self, &'static str> {
        if text.len() > MAX_URL_BYTES {
            return Err("a URL of at most 16 KiB");
        }
        if !text.bytes().all(|b| b.is_ascii_graphic()) {
            return Err("a URL in printable ASCII");
        }
        let (scheme, rest) = text.split_once("://").ok_or("a URL with http:// or https://")?;
        let https = match scheme.to_ascii_lowercase().as_str() {
            "https" => true,
            "http" => false,
            _ => return Err("a URL with http:// or https://"),
        };
        let rest = rest.split('#').next().unwrap_or_default();
        let end = rest.find(['/', '?']).unwrap_or(rest.len());
        let (authority, target) = rest.split_at(end);
        if !crate::reference::is_domain(authority) {
            return Err("a URL with a host's name or address, without a user");
        }
        let bare = authority.rfind(']').unwrap_or(0);
        let (host, port) = match authority[bare..].find(':') {
            Some(colon) => {
                let (host, port) = authority.split_at(bare + colon);
                (host, port[1..].parse().map_err(|_| "a port of 1 to 65535")?)
            }
            None => (authority, if https { 443 } else { 80 }),
        };
        let host = host.trim_start_matches('[').trim_end_matches(']').to_ascii_lowercase();
        let target = if target.starts_with('/') { target.to_owned() } else { format!("/{target}") };
        Ok(Self { https, host, port, target })
    }

    /// The URL that the header `Location` of this URL's answer means (RFC 3986, 5.2; a relative
    /// path is not normalised, because servers do that).
    pub fn join(&self, location: &str) -> Result<Self, &'static str> {
        let own = self.origin();
        if location.contains("://") && !location.starts_with(['/', '?']) {
            return Self::parse(location);
        }
        if let Some(rest) = location.strip_prefix("//") {
            return Self::parse(&format!("{}://{rest}", self.scheme()));
        }
        if location.starts_with('/') {
            return Self::parse(&format!("{own}{location}"));
        }
        let path = self.target.split('?').next().unwrap_or_default();
        let folder = path.rfind('/').map_or("/", |slash| &path[..=slash]);
        Self::parse(&format!("{own}{folder}{location}"))
    }

    /// The URL that a redirect from this one leads to, which is not from https to http.
    pub fn redirect(&self, location: &str) -> Result<Self, &'static str> {
        let next = self.join(location)?;
        if self.https && !next.https {
            return Err("https after https");
        }
        Ok(next)
    }

    pub const fn scheme(&self) -> &'static str {
        if self.https { "https" } else { "http" }
    }

    /// Host and port as in the header `Host`: without the scheme's usual port.
    pub fn authority(&self) -> String {
        let host =
            if self.host.contains(':') { format!("[{}]", self.host) } else { self.host.clone() };
        let usual = if self.https { 443 } else { 80 };
        if self.port == usual { host } else { format!("{host}:{}", self.port) }
    }

    /// Scheme, host and port: what a credential belongs to.
    pub fn origin(&self) -> String {
        format!("{}://{}", self.scheme(), self.authority())
    }

    /// Whether both have the same scheme, host and port.
    pub fn same_origin(&self, other: &Self) -> bool {
        (self.https, &self.host, self.port) == (other.https, &other.host, other.port)
    }
}

/// Without the query, which may hold a signature.
impl fmt::Display for Url {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let path = self.target.split('?').next().unwrap_or_default();
        write!(f, "{}{path}", self.origin())
    }
}

/// `text` for a query or a form: everything but letters, digits and `-._~` as `%XX`.
pub(crate) fn encoded(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for byte in text.bytes() {
        if byte.is_ascii_alphanumeric() || b"-._~".contains(&byte) {
            out.push(char::from(byte));
        } else {
            out.push_str(&format!("%{byte:02X}"));
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn urls_are_read_and_shown_without_their_query() {
        let url = Url::parse("HTTPS://Host.Example:5000/v2/?a=b#c").unwrap();
        assert_eq!(url.to_string(), "https://host.example:5000/v2/");
        assert_eq!(url.target, "/v2/?a=b");
        assert_eq!(Url::parse("http://[::1]:80/x").unwrap().authority(), "[::1]");
        assert_eq!(Url::parse("http://[::1]/x").unwrap().host, "::1");
        assert_eq!(Url::parse("https://a?b").unwrap().target, "/?b");
        for bad in ["a", "ftp://a/", "http://", "http://u:p@a/", "http://a:0/", "http://a b/"] {
            assert!(Url::parse(bad).is_err(), "{bad}");
        }
        assert!(Url::parse(&format!("http://a/{}", "x".repeat(20_000))).is_err());
    }

    #[test]
    fn locations_are_relative_to_their_url() {
        let url = Url::parse("https://a:1/v2/x/blobs/y?q").unwrap();
        for (location, expected) in [
            ("https://b/z", "https://b/z"),
            ("//b/z", "https://b/z"),
            ("/z", "https://a:1/z"),
            ("z?x://", "https://a:1/v2/x/blobs/z"),
            ("/z?u=http://c/", "https://a:1/z"),
        ] {
            let got = url.join(location);
            // A relative path with `://` in its query is taken for an absolute URL and refused.
            let shown = got.map(|url| url.to_string());
            if location.starts_with("z?") {
                assert!(shown.is_err(), "{location}");
            } else {
                assert_eq!(shown.as_deref(), Ok(expected), "{location}");
            }
        }
        assert_eq!(url.redirect("http://b/z"), Err("https after https"));
        assert!(url.redirect("https://b/z").is_ok());
        let http = Url::parse("http://a/").unwrap();
        assert!(http.redirect("http://b/z").is_ok() && http.redirect("https://b/z").is_ok());
        assert!(url.same_origin(&url.join("/z").unwrap()));
        for other in ["http://a:1/", "https://a/", "https://b:1/"] {
            assert!(!url.same_origin(&url.join(other).unwrap()), "{other}");
        }
    }

    #[test]
    fn a_query_is_encoded() {
        assert_eq!(encoded("repository:a/b:pull é"), "repository%3Aa%2Fb%3Apull%20%C3%A9");
    }
}
