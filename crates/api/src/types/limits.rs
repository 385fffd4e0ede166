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
        /// CPUs of the host that this VM alone has, for guest and devices together: at least 1, and
        /// one less than dayflyd leaves for VMs. Each clone of a fork books as many again.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub cpus_booked: Option<u32>,
        /// The most that it reads from and writes to the disks of the state folder; only on a host
        /// with cgroup v2.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub io_max: Option<IoMax>,
    }

    /// The most that a VM reads from and writes to each disk of the state folder in one second. At
    /// least one field is given; one that is absent limits nothing.
    #[derive(Copy, Default)]
    pub struct IoMax {
        /// Bytes read, at least 65,536.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub read_bytes_per_s: Option<u64>,
        /// Bytes written, at least 65,536.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub write_bytes_per_s: Option<u64>,
        /// Read requests, at least 10.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub reads_per_s: Option<u64>,
        /// Write requests, at least 10.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub writes_per_s: Option<u64>,
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
        /// Memory over time: bytes times seconds, from a look each minute. 0 before the first look.
        #[serde(default)]
        pub memory_byte_seconds: u64,
        /// What CPU time was for; absent if the VMM is of an earlier version.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub parts: Option<CpuParts>,
    }

    /// What the CPU time of a VM was for, in microseconds. No figure goes down.
    ///
    /// The first three, and that of `creation_us` which the VMM took, are parts of `cpu_us`. While
    /// the VM lives, they may lack what its threads have done in the last milliseconds.
    #[derive(Copy, Default)]
    pub struct CpuParts {
        /// Threads of vCPUs, which is the guest; and what ended the VMM, once it has ended.
        pub vcpus_us: u64,
        /// Threads of devices: disks, packets, vsock.
        pub io_us: u64,
        /// Anything else of the VM's processes: pauses, snapshots, forks, and relays of its
        /// published ports.
        pub work_us: u64,
        /// The creation: the daemon's thread that started the VMM, the zygote's fork of it, and the
        /// VMM's main thread until the guest ran. What was ready in the pool has only the last one.
        pub creation_us: u64,
        /// The end: the daemon's threads that freed the VM's memory and removed its files.
        pub destruction_us: u64,
    }

    /// What the guest has moved to and from one disk since the VM was started last, as its VMM
    /// counts it. No figure goes down.
    #[derive(Copy, Default)]
    pub struct DiskTraffic {
        /// Requests that read.
        pub reads: u64,
        /// Bytes read.
        pub read_bytes: u64,
        /// Requests that wrote. Zeroed and discarded ranges do not count.
        pub writes: u64,
        /// Bytes written.
        pub written_bytes: u64,
    }

    /// What the guest has sent and received since the VM was started last, as its VMM counts it. No
    /// figure goes down.
    #[derive(Copy, Default)]
    pub struct NetTraffic {
        /// Packets that the guest received. One of up to 64 KiB may be many on the wire.
        pub received_packets: u64,
        /// Their bytes, from the Ethernet header on.
        pub received_bytes: u64,
        /// Packets that the guest sent.
        pub sent_packets: u64,
        /// Their bytes.
        pub sent_bytes: u64,
        /// Packets of the guest that were dropped: sent before it had a network, not from its
        /// address, or refused by the host.
        pub refused_packets: u64,
    }

    /// How a VMM reads the disks of its VM.
    pub struct DiskReads {
        /// Whether the VMM has a ring of io_uring: reads that wait for the host's disk are then in
        /// flight together. Without it, and on file systems that cannot say whether a read would
        /// wait, they come one after the other.
        pub io_uring: bool,
        /// Why the kernel has refused a ring, or no longer serves it; absent if there is one.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub refused: Option<String>,
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
            cpus_booked: self.cpus_booked.or(other.cpus_booked),
            io_max: self.io_max.or(other.io_max),
        }
    }
}
