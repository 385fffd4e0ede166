//! Why a stream broke off: its last frame cannot be sent inside another one, so the client asks.

use super::error::ClientError;
use crate::types::ApiError;
use futures::future::BoxFuture;
use std::fmt;
use std::sync::Arc;

/// Asks a daemon why this VM has ended; `None` if it has not, or the daemon does not answer.
pub(super) type Ask = dyn Fn(String) -> BoxFuture<'static, Option<ApiError>> + Send + Sync;

/// Where the reason is asked for.
#[derive(Clone)]
pub(super) struct Reason(Arc<Ask>);

impl fmt::Debug for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Reason")
    }
}

impl Reason {
    pub(super) fn new(
        ask: impl Fn(String) -> BoxFuture<'static, Option<ApiError>> + Send + Sync + 'static,
    ) -> Self {
        Self(Arc::new(ask))
    }

    /// The error of a stream to this VM: why the VM has ended, if the connection broke because of
    /// that, or else `error`.
    pub(super) async fn instead_of(&self, error: ClientError, vm: &str) -> ClientError {
        if !matches!(error, ClientError::Broken { .. }) {
            return error;
        }
        (self.0)(vm.to_owned()).await.map_or(error, ClientError::Refused)
    }
}
