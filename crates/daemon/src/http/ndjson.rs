//! Progress of long operations, one JSON line each. An operation ends when its client goes away.

use crate::base::error::{ApiError, Outcome};
use crate::base::progress::ProgressSender;
use axum::body::Body;
use axum::http::header;
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use dayfly_api::types::{Collected, Progress, Recording, Repaired, Snapshot, Verified};
use std::future::Future;
use tokio::sync::mpsc;
use tokio_stream::StreamExt;
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::sync::CancellationToken;

/// Lines that wait for a slow client before the operation waits for the client.
const BACKLOG: usize = 64;

/// The result with which an operation ends.
pub trait Ending {
    /// The last line of the operation's stream.
    fn line(self) -> Progress;
}

impl Ending for Snapshot {
    fn line(self) -> Progress {
        Progress::Snapshot(Box::new(self))
    }
}

impl Ending for Recording {
    fn line(self) -> Progress {
        Progress::Recorded(Box::new(self))
    }
}

impl Ending for Verified {
    fn line(self) -> Progress {
        Progress::Verified(Box::new(self))
    }
}

impl Ending for Collected {
    fn line(self) -> Progress {
        Progress::Collected(Box::new(self))
    }
}

impl Ending for Repaired {
    fn line(self) -> Progress {
        Progress::Repaired(Box::new(self))
    }
}

/// Starts `operation` and answers with its progress. If the client goes away or the daemon stops,
/// the operation's future is dropped, and the operation undoes itself.
pub fn stream<F, Fut, T>(stop: CancellationToken, operation: F) -> Response
where
    F: FnOnce(ProgressSender) -> Fut,
    Fut: Future<Output = Outcome<T>> + Send + 'static,
    T: Ending,
{
    let (sender, receiver) = mpsc::channel(BACKLOG);
    let work = operation(ProgressSender(sender.clone()));
    tokio::spawn(async move {
        let last = tokio::select! {
            outcome = work => match outcome {
                Ok(ending) => ending.line(),
                Err(ApiError(error)) => Progress::Failed(error),
            },
            () = sender.closed() => return,
            () = stop.cancelled() => Progress::Failed(ApiError::stopping().0),
        };
        let _ = sender.send(last).await;
    });
    let lines = ReceiverStream::new(receiver).map(|progress| {
        let mut line = serde_json::to_vec(&progress).map_err(std::io::Error::other)?;
        line.push(b'\n');
        Ok::<_, std::io::Error>(Bytes::from(line))
    });
    ([(header::CONTENT_TYPE, "application/x-ndjson")], Body::from_stream(lines)).into_response()
}
