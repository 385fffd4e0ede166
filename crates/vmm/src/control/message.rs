//! The messages of the control protocol, and the record of a VMM's end.

use crate::config::{LinkConfig, RestoreConfig, Shape};
use crate::disk::{DiskReads, DiskTraffic, FileId, NoSpace};
use crate::virtio::BalloonStatus;
use serde::{Deserialize, Serialize};

/// The version of the protocol that this code speaks ([`crate::control`]).
pub const PROTOCOL: u32 = 6;
/// The longest JSON of a message that either side accepts, in bytes.
pub const MAX_MESSAGE_BYTES: usize = 64 << 10;

/// A request from the daemon to a VMM.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "command", rename_all = "snake_case")]
pub enum Command {
    /// Report the state of the VMM: answered with [`Answer::Status`].
    Status,
    /// Restore a saved machine. Only a warm VMM accepts this command, and only once. If the restore
    /// fails, the VMM ends and its exit record names the cause.
    Restore(RestoreConfig),
    /// Stop every vCPU between two instructions and every device between two requests. Idempotent.
    Pause,
    /// Resume vCPUs and devices. A disk that has no space on the host tries its request again.
    /// Idempotent.
    Resume,
    /// Write the whole machine. The VM must be paused, and stays paused.
    ///
    /// Descriptors, in order:
    /// - an empty file for the state,
    /// - an empty file for guest memory (sparse: zero pages become holes),
    /// - an empty file for the page map ([`crate::disk::page_map::record`]),
    /// - for each writable disk, an empty file for the map of its writable layer, an empty file
    ///   that becomes the new writable layer, and the data of the old one, opened read-only. A
    ///   daemon of an earlier version leaves out the third file, for all disks.
    ///
    /// After `Ok` the old writable layers are frozen: never written again. The VMM has closed its
    /// writable descriptors of those that it got read-only.
    Save,
    /// Copy RAM to the first descriptor that comes with the message, as `Save` does, while the VM
    /// runs. A second one may follow: the snapshot's own memory file, opened read-only, whose holes
    /// are then not read. A VMM of an earlier version refuses it. Pages that the guest writes
    /// meanwhile are copied again. A later `Save`, `Freeze` or `Fork` with the first descriptor
    /// then has few pages left to copy. Without a descriptor: stop noting writes.
    Precopy {
        /// Copy only the pages that differ from those of the VM's template: for `Fork`.
        #[serde(default)]
        own: bool,
    },
    /// `Pause`, `Save` and `Resume` in one command, with the descriptors of `Save`: the shortest
    /// pause.
    Freeze,
    /// As `Freeze`, but clones can start beside the running VM at once. Only after `Precopy`.
    ///
    /// The third descriptor, the page map of `Save`, is here an empty file for a sealed list of
    /// pages ([`crate::memory::backing`]). After `Precopy` with `own` the list names the pages that
    /// the memory file has; all other pages are those of the VM's template. Without `own` the list
    /// is empty, and the memory file has all of RAM.
    Fork,
    /// Write the sealed record of the pages touched since the restore
    /// ([`crate::memory::working_set`]) to the one descriptor that comes with the message, an empty
    /// file. If the VMM was not started to record, the record has only the pages written.
    WorkingSet,
    /// Replace the lower frozen layers of a disk by layers with the same blocks, merged into fewer
    /// files. Accepted at any time.
    ///
    /// Descriptors: the data of the highest layer to be replaced, the same file that this VMM has
    /// open; then the data and the map of each new layer, the lowest layer first.
    Rebase {
        /// The disk's number, from 0.
        disk: u8,
    },
    /// Connect the network device to the tap whose descriptor comes with the message. Without a
    /// descriptor, and before the first `Connect`, packets of the guest are dropped. Accepted at
    /// any time.
    ///
    /// The tap is non-blocking, has a header of 12 bytes, and its offloads are set.
    Connect(LinkConfig),
    /// Set how much memory the guest shall give to its balloon, and ask its driver for new
    /// statistics: answered with [`Answer::Balloon`], before the driver does either. The guest may
    /// give less, or nothing. Accepted at any time. Since version 6.
    Balloon {
        /// The memory in bytes, at most RAM; `None`: leave it as it is.
        #[serde(default)]
        target_bytes: Option<u64>,
    },
    /// End this VMM now, without asking the guest.
    Quit,
}

/// A VMM's answer to a [`Command`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "answer", rename_all = "snake_case")]
pub enum Answer {
    /// The command is done.
    Ok,
    /// The answer to `Status`.
    Status(Status),
    /// The answer to `Precopy`.
    Precopied(Precopied),
    /// The answer to `Balloon`.
    Balloon(BalloonStatus),
    /// The answer to `Freeze` and `Fork`.
    Frozen(Frozen),
    /// The command was refused or failed; the VM is unchanged.
    Err {
        /// What failed, where, expected and got.
        message: String,
    },
}

/// The result of copying RAM under a running VM.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Precopied {
    /// Rounds in which pages written meanwhile were copied again.
    pub rounds: u32,
    /// Pages copied in all these rounds.
    pub pages: u64,
    /// Duration in microseconds.
    pub took_us: u64,
}

/// The result of a freeze or fork.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Frozen {
    /// How long the VM stood still, in microseconds.
    pub paused_us: u64,
    /// Pages copied during that pause.
    pub pages: u64,
}

/// The default of [`Status::whole`], for VMMs that do not report it.
const fn yes() -> bool {
    true
}

/// The default of [`Status::protocol`], for VMMs that do not report it.
const fn first_version() -> u32 {
    1
}

/// The command during which a VMM answered `Status`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Busy {
    /// RAM is being copied. The VM runs, unless it was paused before.
    Precopy,
    /// The freeze is done, and the VM goes on; its page map is being written.
    Freeze,
    /// A command that a later version of the protocol adds.
    #[serde(other)]
    Other,
}

/// The state of a VMM.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Status {
    /// The version of the protocol that the VMM speaks. A VMM of version 1 does not report it.
    #[serde(default = "first_version")]
    pub protocol: u32,
    /// Whether all of the VM's RAM is present: no page is still missing in a memfd that a pager
    /// fills.
    #[serde(default = "yes")]
    pub whole: bool,
    /// Whether the vCPUs are stopped by `Pause`.
    pub paused: bool,
    /// The VM's size. `max_vcpus` of it since version 6.
    pub shape: Shape,
    /// Microseconds (CLOCK_MONOTONIC) at which each phase of the start ended.
    pub phases: Vec<(String, u64)>,
    /// For each disk the files of its layers that the VMM has open: frozen layers, the lowest
    /// first, then the writable layer if there is one. Without the base image. Since version 2.
    #[serde(default)]
    pub layers: Vec<Vec<FileId>>,
    /// The command that the VMM works on; `None`: it waits for one. Other commands wait until the
    /// end of this one. Since version 2.
    #[serde(default)]
    pub busy: Option<Busy>,
    /// Why a disk waits for space on the host; `None`: none waits. The VM is then stopped until
    /// `Resume`, whatever `paused` is. Since version 3.
    #[serde(default)]
    pub no_space: Option<NoSpace>,
    /// How much each disk has moved. Since version 4.
    #[serde(default)]
    pub traffic: Vec<DiskTraffic>,
    /// How the disks are read; `None`: there are none. Since version 5.
    #[serde(default)]
    pub disk_reads: Option<DiskReads>,
}

impl Status {
    /// The status of a running VM of this shape and of this version, without disks.
    #[must_use]
    pub const fn of(shape: Shape) -> Self {
        Self {
            protocol: PROTOCOL,
            whole: true,
            paused: false,
            shape,
            phases: Vec::new(),
            layers: Vec::new(),
            busy: None,
            no_space: None,
            traffic: Vec::new(),
            disk_reads: None,
        }
    }
}

/// Why a VMM ended, written to its exit file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExitRecord {
    /// The kind of end.
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
    /// The guest asked for a reboot (ACPI reset register, keyboard controller, triple fault). The
    /// VMM never restarts the guest; the creator of the VM decides.
    Reboot,
    /// The guest's kernel panicked (pvpanic).
    Panic,
    /// The daemon sent `Quit`.
    Quit,
    /// The VMM could not go on: bad input, an unexpected exit from KVM, an error of the host.
    Failed,
}

#[cfg(test)]
#[path = "message_tests.rs"]
mod tests;
