//! What a client of registries and a client of token servers share: configuration, transport,
//! retries, and the words of an error.

use crate::config::Config;
use crate::credentials::DockerConfig;
use crate::error::RegistryError;
use crate::retry::Policy;
use crate::text::shown;
use crate::transport::{Answer, Body, Transport};
use http::header::RETRY_AFTER;
use serde::Deserialize;

/// Upper limit for the body of an error, in bytes.
const MAX_ERROR_BYTES: usize = 16 << 10;

/// Makes requests, again if that makes sense.
#[derive(Debug)]
pub(crate) struct Requests {
    pub config: Config,
    pub docker: DockerConfig,
    pub transport: Transport,
    pub policy: Policy,
}

impl Requests {
    /// Makes a request again as the policy says.
    pub(crate) async fn patiently<T, F: Future<Output = Result<T, RegistryError>>>(
        &self,
        mut act: impl FnMut() -> F,
    ) -> Result<T, RegistryError> {
        let mut attempt = 1;
        loop {
            let error = match act().await {
                Ok(done) => return Ok(done),
                Err(error) => error,
            };
            let Some(pause) = self.policy.after(attempt, &error) else { return Err(error) };
            tracing::debug!(%error, attempt, "again after a pause");
            tokio::time::sleep(pause).await;
            attempt += 1;
        }
    }
}

/// The error for an answer with an unexpected status.
pub(crate) async fn unexpected(expected: &'static str, answer: Answer) -> RegistryError {
    let status = answer.status;
    let wait = answer.headers.get(RETRY_AFTER).and_then(|value| value.to_str().ok());
    RegistryError::Status {
        url: answer.url.to_string(),
        expected,
        status: status.to_string(),
        retry: matches!(status.as_u16(), 408 | 429 | 500 | 502 | 503 | 504),
        wait_s: wait.and_then(|text| text.trim().parse().ok()),
        message: message(answer.body).await,
    }
}

/// The first error that a registry explains (distribution-spec, "Error Codes"), with `: ` before
/// it; empty if there is none.
pub(crate) async fn message(body: Body) -> String {
    let bytes = body.whole(MAX_ERROR_BYTES).await.unwrap_or_default();
    explained(&bytes).map_or_else(String::new, |text| format!(": {}", shown(&text)))
}

pub(crate) fn explained(bytes: &[u8]) -> Option<String> {
    #[derive(Deserialize)]
    struct Errors {
        errors: Vec<One>,
    }
    #[derive(Deserialize)]
    struct One {
        #[serde(default)]
        code: String,
        #[serde(default)]
        message: String,
    }
    let errors: Errors = serde_json::from_slice(bytes).ok()?;
    let first = errors.errors.into_iter().next()?;
    Some(if first.message.is_empty() { first.code } else { first.message })
}
