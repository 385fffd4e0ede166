//! The messages between the daemon and a zygote, after the configuration.

use crate::config::Shape;
use dayfly_sys::group::Entry;
use serde::{Deserialize, Serialize};
use std::os::fd::OwnedFd;

/// A request from the daemon to a zygote, after the configuration.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "command", rename_all = "snake_case")]
pub enum Command {
    /// Fork a pre-forked VMM.
    Fork {
        /// The expected shape of the next VM: a hint.
        #[serde(default)]
        likely: Option<Shape>,
        /// How it enters its control group; the descriptors come with the message. `None`: it stays
        /// in the zygote's.
        #[serde(default)]
        group: Option<Enter>,
        /// The CPUs that it restricts itself to in that group; empty: those of the configuration.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        cpus: Vec<u32>,
    },
}

/// How a pre-forked VMM enters its control group ([`dayfly_sys::group::Entry`]).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Enter {
    /// It is made in the group, whose folder comes with the message.
    Folder,
    /// It writes the files `tasks`, which come with the message.
    Tasks,
}

impl Enter {
    pub(super) const fn of(entry: &Entry) -> Self {
        match entry {
            Entry::Folder(_) => Self::Folder,
            Entry::Tasks(_) => Self::Tasks,
        }
    }

    /// The entry with these descriptors; `None` if a folder is expected and none came.
    pub(super) fn with(self, fds: Vec<OwnedFd>) -> Option<Entry> {
        match self {
            Self::Folder => fds.into_iter().next().map(Entry::Folder),
            Self::Tasks => Some(Entry::Tasks(fds)),
        }
    }
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
        /// Microseconds of CPU time that the zygote took since the report before this one. Absent
        /// in a zygote of an earlier version.
        #[serde(default)]
        cpu_us: u64,
    },
}
