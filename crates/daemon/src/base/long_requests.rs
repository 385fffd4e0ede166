//! Bounds the memory of requests that run a program with long arguments.
//!
//! A request of up to 256 KiB ([`dayfly_api::agent::MAX_FRAME_BYTES`]) is read at once. A longer
//! one waits for a [`Permit`] before the rest of it is read, and has it until the guest's agent has
//! all of it. What waits is in the client's socket. A permit stands for the JSON (4 MiB), the
//! strings of a program (2 MiB as Linux counts them), and the frames for the agent (2 MiB); JSON of
//! many short strings takes more, up to about 100 MiB. So 1,000 programs that start at once take no
//! more than [`AT_ONCE`] of them.
//!
//! A client that has a permit has to send the rest within the deadline of a first frame. A user of
//! the host has at most [`OF_USER`] permits, so that a user whose clients stall, or whose VMs start
//! slowly, does not take all of them.

use crate::base::caller::Caller;
use dayfly_units::sync::lock;
use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// The most long requests in memory.
pub const AT_ONCE: usize = 8;
/// The most of one user.
pub const OF_USER: usize = 2;

/// The right to have a long request in memory, until it is dropped.
pub type Permit = Arc<[OwnedSemaphorePermit; 2]>;

/// A user, by id; `None` if the kernel does not say it.
type User = Option<u32>;

/// The permits of one daemon.
#[derive(Debug, Clone)]
pub struct LongRequests {
    all: Arc<Semaphore>,
    of_users: Arc<Mutex<HashMap<User, Arc<Semaphore>>>>,
}

impl Default for LongRequests {
    fn default() -> Self {
        Self { all: Arc::new(Semaphore::new(AT_ONCE)), of_users: Arc::default() }
    }
}

impl LongRequests {
    /// Waits for a permit for `caller`, in the order of the calls. `None` never comes, because the
    /// semaphores are not closed.
    pub async fn permit(&self, caller: Option<&Caller>) -> Option<Permit> {
        let of_user = self.of_user(caller.map(|caller| caller.uid)).acquire_owned().await.ok()?;
        let of_all = self.all.clone().acquire_owned().await.ok()?;
        Some(Arc::new([of_user, of_all]))
    }

    fn of_user(&self, user: User) -> Arc<Semaphore> {
        let mut users = lock(&self.of_users);
        // Users whose requests are done.
        users.retain(|_, permits| Arc::strong_count(permits) > 1);
        users.entry(user).or_insert_with(|| Arc::new(Semaphore::new(OF_USER))).clone()
    }

    /// How many permits are free.
    #[cfg(test)]
    pub fn free(&self) -> usize {
        self.all.available_permits()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures::FutureExt;

    #[tokio::test]
    async fn a_user_takes_not_all_and_gives_back() {
        let permits = LongRequests::default();
        let user = |uid| Caller { uid, ..Caller::default() };
        let mut held = Vec::new();
        for uid in 0..4 {
            for _ in 0..OF_USER {
                held.push(permits.permit(Some(&user(uid))).await.unwrap());
            }
            assert!(permits.permit(Some(&user(uid))).now_or_never().is_none(), "{uid}");
        }
        assert_eq!(permits.free(), 0);
        let more = user(9);
        let mut next = Box::pin(permits.permit(Some(&more)));
        assert!(next.as_mut().now_or_never().is_none());
        drop(held.pop());
        drop(next.await.unwrap());
        held.clear();
        drop(permits.permit(None).await.unwrap());
        assert_eq!((permits.free(), lock(&permits.of_users).len()), (AT_ONCE, 1));
    }
}
