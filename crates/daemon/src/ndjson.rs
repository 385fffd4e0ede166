//! Long operations, told line by line; they end when nobody listens any more.

use crate::error::{Fault, Outcome};
use axum::body::Body;
use axum::http::header;
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use dayfly_api::types::{Collected, ErrorCode, Progress, Rehearsal, Snapshot, Verified};
use dayfly_store::Meter;
use std::future::Future;
use std::time::Duration;
use tokio::sync::mpsc;
use tokio_stream::StreamExt;
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::sync::CancellationToken;

/// Lines that wait for a slow reader before the operation waits for him.
const BACKLOG: usize = 64;
/// How often a meter is read.
const LOOK: Duration = Duration::from_millis(200);

/// Where an operation says how far it is.
#[derive(Debug, Clone)]
pub struct Teller(mpsc::Sender<Progress>);

impl Teller {
    /// Nobody hears it.
    #[cfg(test)]
    pub(crate) fn of_nobody() -> Self {
        Self(mpsc::channel(1).0)
    }

    /// A phase begins.
    pub async fn phase(&self, label: impl Into<String>) {
        self.tell(Progress::Phase { label: label.into() }).await;
    }

    /// Says anything. Where nobody listens, the operation is being ended anyway.
    pub async fn tell(&self, progress: Progress) {
        let _ = self.0.send(progress).await;
    }

    /// As [`Self::tell`], for steps on the way: left out where the reader is behind.
    pub fn tell_if_heard(&self, progress: Progress) {
        let _ = self.0.try_send(progress);
    }
}

/// What an operation ends with.
pub trait Ending {
    /// As the last line of its stream.
    fn line(self) -> Progress;
}

impl Ending for Snapshot {
    fn line(self) -> Progress {
        Progress::Snapshot(Box::new(self))
    }
}

impl Ending for Rehearsal {
    fn line(self) -> Progress {
        Progress::Rehearsed(Box::new(self))
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

/// Waits for `work` of the store, and tells what `meter` shows meanwhile: each of its parts is a phase.
pub async fn metered<T>(tell: &Teller, meter: &Meter, work: impl Future<Output = T>) -> T {
    let mut work = std::pin::pin!(work);
    let mut look = tokio::time::interval(LOOK);
    let mut last = dayfly_store::Reading::default();
    loop {
        tokio::select! {
            biased;
            done = &mut work => return done,
            _ = look.tick() => {
                let now = meter.reading();
                if now.part != last.part {
                    tell.phase(now.part).await;
                }
                if now != last && now.done > 0 {
                    tell.tell_if_heard(Progress::Step { done: now.done, total: now.total });
                }
                last = now;
            }
        }
    }
}

/// Stops what a meter belongs to when nobody waits for it any more.
#[derive(Debug)]
pub struct StopWhenDropped(pub std::sync::Arc<Meter>);

impl Drop for StopWhenDropped {
    fn drop(&mut self) {
        self.0.stop();
    }
}

/// Starts `operation` and answers with what it tells. When the client goes away, or the daemon stops, the operation is dropped
/// where it waits, and undoes itself.
pub fn stream<F, Fut, T>(stop: CancellationToken, operation: F) -> Response
where
    F: FnOnce(Teller) -> Fut,
    Fut: Future<Output = Outcome<T>> + Send + 'static,
    T: Ending,
{
    let (sender, receiver) = mpsc::channel(BACKLOG);
    let work = operation(Teller(sender.clone()));
    tokio::spawn(async move {
        let last = tokio::select! {
            outcome = work => match outcome {
                Ok(ending) => ending.line(),
                Err(Fault(error)) => Progress::Failed(error),
            },
            () = sender.closed() => return,
            () = stop.cancelled() => Progress::Failed(Fault::new(ErrorCode::Internal, "the daemon was asked to stop").0),
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
