//! Progress of an operation, for the client that waits for it.

use dayfly_api::types::Progress;
use dayfly_store::Meter;
use std::future::Future;
use std::time::Duration;
use tokio::sync::mpsc;

/// Period at which a meter is read.
const LOOK: Duration = Duration::from_millis(200);

/// Sends the progress of one operation to the client that waits for it.
#[derive(Debug, Clone)]
pub struct ProgressSender(pub(crate) mpsc::Sender<Progress>);

impl ProgressSender {
    /// A sender without a receiver, which drops every message.
    #[cfg(test)]
    pub(crate) fn without_receiver() -> Self {
        Self(mpsc::channel(1).0)
    }

    /// Reports that a phase begins.
    pub async fn phase(&self, label: impl Into<String>) {
        self.send(Progress::Phase { label: label.into() }).await;
    }

    /// Sends `progress`. Without a receiver it is dropped, because the operation is being undone
    /// then.
    pub async fn send(&self, progress: Progress) {
        let _ = self.0.send(progress).await;
    }

    /// Sends `progress`, or drops it if the receiver is behind: for steps within a phase.
    pub fn try_send(&self, progress: Progress) {
        let _ = self.0.try_send(progress);
    }
}

/// Waits for `work` of the store. Meanwhile it reports the readings of `meter`: each part of the
/// work is a phase.
pub async fn metered<T>(
    progress: &ProgressSender,
    meter: &Meter,
    work: impl Future<Output = T>,
) -> T {
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
                    progress.phase(now.part).await;
                }
                if now != last && now.done > 0 {
                    progress.try_send(Progress::Step { done: now.done, total: now.total });
                }
                last = now;
            }
        }
    }
}

/// Stops the work of a meter when the future that waits for it is dropped.
#[derive(Debug)]
pub struct StopWhenDropped(pub std::sync::Arc<Meter>);

impl Drop for StopWhenDropped {
    fn drop(&mut self) {
        self.0.stop();
    }
}
