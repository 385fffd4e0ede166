//! Calls that create something. Each has a key, so that it can be repeated when its connection
//! breaks: the daemon carries it out once.

use super::call::{bytes_body, to_json};
use super::{Client, ClientError, ProgressStream};
use crate::types::IDEMPOTENCY_KEY;
use dayfly_units::VmId;
use http::{Method, Request};
use serde::Serialize;
use serde::de::DeserializeOwned;

/// How often a call is sent. The second time is for a connection of the daemon before.
const TIMES: usize = 2;

/// A fresh key: 144 random bits.
fn key() -> String {
    [VmId::random(), VmId::random(), VmId::random()].map(|part| part.to_string()).join("-")
}

impl Client {
    /// A call that creates something, and answers with JSON.
    pub(super) async fn create_once<T: DeserializeOwned>(
        &self,
        path: &str,
        value: &impl Serialize,
    ) -> Result<T, ClientError> {
        let (key, json) = (key(), to_json(value)?);
        let mut times = 1;
        loop {
            let request = self.keyed(path, &key);
            match self.short_request(request, path, bytes_body(json.clone())).await {
                Err(ClientError::Broken { .. }) if times < TIMES => times += 1,
                answer => return self.decoded(&Method::POST, path, &answer?),
            }
        }
    }

    /// A call that creates something, and answers with progress. It is repeated if its connection
    /// breaks before the answer begins.
    pub(super) async fn progress_once(
        &self,
        path: &str,
        value: &impl Serialize,
    ) -> Result<ProgressStream, ClientError> {
        let (key, json) = (key(), to_json(value)?);
        let mut times = 1;
        loop {
            let request = self.keyed(path, &key);
            match self.send(request, bytes_body(json.clone()), None).await {
                Err(ClientError::Broken { .. }) if times < TIMES => times += 1,
                answer => return Ok(ProgressStream::new(answer?.0)),
            }
        }
    }

    fn keyed(&self, path: &str, key: &str) -> http::request::Builder {
        let request = Request::builder().method(Method::POST).uri(path);
        request.header(IDEMPOTENCY_KEY, format!("\"{key}\""))
    }
}
