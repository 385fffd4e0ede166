//! The daemon's HTTP API, version 1, with JSON bodies. The paths are in the OpenAPI document that
//! `dayflyd` serves.
//!
//! Names of numbers end in their unit. Times of day are whole milliseconds since 1970 (`_unix_ms`);
//! durations are `_us` or `_ms`.

use serde::{Deserialize, Serialize};

#[cfg(feature = "openapi")]
use utoipa::ToSchema;

mod balloon;
mod colours;
mod create;
mod daemon;
mod error;
mod events;
mod images;
mod limits;
mod recording;
mod snapshots;
mod store;
mod vms;
mod volumes;
mod wire;

pub use balloon::Balloon;
pub use colours::{ColourHeld, ColourUse, Colours, Footprint, MAX_PICTURE_WIDTH};
pub use create::{
    BootSource, ConnectRequest, CreateManyRequest, CreateRequest, Lifetime, NetworkRequest,
    Publish, RunRequest, Source, TtlRequest,
};
pub use daemon::{Info, Leak};
pub use dayfly_units::{
    Counted, ImageConfig, MemoryKinds, Pages, PortProtocol, StoreStats, Unreadable,
};
pub use error::{ApiError, ErrorCode};
pub use events::{Event, EventKind};
pub use images::{Image, ImageUpload, Kernel, KernelUpload};
pub use limits::{CpuParts, DiskReads, DiskTraffic, IoMax, NetTraffic, VmLimits, VmUsage};
pub use recording::{ColourTouched, MAX_TOUCHES, RecordRequest, Recording};
pub use snapshots::{BakeRequest, Progress, Resident, Snapshot, SnapshotRequest};
pub use store::{
    CollectRequest, Collected, Damaged, LeftAlone, LostSnapshot, Repaired, SnapshotUse, StoreUsage,
    Verified, VerifyRequest,
};
pub use vms::{
    EgressRequest, ExecControl, ExecNotice, ExecResult, ExitKind, ForkRequest, Forked, GuestStat,
    PauseReason, Refused, RemoveManyRequest, RunReply, StreamReply, Vm, VmDetails, VmExit,
    VmNetwork, VmState,
};
pub use volumes::{
    MAX_VOLUMES, VmVolume, Volume, VolumeCreateRequest, VolumeOffer, VolumeRequest, VolumeSource,
};

/// The answer to a request for a list.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(ToSchema))]
pub struct List<T> {
    /// The items of the list, or of one page of it.
    pub items: Vec<T>,
    /// The `cursor` of the next page; absent on the last one, and if the request had no `limit`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub next: Option<String>,
}

impl<T> List<T> {
    /// A whole list.
    #[must_use]
    pub const fn whole(items: Vec<T>) -> Self {
        Self { items, next: None }
    }
}

/// The largest `limit` of a page: a number of items.
pub const MAX_PAGE_ITEMS: usize = 1000;

/// The longest JSON body that the daemon reads, in bytes.
pub const MAX_JSON_BYTES: usize = 1 << 20;
/// The longest JSON body with an [`crate::agent::ExecSpec`] that the daemon reads, in bytes. Its
/// strings are bounded too ([`crate::agent::MAX_STRINGS_BYTES`]).
pub const MAX_EXEC_JSON_BYTES: usize = 4 << 20;
/// The longest line of [`Progress`], in bytes.
pub const MAX_PROGRESS_BYTES: usize = 1 << 20;
/// The header with the key of a request, as the daemon's HTTP library spells it.
pub const IDEMPOTENCY_KEY: &str = "idempotency-key";
/// The value of the `Upgrade` header for exec and run.
pub const UPGRADE: &str = "dayfly-exec";
/// The WebSocket subprotocol of a program's session.
pub const WEBSOCKET_PROTOCOL: &str = "dayfly.exec.v1";
/// The first byte of a binary message that has standard input.
pub const WEBSOCKET_STDIN: u8 = 0;
/// The first byte of a binary message that has standard output.
pub const WEBSOCKET_STDOUT: u8 = 1;
/// The first byte of a binary message that has standard error.
pub const WEBSOCKET_STDERR: u8 = 2;
/// The value of the `Upgrade` header for archives and outputs in frames.
pub const UPGRADE_STREAM: &str = "dayfly-stream";
/// The value of the `Upgrade` header for connections to ports.
pub const UPGRADE_PORT: &str = "dayfly-port";
/// The value of the `Upgrade` header for offers of folders, and for their streams.
pub const UPGRADE_VOLUME: &str = "dayfly-volume";
/// The header of a `101` to a port that describes the VM: a [`Vm`] in JSON, in ASCII.
pub const VM_HEADER: &str = "dayfly-vm";
/// The trailer of an answer that could not be completed: an [`ApiError`] in JSON, of at most
/// 16 KiB. Only requests with `TE: trailers` get trailers.
pub const ERROR_TRAILER: &str = "dayfly-error";
