//! The daemon and its host.

use super::wire::wire;

wire! {
    /// A description of the daemon and its host.
    pub struct Info {
        /// Version of dayflyd.
        pub version: String,
        /// The daemon's process id.
        pub pid: u32,
        /// Release of the host's kernel.
        pub host_kernel: String,
        /// Virtualisation that /dev/kvm uses, by the host's modules: `svm`, `vmx`, or what prevents
        /// it.
        pub kvm: String,
        /// The highest level of x86-64 that the host's CPUs have, 1 to 4 (psABI,
        /// "Micro-Architecture Levels"); 0: unknown.
        #[serde(default)]
        pub cpu_level: u8,
        /// Protocols that archives and outputs may have instead of HTTP: `dayfly-stream`. An
        /// earlier daemon names none.
        #[serde(default)]
        pub upgrades: Vec<String>,
        /// Number of VMs that the daemon knows.
        pub vms: usize,
        /// Folder of images, kernels and snapshots.
        pub state_dir: String,
    }

    /// A leftover of a crash.
    pub struct Leak {
        /// The kind: `process`, `mount`, `cgroup`, `socket` or `file`.
        pub kind: String,
        /// Which process, path or other object it is.
        pub what: String,
    }
}
