//! How the daemon talks to a VMM process, over its control socket.
//!
//! A message is a 4-byte little-endian length, at most [`MAX_MESSAGE_BYTES`], and that many bytes of JSON. Descriptors
//! travel as `SCM_RIGHTS` with the first byte of a message. One [`Command`], one [`Answer`], any number in a row;
//! several connections may be open.

pub mod client;
pub mod server;
pub mod wire;

pub use client::{Client, ClientError};

use crate::config::{LinkConfig, RestoreConfig, Shape};
use serde::{Deserialize, Serialize};

/// The longest message either side accepts.
pub const MAX_MESSAGE_BYTES: usize = 64 << 10;

/// What is asked of a VMM.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "command", rename_all = "snake_case")]
pub enum Command {
    /// What it does now.
    Status,
    /// Take over a saved machine: only of a VMM that was started as a shell, once. Where it cannot be done the VMM ends, and
    /// its exit record says why.
    Restore(RestoreConfig),
    /// Stop every vCPU between two instructions and every device between two requests. Idempotent.
    Pause,
    /// Go on. Idempotent.
    Resume,
    /// Write the whole machine; it must be paused, and stays so.
    ///
    /// Descriptors, in order: an empty file for the state, an empty file for guest memory (sparse: zero pages become holes), an
    /// empty file for the page map ([`crate::disk::page_map::record`]), then for each writable disk an empty file for the map of its writable layer, and an empty file that becomes the new
    /// writable layer. After `Ok` the old writable layers are frozen: never written again.
    Save,
    /// Copy RAM to the one descriptor that comes along, as `Save` does, while the VM runs, again and again what it writes meanwhile.
    /// `Save`, `Freeze` or `Fork` with that descriptor then has little left to copy. Without a descriptor: the end of it.
    Precopy {
        /// Only pages that are not as what it is a clone of has them: for `Fork`.
        #[serde(default)]
        own: bool,
    },
    /// `Pause`, `Save` and `Resume` in one, with the descriptors of `Save`: the VM stands still for as short as can be.
    Freeze,
    /// The same for clones that run beside it at once; only after `Precopy`. In place of the page map an empty file is for the sealed list of the pages that
    /// the memory file has where it was copied to with `own` ([`crate::memory::backing`]): all others are as in what this VM is a clone of. Without `own` the
    /// list is empty, and the memory file has all of RAM.
    Fork,
    /// Write the sealed record of the pages touched since the restore ([`crate::memory::working_set`]) to the one
    /// descriptor that comes along, an empty file; of a clone that was not started to be recorded, of the pages written.
    WorkingSet,
    /// Put other frozen layers in the place of the lower ones of a disk: the same blocks, merged into fewer files. At any time.
    ///
    /// Descriptors: the data of the highest layer to be replaced, the very file that this VMM has; then for each layer that
    /// takes their place, the lowest first, its data and its map.
    Rebase {
        /// Which disk, from 0.
        disk: u8,
    },
    /// Join the network device to the tap whose one descriptor comes along; without a descriptor, what the guest sends is lost. Until the first of these
    /// the same. At any time.
    ///
    /// The tap does not block, and has a header of 12 bytes and its offloads set.
    Connect(LinkConfig),
    /// End this VMM now, without asking the guest.
    Quit,
}

/// What a VMM answers.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "answer", rename_all = "snake_case")]
pub enum Answer {
    /// Done.
    Ok,
    /// The answer to `Status`.
    Status(Status),
    /// The answer to `Precopy`.
    Precopied(Precopied),
    /// The answer to `Freeze` and `Fork`.
    Frozen(Frozen),
    /// Not done; the VM is as it was.
    Err {
        /// What, where, expected and got.
        message: String,
    },
}

/// What copying RAM beneath a VM came to.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Precopied {
    /// How often what had been written was copied again.
    pub rounds: u32,
    /// Pages in all of these.
    pub pages: u64,
    /// Microseconds.
    pub took_us: u64,
}

/// How a VM was frozen.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Frozen {
    /// For so many microseconds it stood still.
    pub paused_us: u64,
    /// Pages that were copied meanwhile.
    pub pages: u64,
}

/// What a VMM is that does not say whether it is whole.
const fn yes() -> bool {
    true
}

/// What a VMM does now.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Status {
    /// Whether all of its memory is there: nothing of it is still to come from a pager.
    #[serde(default = "yes")]
    pub whole: bool,
    /// Whether vCPUs are stopped.
    pub paused: bool,
    /// How large it is.
    pub shape: Shape,
    /// Microseconds (CLOCK_MONOTONIC) at which each phase of the start was done, for the timeline.
    pub phases: Vec<(String, u64)>,
}

/// Why a VMM ended, written to its exit file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExitRecord {
    /// The kind.
    pub reason: ExitReason,
    /// The cause, for people.
    pub message: String,
}

/// Kinds of end.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ExitReason {
    /// The guest powered itself off (ACPI S5).
    PowerOff,
    /// The guest asked for a reboot (ACPI reset register, keyboard controller, triple fault); dayfly does not
    /// restart it: who started it decides.
    Reboot,
    /// The guest's kernel panicked (pvpanic).
    Panic,
    /// `Quit` was asked for.
    Quit,
    /// The VMM could not go on: bad input, an impossible exit from KVM, an error of the host.
    Failed,
}
