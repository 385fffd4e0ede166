//! Paths of the daemon, and its deadlines.
//!
//! ```text
//! <run>/dayflyd.sock            the API
//! <run>/dayflyd.lock            locked by the daemon as long as it lives
//! <run>/netns                   the VM network namespace, mounted ([`crate::net`])
//! <run>/limits                  limits of disks, which VMMs read ([`crate::vm::space`])
//! <run>/vms/<id>/vm.json        the VM's record for the next daemon ([`crate::vm::record`])
//! <run>/vms/<id>/control.sock   the VMM's control socket
//! <run>/vms/<id>/console.log    the guest's console output, in two files that the VMM fills in
//! <run>/vms/<id>/console-2.log  turn ([`crate::vmm::console`])
//! <run>/vms/<id>/exit.json      what the VMM counts for the bill, then why it ended
//!                               ([`dayfly_vmm::meter`])
//! <run>/vms/<id>/volume-0.log   what the process that serves its first volume has reported
//! <run>/vms/<id>/root/          the jail's root, with the sockets of the guest's vsock:
//!                               vsock.sock, vsock.sock_1025 during a boot,
//!                               vsock.root_1026 if the VM may fork itself
//! <state>/                      the store: images, kernels, layers, snapshots, staging
//! <state>/requested             the snapshots that were cloned last ([`crate::vmm::requested`])
//! ```

use crate::base::prefix::Prefix;
use dayfly_host::cpus::CpuList;
use dayfly_host::groups::Root;
use dayfly_units::VmId;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Paths, limits and deadlines of one daemon.
#[derive(Debug, Clone)]
pub struct Config {
    /// Folder of images, kernels, layers and snapshots.
    pub state: PathBuf,
    /// Folder of sockets and of the VMs' folders; may be on a tmpfs.
    pub run: PathBuf,
    /// The `dayfly-vmm` program.
    pub vmm: PathBuf,
    /// Memory that all VMs together may have, in percent of the host's memory.
    pub overcommit: u32,
    /// Memory of the host in bytes that no VM is promised ([`crate::vm::available`]); `None`: VMs
    /// are created whatever memory is available.
    pub memory_reserve_bytes: Option<u64>,
    /// Space of the host's file systems.
    pub disk: DiskSpace,
    /// The most warm VMMs and warm clones that wait.
    pub pool: usize,
    /// The addresses of VMs; `None`: VMs have no network.
    pub network: Option<Prefix>,
    /// Ranges that are not public, and that every VM may reach unless it is closed.
    pub reach: Vec<ipnet::Ipv4Net>,
    /// Socket of the process that listens for published ports on another host; `None`: this daemon
    /// listens on its own host ([`crate::net`]).
    pub ports: Option<PathBuf>,
    /// The first user id of VMs ([`crate::vm::uids`]).
    pub first_uid: u32,
    /// Where VMs have their control groups ([`crate::base::groups`]).
    pub group_root: Root,
    /// The CPUs of dayflyd, on which no VM runs ([`crate::base::cpus`]); empty: VMs have all,
    /// except those that one of them has booked.
    pub main_cpus: CpuList,
    /// Time limits of the daemon's waits.
    pub deadlines: Deadlines,
}

/// Shares and reserves of the host's file systems, in bytes ([`crate::vm::space`]).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DiskSpace {
    /// What each VM's disks are guaranteed; `None`: by the size of the file system.
    pub share_bytes: Option<u64>,
    /// The most that a VM's writable layers may have; `None`: no limit.
    pub quota_bytes: Option<u64>,
    /// Free space with which requests are refused; `None`: by the size of the file system.
    pub reserve_bytes: Option<u64>,
    /// The same of the run folder.
    pub run_reserve_bytes: u64,
}

/// Time limits after which the daemon gives up an operation and undoes it.
#[derive(Debug, Clone, Copy)]
pub struct Deadlines {
    /// From a cold boot's first instruction to the agent's `Ready`.
    pub boot: Duration,
    /// For the agent to answer, to take an identity, or to seal itself.
    pub agent: Duration,
    /// For a guest to accept a connection to one of its ports. Shorter than the VMM's
    /// `ANSWER_TIME`, after which the VMM answers as for a port on which no program listens.
    pub port: Duration,
    /// For a `Stat` request, whose figures are left out of an answer if it takes longer.
    pub stat: Duration,
    /// For an answer on the VMM's control socket, except to `Save`.
    pub control: Duration,
    /// For `Save`, which writes the guest's memory.
    pub save: Duration,
    /// For a page that a clone touches before the pager has it. A clone that waits longer is ended.
    pub page: Duration,
    /// From SIGKILL to the end of the process. The kernel takes about 40 ms to free a GiB.
    pub reap: Duration,
    /// For a client to send the first frame after an HTTP upgrade.
    pub first_frame: Duration,
    /// For running operations to undo themselves after the daemon is asked to stop.
    pub shutdown: Duration,
}

impl Default for Deadlines {
    fn default() -> Self {
        let s = Duration::from_secs;
        Self {
            boot: s(120),
            agent: s(30),
            port: s(20),
            stat: s(3),
            control: s(20),
            save: s(600),
            page: s(30),
            reap: s(60),
            first_frame: s(30),
            shutdown: s(15),
        }
    }
}

impl Deadlines {
    /// Multiplies the limits that depend on the speed of guests, VMMs and the pager, for a host
    /// that is emulated or overloaded. The limits `port`, `stat`, `first_frame` and `shutdown`
    /// stay.
    #[must_use]
    pub fn times(self, timeout_factor: u32) -> Self {
        let Self { boot, agent, control, save, page, reap, .. } = self;
        let [boot, agent, control, save, page, reap] = [boot, agent, control, save, page, reap]
            .map(|usual| usual.saturating_mul(timeout_factor));
        Self { boot, agent, control, save, page, reap, ..self }
    }
}

/// The last component of `argv[0]` of each VMM.
pub const VMM_NAME: &str = "dayfly-vmm";
/// The program that serves the files of a volume, and the last component of its `argv[0]`.
pub const VOLUME_NAME: &str = "dayfly-volume";
/// The program that relays published ports, and the last component of its `argv[0]`.
pub const RELAY_NAME: &str = "dayfly-relay";
/// The last component of `argv[0]` of a [`RELAY_NAME`] that has the streams of a VM.
pub const STREAMS_NAME: &str = "dayfly-streams";
/// The program that stores the RAM of snapshots, and the last component of its `argv[0]`.
pub const PACKER_NAME: &str = "dayfly-packer";
/// Bytes of console output that are kept of each VM.
pub const CONSOLE_MAX_BYTES: u64 = 4 << 20;
/// Default of [`Config::overcommit`]. It is above 100 because clones share unwritten pages.
pub const OVERCOMMIT: u32 = 1000;
/// Default of [`Config::memory_reserve_bytes`]: this part of the host's memory.
pub const MEMORY_RESERVE_FRACTION: u64 = 32;
/// Default of [`Config::pool`] on a host with `memory_bytes`: warm clones of about 2 MiB each may
/// take a twentieth of the memory. This is only a cap; the pool makes as many as were just used.
#[must_use]
pub fn pool(memory_bytes: u64) -> usize {
    usize::try_from(memory_bytes / 20 / (2 << 20)).unwrap_or(usize::MAX).clamp(16, 2048)
}
/// Default of `dayflyd --network`.
pub const NETWORK: &str = "10.88.0.0/16";
/// The least and the most RAM of a VM, in bytes.
pub const MEMORY_BYTES: std::ops::RangeInclusive<u64> = (64 << 20)..=(64 << 30);
/// RAM of a VM is a multiple of this many bytes.
pub const MEMORY_STEP_BYTES: u64 = 2 << 20;
/// Bytes of the longest path of a unix socket (`sun_path`, unix(7)), without the final zero.
pub const SOCKET_PATH_MAX: usize = 107;

impl Config {
    /// The folders of the state folder with the disks of VMs. Some may be mounts.
    #[must_use]
    pub fn disk_folders(&self) -> Vec<PathBuf> {
        ["", "images", "layers", "vms"].map(|name| self.state.join(name)).into()
    }

    /// The socket of the HTTP API.
    #[must_use]
    pub fn socket(&self) -> PathBuf {
        self.run.join("dayflyd.sock")
    }

    /// The lock file: the daemon that has its lock owns the run folder.
    #[must_use]
    pub fn lock(&self) -> PathBuf {
        self.run.join("dayflyd.lock")
    }

    /// The file of the limits of disks.
    #[must_use]
    pub fn limits(&self) -> PathBuf {
        self.run.join("limits")
    }

    /// The file of the snapshots that were cloned last.
    #[must_use]
    pub fn requested(&self) -> PathBuf {
        self.state.join("requested")
    }

    /// The folder that contains the VMs' folders.
    #[must_use]
    pub fn vms(&self) -> PathBuf {
        self.run.join("vms")
    }

    /// The folder of unanswered requests for several VMs.
    #[must_use]
    pub fn batches(&self) -> PathBuf {
        self.run.join("batches")
    }

    /// Mount point of the VM network namespace.
    #[must_use]
    pub fn netns(&self) -> PathBuf {
        self.run.join("netns")
    }

    /// Name of the host's end of the veth pair into the VM network namespace. It depends on the run
    /// folder, so that daemons with different run folders do not collide.
    #[must_use]
    pub fn uplink(&self) -> String {
        let digest = dayfly_store::Digest::of(self.run.as_os_str().as_encoded_bytes()).to_string();
        format!("dayfly{}", &digest[..8])
    }

    /// The folder of prepared run directories, renamed when a VMM starts in them.
    #[must_use]
    pub fn run_dirs(&self) -> PathBuf {
        self.run.join("berths")
    }

    /// The folder of one VM.
    #[must_use]
    pub fn vm(&self, id: VmId) -> VmDir {
        VmDir(self.vms().join(id.to_string()))
    }

    /// The program that relays published ports and streams, which is beside that of VMMs.
    #[must_use]
    pub fn relay(&self) -> PathBuf {
        self.vmm.with_file_name(RELAY_NAME)
    }

    /// The program that stores the RAM of snapshots, which is beside that of VMMs.
    #[must_use]
    pub fn packer(&self) -> PathBuf {
        self.vmm.with_file_name(PACKER_NAME)
    }

    /// `argv[0]` of this daemon's VMMs. It depends on the run folder, so that VMMs of several
    /// daemons can be distinguished.
    #[must_use]
    pub fn vmm_name(&self) -> PathBuf {
        self.run.join(VMM_NAME)
    }

    /// Bytes of the longest socket path below the run folder, to be compared with
    /// [`SOCKET_PATH_MAX`].
    #[must_use]
    pub fn longest_socket_path(&self) -> usize {
        let digits = "0123456789ab";
        VmDir(self.vms().join(digits)).ready().as_os_str().len()
    }
}

/// The folder of one VM.
#[derive(Debug, Clone)]
pub struct VmDir(PathBuf);

impl VmDir {
    /// The folder `path`, which a VM has or will get.
    #[must_use]
    pub fn at(path: PathBuf) -> Self {
        Self(path)
    }
    /// The path of the folder.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.0
    }
    /// The root of the VMM's jail.
    #[must_use]
    pub fn root(&self) -> PathBuf {
        self.0.join("root")
    }
    /// The root of the VMM's jail, as a path from the folder of the VMs' folders.
    #[must_use]
    pub fn root_in_jail(&self) -> PathBuf {
        Path::new("/").join(self.0.file_name().unwrap_or_default()).join("root")
    }
    /// The VMM's control socket.
    #[must_use]
    pub fn control(&self) -> PathBuf {
        self.0.join("control.sock")
    }
    /// The host's socket of the guest's vsock.
    #[must_use]
    pub fn vsock(&self) -> PathBuf {
        self.root().join("vsock.sock")
    }
    /// The socket on which the agent reports after a cold boot.
    #[must_use]
    pub fn ready(&self) -> PathBuf {
        self.root().join(format!("vsock.sock_{}", dayfly_api::agent::READY_PORT))
    }
    /// The guest request socket, if the VM has one: root of its guest asks here for clones of the
    /// VM. The vsock muxer of `dayfly_vmm::virtio` refuses other users of the guest.
    #[must_use]
    pub fn guest_socket(&self) -> PathBuf {
        self.root().join(format!("vsock.root_{}", dayfly_api::agent::HOST_PORT))
    }
    /// The two files of the guest's console, which the VMM fills in turn.
    #[must_use]
    pub fn console(&self) -> [PathBuf; 2] {
        ["console.log", "console-2.log"].map(|name| self.0.join(name))
    }
    /// The exit file: what the VMM counts for the bill, and why it ended.
    #[must_use]
    pub fn exit(&self) -> PathBuf {
        self.0.join("exit.json")
    }
    /// `argv[0]` of the processes that serve its volumes, which names the VM.
    #[must_use]
    pub fn volume_server(&self) -> PathBuf {
        self.0.join(VOLUME_NAME)
    }
    /// What the process that serves its volume `number` has reported.
    #[must_use]
    pub fn volume_log(&self, number: usize) -> PathBuf {
        self.0.join(format!("volume-{number}.log"))
    }
    /// `argv[0]` of the process that relays its published ports, which names the VM.
    #[must_use]
    pub fn relay(&self) -> PathBuf {
        self.0.join(RELAY_NAME)
    }
    /// `argv[0]` of the process that stores the RAM of its snapshot, which names the VM.
    #[must_use]
    pub fn packer(&self) -> PathBuf {
        self.0.join(PACKER_NAME)
    }
    /// What the process that relays its published ports has reported.
    #[must_use]
    pub fn relay_log(&self) -> PathBuf {
        self.0.join("relay.log")
    }
    /// `argv[0]` of the process that has its streams, which names the VM.
    #[must_use]
    pub fn streams(&self) -> PathBuf {
        self.0.join(STREAMS_NAME)
    }
    /// What that process has reported.
    #[must_use]
    pub fn streams_log(&self) -> PathBuf {
        self.0.join("streams.log")
    }
    /// The VM's record for the next daemon.
    #[must_use]
    pub fn record(&self) -> PathBuf {
        self.0.join("vm.json")
    }
}
