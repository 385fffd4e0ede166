//! The configuration of a VMM process: a [`VmmConfig`] names the open file descriptors that the
//! process needs.
//!
//! A pre-forked VMM of a [`crate::zygote`] reads its configuration from a message; its descriptors
//! are numbered by their places in the message. `dayfly-vmm --config-fd N` reads the JSON of one
//! configuration from descriptor N to its end. The process opens no file by path, with one
//! exception: vsock connections of the guest go to sockets in the root folder of its jail.

use dayfly_units::{CpuModel, Digest, VmId};
use serde::{Deserialize, Serialize};
use std::net::Ipv4Addr;
use std::path::PathBuf;

/// A descriptor's number in the VMM process, or its place in a message.
pub type FdNumber = i32;

/// The most vCPUs of a VM.
pub const MAX_VCPUS: u8 = 16;
/// The most network devices of a VM.
pub const MAX_NETS: u8 = 1;
/// The most disks of a VM.
pub const MAX_DISKS: usize = 8;
/// The most frozen layers of a disk.
pub const MAX_LAYERS: usize = 64;
/// The longest configuration, in bytes of JSON.
pub const MAX_CONFIG_BYTES: usize = 1 << 20;
/// The size of a block of a copy-on-write layer, in bytes.
pub const DISK_BLOCK_BYTES: u64 = 4096;
/// The vsock context id of every guest. It is not unique on a host, because each VM has its own
/// vsock device and unix socket.
pub const GUEST_CID: u32 = 3;

/// The whole configuration of one VMM.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct VmmConfig {
    /// The VM's id; shown in the command line of the process.
    pub id: VmId,
    /// The jail to enter before the guest runs. `None` only in tests.
    pub jail: Option<JailConfig>,
    /// `/dev/kvm`, opened read-write; `None` under a zygote, which has it already.
    pub kvm_fd: Option<FdNumber>,
    /// A listening unix stream socket for the protocol of [`crate::control`].
    pub control_fd: FdNumber,
    /// A connection for the same protocol, made ahead. Commands that the daemon sends before the
    /// process serves it wait in the socket.
    #[serde(default)]
    pub link_fd: Option<FdNumber>,
    /// Whether the process runs at a lower priority until a guest is started in it.
    #[serde(default)]
    pub background: bool,
    /// A listening unix stream socket. A client sends `CONNECT <port>\n`, the VMM answers `OK
    /// <n>\n`; then bytes flow to and from that port of the guest.
    pub vsock_fd: FdNumber,
    /// The target of connections that the guest starts: port P of CID 2 is the unix socket
    /// `<vsock_path>_<P>`, a path inside the jail (`/vsock.sock`).
    pub vsock_path: PathBuf,
    /// Two empty files opened for appending, which take the output of the guest's serial console in
    /// turns ([`crate::platform::Console`]).
    pub console_fds: [FdNumber; 2],
    /// The most bytes of output in both files together. When the limit is reached, the older file
    /// is emptied for new output.
    pub console_max_bytes: u64,
    /// An empty file for the JSON of the [`crate::control::ExitRecord`], which is written once,
    /// just before the process ends.
    pub exit_fd: FdNumber,
    /// Whether that file is not empty, but has the page of [`crate::meter`], and is open for
    /// reading and appending.
    #[serde(default)]
    pub metered: bool,
    /// The file of the limits on the growth of disks ([`crate::disk::room`]), opened for reading;
    /// `None`: only the file system limits the growth.
    #[serde(default)]
    pub limits_fd: Option<FdNumber>,
    /// How the guest starts.
    pub start: Start,
}

/// The configuration of a zygote: its first message, with `/dev/kvm` (opened read-write) as the one
/// descriptor.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct ZygoteConfig {
    /// The folder that contains the VMs' folders. The zygote and its VMMs see nothing else of the
    /// host's files.
    pub folder: PathBuf,
    /// The CPUs that the zygote and the VMMs run on; empty: those that the zygote inherits.
    #[serde(default)]
    pub cpus: Vec<u32>,
    /// The CPUs that the VMMs run on, if the zygote stays on those that it inherits; empty: those
    /// of the zygote.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub vmm_cpus: Vec<u32>,
    /// The preferred NUMA node for the VMMs' memory; `None`: the node of the CPU that touches it.
    #[serde(default)]
    pub node: Option<u32>,
}

/// The jail of a VMM.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct JailConfig {
    /// The folder that becomes the root, a path inside the zygote's view. The daemon makes it, and
    /// it contains only this VM's sockets.
    pub root: PathBuf,
    /// The VM's user id, above 0.
    pub uid: u32,
    /// The VM's group id, above 0.
    pub gid: u32,
}

/// How the guest starts.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Start {
    /// A cold boot from a kernel, at once.
    Boot(BootConfig),
    /// As a warm VMM: `Restore` over the control socket says from which saved machine.
    #[serde(rename = "shell")]
    WarmVmm {
        /// The shape of the VMs that it accepts.
        shape: Shape,
        /// Whether to record which pages the guest touches, for `WorkingSet`
        /// ([`crate::memory::recorder`]).
        record: bool,
    },
}

impl Start {
    /// The shape of the VM.
    #[must_use]
    pub fn shape(&self) -> Shape {
        match self {
            Self::Boot(boot) => Shape {
                memory_bytes: boot.memory_bytes,
                vcpus: boot.vcpus,
                max_vcpus: boot.max_vcpus,
                disks: u8::try_from(boot.disks.len()).unwrap_or(u8::MAX),
                nets: boot.nets,
                cpu_model: boot.cpu_model,
            },
            Self::WarmVmm { shape, .. } => *shape,
        }
    }
}

/// The size of a VM: what a warm VMM is made for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Shape {
    /// RAM in bytes: a multiple of 2 MiB, at least 64 MiB.
    pub memory_bytes: u64,
    /// vCPUs, 1 to [`MAX_VCPUS`].
    pub vcpus: u8,
    /// vCPUs that the guest knows of, if they are more than `vcpus`: the most of its clones. A warm
    /// VMM also accepts a saved VM with another number; then CPUID is set once more.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub max_vcpus: u8,
    /// Disks, at most [`MAX_DISKS`].
    pub disks: u8,
    /// Network devices, at most [`MAX_NETS`].
    #[serde(default)]
    pub nets: u8,
    /// The model of the vCPUs. A warm VMM also accepts a saved VM of another model; then CPUID is
    /// set once more.
    #[serde(default, skip_serializing_if = "CpuModel::is_host")]
    pub cpu_model: CpuModel,
}

impl Shape {
    /// The number of vCPUs that the guest knows of, at least `vcpus`.
    #[must_use]
    pub fn known_vcpus(&self) -> u8 {
        self.max_vcpus.max(self.vcpus)
    }
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes a reference")]
const fn is_zero(number: &u8) -> bool {
    *number == 0
}

/// The network attachment of a network device ([`crate::control::Command::Connect`]).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LinkConfig {
    /// The MAC address of the guest's interface.
    pub mac: [u8; 6],
    /// The only IPv4 address from which the guest may send packets.
    pub address: Ipv4Addr,
    /// The limit on what the guest sends; `None`: unlimited.
    #[serde(default)]
    pub sends: Option<Rate>,
    /// The limit on what the guest receives; `None`: unlimited.
    #[serde(default)]
    pub receives: Option<Rate>,
}

/// A limit on bytes: a token bucket.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Rate {
    /// The mean rate.
    pub bytes_per_second: u64,
    /// The most bytes at once, after a long idle time.
    pub burst_bytes: u64,
}

/// A cold boot.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct BootConfig {
    /// The kernel, an ELF vmlinux.
    pub kernel_fd: FdNumber,
    /// An initramfs, in a compression that the kernel supports.
    pub initrd_fd: Option<FdNumber>,
    /// The kernel's command line.
    pub cmdline: String,
    /// RAM in bytes: a multiple of 2 MiB, at least 64 MiB.
    pub memory_bytes: u64,
    /// vCPUs, 1 to [`MAX_VCPUS`].
    pub vcpus: u8,
    /// vCPUs that the firmware announces, if they are more than `vcpus`; at most [`MAX_VCPUS`]. The
    /// guest must not start the others (`maxcpus=` of Linux), but its clones can have them.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub max_vcpus: u8,
    /// Disks in the order vda, vdb, …; at most [`MAX_DISKS`].
    pub disks: Vec<DiskConfig>,
    /// Network devices, at most [`MAX_NETS`], not connected yet.
    #[serde(default)]
    pub nets: u8,
    /// The model of the vCPUs, which this host's CPU must have.
    #[serde(default, skip_serializing_if = "CpuModel::is_host")]
    pub cpu_model: CpuModel,
}

/// A start from a snapshot. Descriptors are numbered by their places in the message, from 0.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RestoreConfig {
    /// The state file that `Save` wrote, sealed.
    pub state_fd: FdNumber,
    /// Guest RAM as `Save` wrote it, mapped `MAP_PRIVATE`: a restore copies nothing, and clones
    /// share each page until they write it.
    pub memory_fd: FdNumber,
    /// Pages of RAM that lie in other memory files.
    #[serde(default)]
    pub shared: Option<SharedConfig>,
    /// The disks that the saved VM had, each with a fresh writable layer.
    pub disks: Vec<DiskConfig>,
    /// The clone's VM generation id: new for every clone.
    pub generation: [u8; 16],
    /// The record of pages to populate before the guest runs ([`crate::memory::working_set`]).
    #[serde(default)]
    pub working_set_fd: Option<FdNumber>,
    /// A socket to the pager that fills the memory file, if the file is not whole yet
    /// ([`crate::memory::lazy`]).
    #[serde(default)]
    pub pager_fd: Option<FdNumber>,
    /// Whether the VM stays paused until `Resume`.
    pub paused: bool,
}

/// Pages of RAM that are mapped from memory files other than the snapshot's own file
/// ([`crate::memory::backing`]).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SharedConfig {
    /// The sealed list of the pages.
    pub list_fd: FdNumber,
    /// The memory files, all of them whole.
    pub file_fds: Vec<FdNumber>,
}

/// A disk: a base image, read-only layers over it, and one writable layer on top.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DiskConfig {
    /// The size that the guest sees, in bytes: a multiple of [`DISK_BLOCK_BYTES`].
    pub size_bytes: u64,
    /// The raw base image, read-only. If it is shorter than `size_bytes`, the rest reads as zero.
    pub base_fd: FdNumber,
    /// Frozen layers over the base, the lowest first; at most [`MAX_LAYERS`].
    pub layers: Vec<LayerConfig>,
    /// An empty file, opened read-write, that takes this VM's writes; `None`: the disk is read-only
    /// for the guest.
    pub writable_fd: Option<FdNumber>,
    /// The hash trees of the base and of the layers, in this order; a VMM of an earlier version
    /// ignores them. Missing entries count as `None`: what is read of that file is not checked.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub trees: Vec<Option<TreeConfig>>,
}

/// The hash tree of a published disk file: its descriptor and its root. A tuple, because a restore
/// may have hundreds, and the length of a message is limited.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TreeConfig(pub FdNumber, pub Digest);

/// A frozen copy-on-write layer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LayerConfig {
    /// A sparse file: block b of the disk lies at byte b × [`DISK_BLOCK_BYTES`], if the map has b.
    pub data_fd: FdNumber,
    /// The sealed map of the blocks in this layer ([`crate::disk::layer`]).
    pub map_fd: FdNumber,
}
