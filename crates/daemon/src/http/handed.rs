//! A stream that was handed over, as the daemon watches it.
//!
//! The guest may have taken its process over, and then the process sends what it likes, or nothing.
//! So what the daemon keeps for a stream does not depend on the process alone:
//!
//! | | |
//! |---|---|
//! | the client closes its connection | seen on the client's socket, which the daemon has too |
//! | the process answers no question | the stream ends |
//! | the process sends what is not due | the stream ends |
//!
//! The daemon reads nothing from the client's socket, and sends nothing on it.

use crate::base::hangup::hung_up;
use crate::http::relay::{Over, Wrong, ended};
use crate::net::line::Line;
use crate::ops::liveness::Hears;
use crate::vm::Vm;
use dayfly_relay::streams::message::{Event, FAREWELL_MAX_BYTES, Heard, Order};
use rustix::net::{Shutdown, shutdown};
use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use tokio::net::UnixStream;
use tokio::sync::watch;
use tokio::time::{sleep, timeout};

/// A stream that a process has.
#[derive(Debug)]
pub struct Watched {
    line: Line,
    /// `None`: the runtime does not give it back.
    client: Option<OwnedFd>,
    /// Time limit of an answer of the process.
    within: Duration,
    /// The number of the last question.
    asked: AtomicU64,
    /// The last answer, and the number of its question.
    answered: watch::Sender<(u64, Heard)>,
}

impl Watched {
    /// A stream with this line, whose client has the other end of `client`.
    #[must_use]
    pub fn new(line: Line, client: UnixStream, within: Duration) -> Self {
        // No event of it reaches the runtime any more.
        let client = client.into_std().ok().map(OwnedFd::from);
        let (asked, answered) = (AtomicU64::new(0), watch::Sender::new((0, Heard::default())));
        Self { line, client, within, asked, answered }
    }

    /// Asks the process what has come from the agent. Returns the number of the question.
    fn ask(&self) -> io::Result<u64> {
        let question = self.asked.fetch_add(1, Ordering::Relaxed) + 1;
        self.line.order(&Order::Ask(question))?;
        Ok(question)
    }

    /// Whether a question was not answered yet.
    fn awaits_an_answer(&self) -> bool {
        self.answered.borrow().0 < self.asked.load(Ordering::Relaxed)
    }

    /// Notes an answer. Returns whether it was due.
    fn note(&self, question: u64, heard: Heard) -> bool {
        let is_due = self.awaits_an_answer() && question == self.answered.borrow().0 + 1;
        if is_due {
            self.answered.send_replace((question, heard));
        }
        is_due
    }

    /// Resolves when the client has left, and its process has had time to report it.
    async fn client_left(&self) {
        if let Some(client) = &self.client {
            match hung_up(client).await {
                Ok(()) => return sleep(self.within).await,
                Err(e) => tracing::debug!("a client's end is not watched: {e}"),
            }
        }
        std::future::pending().await
    }

    /// The next message of the process that is no answer. `None`: it has ended, sends what is not
    /// due, or does not answer for two periods of the time limit.
    async fn next(&self) -> Option<Event> {
        let left = self.client_left();
        tokio::pin!(left);
        let mut is_late = false;
        loop {
            tokio::select! {
                biased;
                event = self.line.next() => match event? {
                    Event::Heard { question, heard } => {
                        if !self.note(question, heard) {
                            return None;
                        }
                        is_late = false;
                    }
                    Event::Taken => return None,
                    event => return Some(event),
                },
                () = &mut left => return Some(Event::Gone),
                () = sleep(self.within) => {
                    if !self.awaits_an_answer() {
                        is_late = false;
                        self.ask().ok()?;
                    } else if std::mem::replace(&mut is_late, true) {
                        return None;
                    }
                }
            }
        }
    }

    /// Waits for the end of the stream.
    pub async fn over(&self, vm: &Vm) -> Over {
        match self.next().await {
            Some(Event::Ended(frame)) => ended(frame),
            Some(Event::Closed) => Over::Closed,
            Some(Event::Wrong(header)) => Over::Wrong(Wrong::of(header)),
            Some(Event::Gone) => {
                self.close();
                Over::Gone
            }
            _ => {
                tracing::warn!(
                    vm = %vm.id, name = %vm.name,
                    "the process of its streams has lost one, whose client is disconnected"
                );
                self.close();
                Over::Gone
            }
        }
    }

    /// Has the process send the client's last bytes. Returns when the client's kernel has them, or
    /// the client is gone.
    pub async fn finish(self, last: Vec<u8>) {
        let last = if last.len() <= FAREWELL_MAX_BYTES { last } else { Vec::new() };
        if self.line.order(&Order::Finish(last)).is_ok() {
            // The process may have reported the end of the stream before it got this, but only
            // once: one that its guest has taken over may report it for ever.
            let first = self.next().await;
            if matches!(first, Some(Event::Ended(_) | Event::Closed | Event::Wrong(_))) {
                self.next().await;
            }
        }
        self.close();
    }

    /// Closes the client's connection, which the process may have kept open. The client gets what
    /// was sent before.
    fn close(&self) {
        if let Some(client) = &self.client {
            // An error means that it is closed.
            let _ = shutdown(client, Shutdown::Both);
        }
    }
}

impl Hears for Watched {
    async fn heard(&self) -> Heard {
        let mut answers = self.answered.subscribe();
        let before = Heard { waits: false, ..self.answered.borrow().1 };
        // A process without an answer, such as one that waits for its CPUs, has heard nothing new.
        let Ok(question) = self.ask() else { return before };
        let answer = async {
            let answer = answers.wait_for(|(number, _)| *number >= question).await;
            answer.map(|answer| answer.1).unwrap_or(before)
        };
        timeout(self.within, answer).await.unwrap_or(before)
    }
}

#[cfg(test)]
#[path = "handed_tests.rs"]
mod tests;
