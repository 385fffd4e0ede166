//! A volume without stream and threads, for the fuzz target.

use crate::message::{Message, Reply};
use crate::ops::{Interrupted, Volume};
use crate::options::Options;
use crate::own::OwnFds;
use rustix::fd::OwnedFd;

/// A volume that answers messages one after another.
#[derive(Debug)]
pub struct Session {
    volume: Volume,
    reply: Reply,
}

impl Session {
    /// Serves a folder with few nodes and handles, so that their bounds are reached.
    ///
    /// # Panics
    /// The folder cannot be served.
    #[must_use]
    #[expect(clippy::unwrap_used, reason = "for tests")]
    pub fn new(folder: OwnedFd, read_only: bool) -> Self {
        let few = Options { max_nodes: 12, max_open_nodes: 9, max_handles: 6, ..Options::own() };
        let options = Options { read_only, ..few };
        let volume = Volume::new(folder, OwnFds::by_path().unwrap(), options).unwrap();
        Self { volume, reply: Reply::default() }
    }

    /// The answer to a message. `None` if the message has none, or if it is no message.
    pub fn answer(&mut self, message: &[u8]) -> Option<&[u8]> {
        let message = Message::parse(message)?;
        self.volume.handle(message, &mut self.reply, &Interrupted::default())
    }

    /// Nodes, those of them with a descriptor, and handles.
    #[must_use]
    pub fn counts(&self) -> (usize, usize, usize) {
        self.volume.counts()
    }
}
