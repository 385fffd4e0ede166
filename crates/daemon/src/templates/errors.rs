//! Errors of the store as errors of the API.

use crate::base::error::ApiError;
use dayfly_api::types::ErrorCode;
use dayfly_store::{
    CommitError, GcError, IoError, OpenError, PinError, PutError, RemoveError, UsedLayerError,
};
use dayfly_units::error::chain;
use std::io;

fn io_code(e: &IoError) -> ErrorCode {
    match e {
        _ if e.is_no_space() => ErrorCode::Exhausted,
        _ if e.is_read_only() => ErrorCode::Conflict,
        _ => ErrorCode::Internal,
    }
}

impl From<IoError> for ApiError {
    fn from(e: IoError) -> Self {
        Self::new(io_code(&e), chain(&e))
    }
}

impl From<UsedLayerError> for ApiError {
    fn from(e: UsedLayerError) -> Self {
        match e {
            UsedLayerError::Io(e) => e.into(),
            UsedLayerError::FileSystem { .. } => Self::new(ErrorCode::State, e),
        }
    }
}

impl From<OpenError> for ApiError {
    fn from(e: OpenError) -> Self {
        let code = match &e {
            OpenError::NotFound { .. } => ErrorCode::NotFound,
            OpenError::Damage(_) => ErrorCode::Damaged,
            OpenError::Io(e) => io_code(e),
        };
        Self::new(code, chain(&e))
    }
}

impl From<PutError> for ApiError {
    fn from(e: PutError) -> Self {
        let full = |e: &io::Error| {
            matches!(e.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded)
        };
        let code = match &e {
            PutError::Stream {
                source: dayfly_store::sparse::CopyError::Write { source, .. },
                ..
            } => {
                if full(source) {
                    ErrorCode::Exhausted
                } else {
                    ErrorCode::Internal
                }
            }
            PutError::TooLarge { .. }
            | PutError::Stream { .. }
            | PutError::Longer { .. }
            | PutError::Invalid { .. } => ErrorCode::Invalid,
            PutError::Digest { .. } => ErrorCode::Damaged,
            PutError::InUse { .. } => ErrorCode::Conflict,
            PutError::Io(e) => io_code(e),
        };
        Self::new(code, chain(&e))
    }
}

impl From<RemoveError> for ApiError {
    fn from(e: RemoveError) -> Self {
        let code = match &e {
            RemoveError::NotFound { .. } => ErrorCode::NotFound,
            RemoveError::InUse { .. } => ErrorCode::Conflict,
            RemoveError::Io(e) => io_code(e),
        };
        Self::new(code, chain(&e))
    }
}

impl From<CommitError> for ApiError {
    fn from(e: CommitError) -> Self {
        let code = match &e {
            CommitError::Exists { .. } => ErrorCode::Conflict,
            CommitError::Damage(_) => ErrorCode::Damaged,
            CommitError::Invalid { .. } => ErrorCode::Invalid,
            CommitError::Io(e) => io_code(e),
            CommitError::Work(e) if e.is_no_space => ErrorCode::Exhausted,
            CommitError::Work(_) => ErrorCode::Internal,
        };
        Self::new(code, chain(&e))
    }
}

impl From<PinError> for ApiError {
    fn from(e: PinError) -> Self {
        let code = match &e {
            PinError::Damage(_) => ErrorCode::Damaged,
            PinError::Io(e) => io_code(e),
        };
        Self::new(code, chain(&e))
    }
}

impl From<GcError> for ApiError {
    fn from(e: GcError) -> Self {
        Self::new(ErrorCode::Internal, chain(&e))
    }
}
