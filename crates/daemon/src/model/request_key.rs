//! The key by which a client repeats a request without repeating what it does.

use crate::base::error::{ApiError, Outcome};
use dayfly_units::Digest;
use serde::{Deserialize, Serialize};

/// The longest key, in characters.
pub const LONGEST: usize = 128;

/// The key of a request, and the digest of all that the request says.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RequestKey {
    /// The key.
    pub key: String,
    /// The digest of method, path, query and body.
    pub request: Digest,
}

/// The key in a header `Idempotency-Key`: a string of RFC 9651, or the same without the quotes.
///
/// # Errors
/// It is not 1 to 128 visible ASCII characters without quotes and backslashes.
pub fn parse(header: &[u8]) -> Outcome<String> {
    let text = str::from_utf8(header).unwrap_or_default().trim();
    let inner = text.strip_prefix('"').and_then(|text| text.strip_suffix('"')).unwrap_or(text);
    let fits = (1..=LONGEST).contains(&inner.len())
        && inner.bytes().all(|byte| byte.is_ascii_graphic() && !b"\"\\".contains(&byte));
    if fits {
        return Ok(inner.to_owned());
    }
    Err(ApiError::invalid(format_args!(
        "Idempotency-Key: expected 1 to {LONGEST} visible ASCII characters without \" and \\, got \
         {} bytes; a UUID is a good key",
        header.len()
    )))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_is_a_quoted_string_or_the_same_without_quotes() {
        assert_eq!(parse(b"8e03978e-40d5").unwrap(), "8e03978e-40d5");
        assert_eq!(parse(b"\"8e03978e-40d5\"").unwrap(), "8e03978e-40d5");
        assert!(parse(&[b'x'; LONGEST]).is_ok());
        for bad in [b"".as_slice(), b"\"\"", b"\"", b"a b", b"a\\b", b"\xff", &[b'x'; LONGEST + 1]]
        {
            let error = parse(bad).unwrap_err().to_string();
            assert!(error.starts_with("Idempotency-Key: expected 1 to 128"), "{error}");
        }
    }
}
