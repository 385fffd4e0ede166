//! What happened to VMs: `GET /v1/events`.

use super::vms::VmExit;
use super::wire::wire;
use dayfly_units::{Name, VmId};

wire! {
    /// Something that happened to a VM, or to the stream of events itself.
    pub struct Event {
        /// Identifies the event. A client that sends it as `Last-Event-ID` gets what followed.
        pub id: String,
        /// Time of the event.
        pub at_unix_ms: u64,
        /// What happened.
        pub kind: EventKind,
        /// The VM; `None` if the event concerns the stream.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub vm: Option<VmId>,
        /// The VM's name.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub name: Option<Name>,
        /// Why the VM ended, if `kind` is `exited` or `billed`.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub exit: Option<VmExit>,
        /// The snapshot that was made, if `kind` is `snapshotted`.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub snapshot: Option<Name>,
        /// Why events are missing, why the stream ends, or what happened to a volume, for people.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub message: Option<String>,
    }

    /// Kinds of [`Event`].
    #[derive(Copy, Hash)]
    #[serde(rename_all = "snake_case")]
    pub enum EventKind {
        /// The VM is ready: created, or a clone of a fork.
        Created,
        /// The VM, which had ended, was started again.
        Started,
        /// The VM's vCPUs were stopped on request.
        Paused,
        /// The VM's vCPUs were started again.
        Unpaused,
        /// Clones of the VM were started.
        Forked,
        /// A snapshot of the VM was stored.
        Snapshotted,
        /// The VM's time to live was changed.
        Updated,
        /// The VM lost a volume: the process that serves its files has ended.
        VolumeLost,
        /// The VM has ended.
        Exited,
        /// The VM was removed.
        Removed,
        /// The process of a VM that was removed while it lived has ended; `exit` has its last bill.
        Billed,
        /// Events before this one are missing: the daemon keeps the newest 4096, and none of an
        /// earlier daemon. The client has to list the VMs anew. Always sent, whatever the filters.
        Gap,
        /// The last event of a stream whose client read too slowly: events would be missing. The
        /// client may connect again with `Last-Event-ID`. Always sent, whatever the filters.
        Cut,
    }
}

impl EventKind {
    /// All kinds, and their names in the API.
    pub const ALL: [(Self, &str); 13] = [
        (Self::Created, "created"),
        (Self::Started, "started"),
        (Self::Paused, "paused"),
        (Self::Unpaused, "unpaused"),
        (Self::Forked, "forked"),
        (Self::Snapshotted, "snapshotted"),
        (Self::Updated, "updated"),
        (Self::VolumeLost, "volume_lost"),
        (Self::Exited, "exited"),
        (Self::Removed, "removed"),
        (Self::Billed, "billed"),
        (Self::Gap, "gap"),
        (Self::Cut, "cut"),
    ];

    /// The kind's name in the API.
    #[must_use]
    pub fn name(self) -> &'static str {
        Self::ALL.iter().find(|(kind, _)| *kind == self).map_or("unknown", |(_, name)| name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_names_are_those_of_the_json() {
        for (kind, name) in EventKind::ALL {
            assert_eq!(serde_json::to_value(kind).unwrap(), name);
            assert_eq!(kind.name(), name);
        }
    }
}
