//! The head of an upload: a length, then JSON. The store reads the rest, which is one zstd frame.
//!
//! The length is checked before memory is allocated for it.

use crate::base::error::ApiError;
use crate::http::json;
use dayfly_api::types::MAX_JSON_BYTES;
use serde::de::DeserializeOwned;
use std::io::{self, Read};

/// Why an upload was refused before it reached the store.
#[derive(Debug, thiserror::Error)]
pub enum UploadError {
    /// The upload ends too early, or the connection broke.
    #[error("upload, {what}: {source}")]
    Io {
        /// The part that was being read.
        what: &'static str,
        /// The error of the connection.
        #[source]
        source: io::Error,
    },
    /// The head's length is 0, or above the limit.
    #[error("upload, length of the head at byte 0: expected 1 to {MAX_JSON_BYTES}, got {0}")]
    HeadLength(u32),
    /// The head is not JSON of its type.
    #[error("upload, head at byte 4: {0}")]
    Head(#[source] json::JsonError),
}

impl From<UploadError> for ApiError {
    fn from(e: UploadError) -> Self {
        Self::invalid(e)
    }
}

/// Reads the head of an upload.
///
/// # Errors
/// [`UploadError`].
pub fn read_head<T: DeserializeOwned>(from: &mut impl Read) -> Result<T, UploadError> {
    let mut length = [0; 4];
    from.read_exact(&mut length)
        .map_err(|source| UploadError::Io { what: "length of the head at byte 0", source })?;
    let length = u32::from_le_bytes(length);
    if length == 0 || length as usize > MAX_JSON_BYTES {
        return Err(UploadError::HeadLength(length));
    }
    let mut json = vec![0; length as usize];
    from.read_exact(&mut json)
        .map_err(|source| UploadError::Io { what: "head at byte 4", source })?;
    json::decoded(&json).map_err(UploadError::Head)
}

#[cfg(test)]
mod tests {
    use super::*;
    use dayfly_api::types::KernelUpload;
    use proptest::prelude::*;

    fn head() -> KernelUpload {
        KernelUpload {
            release: "6.12".into(),
            vmlinux_bytes: 3,
            initrd_bytes: 2,
            modules: None,
            digest: "d".into(),
        }
    }

    fn upload() -> Vec<u8> {
        let json = serde_json::to_vec(&head()).unwrap();
        let length = u32::try_from(json.len()).unwrap();
        [length.to_le_bytes().to_vec(), json, b"abcde".to_vec()].concat()
    }

    fn read(mut bytes: &[u8]) -> Result<(KernelUpload, Vec<u8>), ApiError> {
        let head = read_head(&mut bytes)?;
        let mut body = Vec::new();
        bytes.read_to_end(&mut body).map_err(ApiError::invalid)?;
        Ok((head, body))
    }

    #[test]
    fn a_head_is_read_and_every_truncation_refused() {
        let whole = upload();
        assert_eq!(read(&whole).unwrap(), (head(), b"abcde".to_vec()));
        for length in 0..whole.len() - 5 {
            assert!(read(&whole[..length]).is_err(), "cut to {length} bytes");
        }
    }

    #[test]
    fn a_head_over_the_cap_is_refused_before_it_is_read() {
        for length in [0, u32::try_from(MAX_JSON_BYTES).unwrap() + 1, u32::MAX] {
            let refused = read_head::<KernelUpload>(&mut length.to_le_bytes().as_slice());
            assert!(matches!(refused, Err(UploadError::HeadLength(got)) if got == length));
        }
    }

    proptest! {
        #[test]
        fn any_bytes_are_read_or_refused(bytes in proptest::collection::vec(any::<u8>(), 0..100)) {
            let _ = read(&bytes);
        }
    }
}
