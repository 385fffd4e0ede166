//! Bounds the memory of requests that run a program with long arguments.
//!
//! A request of up to 256 KiB ([`dayfly_api::agent::MAX_FRAME_BYTES`]) is read at once. A longer one waits for a
//! [`Permit`] before the rest of it is read, and has it until the guest's agent has all of it. What
//! waits is in the client's socket. A permit stands for the JSON (4 MiB), the strings of a program
//! (2 MiB as Linux counts them), and the frames for the agent (2 MiB); JSON of many short strings
//! takes more, up to about 60 MiB. So 1,000 programs that start at once take no more than
//! [`AT_ONCE`] of them.
//!
//! A client that has a permit has to send the rest within the deadline of a first frame, so that
//! clients that stall delay others only.

use std::sync::Arc;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// The most long requests in memory.
pub const AT_ONCE: usize = 8;

/// The right to have a long request in memory, until it is dropped.
pub type Permit = Arc<OwnedSemaphorePermit>;

/// The permits of one daemon.
#[derive(Debug, Clone)]
pub struct LongRequests(Arc<Semaphore>);

impl Default for LongRequests {
    fn default() -> Self {
        Self(Arc::new(Semaphore::new(AT_ONCE)))
    }
}

impl LongRequests {
    /// Waits for a permit, in the order of the calls. `None` never comes, because the semaphore is
    /// not closed.
    pub async fn permit(&self) -> Option<Permit> {
        self.0.clone().acquire_owned().await.ok().map(Arc::new)
    }

    /// The semaphore, for code that polls.
    #[must_use]
    pub fn semaphore(&self) -> Arc<Semaphore> {
        self.0.clone()
    }
}
