//! Requests with a key (`Idempotency-Key`): the same key and the same request get the first answer.
//!
//! ```text
//!  enter ─▶ First ─▶ the work runs ─▶ Ticket::finish ─▶ Kept, or forgotten if nothing was made
//!        ├▶ Again: waits for the answer of the work that runs
//!        ├▶ Kept: the answer
//!        └▶ Adopted: VMs of a request that an earlier daemon carried out
//! ```
//!
//! The work of a key belongs to all requests that wait for it. It is cancelled when the last of
//! them is gone, as the work of a request without a key is when its client is gone.

use crate::base::error::{ApiError, Outcome};
use crate::model::request_key::RequestKey;
use axum::http::StatusCode;
use bytes::Bytes;
use dayfly_api::types::ErrorCode;
use dayfly_units::{Digest, VmId, sync::lock};
use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;
use tokio::sync::watch;
use tokio::time::Instant;
use tokio_util::sync::{CancellationToken, DropGuard};

/// For how long the answer to a request is kept.
pub const KEEP: Duration = Duration::from_secs(24 * 60 * 60);
/// The most answers that are kept.
const MOST: usize = 4096;
/// The most bytes of answers that are kept.
const MOST_BYTES: usize = 64 << 20;
/// The longest answer that is kept, in bytes.
const LONGEST: usize = 8 << 20;

/// The answer to a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Answer {
    /// Its status.
    pub status: StatusCode,
    /// Its content type.
    pub kind: &'static str,
    /// Its body.
    pub body: Bytes,
}

#[derive(Debug)]
enum State {
    Running {
        done: watch::Receiver<Option<Arc<Answer>>>,
        waiters: Weak<DropGuard>,
    },
    Kept(Arc<Answer>),
    /// Kept without its body, which was too long.
    TooLong(usize),
    Adopted(Vec<VmId>),
}

#[derive(Debug)]
struct Entry {
    request: Digest,
    /// Distinguishes this entry from a later one of the same key.
    number: u64,
    state: State,
}

/// An entry that is kept, in the order of its end.
#[derive(Debug)]
struct Ended {
    key: String,
    number: u64,
    at: Instant,
    bytes: usize,
}

#[derive(Debug, Default)]
struct Inner {
    entries: HashMap<String, Entry>,
    ended: VecDeque<Ended>,
    bytes: usize,
    next: u64,
}

/// The requests with a key.
#[derive(Debug, Default)]
pub struct Requests(Mutex<Inner>);

/// What a request with a key gets.
#[derive(Debug)]
pub enum Entered {
    /// It is the first one: the caller does the work, until the token is cancelled.
    First(Ticket, Waiting, CancellationToken),
    /// The work is being done.
    Again(Waiting),
    /// The work is done.
    Kept(Arc<Answer>),
    /// An earlier daemon did the work: these are its VMs.
    Adopted(Vec<VmId>),
}

/// A request that waits for the work of its key.
#[derive(Debug)]
pub struct Waiting {
    done: watch::Receiver<Option<Arc<Answer>>>,
    _waiters: Arc<DropGuard>,
}

/// The right to answer the requests of a key. If it is dropped, the key is forgotten.
#[derive(Debug)]
pub struct Ticket {
    requests: Arc<Requests>,
    key: String,
    number: u64,
    done: watch::Sender<Option<Arc<Answer>>>,
}

impl Waiting {
    /// The answer, when the work is done.
    ///
    /// # Errors
    /// The work was given up.
    pub async fn answer(&mut self) -> Outcome<Arc<Answer>> {
        let answer = self.done.wait_for(Option::is_some).await.ok().and_then(|done| done.clone());
        answer.ok_or_else(|| {
            let message = "the first request of this key was given up; ask again";
            ApiError::new(ErrorCode::Internal, message)
        })
    }
}

impl Ticket {
    /// Answers the requests of the key. With `keep`, later requests get the answer too.
    pub fn finish(self, answer: Answer, keep: bool) {
        if keep {
            let mut inner = lock(&self.requests.0);
            let long = answer.body.len() > LONGEST;
            let bytes = if long { 0 } else { answer.body.len() };
            if let Some(entry) = inner.entries.get_mut(&self.key)
                && entry.number == self.number
            {
                entry.state = if long {
                    State::TooLong(answer.body.len())
                } else {
                    State::Kept(Arc::new(answer.clone()))
                };
                inner.ended(self.key.clone(), self.number, bytes);
            }
        }
        self.done.send_replace(Some(Arc::new(answer)));
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        let mut inner = lock(&self.requests.0);
        let running = |entry: &Entry| {
            entry.number == self.number && matches!(entry.state, State::Running { .. })
        };
        if inner.entries.get(&self.key).is_some_and(running) {
            inner.entries.remove(&self.key);
        }
    }
}

impl Inner {
    fn ended(&mut self, key: String, number: u64, bytes: usize) {
        self.bytes = self.bytes.saturating_add(bytes);
        self.ended.push_back(Ended { key, number, at: Instant::now(), bytes });
        self.expire();
    }

    /// Forgets the oldest answers beyond the limits.
    fn expire(&mut self) {
        while let Some(oldest) = self.ended.front()
            && (oldest.at.elapsed() >= KEEP || self.ended.len() > MOST || self.bytes > MOST_BYTES)
            && let Some(Ended { key, number, bytes, .. }) = self.ended.pop_front()
        {
            self.bytes = self.bytes.saturating_sub(bytes);
            if self.entries.get(&key).is_some_and(|entry| entry.number == number) {
                self.entries.remove(&key);
            }
        }
    }

    fn number(&mut self) -> u64 {
        self.next += 1;
        self.next
    }
}

impl Requests {
    /// What a request with this key gets.
    ///
    /// # Errors
    /// The key belongs to another request, or its answer was too long to keep.
    pub fn enter(self: &Arc<Self>, key: &RequestKey) -> Outcome<Entered> {
        let RequestKey { key, request } = key;
        let mut inner = lock(&self.0);
        inner.expire();
        if let Some(entry) = inner.entries.get(key) {
            if entry.request != *request {
                return Err(ApiError::new(
                    ErrorCode::KeyReused,
                    format_args!(
                        "Idempotency-Key {key}: it belongs to another request, with another path \
                         or body; take a new key for each request, and the same only to repeat it"
                    ),
                ));
            }
            match &entry.state {
                State::Kept(answer) => return Ok(Entered::Kept(answer.clone())),
                State::Adopted(vms) => return Ok(Entered::Adopted(vms.clone())),
                State::TooLong(got) => {
                    return Err(ApiError::conflict(format_args!(
                        "Idempotency-Key {key}: the request was carried out; its answer had {got} \
                         bytes, and at most {LONGEST} are kept"
                    )));
                }
                State::Running { done, waiters } => {
                    // Without waiters it is being cancelled: this request begins anew.
                    if let Some(waiters) = waiters.upgrade() {
                        let waiting = Waiting { done: done.clone(), _waiters: waiters };
                        return Ok(Entered::Again(waiting));
                    }
                }
            }
        }
        let (sender, done) = watch::channel(None);
        let token = CancellationToken::new();
        let waiters = Arc::new(token.clone().drop_guard());
        let number = inner.number();
        let state = State::Running { done: done.clone(), waiters: Arc::downgrade(&waiters) };
        inner.entries.insert(key.clone(), Entry { request: *request, number, state });
        let ticket = Ticket { requests: self.clone(), key: key.clone(), number, done: sender };
        Ok(Entered::First(ticket, Waiting { done, _waiters: waiters }, token))
    }

    /// Adds a VM of a request that an earlier daemon carried out.
    pub fn adopt(&self, key: &RequestKey, vm: VmId) {
        let mut inner = lock(&self.0);
        if let Some(entry) = inner.entries.get_mut(&key.key)
            && entry.request == key.request
            && let State::Adopted(vms) = &mut entry.state
        {
            vms.push(vm);
            return;
        }
        let number = inner.number();
        let state = State::Adopted(vec![vm]);
        inner.entries.insert(key.key.clone(), Entry { request: key.request, number, state });
        inner.ended(key.key.clone(), number, 0);
    }

    /// Forgets a key whose VMs, of an earlier daemon, are gone. A request that began anew with it
    /// stays.
    pub fn forget(&self, key: &RequestKey) {
        let mut inner = lock(&self.0);
        let adopted = |entry: &Entry| {
            entry.request == key.request && matches!(entry.state, State::Adopted(_))
        };
        if inner.entries.get(&key.key).is_some_and(adopted) {
            inner.entries.remove(&key.key);
        }
    }
}

#[cfg(test)]
#[path = "requests_tests.rs"]
mod tests;
