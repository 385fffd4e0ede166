//! Volumes: folders of the host in VMs.

use super::wire::wire;
use dayfly_units::{Name, VmId};

wire! {
    /// Where a volume's files are.
    #[serde(rename_all = "snake_case")]
    pub enum VolumeSource {
        /// A folder of the host, as an absolute path. It is opened with the rights of the client,
        /// and made if it is missing.
        Path(String),
        /// The named volume of the client. It is made if it is missing.
        Name(Name),
        /// A folder of another host, which a process there offers: for a daemon in a machine.
        Offer(VolumeOffer),
    }

    /// A folder of another host. A process there offers it with `POST /v1/volumes/offers/{token}`
    /// before the request, and serves its files.
    pub struct VolumeOffer {
        /// The token of the offer: 32 hexadecimal digits, chosen at random by the client.
        pub token: String,
        /// The folder on that host, for people.
        pub path: String,
        /// The user of that host as which its files are opened, for people.
        pub uid: u32,
    }

    /// A volume for a new VM.
    pub struct VolumeRequest {
        /// Where its files are.
        pub source: VolumeSource,
        /// Absolute path in the guest. The folder is made if it is missing, and covered if it is
        /// there.
        pub target: String,
        /// Whether the guest may only read.
        #[serde(default)]
        pub read_only: bool,
    }

    /// A volume of a VM.
    pub struct VmVolume {
        /// Where its files are.
        pub source: VolumeSource,
        /// Absolute path in the guest.
        pub target: String,
        /// Whether the guest may only read.
        #[serde(default)]
        pub read_only: bool,
        /// The user of the host as which its files are opened.
        pub uid: u32,
        /// Why the guest cannot use it any more; absent if it can.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub problem: Option<String>,
    }

    /// A named volume: a folder that the daemon keeps until it is removed. Each user of the host
    /// has other ones.
    pub struct Volume {
        /// The volume's name.
        pub name: Name,
        /// When it was made.
        pub created_unix_ms: u64,
        /// The user of the host to whom it belongs.
        pub uid: u32,
        /// The VMs that have it, those included that have ended and are not removed.
        pub vms: Vec<VmId>,
    }

    /// Makes a named volume, or finds it.
    pub struct VolumeCreateRequest {
        /// The volume's name.
        pub name: Name,
    }
}

/// The most volumes of a VM.
pub const MAX_VOLUMES: usize = 16;
