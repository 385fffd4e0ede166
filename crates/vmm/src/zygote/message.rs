//! The messages between the daemon and a zygote, after the configuration.

use crate::config::Shape;
use serde::{Deserialize, Serialize};

/// A request from the daemon to a zygote, after the configuration.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "command", rename_all = "snake_case")]
pub enum Command {
    /// Fork a pre-forked VMM.
    Fork {
        /// The expected shape of the next VM: a hint.
        #[serde(default)]
        likely: Option<Shape>,
    },
}

/// A message from a zygote to the daemon.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "told", rename_all = "snake_case")]
pub enum Report {
    /// A pre-forked VMM exists. Two descriptors come with the message: its pidfd, and the socket on
    /// which only this process reads its configuration.
    Forked {
        /// The process id in the zygote's PID namespace.
        pid: u32,
    },
}
