//! The balloon of a VM: memory that its guest gives back.

use super::wire::wire;

wire! {
    /// The balloon of a VM, as its VMM shows it. What the guest says is not checked.
    pub struct Balloon {
        /// Whether a driver of the guest uses the device now.
        pub driver: bool,
        /// Whether the driver reports free memory.
        pub reports: bool,
        /// Which rule the guest's driver broke; its device does nothing until it is reset.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub broken: Option<String>,
        /// The memory that the host wants in the balloon.
        pub target_bytes: u64,
        /// The memory that the guest says is in the balloon.
        pub actual_bytes: u64,
        /// The length of all ranges that the guest gave back since its VMM has it: a range that
        /// was used and freed again counts again.
        pub discarded_bytes: u64,
        /// Ranges that the guest gave back and that are not of its memory.
        pub refused: u64,
        /// What the guest said last of its memory: all of it; absent if it has said nothing.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub guest_total_bytes: Option<u64>,
        /// Memory that the guest does not use.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub guest_free_bytes: Option<u64>,
        /// Memory that a new program of the guest could have.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub guest_available_bytes: Option<u64>,
        /// Memory of the guest's caches of files.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub guest_cached_bytes: Option<u64>,
    }
}
