//! Folders that are not on this host: a process on another host offers them, and serves each stream
//! that it is asked for. The daemon of a machine has the folders of the user's host in this way.
//!
//! ```text
//! process on the user's host                        daemon
//!   POST …/volumes/offers/TOKEN ──────────────────▶   a volume with TOKEN is to be mounted
//!          ◀───────────────────────────── "STREAM\n"
//!   POST …/volumes/streams/STREAM ────────────────▶   joined with the stream to the guest
//!          ◀──────────────────────────────── "end\n"  no VM has the volume any more
//! ```
//!
//! The client chose the token, and the process that the client started chose the folder. This
//! daemon names none, so that it cannot reach others, even if it was taken over.

use crate::base::error::{ApiError, Outcome};
use crate::base::random::random;
use dayfly_units::sync::lock;
use std::collections::BTreeMap;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio::sync::{Notify, oneshot};
use tokio::time::{Instant, timeout_at};

/// The most offers at a time.
const MOST: usize = 1024;
/// How long a volume waits for its offer, which is made anew after a restart of the daemon.
const WAIT: Duration = Duration::from_secs(5);

/// All offers.
#[derive(Debug, Default)]
pub struct Offers {
    state: Mutex<State>,
    /// Notified when an offer was made.
    made: Notify,
}

#[derive(Debug, Default)]
struct State {
    /// The orders for each offer, by token. The number distinguishes an offer from a later one.
    held: BTreeMap<String, (u64, UnboundedSender<String>)>,
    /// Streams that were asked for, by name.
    wanted: BTreeMap<String, oneshot::Sender<UnixStream>>,
    next: u64,
}

/// An offer that holds until this is dropped.
#[derive(Debug)]
pub struct Offer {
    offers: Arc<Offers>,
    /// Its token.
    pub token: String,
    number: u64,
    orders: UnboundedReceiver<String>,
}

impl Offer {
    /// The name of the next stream to be made.
    pub async fn next(&mut self) -> Option<String> {
        self.orders.recv().await
    }
}

impl Drop for Offer {
    fn drop(&mut self) {
        let held = &mut lock(&self.offers.state).held;
        if held.get(&self.token).is_some_and(|(number, _)| *number == self.number) {
            held.remove(&self.token);
        }
    }
}

/// A wanted stream. It is not wanted any more when this is dropped.
struct Wanted<'a>(&'a Offers, String);

impl Drop for Wanted<'_> {
    fn drop(&mut self) {
        lock(&self.0.state).wanted.remove(&self.1);
    }
}

/// Checks a token, or the name of a stream: 32 hexadecimal digits.
///
/// # Errors
/// It is none.
pub fn checked(token: &str) -> Outcome<()> {
    if token.len() == 32 && token.bytes().all(|byte| byte.is_ascii_hexdigit()) {
        return Ok(());
    }
    Err(ApiError::invalid("token: expected 32 hexadecimal digits"))
}

impl Offers {
    /// A new offer, in the place of an earlier one with this token.
    ///
    /// # Errors
    /// The token is none, or there are too many offers.
    pub fn offer(self: &Arc<Self>, token: String) -> Outcome<Offer> {
        checked(&token)?;
        let (sender, orders) = unbounded_channel();
        let number = {
            let mut state = lock(&self.state);
            if state.held.len() >= MOST && !state.held.contains_key(&token) {
                return Err(ApiError::conflict(format_args!(
                    "offers of folders: expected fewer than {MOST}, got {MOST}"
                )));
            }
            state.next += 1;
            let number = state.next;
            state.held.insert(token.clone(), (number, sender));
            number
        };
        self.made.notify_waiters();
        Ok(Offer { offers: self.clone(), token, number, orders })
    }

    /// Waits until there is an offer with this token.
    ///
    /// # Errors
    /// There is none in time. `path` is the folder.
    pub async fn made(&self, token: &str, path: &str) -> Outcome<()> {
        let deadline = Instant::now() + WAIT;
        loop {
            let made = self.made.notified();
            if lock(&self.state).held.contains_key(token) {
                return Ok(());
            }
            timeout_at(deadline, made).await.map_err(|_| not_offered(path))?;
        }
    }

    /// Asks the process that offers `token` for a stream.
    ///
    /// # Errors
    /// No process offers it, or the stream does not come in time.
    pub async fn stream(&self, token: &str, path: &str, within: Duration) -> Outcome<UnixStream> {
        self.made(token, path).await?;
        let (sender, stream) = oneshot::channel();
        let name = hex::encode(random::<16>());
        {
            let mut state = lock(&self.state);
            let (_, orders) = state.held.get(token).ok_or_else(|| not_offered(path))?;
            orders.send(name.clone()).map_err(|_| not_offered(path))?;
            state.wanted.insert(name.clone(), sender);
        }
        let _wanted = Wanted(self, name);
        match tokio::time::timeout(within, stream).await {
            Ok(Ok(stream)) => Ok(stream),
            _ => Err(ApiError::new(
                dayfly_api::types::ErrorCode::Timeout,
                format_args!(
                    "volume {path}: the process that offers it made no stream within {} s",
                    within.as_secs()
                ),
            )),
        }
    }

    /// Whether a stream of this name is wanted.
    #[must_use]
    pub fn wants(&self, name: &str) -> bool {
        lock(&self.state).wanted.contains_key(name)
    }

    /// Gives the stream to the volume that wants it.
    pub fn deliver(&self, name: &str, stream: UnixStream) {
        if let Some(wanted) = lock(&self.state).wanted.remove(name) {
            // A volume that has given up drops the stream.
            let _ = wanted.send(stream);
        }
    }
}

fn not_offered(path: &str) -> ApiError {
    ApiError::new(
        dayfly_api::types::ErrorCode::State,
        format_args!(
            "volume {path}: expected the process of `dayfly` that offers this folder of another \
             host, got none: it has ended; create the VM anew with -v"
        ),
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Write};

    const TOKEN: &str = "0123456789abcdef0123456789abcdef";
    const LONG: Duration = Duration::from_secs(60);

    #[tokio::test(start_paused = true)]
    async fn a_stream_is_ordered_and_delivered_by_its_name() {
        let offers = Arc::new(Offers::default());
        for bad in ["", "0", &TOKEN.replace('f', "g"), &format!("{TOKEN}0")] {
            assert!(offers.offer((*bad).to_owned()).is_err(), "{bad}");
        }
        let none = offers.stream(TOKEN, "/src", LONG).await.unwrap_err().0.message;
        assert!(none.contains("/src") && none.contains("create the VM anew"), "{none}");
        // An offer that is made a little later is waited for.
        let (asking, same) = (offers.clone(), offers.clone());
        let asking = tokio::spawn(async move { asking.stream(TOKEN, "/src", LONG).await });
        tokio::task::yield_now().await;
        let mut offer = same.offer(TOKEN.to_owned()).unwrap();
        let name = offer.next().await.unwrap();
        assert!(offers.wants(&name) && !offers.wants(TOKEN));
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        offers.deliver(&name, ours);
        let mut stream = asking.await.unwrap().unwrap();
        stream.write_all(b"x").unwrap();
        theirs.read_exact(&mut [0]).unwrap();
        assert!(!offers.wants(&name), "once");
        let (late, _end) = UnixStream::pair().unwrap();
        offers.deliver(&name, late);
    }

    #[tokio::test(start_paused = true)]
    async fn a_process_that_connects_anew_replaces_its_offer() {
        let offers = Arc::new(Offers::default());
        let first = offers.offer(TOKEN.to_owned()).unwrap();
        let mut second = offers.offer(TOKEN.to_owned()).unwrap();
        drop(first);
        offers.made(TOKEN, "/src").await.unwrap();
        let late = offers.stream(TOKEN, "/src", LONG).await.unwrap_err();
        assert_eq!(late.0.code, dayfly_api::types::ErrorCode::Timeout);
        let name = second.next().await.unwrap();
        assert!(!offers.wants(&name), "the volume has given up");
        drop(second);
        assert!(offers.made(TOKEN, "/src").await.is_err());
    }
}
