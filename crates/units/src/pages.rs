//! Page size and byte counts.

use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;

/// The page size that guests, the store and the host use, in bytes: 4 KiB.
pub const PAGE_SIZE: u64 = 4096;

/// A number of bytes, written by people as `512M`, `2GiB` or `4096`. Suffixes are binary: K = 1024.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Bytes(pub u64);

impl Bytes {
    /// `n` MiB.
    #[must_use]
    pub const fn mib(n: u32) -> Self {
        Self((n as u64) << 20)
    }
}

/// Why a text is not a [`Bytes`].
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("size {0:?}: expected a whole number with an optional K, M, G or T, such as 512M")]
pub struct ParseBytesError(String);

impl FromStr for Bytes {
    type Err = ParseBytesError;
    fn from_str(text: &str) -> Result<Self, ParseBytesError> {
        let bad = || ParseBytesError(text.chars().take(40).collect());
        let digits = text.len() - text.trim_start_matches(|c: char| c.is_ascii_digit()).len();
        let number: u64 = text[..digits].parse().map_err(|_| bad())?;
        let shift = match text[digits..].trim().to_ascii_lowercase().as_str() {
            "" | "b" => 0,
            "k" | "kb" | "kib" => 10,
            "m" | "mb" | "mib" => 20,
            "g" | "gb" | "gib" => 30,
            "t" | "tb" | "tib" => 40,
            _ => return Err(bad()),
        };
        number.checked_mul(1 << shift).map(Self).ok_or_else(bad)
    }
}

impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let text = match self.0 {
            n if n < 1 << 10 => format!("{n} B"),
            n if n < 1 << 20 => format!("{}.{} KiB", n >> 10, ((n & 0x3ff) * 10) >> 10),
            n if n < 1 << 30 => format!("{}.{} MiB", n >> 20, ((n & 0xf_ffff) * 10) >> 20),
            n => format!("{}.{} GiB", n >> 30, ((n & 0x3fff_ffff) * 10) >> 30),
        };
        f.pad(&text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn people_and_machines_write_sizes() {
        assert_eq!("512M".parse(), Ok(Bytes::mib(512)));
        assert_eq!("2GiB".parse(), Ok(Bytes(2 << 30)));
        assert_eq!("4096".parse(), Ok(Bytes(4096)));
        for bad in ["", "M", "1.5G", "-1", "12X", "99999999999T", "1 M M"] {
            assert!(bad.parse::<Bytes>().is_err(), "{bad:?}");
        }
        assert_eq!(Bytes(1536).to_string(), "1.5 KiB");
        assert_eq!(Bytes::mib(256).to_string(), "256.0 MiB");
    }
}
