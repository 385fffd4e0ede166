//! A guest's console.

use super::{Params, Shared, Word};
use crate::error::{Fault, Outcome};
use crate::vm::Vm;
use axum::body::Body;
use axum::extract::State;
use axum::http::header;
use axum::response::{IntoResponse, Response};
use bytes::{Bytes, BytesMut};
use dayfly_api::types::ApiError;
use serde::Deserialize;
use std::io;
use std::sync::Arc;
use std::time::Duration;
use tokio::fs::File;
use tokio::io::AsyncReadExt;

/// Between two looks at a console that is followed.
const LOOK: Duration = Duration::from_millis(100);
/// Read at once.
const CHUNK_BYTES: usize = 64 << 10;

/// How to show a console.
#[derive(Debug, Deserialize, utoipa::IntoParams)]
#[into_params(parameter_in = Query)]
pub struct LogParams {
    /// Go on until the VM ends.
    #[serde(default)]
    follow: bool,
}

/// What a guest wrote to its console.
#[utoipa::path(get, path = "/v1/vms/{vm}/logs", params(("vm" = String, Path), LogParams),
    responses((status = 200, body = String, content_type = "text/plain"), (status = 404, body = ApiError)))]
pub async fn logs(
    State(daemon): Shared,
    Word(word): Word,
    Params(params): Params<LogParams>,
) -> Outcome<Response> {
    let vm = daemon.registry.find(&word)?;
    let path = vm.dir.console();
    let file =
        File::open(&path).await.map_err(|e| Fault::internal(format_args!("{}: {e}", path.display())))?;
    let tail = Tail { file, vm: params.follow.then_some(vm), last_look: false };
    let pieces = futures::stream::try_unfold(tail, async |mut tail| {
        let piece = tail.next().await?;
        Ok::<_, io::Error>(piece.map(|piece| (piece, tail)))
    });
    Ok(([(header::CONTENT_TYPE, "text/plain; charset=utf-8")], Body::from_stream(pieces)).into_response())
}

struct Tail {
    file: File,
    /// Whose end to wait for.
    vm: Option<Arc<Vm>>,
    last_look: bool,
}

impl Tail {
    async fn next(&mut self) -> io::Result<Option<Bytes>> {
        loop {
            let mut piece = BytesMut::with_capacity(CHUNK_BYTES);
            if self.file.read_buf(&mut piece).await? > 0 {
                return Ok(Some(piece.freeze()));
            }
            let Some(vm) = self.vm.as_ref().filter(|_| !self.last_look) else { return Ok(None) };
            // What was written between the last read and the end is read after the end has been seen.
            self.last_look = tokio::time::timeout(LOOK, vm.wait_gone()).await.is_ok();
        }
    }
}
