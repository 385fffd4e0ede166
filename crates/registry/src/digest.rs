//! The digest of a blob.

use sha2::{Digest as _, Sha256};
use std::fmt;
use std::str::FromStr;

/// A SHA-256 digest, written as `sha256:` and 64 lower-case hexadecimal digits.
///
/// The OCI specification also registers SHA-512, which no known registry uses.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct BlobDigest(String);

/// Why a text is not a [`BlobDigest`].
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("digest: expected sha256: and 64 lower-case hexadecimal digits, got {0:?}")]
pub struct DigestError(String);

impl BlobDigest {
    /// The digest of `bytes`.
    #[must_use]
    pub fn of(bytes: &[u8]) -> Self {
        Self::from_hasher(Sha256::new_with_prefix(bytes))
    }

    pub(crate) fn from_hasher(hasher: Sha256) -> Self {
        Self(hex::encode(hasher.finalize()))
    }

    /// The 64 hexadecimal digits.
    #[must_use]
    pub fn hex(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for BlobDigest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "sha256:{}", self.0)
    }
}

impl FromStr for BlobDigest {
    type Err = DigestError;
    fn from_str(text: &str) -> Result<Self, DigestError> {
        let digit = |b: u8| b.is_ascii_digit() || (b'a'..=b'f').contains(&b);
        match text.strip_prefix("sha256:") {
            Some(hex) if hex.len() == 64 && hex.bytes().all(digit) => Ok(Self(hex.to_owned())),
            _ => Err(DigestError(text.chars().take(100).collect())),
        }
    }
}

/// What names a blob.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Blob {
    /// Its digest.
    pub digest: BlobDigest,
    /// Its size in bytes, as its descriptor says.
    pub size: u64,
}
