//! What guests are, and what they are made of.

use crate::prelude::*;
use clap::ValueEnum;
use dayfly_api::client::Client;

/// What is the same for all guests.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Shape {
    /// vCPUs.
    pub cpus: u8,
    /// RAM.
    pub memory: Bytes,
    /// The file that fio reads and writes.
    pub file: Bytes,
    /// Of each job.
    pub seconds: u64,
}

/// A daemon, and the names of what its guests are made of.
#[derive(Debug, Clone)]
pub struct Daemon {
    pub client: Client,
    pub state: PathBuf,
    pub kernel: Name,
    pub image: Name,
}

/// How QEMU performs requests of a disk with `cache=writeback`; `native` needs `O_DIRECT`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Aio {
    /// By io_uring
    #[value(name = "io_uring")]
    IoUring,
    /// By threads
    Threads,
}

impl Aio {
    /// As QEMU names it.
    pub const fn name(self) -> &'static str {
        match self {
            Self::IoUring => "io_uring",
            Self::Threads => "threads",
        }
    }
}
