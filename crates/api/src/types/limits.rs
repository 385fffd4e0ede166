//! Limits of what a VM takes from the host, and what it has taken.

use super::wire::wire;

wire! {
    /// Limits of what a VM takes from the host, its devices included. A field that is absent limits
    /// nothing. Clones that a fork makes of the VM have the same limits each, unless the fork gives
    /// others; clones of a snapshot have those of their request.
    #[derive(Copy, Default)]
    pub struct VmLimits {
        /// The most CPU time, in thousandths of a CPU of the host: 50 to 1,024,000.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub cpu_max_millicpus: Option<u32>,
        /// Its share of CPU time while other VMs want the same CPUs: 1 to 10,000; without it 100.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub cpu_weight: Option<u32>,
        /// The most memory of the host beyond the guest's RAM and its page tables, at least 16 MiB.
        /// A VM that needs more ends with the reason `memory`.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub memory_max_bytes: Option<u64>,
        /// The most processes and threads on the host, at least 16 more than it has vCPUs.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub pids_max: Option<u32>,
    }

    /// What a VM has taken from the host since it was started last, from the counters of its
    /// control group. No figure goes down, except `memory_bytes`.
    #[derive(Copy, Default)]
    pub struct VmUsage {
        /// CPU time in microseconds: guest and devices together.
        pub cpu_us: u64,
        /// Of that, time of the guest and of the VMM. The kernel samples it, so that the two parts
        /// need not add up to `cpu_us`.
        pub cpu_user_us: u64,
        /// Of that, time of the host's kernel.
        pub cpu_system_us: u64,
        /// Bytes of the host's memory now, with the page cache of its disks; absent after its end.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub memory_bytes: Option<u64>,
        /// The most bytes that it had at one time; absent with cgroup v2 before Linux 5.19.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub memory_peak_bytes: Option<u64>,
    }
}

impl VmLimits {
    /// Whether nothing is limited.
    #[must_use]
    pub fn is_none(&self) -> bool {
        *self == Self::default()
    }

    /// These limits, and each that is absent as in `other`.
    #[must_use]
    pub fn or(self, other: Self) -> Self {
        Self {
            cpu_max_millicpus: self.cpu_max_millicpus.or(other.cpu_max_millicpus),
            cpu_weight: self.cpu_weight.or(other.cpu_weight),
            memory_max_bytes: self.memory_max_bytes.or(other.memory_max_bytes),
            pids_max: self.pids_max.or(other.pids_max),
        }
    }
}
