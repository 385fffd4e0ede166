//! Limits of a group, and what its processes have used.

use std::io;

/// Limits of a group. `None`: no limit, or the usual weight.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Limits {
    /// The most CPU time, in thousandths of a CPU.
    pub cpu_max_millicpus: Option<u32>,
    /// The share of CPU time against other groups, 1 to 10,000; usually 100.
    pub cpu_weight: Option<u32>,
    /// The most memory, in bytes.
    pub memory_max_bytes: Option<u64>,
    /// The most processes and threads.
    pub pids_max: Option<u32>,
}

/// The limit of disks in errors.
pub(super) const IO_MAX: &str = "io_max";

/// The period of a limit of CPU time, in microseconds: the kernel's default.
pub(super) const CPU_PERIOD_US: u64 = 100_000;

/// The CPUs of this process. All VMs together weigh as much as one task on each of them.
pub(super) fn cpus() -> u64 {
    crate::cpus::number() as u64
}

impl Limits {
    /// Whether nothing is limited.
    #[must_use]
    pub fn is_none(&self) -> bool {
        *self == Self::default()
    }

    /// The microseconds of CPU time in each [`CPU_PERIOD_US`].
    pub(super) fn cpu_quota_us(&self) -> Option<u64> {
        self.cpu_max_millicpus.map(|milli| u64::from(milli) * CPU_PERIOD_US / 1000)
    }
}

/// The controllers of a tree. Each limits what its field says.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Controllers {
    /// CPU time.
    pub cpu: bool,
    /// Memory.
    pub memory: bool,
    /// Processes and threads.
    pub pids: bool,
}

/// The most that the processes of a group may read from and write to each of some disks, in each
/// second. `None`: no limit.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct IoMax {
    /// Bytes read.
    pub read_bytes: Option<u64>,
    /// Bytes written.
    pub write_bytes: Option<u64>,
    /// Read requests.
    pub reads: Option<u64>,
    /// Write requests.
    pub writes: Option<u64>,
}

impl IoMax {
    /// The keys and values of `io.max`.
    pub(super) fn keys(&self) -> String {
        let Self { read_bytes, write_bytes, reads, writes } = *self;
        [("rbps", read_bytes), ("wbps", write_bytes), ("riops", reads), ("wiops", writes)]
            .into_iter()
            .filter_map(|(key, value)| value.map(|value| format!(" {key}={value}")))
            .collect()
    }
}

/// Why a limit was not set.
#[derive(Debug, thiserror::Error)]
pub enum GroupError {
    /// The host does not give the controller of this limit.
    #[error("{limit}: the control groups of this host have no controller {controller:?}")]
    NoController {
        /// The limit.
        limit: &'static str,
        /// The controller.
        controller: &'static str,
    },
    /// Only cgroup v2 has this limit.
    #[error(
        "{limit}: this host has the controllers of cgroup v1, which does not limit writes that go \
         through the page cache; a host with cgroup v2 has this limit"
    )]
    OnlyV2 {
        /// The limit.
        limit: &'static str,
    },
    /// These CPUs cannot be kept free of VMs.
    #[error("{0}")]
    Main(String),
    /// The kernel refuses the value.
    #[error("{limit}: {source}")]
    Refused {
        /// The limit.
        limit: &'static str,
        /// The kernel's error, with the file.
        #[source]
        source: io::Error,
    },
}

impl GroupError {
    /// The error that the kernel gave for this limit.
    pub(super) fn refused(limit: &'static str) -> impl FnOnce(io::Error) -> Self {
        move |source| Self::Refused { limit, source }
    }
}

impl Controllers {
    /// Whether each of them is there.
    #[must_use]
    pub const fn are_all(self) -> bool {
        self.cpu && self.memory && self.pids
    }

    /// Checks that each given limit has its controller.
    ///
    /// # Errors
    /// [`GroupError::NoController`].
    pub fn check(self, limits: &Limits) -> Result<(), GroupError> {
        let Limits { cpu_max_millicpus, cpu_weight, memory_max_bytes, pids_max } = limits;
        for (asked, has, limit, controller) in [
            (cpu_max_millicpus.is_some(), self.cpu, "cpu_max", "cpu"),
            (cpu_weight.is_some(), self.cpu, "cpu_weight", "cpu"),
            (memory_max_bytes.is_some(), self.memory, "memory_max", "memory"),
            (pids_max.is_some(), self.pids, "pids_max", "pids"),
        ] {
            if asked && !has {
                return Err(GroupError::NoController { limit, controller });
            }
        }
        Ok(())
    }
}

/// The CPU time of a group's processes, in microseconds.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct CpuTime {
    /// All of it, exact.
    pub all_us: u64,
    /// Of that, time of programs and guests, which the kernel samples: the two parts need not add
    /// up to the whole.
    pub user_us: u64,
    /// Of that, time of the kernel.
    pub system_us: u64,
}

/// What the processes of a group have used since the group was made or reset.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Usage {
    /// CPU time; `None` in a v1 without cpuacct.
    pub cpu: Option<CpuTime>,
    /// Bytes that are charged to the group now; `None` without the controller.
    pub memory_bytes: Option<u64>,
    /// The most bytes that were charged to it; `None` without the controller, and in v2 before
    /// Linux 5.19.
    pub memory_peak_bytes: Option<u64>,
    /// How often the kernel killed a process of the group because memory was short, in the group
    /// or on the host.
    pub oom_kills: u64,
}
